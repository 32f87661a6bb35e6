"""The notebooks of examples/notebooks run from top to bottom, and hold no outputs."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


def read_cells(notebook: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"]
    return found


async def run_cells(cells: list[dict[str, Any]], name: str) -> None:
    """Run the code as a notebook does: one namespace, `await` at the top level."""
    names: dict[str, Any] = {"__name__": name}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            code = compile(
                "".join(cell["source"]), f"{name}[{number}]", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            )
            if inspect.iscoroutine(running := eval(code, names)):
                await running


def test_there_is_one_for_each_kind_of_user() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"planner", "router", "cache", "tiers", "embedding"}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_writes_nothing(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(EXAMPLES / "demo_trace.jsonl", tmp_path)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    asyncio.run(run_cells(read_cells(notebook), notebook.stem))
    assert not list((tmp_path / "notebooks").iterdir())


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_no_outputs_and_begins_with_a_title(notebook: Path) -> None:
    content = json.loads(notebook.read_text())
    assert content["nbformat"] == 4
    assert "".join(content["cells"][0]["source"]).startswith("# ")
    for cell in content["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
