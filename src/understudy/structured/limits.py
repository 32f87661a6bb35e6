"""Refuse forms that the library would compile for minutes, or that would end the process."""

from __future__ import annotations

import json
import math
import re
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from understudy.structured.formed import FormError
from understudy.structured.hints import is_number, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_WRITTEN = 1 << 17
"""Characters of a schema as the library reads it: it compiles them at once, in up to two seconds of CPU time."""
MAX_TEXT = 1 << 16
"""Characters of a grammar."""
MAX_PATTERN = 1 << 14
"""Characters of an expression, or of all patterns of a schema: the time grows with the square of their length."""
_MAX_LINKS = 500
"""References of a schema, rules of a grammar: the library follows them by recursion, on the stack of its thread."""
_MAX_TOGETHER = 8
"""Patterns that one value may have to match: the time to intersect them grows threefold with each."""
_MAX_MULTIPLE = 100_000
"""Common multiple of what a number is divided by, without its factors 2 and 5: as many states are searched."""
_MAX_KEY_PATTERNS = 64
"""Patterns of an object's keys: each is compared with each."""
_MAX_INTERSECTIONS = 16
"""Intersections of a grammar: every &, as texts cannot be found without reading the grammar."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LINKS = ("$ref", "anyOf", "oneOf")
_NEUTRAL = frozenset(
    (
        *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default"),
        *("examples", "example", "deprecated", "readOnly", "writeOnly", "nullable", "discriminator"),
        *("type", "required"),
    )
)
"""Keywords that add no pattern to those of a link beside them."""
_INSERTED = re.compile(r"%json\s*")


def check_schema(schema: Any) -> None:
    """ValueError for a schema beyond the limits."""
    links, patterns, characters, joins = 0, 0, 0, False
    multiples: set[Fraction] = set()
    for part in parts_of(schema):
        for name in _BOUNDS:
            if isinstance(bound := part.get(name), int | float) and abs(bound) >= 1 << 63:
                raise ValueError(f"{name}: numbers from 2**63 on are not supported; choose a smaller one")
        keys = part.get("patternProperties")
        if isinstance(keys, dict) and len(keys) > _MAX_KEY_PATTERNS:
            raise ValueError(f"patternProperties has more than {_MAX_KEY_PATTERNS} patterns; send fewer")
        links += "$ref" in part
        patterns += "pattern" in part
        characters += sum(map(len, keys)) if isinstance(keys, dict) else 0
        characters += len(text) if isinstance(text := part.get("pattern"), str) else 0
        step: Any = part.get("multipleOf")
        if is_number(step) and step > 0:
            multiples.add(Fraction(str(step)))
        linked = [name for name in _LINKS if name in part]
        others = part.keys() - _NEUTRAL - set(linked)
        joins |= "allOf" in part or len(linked) > 1 or bool(linked and others)
    if links > _MAX_LINKS:
        raise ValueError(f"the schema has more than {_MAX_LINKS} references; send fewer")
    if joins and patterns > _MAX_TOGETHER:
        raise ValueError(
            f"the schema joins parts (allOf, or keywords beside $ref or anyOf) and has more than {_MAX_TOGETHER} "
            "patterns; send fewer, or write the parts as one"
        )
    if joins and len(multiples) > 1 and _states_of(multiples) > _MAX_MULTIPLE:
        raise ValueError(
            "the schema joins parts (allOf, or keywords beside $ref or anyOf) and has multipleOf whose common multiple "
            f"is above {_MAX_MULTIPLE:,}; choose smaller ones, or write the parts as one"
        )
    if characters > MAX_PATTERN:
        raise ValueError(f"the patterns have more than {MAX_PATTERN:,} characters; send shorter ones")


def check_grammar(text: str, *, is_gbnf: bool) -> None:
    """ValueError for a grammar beyond the limits."""
    if text.count("::=" if is_gbnf else ":") > _MAX_LINKS:
        raise ValueError(f"the grammar has more than {_MAX_LINKS} rules; send fewer")
    if text.count("&") > _MAX_INTERSECTIONS:
        raise ValueError(
            f"the grammar has more than {_MAX_INTERSECTIONS} intersections (&, within texts too); send fewer"
        )
    for found in _INSERTED.finditer(text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"%json: {error}") from None
        check_schema(schema)


def _states_of(multiples: set[Fraction]) -> int:
    """Return the number of remainders in a search for a common multiple."""
    common = math.lcm(*(one.numerator for one in multiples))
    for factor in (2, 5):
        while common % factor == 0:
            common //= factor
    return common


@contextmanager
def refuse_panics() -> Iterator[None]:
    """Turn a failed assertion of the library, which is no Exception, into FormError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise FormError(f"Grammar error: {error}") from None
