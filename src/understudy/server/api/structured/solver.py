"""The search for values that meet several schemas at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from understudy.server.api.structured.constraints import Constraints
from understudy.server.api.structured.containers import Containers
from understudy.server.api.structured.errors import Steps
from understudy.server.api.structured.negation import Check, Part, opposite
from understudy.server.api.structured.numbers import numbers_of
from understudy.server.api.structured.strings import strings_of
from understudy.server.api.structured.validator import Validator
from understudy.server.api.structured.values import TooLong

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from understudy.server.api.structured.document import Document, Schema
    from understudy.server.api.structured.place import Place

MAX_DEPTH = 64
_LEAN_DEPTH = 8
_LEAN_PARTS = 256
"""Deeper, or after so many parts, only what is required is made."""
_PART_STEPS = 4
_TRIES = 8
_IN_PLACE = frozenset(("$ref", "allOf", "anyOf", "oneOf", "not", "$defs", "definitions"))


class _Node(NamedTuple):
    """A value's schemas while alternatives are chosen."""

    own: list[dict[str, Any] | Check]
    choices: list[tuple[str, list[list[Part]]]]
    seen: dict[int, Part]
    place: Place


class Solver:
    """Make values for the schemas of one document, with a limited number of steps."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.validator = Validator(document)
        self._containers = Containers(self)
        self.conflict = ""
        """The first keyword that ruled a value out."""
        self.steps = self.validator.steps = Steps()
        self._parts = 0
        self._made_lean: dict[tuple[int, ...] | None, Any] = {}
        """Values by the schemas that they are for; used again where only what is required is made."""

    def restart(self) -> None:
        """Begin another answer: with all steps."""
        self.steps = self.validator.steps = Steps()
        self._parts = 0
        self._made_lean.clear()
        self.conflict = ""

    def rule_out(self, keyword: str) -> None:
        """Note why there is no value."""
        self.conflict = self.conflict or keyword

    def is_lean(self, place: Place) -> bool:
        """Return whether only what is required is to be made here."""
        return place.depth > _LEAN_DEPTH or self._parts > _LEAN_PARTS

    def is_recursive(self, parts: Iterable[Part], place: Place) -> bool:
        """Return whether one of the schemas refers to a schema that this place is within."""
        return any(isinstance(part, dict) and part.get("$ref") in place.references for part in parts)

    def values(self, schemas: list[Schema], place: Place) -> Iterator[Any]:
        """Yield values that all the schemas admit; values that are too long come last."""
        self._parts += 1
        self.steps.take(_PART_STEPS)
        if place.depth > MAX_DEPTH:
            self.rule_out("$ref")
            return
        key = tuple(map(id, schemas)) if self.is_lean(place) and self.document.owns(schemas) else None
        if key in self._made_lean:
            yield self._made_lean[key]
        for value in self._branch(list(schemas), _Node([], [], {}, place), schemas):
            if key is not None and not isinstance(value, TooLong):
                self._made_lean.setdefault(key, value)
            yield value

    # ── Alternatives ──

    def _branch(self, todo: list[Part], node: _Node, whole: list[Schema]) -> Iterator[Any]:
        self.steps.take(1 + len(node.own))
        opened = self._open(todo, node)
        if opened is None:
            return
        if any(isinstance(one, dict) and ("enum" in one or "const" in one) for one in opened.own):
            yield from self._given(opened, whole)
            return
        wanted = Constraints(opened.own)
        if not wanted.kinds:
            self.rule_out(wanted.conflict)
        elif opened.choices:
            yield from self._choose(opened, whole)
        else:
            yield from self._checked(wanted, opened.place)

    def _open(self, todo: list[Part], node: _Node) -> _Node | None:
        """Take the schemas apart: what they say themselves, and the choices that they leave. None: impossible."""
        own, choices, seen, place = list(node.own), list(node.choices), dict(node.seen), node.place
        while todo:
            part = todo.pop(0)
            if isinstance(part, Check):
                own.append(part)
                continue
            if isinstance(part, bool):
                if not part:
                    return None
                continue
            if id(part) in seen:
                continue
            seen[id(part)] = part  # kept, so that no other schema gets its id
            if "$ref" in part:
                todo.append(self.document.resolve(part["$ref"]))
                place = place._replace(references=place.references | {part["$ref"]})
            todo += part.get("allOf", ())
            if "anyOf" in part:
                choices.append(("anyOf", [[one] for one in part["anyOf"]]))
            if "oneOf" in part:
                choices.append(("oneOf", _exactly_one(part["oneOf"])))
            if "not" in part:
                choices.append(("oneOf", list(opposite(part["not"], self.document))))
            if not _IN_PLACE.issuperset(part):
                own.append(part)
        return _Node(own, choices, seen, place)

    def _choose(self, node: _Node, whole: list[Schema]) -> Iterator[Any]:
        fewest = min(range(len(node.choices)), key=lambda place: len(node.choices[place][1]))
        keyword, alternatives = node.choices[fewest]
        rest = node._replace(choices=[*node.choices[:fewest], *node.choices[fewest + 1 :]])
        place = node.place
        lean = self.is_lean(place)

        def rank(parts: list[Part]) -> tuple[bool, float]:
            height = max(
                (self.document.height(one) for one in parts if not isinstance(one, Check)), default=0
            )
            return self.is_recursive(parts, place), height if lean else 0

        conflict, self.conflict = self.conflict, ""
        long: list[Any] = []
        for parts in sorted(alternatives, key=rank):
            for value in self._branch(list(parts), rest, whole):
                if isinstance(value, TooLong):
                    long.append(value)
                    break
                found, self.conflict = self.conflict, conflict
                yield value
                conflict, self.conflict = self.conflict, found
        yield from long
        self.rule_out(keyword)
        self.conflict = conflict or self.conflict

    def _given(self, node: _Node, whole: list[Schema]) -> Iterator[Any]:
        """Yield the values that `enum` and `const` leave."""
        schemas = [one for one in node.own if isinstance(one, dict)]
        lists = [one["enum"] for one in schemas if "enum" in one]
        lists += [[one["const"]] for one in schemas if "const" in one]
        values = min(lists, key=len)
        start = node.place.key % len(values)
        for value in values[start:] + values[:start]:
            broken = next(filter(None, (self.validator.broken(value, one) for one in whole)), "")
            if not broken:
                yield value
            self.rule_out(broken)

    # ── Values ──

    def _checked(self, wanted: Constraints, place: Place) -> Iterator[Any]:
        """Yield the values that pass the checks, as long as that does not take too many tries."""
        failures = 0
        most = min((check.tries for check in wanted.checks), default=0)
        for value in self._made(wanted, place):
            if isinstance(value, TooLong) or all(
                self.validator.is_valid(value, check.schema) for check in wanted.checks
            ):
                yield value
            else:
                failures += 1
                if failures >= most:
                    return

    def _made(self, wanted: Constraints, place: Place) -> Iterator[Any]:
        long: list[Any] = []
        for kind in wanted.kinds:
            for value in self._of_kind(kind, wanted, place):
                if isinstance(value, TooLong):
                    long.append(value)
                    break
                yield value
        yield from long
        if wanted.conflict:
            self.rule_out(wanted.conflict)

    def _of_kind(self, kind: str, wanted: Constraints, place: Place) -> Iterator[Any]:
        match kind:
            case "null":
                yield None
            case "boolean":
                yield bool(place.key % 2)
                yield not place.key % 2
            case "integer" | "fraction":
                yield from numbers_of(wanted, self.steps, whole=kind == "integer")
                self.rule_out(
                    "multipleOf" if wanted.multiples else wanted.low.keyword if wanted.low else "type"
                )
            case "string":
                yield from strings_of(wanted, self.document, place.key, self.steps)
                self.rule_out("pattern" if wanted.patterns else "format" if wanted.formats else "maxLength")
            case "array":
                yield from self._containers.arrays(wanted, place)
            case _:
                yield from self._containers.objects(wanted, place)


def _exactly_one(schemas: list[Schema]) -> list[list[Part]]:
    """Return the ways to meet one of the schemas only: first by trial, then by breaking all others."""
    tried: list[list[Part]] = [[one, Check({"oneOf": schemas}, _TRIES)] for one in schemas]
    broken: list[list[Part]] = [
        [one, *({"not": other} for other in [*schemas[:place], *schemas[place + 1 :]])]
        for place, one in enumerate(schemas)
    ]
    return tried + broken if len(schemas) > 1 else [[schemas[0]]]
