"""src/understudy/_core.pyi is what tools/write_stub.py writes, and says a type for nearly everything."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STUB = (ROOT / "src" / "understudy" / "_core.pyi").read_text(encoding="utf-8")

SAYS_OBJECT = {
    "BlockVisits.__init__": "workload: columns that are read by name",
    "run_fleet": "workload: the same",
    "read_id_lists": "anything with a buffer, such as msgspec.Raw",
    "VllmEngine.take_offload_line": "values of a log line, which recordings compare as they are",
    **dict.fromkeys(
        ("VllmEngineConfig.__init__", "TierConfig.__init__", "SharedTierConfig.__init__"),
        "the result of a callable that makes a policy, which is checked when it is called",
    ),
}
"""Functions whose types say `object`, with the reason. Comparisons and `__exit__` take any object."""


def test_the_stub_is_what_the_tool_writes() -> None:
    nanobind = pytest.importorskip("nanobind")
    written_with = re.search(r"with nanobind ([\d.]+);", STUB)
    assert written_with is not None
    if nanobind.__version__ != written_with[1]:
        pytest.skip(
            f"nanobind {nanobind.__version__} spells signatures as it likes; {written_with[1]} wrote the stub"
        )
    tool = [sys.executable, str(ROOT / "tools" / "write_stub.py"), "--check"]
    checked = subprocess.run(tool, capture_output=True, text=True, timeout=120, check=False)
    assert checked.returncode == 0, checked.stderr


def functions() -> dict[str, list[ast.FunctionDef]]:
    """List the functions of the stub by name; those of a class are prefixed with the class."""
    out: dict[str, list[ast.FunctionDef]] = {}
    for node in ast.parse(STUB).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for member in inside:
            if isinstance(member, ast.FunctionDef):
                out.setdefault(prefix + member.name, []).append(member)
    return out


def annotated_types(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    found = [ast.unparse(each.annotation) for each in listed if each.annotation is not None]
    return [*found, *([ast.unparse(function.returns)] if function.returns is not None else [])]


def test_functions_that_say_object_are_listed_with_their_reason() -> None:
    vague = r"\bobject\b|^(tuple|list|dict)$"
    said = {
        name
        for name, overloads in functions().items()
        for function in overloads
        if function.name not in ("__eq__", "__exit__")
        and any(re.search(vague, annotation) for annotation in annotated_types(function))
    }
    assert said == set(SAYS_OBJECT)


def test_the_stub_never_says_any_nor_a_name_of_cpp() -> None:
    names = {node.id for node in ast.walk(ast.parse(STUB)) if isinstance(node, ast.Name)}
    assert not {"Any", "Incomplete", "Unknown"} & names
    assert not [
        text
        for overloads in functions().values()
        for each in overloads
        for text in annotated_types(each)
        if "::" in text
    ]
