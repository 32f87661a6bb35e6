"""The rooms of the core stand in one order, and each uses only those before it."""

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


PYTHON = Path(__file__).parents[1] / "src" / "understudy"


def rooms_used_by(room: str) -> set[str]:
    used = set()
    for path in (PYTHON / room).rglob("*.py"):
        used |= set(re.findall(r"^\s*from understudy\.(\w+)", path.read_text(), re.MULTILINE))
    return used - {room, "_core", "errors"}


def test_times_of_gpus_stand_above_tiers_and_engines() -> None:
    assert rooms_used_by("timing") <= {"kv", "checks", "outputs", "yaml_text"}


def test_kv_cache_groups_stand_above_tiers_and_engines() -> None:
    assert rooms_used_by("groups") <= {"kv", "checks", "defaults", "timing"}


def test_nobody_but_the_command_line_uses_calibration() -> None:
    rooms = [
        path.name for path in PYTHON.iterdir() if path.is_dir() and path.name not in ("calibrate", "cli")
    ]
    assert not [room for room in rooms if "calibrate" in rooms_used_by(room)]
    assert not rooms_used_by("calibrate") & {"cli", "server", "qwen3", "api"}


def test_nobody_but_the_command_line_uses_sweeps() -> None:
    rooms = [path.name for path in PYTHON.iterdir() if path.is_dir() and path.name not in ("sweep", "cli")]
    assert not [room for room in rooms if "sweep" in rooms_used_by(room)]
    assert not rooms_used_by("sweep") & {"cli", "qwen3", "calibrate"}


def test_every_file_of_the_engine_that_the_documents_name_is_there() -> None:
    said = (CORE.parent / "docs" / "architecture.md").read_text()
    listed = said[said.index("`core/engine/vllm/` implements vLLM's rules") : said.index("These classes are")]
    named = set(re.findall(r"`(\w+)`", listed))
    assert named <= {path.stem for path in (CORE / "engine" / "vllm").glob("*.cpp")}
    assert len(named) >= 10


def test_the_two_walks_of_a_newcomer_name_files_that_are_there_and_none_twice() -> None:
    """A trace row to a report cell in at most 12 files, and a POST to an SSE chunk in at most 16."""
    root = CORE.parent
    said = (root / "docs" / "architecture.md").read_text()
    section = said[said.index("## Two walks through the code") :]
    section = section[: section.index("\n## ", 5)]
    walks = [re.findall(r"^\| `([\w/.]+)`", table, re.MULTILINE) for table in section.split("From `POST")]
    assert [len(set(walk)) for walk in walks] == [len(walk) for walk in walks]
    assert 8 <= len(walks[0]) <= 12
    assert 10 <= len(walks[1]) <= 16
    for path in walks[0]:
        assert (root / path).is_file(), path
    for path in walks[1]:
        assert (root / path).is_file() or (root / "src" / "understudy" / path).is_file(), path
