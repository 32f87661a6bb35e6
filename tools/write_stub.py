"""Write src/understudy/_core.pyi from the signatures of the compiled core.

    python tools/write_stub.py
    python tools/write_stub.py --check    # exits with 1 if the file is another

It runs in a process of its own, because libraries keep caches on the core's classes, which a stub would list.
Needs a core with the engines of the tests (UNDERSTUDY_TEST_ENGINES), as `make test` builds it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nanobind
from nanobind.stubgen import StubGen

from understudy import _core

STUB = Path(__file__).parents[1] / "src" / "understudy" / "_core.pyi"
TYPES = "understudy.core_types"

REPLACEMENTS = (
    # Arrays have their element type; what else nanobind says of them is not Python.
    (r"Annotated\[(NDArray\[[\w.]+\]), dict\(.*?\)\]", r"\1"),
    (r"\bAnnotated, |, Annotated\b", ""),
    (rf"{re.escape(TYPES)}\.(\w+)", r"\1"),
    (r"\bFIELDS: tuple = .*", "FIELDS: tuple[str, ...]"),
    # A stub's way to say that a class cannot be hashed.
    (r"__hash__: None = None", "__hash__: None  # type: ignore[assignment]"),
)


def render() -> str:
    """Return the stub of the compiled core."""
    generator = StubGen(module=_core)
    generator.put(_core)
    text = generator.get()
    named = sorted(set(re.findall(rf"{re.escape(TYPES)}\.(\w+)", text)))
    for pattern, replacement in REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    imports = ",\n    ".join(named)
    text = re.sub(
        rf"^import {re.escape(TYPES)}$", f"from {TYPES} import (\n    {imports},\n)", text, flags=re.MULTILINE
    )
    return f"# Written by tools/write_stub.py with nanobind {nanobind.__version__}; not to be edited.\n{text}"


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(None if render() == STUB.read_text(encoding="utf-8") else "run python tools/write_stub.py")
    STUB.write_text(render(), encoding="utf-8")
