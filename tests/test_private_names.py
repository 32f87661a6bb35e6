"""No module uses private names of the standard library, which change without notice."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = sorted((Path(__file__).parents[1] / "src" / "understudy").rglob("*.py"))
PUBLIC = {"os._exit", "argparse._SubParsersAction", "argparse._ArgumentGroup"}
"""Documented, or a type that has no other name."""


MAY_USE = re.compile(
    r"(?<![\w.])(?!self\b|cls\b)\w+\._[A-Za-z]|\bgetattr\(|\bimport\b[^\n]*\b_[A-Za-z]|\bimport \("
)
"""Found in every module that could use such a name; parsing all of them takes seconds."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names and module != "__future__"


def private_uses(tree: ast.Module) -> Iterator[str]:
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {one.asname or one.name.partition(".")[0]: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and is_standard(node.module or ""):
            modules |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
            yield from (f"{node.module}.{one.name}" for one in node.names if is_private(one.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id, "")
            if is_standard(module):
                yield f"{module}.{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                yield f"getattr {name.value!r}"


def private_uses_in(text: str) -> Iterator[str]:
    if MAY_USE.search(text):
        yield from private_uses(ast.parse(text))


def test_no_module_uses_a_private_name_of_the_standard_library() -> None:
    found = {path.name: set(private_uses_in(path.read_text())) - PUBLIC for path in SOURCES}
    assert {name: uses for name, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("import os\nos._exists(1)", "os._exists"),
        ("from os import _exists", "os._exists"),
        ("from os import (\n    path,\n    _exists,\n)", "os._exists"),
        ("import os as system\nsystem._exists", "os._exists"),
        ("getattr(one, '_name')", "getattr '_name'"),
    ],
)
def test_a_private_name_is_found_wherever_it_stands(text: str, use: str) -> None:
    assert list(private_uses_in(text)) == [use]
