"""Random faults of one line: conditions that are negated, numbers that are off by one, statements that are dropped."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import NamedTuple

from mutant import Mutant

HOUSE = Path(__file__).parents[1]
ROOMS = {
    "core/engine/sglang/*.cpp": "tests/engines/test_sglang.py tests/replay/test_sglang_disaggregation.py "
    "tests/replay/test_sglang_fast_forward.py tests/engines/test_sglang_pools.py",
    "core/engine/handoff_net.cpp": "tests/replay/test_disaggregation.py tests/replay/test_handoff_failures.py",
    "core/engine/vllm/loads.cpp": "tests/engines/test_handoff_conformance.py tests/replay/test_disaggregation.py "
    "tests/replay/test_handoff_failures.py",
    "core/engine/vllm/handoff/*.cpp": "tests/engines/test_handoff_conformance.py tests/replay/test_disaggregation.py "
    "tests/replay/test_handoff_failures.py",
    "core/replay/fleet_pushed.cpp": "tests/replay/test_sglang_disaggregation.py",
    "core/replay/fleet_staged.cpp": "tests/replay/test_disaggregation.py tests/replay/test_handoff_failures.py",
}
"""Tests that must notice a fault, by the files that it may be in."""
_CONDITION = re.compile(r"(?P<head>^ +if )\((?P<inner>[^;]+)\)(?P<tail> (?:\{|[^{}]*;))$")
_NUMBER = re.compile(r" (?P<sign>[-+]|[<>=]=|[<>]) (?P<number>[01])(?=[;,) ])")
_STATEMENT = re.compile(
    r"^(?P<indent> +)(?P<statement>(?:\+\+|--)?[a-z_][\w.>\[\]-]*(?:\(.*\)| [-+]?= [^{}]+)?;)$"
)
_NO_STATEMENT = re.compile(r"^(?:return|break|continue|throw|const|auto|using|co_|case|default|else|std::)\b")


class _Place(NamedTuple):
    file: str
    line: int
    kind: str
    becomes: str


def list_places(file: str, text: str) -> list[_Place]:
    """List the faults that lines of a file may have, at most one of each kind per line."""
    places = []
    for number, line in enumerate(text.splitlines()):
        if "//" in line or "UNDERSTUDY_ASSERT" in line:
            continue
        found = _CONDITION.match(line)
        if found and _is_balanced(found["inner"]) and " = " not in found["inner"]:
            negated = f"{found['head']}(FAULT != static_cast<bool>({found['inner']})){found['tail']}"
            places.append(_Place(file, number, "negated", negated))
        if (found := _NUMBER.search(line)) and " for " not in f" {line.strip()}":
            off = f" {found['sign']} (FAULT ? {1 + int(found['number'])} : {found['number']})"
            places.append(
                _Place(file, number, "off by one", line[: found.start()] + off + line[found.end() :])
            )
        found = _STATEMENT.match(line)
        if found and not _NO_STATEMENT.match(found["statement"]) and _is_balanced(line):
            dropped = f"{found['indent']}if (!FAULT) {found['statement']}"
            places.append(_Place(file, number, "dropped", dropped))
    return places


def draw(count: int, seed: int) -> list[Mutant]:
    """Draw faults of different lines, each of which stands once in its file; fewer if there are not as many."""
    draws = Random(f"faults {seed}")
    texts = {
        str(path.relative_to(HOUSE)): (path.read_text(encoding="utf-8"), tests)
        for pattern, tests in ROOMS.items()
        for path in sorted(HOUSE.glob(pattern))
    }
    places = [place for file, (text, _) in texts.items() for place in list_places(file, text)]
    draws.shuffle(places)
    taken: set[tuple[str, int]] = set()
    mutants: list[Mutant] = []
    for place in places:
        text, tests = texts[place.file]
        lines = text.splitlines()
        near = {(place.file, place.line + step) for step in (-1, 0, 1)}
        was = "\n".join(lines[place.line - 1 : place.line + 1]) + "\n"
        if len(mutants) == count or taken & near or text.count(was) != 1:
            continue
        taken |= near
        becomes = f"{lines[place.line - 1]}\n{place.becomes}\n"
        mutants.append(Mutant(f"{place.file}:{place.line + 1} {place.kind}", place.file, was, becomes, tests))
    return mutants


def _is_balanced(text: str) -> bool:
    """Whether each parenthesis is closed within the text, and none before it is opened."""
    depth = 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            return False
    return depth == 0
