"""The page that walks a token through the engine speaks of files and names that are there."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import understudy.qwen3

ROOM = Path(understudy.qwen3.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "qwen3.md"


def test_every_name_of_the_walk_is_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    walk = text.split("## One token, from prompt to page to logits")[1].split("\n## ")[0]
    names = [name for name in re.findall(r"`([a-z_0-9]+(?:\.\w+)+)`", walk) if not name.endswith(".py")]
    assert len(names) > 15
    for name in names:
        module, *path = name.split(".")
        found: object = import_module(f"understudy.qwen3.{module}") if module != "triton_backend" else None
        if found is None:  # needs triton
            assert f"class {path[0]}" in (ROOM / f"{module}.py").read_text(encoding="utf-8")
            continue
        for part in path:
            found = getattr(found, part)


def test_the_page_says_how_long_the_walk_is() -> None:
    text = PAGE.read_text(encoding="utf-8")
    walk = text.split("## One token, from prompt to page to logits")[1].split("\nThese files have")[0]
    modules = {name.split(".")[0] for name in re.findall(r"`([a-z_0-9]+(?:\.\w+)+)`", walk)}
    aside = {"arrays", "graphs", "triton_backend"}
    assert modules > aside

    def lines(files: list[Path]) -> int:
        return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)

    told = [int(number.replace(",", "")) for number in re.findall(r"These files have ([\d,]+) lines", text)]
    told += [
        int(number.replace(",", "")) for number in re.findall(r"kernels, which have ([\d,]+) more", text)
    ]
    found = [lines([ROOM / f"{module}.py" for module in modules - aside])]
    found.append(lines([ROOM / f"{module}.py" for module in aside] + list((ROOM / "kernels").glob("*.py"))))
    assert len(told) == 2
    for said, there in zip(told, found, strict=True):
        assert abs(said - there) <= 0.05 * there, (said, there)


def test_every_file_is_named_on_the_page_and_fits_on_a_few_screens() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for file in ROOM.glob("*.py"):
        if file.stem != "__init__":
            assert f"`{file.stem}." in text, file.name
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 300, file.name
