"""Write docs/reference.md, the reference of the names that rooms export, from their docstrings and the stub."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference.md"
ROOMS = ("kv", "router", "events", "tiers", "workload", "report", "explain", "groups")
"""Rooms whose `__all__` is public."""
MORE = {
    "kv": ("understudy.kv.kv_manager:KvManager",),
    "tokens": (
        "understudy.tokens:TokenBlocks",
        "understudy.tokens:Identities",
        "understudy.tokens:Identity",
    ),
    "errors": ("understudy.errors",),
}
"""Public names that no `__all__` lists, by section; a module: all its classes."""
HEAD = """# Reference of the library

Names to import from the rooms of the package: blocks, routers, events, tiers, workloads, reports. The verbs and their
settings are in [api.md](api.md). [managers.md](managers.md) says which manager of blocks to take. This page is written
from the docstrings by `python tools/write_reference.py`.

"""
WIDTH = 118


def list_names() -> dict[str, list[tuple[str, Any]]]:
    """Return the public names of each section with their module, sorted."""
    found: dict[str, dict[str, tuple[str, Any]]] = {}
    for room in ROOMS:
        module = importlib.import_module(f"understudy.{room}")
        found[room] = {name: (f"understudy.{room}", getattr(module, name)) for name in module.__all__}
    for section, paths in MORE.items():
        names = found.setdefault(section, {})
        for path in paths:
            where, _, name = path.partition(":")
            module = importlib.import_module(where)
            wanted = [name] if name else [one for one, kind in vars(module).items() if isinstance(kind, type)]
            names |= {one: (where, getattr(module, one)) for one in wanted}
    return {
        section: sorted((name, thing) for name, (_, thing) in names.items())
        for section, names in found.items()
    }


@cache
def parse(path: Path) -> dict[str, ast.stmt]:
    """Return the classes and functions of a file by name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }


def find_node(thing: Any) -> ast.stmt | None:
    """Return the syntax tree of a class or function, from its file or from the stub of the core; None for a value."""
    if getattr(thing, "__module__", "").startswith("understudy._core"):
        return parse(ROOT / "src" / "understudy" / "_core.pyi").get(thing.__name__)
    thing = inspect.unwrap(thing) if callable(thing) else thing
    if isinstance(thing, type) or inspect.isfunction(thing):
        return parse(Path(inspect.getsourcefile(thing) or "")).get(thing.__name__)
    return None


def describe(room: str, name: str, thing: Any) -> str:
    """Return the section of a name. KeyError if it has no docstring."""
    node = find_node(thing)
    if node is None:
        return f"### {room}.{name}\n\n{describe_value(thing)}"
    is_core = getattr(thing, "__module__", "").startswith("understudy._core")
    text = ast.get_docstring(node) if is_core and isinstance(node, ast.ClassDef) else inspect.getdoc(thing)
    if not text:
        raise KeyError(f"understudy.{room}.{name}: the docstring is missing; add one")
    lines = [f"### {room}.{name}", "", text.strip()]
    if isinstance(node, ast.ClassDef):
        members = list(list_members(node))
        lines += ["", *members] if members else []
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        lines[2:2] = ["```text", f"{name}{signature(node)}", "```", ""]
    return "\n".join(lines)


def describe_value(thing: Any) -> str:
    """Describe a constant or an alias."""
    text = str(thing).replace("understudy.", "")
    return f"`{text}`" if len(text) <= WIDTH else f"A {type(thing).__name__} of {len(thing)} entries."


def list_members(node: ast.ClassDef) -> Iterator[str]:
    """Yield a line for each field and public method; methods that override a documented one need no text."""
    for at, one in enumerate(node.body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            if one.target.id.startswith("_"):
                continue
            after = node.body[at + 1] if at + 1 < len(node.body) else None
            value = f" = {ast.unparse(one.value)}" if one.value is not None else ""
            yield f"- `{one.target.id}: {ast.unparse(one.annotation)}{value}`{text_of(after)}"
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(each) for each in one.decorator_list}
            if any(each.endswith((".setter", "overload")) for each in decorators):
                continue
            if one.name == "__init__":
                yield f"- `{node.name}{signature(one)}`{doc_of(one)}"
            elif not one.name.startswith("_"):
                is_property = decorators & {"property", "cached_property"}
                yield f"- `{one.name}{'' if is_property else signature(one)}`{doc_of(one)}"


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return arguments and result without self."""
    arguments = ast.unparse(node.args)
    for first in ("self", "cls"):
        if arguments == first or arguments.startswith(f"{first}, "):
            arguments = arguments.removeprefix(first).removeprefix(", ")
    result = "" if node.returns is None or node.name == "__init__" else f" -> {ast.unparse(node.returns)}"
    return f"({arguments}){result}".replace("understudy.core_types.", "")


def doc_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the first paragraph of a docstring, behind a colon."""
    text = ast.get_docstring(node)
    return "" if not text else f": {' '.join(text.split(chr(10) * 2)[0].split())}"


def text_of(node: ast.stmt | None) -> str:
    """Return the text below a field, behind a colon."""
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        return f": {' '.join(node.value.value.split())}"
    return ""


def render() -> str:
    """Return the text of the page."""
    sections = []
    for room, names in list_names().items():
        about = inspect.getdoc(importlib.import_module(f"understudy.{room}")) or ""
        listed = "\n\n".join(describe(room, name, thing) for name, thing in names)
        sections.append(f"## understudy.{room}\n\n{about.split(chr(10) * 2)[0]}\n\n{listed}")
    return HEAD + "\n\n".join(sections) + "\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
