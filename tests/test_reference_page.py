"""docs/reference.md is what tools/write_reference.py writes, and no public name is missing."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("write_reference", ROOT / "tools" / "write_reference.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


SCRIPT = load_script()


def test_the_page_is_the_one_that_the_script_writes() -> None:
    assert (ROOT / "docs" / "reference.md").read_text() == SCRIPT.render(), (
        "run python tools/write_reference.py"
    )


def test_every_exported_name_has_a_section() -> None:
    headings = {line[4:] for line in SCRIPT.render().splitlines() if line.startswith("### ")}
    for room in SCRIPT.ROOMS:
        for name in importlib.import_module(f"understudy.{room}").__all__:
            assert f"{room}.{name}" in headings
    assert {"tokens.TokenBlocks", "kv.KvManager", "errors.CapacityExhausted"} <= headings


def test_every_room_with_exports_is_on_the_page_or_is_no_library() -> None:
    rooms = {
        path.parent.name
        for path in (ROOT / "src" / "understudy").glob("*/__init__.py")
        if "__all__" in path.read_text()
    }
    # Live servers, the real engine and HTTP are used by verbs.
    assert rooms - set(SCRIPT.ROOMS) == {"http", "online", "qwen3"}


class LacksADocstring:
    pass


def test_a_name_without_a_docstring_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"understudy\.kv\.LacksADocstring: the docstring is missing"):
        SCRIPT.describe("kv", "LacksADocstring", LacksADocstring)


def test_the_methods_of_the_kv_manager_all_have_a_text() -> None:
    section = SCRIPT.render().split("### kv.RequestKv\n")[1].split("\n### ")[0]
    lines = [line for line in section.splitlines() if line.startswith("- ")]
    assert len(lines) >= 5
    assert all("`: " in line for line in lines)
