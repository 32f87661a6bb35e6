"""docs/api.md is what tools/write_api.py writes, and its examples run."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import understudy as us

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[1]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_api", ROOT / "tools" / "write_api.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


SCRIPT: Any = load_script()


def test_the_page_is_the_one_that_the_script_writes() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == SCRIPT.render(), "run python tools/write_api.py"


def test_every_public_name_has_a_section() -> None:
    headings = [line[3:] for line in SCRIPT.render().splitlines() if line.startswith("## ")]
    assert headings == [*dir(us), "Returned types"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the files that the examples name, as the current one."""
    shutil.copy(ROOT / "examples" / "demo_trace.jsonl", tmp_path / "trace.jsonl")
    row = {"request_id": "a", "arrival_s": 0.0, "input_tokens": 99, "output_tokens": 9}
    (tmp_path / "recorded.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", dir(us))
def test_examples_run_with_the_public_names_alone(name: str, folder: Path) -> None:
    exec(SCRIPT.read_doc(getattr(us, name)).example, {"us": us})


def lacks_a_text(path: str, seed: int) -> None:
    """Read a file.

    Parameters:
        path: the file.
    """


def test_a_parameter_without_a_description_is_an_error() -> None:
    with pytest.raises(KeyError, match="seed"):
        list(SCRIPT.list_parameters(lacks_a_text))


class LacksAText:
    """Settings."""

    size: int = 0
    """Bytes."""
    rate: float = 0.0


LacksAText.__module__ = "understudy.made_up"


def test_a_field_without_a_description_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCRIPT.sys.modules, "understudy.made_up", importlib.import_module(__name__))
    with pytest.raises(KeyError, match=r"LacksAText\.rate: the docstring is missing"):
        list(SCRIPT.list_fields(LacksAText))
