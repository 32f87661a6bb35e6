"""The rooms of the core stand in one order, and each uses only those before it."""

import ast
import re
from pathlib import Path

import pytest

CORE = Path(__file__).parents[1] / "core"
CMAKE = Path(__file__).parents[1] / "CMakeLists.txt"


def rooms_in_order() -> list[str]:
    named = re.search(r"^set\(rooms ([a-z ]+)\)$", CMAKE.read_text(), re.MULTILINE)
    assert named is not None, "CMakeLists.txt names the rooms in a line of its own"
    return [*named[1].split(), "bindings", "tests"]


def test_every_folder_of_the_core_is_a_room_with_a_place() -> None:
    assert {path.name for path in CORE.iterdir()} <= set(rooms_in_order())


@pytest.mark.parametrize("room", [path.name for path in sorted(CORE.iterdir())])
def test_a_room_of_the_core_uses_only_those_before_it(room: str) -> None:
    order = rooms_in_order()
    allowed = set(order[: order.index(room) + 1])
    sources = [path for path in (CORE / room).rglob("*") if path.suffix in {".hpp", ".cpp"}]
    assert sources
    for path in sources:
        for used in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
            if "/" not in used:  # beside it
                assert (path.parent / used).exists()
                continue
            assert used.split("/")[0] in allowed, f"{path.relative_to(CORE)} uses {used}"


def test_a_run_knows_engines_by_their_interface_alone() -> None:
    assert not [
        path.name for path in sorted((CORE / "replay").iterdir()) if "vllm" in path.read_text().lower()
    ]


def test_the_core_uses_no_iostreams() -> None:
    """They crash where a toolchain links libstdc++ statically, and write numbers as the locale says."""
    for path in sorted([*CORE.rglob("*.hpp"), *CORE.rglob("*.cpp")]):
        found = re.search(
            r"sstream|iostream|ostream|fstream|iomanip|std::(cout|cerr|format|locale)\b", path.read_text()
        )
        assert found is None, f"{path.relative_to(CORE)} uses {found[0]}"


PYTHON = CORE.parent / "src" / "understudy"


def python_rooms_in_order() -> list[str]:
    said = (CORE.parent / "docs" / "architecture.md").read_text()
    listed = said[said.index("src/understudy/\n") : said.index("\ntests/  ")]
    return [
        name.removesuffix(".py").removesuffix("/")
        for line in re.findall(r"^  (\S.*?)(?:   |$)", listed, re.MULTILINE)
        for name in line.split()
    ]


def read_modules() -> dict[str, Path]:
    """Return the file of every module, by its name below `understudy`."""
    names = {path: path.relative_to(PYTHON).with_suffix("").parts for path in PYTHON.rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): path for path, parts in names.items()}


