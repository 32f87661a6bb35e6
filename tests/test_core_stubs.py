"""The stub of the native core names exactly what the core has."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import understudy
from understudy import _core

if TYPE_CHECKING:
    from collections.abc import Iterable

STUB = ast.parse(Path(understudy.__file__).with_name("_core.pyi").read_text())


def public(names: Iterable[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def names_of(node: ast.stmt) -> list[str]:
    match node:
        case ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            return []  # for the type checker only
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case _:
            return []


def stub_names(body: list[ast.stmt]) -> set[str]:
    return public(name for node in body for name in names_of(node))


def test_every_name_of_the_core_is_in_the_stub_and_no_other() -> None:
    assert stub_names(STUB.body) == public(dir(_core))


def test_every_member_of_every_class_is_in_the_stub_and_no_other() -> None:
    for node in STUB.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            assert stub_names(node.body) == public(vars(getattr(_core, node.name))), node.name
