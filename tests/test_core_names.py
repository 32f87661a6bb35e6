"""Names of the native core: no two types of one namespace share one, which a linker would not notice."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

CORE = Path(__file__).parents[1] / "core"
SCOPE = re.compile(
    r"^(?P<open>namespace(?: [\w:]+)? \{)|^(?P<close>\}  // namespace)|"
    r"^(?:class|struct|union|enum class|enum) (?:alignas\(\w+\) )?(?P<name>\w+)(?: final)?(?: : [^;{]+)? \{",
    re.MULTILINE,
)


def types_of(text: str) -> list[str]:
    """Types that a file defines at the level of a namespace, with that; those of unnamed namespaces are its own."""
    found, spaces = [], []
    for match in SCOPE.finditer(text):
        if match["open"] is not None:
            spaces.append(match["open"].removeprefix("namespace").removesuffix("{").strip())
        elif match["close"] is not None:
            spaces.pop()
        elif "" not in spaces:
            found.append("::".join([*spaces, match["name"]]))
    return found


def test_every_type_of_the_core_is_defined_once() -> None:
    places = defaultdict(list)
    for file in sorted(CORE.rglob("*.[ch]pp")):
        for name in types_of(file.read_text(encoding="utf-8")):
            places[name].append(file.relative_to(CORE).as_posix())
    assert len(places) > 200
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
