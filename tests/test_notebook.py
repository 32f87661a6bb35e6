"""examples/notebook.py runs as it is, with the public names alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import understudy as us

SCRIPT = Path(__file__).parents[1] / "examples" / "notebook.py"


def test_it_prints_each_run_the_comparison_and_the_best(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for name in ("round robin", "KV routing", "host tier"):
        assert any(line.startswith(f"{name}: TTFT p99 ") for line in lines)
    assert "Configuration" in done.stdout
    assert lines[-1].startswith("lowest TTFT p99: ")
    assert not list(tmp_path.iterdir())


def test_it_uses_public_names_only_and_is_short() -> None:
    tree = ast.parse(SCRIPT.read_text())
    imported = {
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert imported == {"sys", "Path", "understudy"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "us"
    }
    assert {"read_trace", "replay", "compare", "KvRouting"} <= used <= set(dir(us))
    assert len(ast.unparse(tree).splitlines()) <= 25