def read_imports(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Return the modules that each one imports: for annotations and inside functions too."""
    imports: dict[str, set[str]] = {}
    for module, path in modules.items():
        used = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("understudy"):
                continue
            base = (node.module or "").removeprefix("understudy").removeprefix(".")
            for alias in node.names:
                name = f"{base}.{alias.name}".lstrip(".")
                used.add(name if name in modules else base)
        imports[module] = used & set(modules) - {module, "__init__"}
    return imports


def test_every_room_of_the_package_has_a_place_in_the_order() -> None:
    there = {path.stem for path in PYTHON.glob("*.py")} | {path.parent.name for path in PYTHON.glob("*/*.py")}
    order = python_rooms_in_order()
    assert there - {"__init__", "__main__"} == set(order)
    assert len(order) == len(set(order))


def test_a_room_of_the_package_uses_only_those_before_it() -> None:
    order = python_rooms_in_order()
    place = {room: index for index, room in enumerate(order)}
    for module, used in read_imports(read_modules()).items():
        room = module.split(".")[0]
        if room in place:
            late = [name for name in used if place[name.split(".")[0]] > place[room]]
            assert not late, f"{module} imports {late}, whose rooms stand behind {room}"


def test_no_files_import_each_other() -> None:
    imports = read_imports(read_modules())
    reached: dict[str, set[str]] = {}
    for module in imports:
        todo, found = [module], set[str]()
        while todo:
            for name in imports[todo.pop()] - found:
                found.add(name)
                todo.append(name)
        reached[module] = found
    circling = {module for module in imports if module in reached[module]}
    assert not circling, sorted(circling)


def rooms_used_by(room: str) -> set[str]:
    used = set()
    for path in (PYTHON / room).rglob("*.py"):
        used |= set(re.findall(r"^\s*from understudy\.(\w+)", path.read_text(), re.MULTILINE))
    return used - {room, "_core", "errors"}


def test_nobody_but_the_command_line_uses_calibration_sweeps_and_recordings() -> None:
    for room in ("calibrate", "sweep", "conformance"):
        known = {
            room,
            "cli",
            *(["planning"] if room == "sweep" else []),
        }  # a plan is a sweep that finds its space
        users = [path.name for path in PYTHON.iterdir() if path.is_dir() and path.name not in known]
        assert not [user for user in users if room in rooms_used_by(user)]
    assert not rooms_used_by("calibrate") & {"cli", "server", "qwen3", "api"}
    assert not rooms_used_by("sweep") & {"cli", "qwen3", "calibrate"}


def test_every_file_of_the_engine_that_the_documents_name_is_there() -> None:
    said = (CORE.parent / "docs" / "architecture.md").read_text()
    listed = said[said.index("`core/engine/vllm/` implements vLLM's rules") : said.index("These classes are")]
    named = set(re.findall(r"`(\w+)`", listed))
    assert named <= {path.stem for path in (CORE / "engine" / "vllm").glob("*.cpp")}
    assert len(named) >= 10


def test_every_name_that_stands_beside_vllms_is_declared() -> None:
    said = (CORE.parent / "docs" / "architecture.md").read_text()
    table = said[said.index("| vLLM | here,") :].split("\n\n")[0]
    ours = " ".join(row.split("|")[2] for row in table.splitlines()[2:])
    named = re.findall(r"`(\w+)::(\w+)`", ours)
    assert len(named) > 15
    headers = [path.read_text() for path in (CORE / "engine" / "vllm").glob("*.hpp")]
    for holder, member in named:
        declared = [
            text
            for text in headers
            if re.search(rf"(class|struct) (alignas\(\d+\) )?{holder}\b[^;]*{{", text)
        ]
        assert any(re.search(rf"\b{member}\b", text) for text in declared), f"{holder}::{member}"


def test_the_two_walks_of_a_newcomer_name_functions_that_are_there_in_twenty_files() -> None:
    """From a trace row to a report cell, and from a POST to an SSE chunk."""
    root = CORE.parent
    said = (root / "docs" / "architecture.md").read_text()
    section = said[said.index("## Two walks through the code") :]
    section = section[: section.index("\n## ", 5)]
    offline, live = (
        re.findall(r"^\| `([\w/.]+)` \| `(\w+)` \|", table, re.MULTILINE)
        for table in section.split("From `POST")
    )
    steps = [(root / file, name) for file, name in offline]
    steps += [(root / "src" / "understudy" / file, name) for file, name in live]
    assert len(steps) == len({file for file, _ in steps}) == 20
    for file, name in steps:
        defined = rf"^ *(async )?def {name}\(" if file.suffix == ".py" else rf"^\w[\w:&<> ]*\b{name}\("
        assert re.search(defined, file.read_text(), re.MULTILINE), f"{file} defines no {name}"
    for file in re.findall(r"\((?:`([\w/]+\.\w+)`)\)", section):
        assert (root / file).is_file() or (root / "src" / "understudy" / file).is_file(), file


def test_every_class_that_the_page_of_the_architecture_names_is_there() -> None:
    root = CORE.parent
    named = set(
        re.findall(r"`([A-Z]\w*[a-z]\w*)(?:::\w+)?`", (root / "docs" / "architecture.md").read_text())
    )
    sources = [*CORE.rglob("*.hpp"), *PYTHON.rglob("*.py")]
    defined = {
        name
        for path in sources
        for name in re.findall(
            r"^ *(?:class|struct|enum class) (?:alignas\(\d+\) )?(\w+)", path.read_text(), re.MULTILINE
        )
    }
    assert len(named) >= 20
    assert not named - defined
