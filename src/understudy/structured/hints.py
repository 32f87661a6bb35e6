"""Texts that may fit somewhere in an answer: the library decides where one does."""

from __future__ import annotations

import importlib
import warnings
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.structured.formed import MAX_CHARACTERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WORDS = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel")
FORMATS = {
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "date": "2000-01-01",
    "duration": "P1D",
    "email": "alpha@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "uri": "https://example.com/alpha",
}
_MOST = 64
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_LETTERS = "a0A-_ .é"
_CATEGORIES = {"CATEGORY_DIGIT": "0", "CATEGORY_WORD": "a", "CATEGORY_SPACE": " "}


class Hints:
    """Candidates for strings and numbers of a schema, in its order; equal ones appear once."""

    def __init__(self, schema: Any = None) -> None:
        self.texts: dict[str, None] = {}
        self.numbers: dict[str, None] = {"0": None}
        self.lengths: set[int] = set()
        self.limits_properties = False
        """True if the library may refuse the schema for its optional properties."""
        if schema is not None:
            for part in parts_of(schema):
                self._read(part)

    def _read(self, part: dict[str, Any]) -> None:
        if len(self.texts) < _MOST:
            if isinstance(part.get("pattern"), str):
                self.texts[spell(part["pattern"])] = None
            if isinstance(name := part.get("format"), str) and name in FORMATS:
                self.texts[FORMATS[name]] = None
        if "minProperties" in part or "maxProperties" in part:
            self.limits_properties = True
        least = part.get("minLength")
        if isinstance(least, int) and least <= MAX_CHARACTERS and len(self.lengths) < _MOST:
            self.lengths.add(least)
        if len(self.numbers) < _MOST:
            self.numbers.update(dict.fromkeys(_numbers(part)))


def parts_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a schema."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            yield part
            todo.extend(reversed(part.values()))
        elif isinstance(part, list):
            todo.extend(reversed(part))


def _numbers(part: dict[str, Any]) -> Iterator[str]:
    """Yield bounds, their neighbours and the multiples next to them."""
    bounds: list[Any] = [part.get(name) for name in _BOUNDS]
    step: Any = part.get("multipleOf")
    try:
        exact = [Decimal(str(bound)) for bound in bounds if is_number(bound)]
        for bound in exact:
            yield from (_plain(bound), _plain(bound // 1 + 1), _plain(-(-bound // 1) - 1))
        if is_number(step) and step > 0:
            unit = Decimal(str(step))
            for bound in exact or [Decimal(0)]:
                multiples = [unit * (bound // unit + more) for more in range(-2, 8)]
                # Clients divide floating-point numbers: choose a multiple that is one for them, too.
                yield from (_plain(one) for one in multiples if (float(one) / step).is_integer())
        elif len(exact) > 1:
            yield _plain((min(exact) + max(exact)) / 2)
    except (InvalidOperation, OverflowError, ValueError):
        return


def is_number(value: Any) -> bool:
    """Whether the value of a keyword is a number for which answers are searched."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18


def _plain(number: Decimal) -> str:
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def spell(pattern: str, most: int = 1 << 17) -> str:
    """Return a short text that the pattern probably matches, or nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parser: Any = importlib.import_module("re._parser")
            return _spell(parser.parse(pattern), most).encode(errors="ignore").decode()
    except Exception:  # patterns of another dialect: the answer is found without this hint
        return ""


def _spell(items: Iterable[Any], most: int) -> str:
    out: list[str] = []
    for kind, value in items:
        match str(kind):
            case "LITERAL":
                out.append(chr(value))
            case "NOT_LITERAL":
                out.append(next(letter for letter in _LETTERS if ord(letter) != value))
            case "ANY":
                out.append("a")
            case "IN":
                out.append(_letter(value))
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                once = _spell(value[2], most) if value[0] else ""
                out.append(once * min(value[0], most // len(once) + 1) if once else "")
            case "SUBPATTERN":
                out.append(_spell(value[3], most))
            case "ATOMIC_GROUP":
                out.append(_spell(value, most))
            case "BRANCH":
                out.append(_spell(value[1][0], most))
    return "".join(out)[:most]


def _letter(members: list[Any]) -> str:
    """Return a character of a set."""
    if str(members[0][0]) != "NEGATE":
        kind, value = members[0]
        if str(kind) == "CATEGORY":
            return _CATEGORIES.get(str(value), "-")
        return chr(value if str(kind) == "LITERAL" else value[0])
    for letter in _LETTERS:
        if not any(_has(member, letter) for member in members[1:]):
            return letter
    return "~"


def _has(member: tuple[Any, Any], letter: str) -> bool:
    kind, value = member
    match str(kind):
        case "LITERAL":
            return bool(ord(letter) == value)
        case "RANGE":
            return bool(value[0] <= ord(letter) <= value[1])
    return {
        "CATEGORY_DIGIT": letter.isdigit(),
        "CATEGORY_WORD": letter.isalnum() or letter == "_",
        "CATEGORY_SPACE": letter.isspace(),
        "CATEGORY_NOT_DIGIT": not letter.isdigit(),
        "CATEGORY_NOT_WORD": not (letter.isalnum() or letter == "_"),
        "CATEGORY_NOT_SPACE": not letter.isspace(),
    }.get(str(value), True)


def quoted(text: str) -> bytes:
    """Return the text as JSON, without the first quote."""
    return msgspec.json.encode(text)[1:]
