"""Arrays and objects: their parts are made one after the other, and varied until all fit together."""

from __future__ import annotations

from itertools import chain, combinations, count, islice
from typing import TYPE_CHECKING, Any, Protocol

from understudy._core import xxh3_64
from understudy.server.api.structured.texts import MAX_CHARACTERS
from understudy.server.api.structured.values import LongList, LongObject, TooLong, identity, json_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from understudy.server.api.structured.constraints import Constraints
    from understudy.server.api.structured.document import Schema
    from understudy.server.api.structured.errors import Steps
    from understudy.server.api.structured.negation import Part
    from understudy.server.api.structured.place import Place

_ABSENT: Any = object()
_VARIED_ITEMS = 8
"""Items that differ; later ones repeat them."""
_MORE_LENGTHS = 8
_MAX_TWINS = 16


class PartMaker(Protocol):
    """Makes the parts of containers: a solver."""

    steps: Steps
    conflict: str

    def rule_out(self, keyword: str) -> None:
        """Note why there is no value."""

    def is_lean(self, place: Place) -> bool:
        """Return whether only what is required is to be made here."""

    def is_recursive(self, parts: Iterable[Part], place: Place) -> bool:
        """Return whether one of the schemas refers to a schema that this place is within."""

    def values(self, schemas: list[Schema], place: Place) -> Iterator[Any]:
        """Yield values that all the schemas admit."""


class Stream:
    """The values of one part, made when they are first asked for."""

    def __init__(self, values: Iterator[Any]) -> None:
        self._values = values
        self._made: list[Any] = []

    def has(self, place: int) -> bool:
        """Return whether there are more than `place` values."""
        while len(self._made) <= place:
            for value in self._values:
                self._made.append(value)
                break
            else:
                return False
        return True

    def __getitem__(self, place: int) -> Any:
        return self._made[place]


class Containers:
    """Make arrays and objects for a solver, which makes their parts."""

    def __init__(self, solver: PartMaker) -> None:
        self._solver = solver

    # ── Arrays ──

    def arrays(self, wanted: Constraints, place: Place) -> Iterator[list[Any]]:
        """Yield arrays, those of the most natural length first."""
        low, high = wanted.items.low, wanted.items.high
        usual = low if self._solver.is_lean(place) else max(low, wanted.prefix, 1)
        lengths = dict.fromkeys(
            int(min(length, high))
            for length in chain([usual], range(usual - 1, low - 1, -1), range(usual, usual + _MORE_LENGTHS))
        )
        impossible = high + 1
        for length in lengths:
            if length >= impossible:
                continue
            makes = self._unique if wanted.is_unique else self._twins if wanted.has_twins else self._repeated
            found = False
            for made in makes(wanted, place, length):
                if isinstance(made, int):  # no item can be at this place
                    impossible = min(impossible, made + 1)
                    break
                found = True
                yield made
            if not found and wanted.is_unique:
                self._solver.rule_out("uniqueItems")
        self._solver.rule_out(wanted.items.low_keyword)

    def _item(self, wanted: Constraints, place: Place, index: int) -> Stream:
        schemas = wanted.schemas_at(index)
        return Stream(self._below(schemas, place, place.key + index, is_required=index < wanted.items.low))

    def _below(self, schemas: list[Schema], place: Place, key: int, *, is_required: bool) -> Iterator[Any]:
        if not is_required and self._solver.is_recursive(schemas, place):
            return iter(())
        return self._solver.values(schemas, place._replace(key=key, depth=place.depth + 1))

    def _repeated(self, wanted: Constraints, place: Place, length: int) -> Iterator[Any]:
        """Yield arrays of a length; or the first place that has no value."""
        prefix = wanted.prefix
        streams: list[Stream] = []
        items: list[Any] = []
        size = 0
        for index in range(length):
            if index < prefix + _VARIED_ITEMS:
                streams.append(self._item(wanted, place, index))
                if not streams[-1].has(0):
                    yield index
                    return
            items.append(streams[index if index < len(streams) else prefix + index % _VARIED_ITEMS][0])
            size += len(json_of(items[-1])) + 1
            if size > MAX_CHARACTERS or isinstance(items[-1], TooLong):
                yield LongList(items)
                return
        yield items
        if length == len(streams):
            yield from islice(_combined(streams, self._solver.steps), 1, None)

    def _unique(self, wanted: Constraints, place: Place, length: int) -> Iterator[Any]:
        """Yield arrays of different items; or the first place that has no value."""
        first = min(length, wanted.prefix)
        streams = [self._item(wanted, place, index) for index in range(first)]
        rest = self._item(wanted, place, first)
        for index, stream in enumerate(streams):
            if not stream.has(0):
                yield index
                return
        for chosen in _different(streams, [], set(), self._solver):
            used = {identity(item) for item in chosen}
            items = list(chosen)
            size = sum(len(json_of(item)) + 1 for item in items)
            for index in count():
                if len(items) >= length or size > MAX_CHARACTERS or not rest.has(index):
                    break
                item = rest[index]
                self._solver.steps.take()
                if identity(item) not in used:
                    used.add(identity(item))
                    items.append(item)
                    size += len(json_of(item)) + 1
            if size > MAX_CHARACTERS:
                yield LongList(items)
            elif len(items) == length:
                yield items

    def _twins(self, wanted: Constraints, place: Place, length: int) -> Iterator[Any]:
        """Yield arrays with two equal items; or the first place that has no value."""
        for made in islice(self._repeated(wanted, place, length), 1):
            if isinstance(made, int | TooLong):
                yield made
                return
            for one, other in islice(combinations(range(length), 2), _MAX_TWINS):
                schemas = [*wanted.schemas_at(one), *wanted.schemas_at(other)]
                for item in islice(self._below(schemas, place, place.key, is_required=True), 1):
                    yield [item if index in (one, other) else kept for index, kept in enumerate(made)]

    # ── Objects ──

    def objects(self, wanted: Constraints, place: Place) -> Iterator[dict[str, Any]]:
        """Yield objects: first with all properties that are named, then with fewer and others."""
        low, high = wanted.properties.low, wanted.properties.high
        streams = {name: self._property(wanted, place, name) for name in wanted.required}
        size = 0
        for count_made, (name, stream) in enumerate(streams.items(), start=1):
            if not stream.has(0):
                self._solver.rule_out("required")
                return
            size += _size(name, stream[0])
            if size > MAX_CHARACTERS:
                yield LongObject((name, stream[0]) for name, stream in islice(streams.items(), count_made))
                return
        present = len(streams)
        lean = self._solver.is_lean(place)
        for name in wanted.names:
            if name in streams:
                continue
            conflict = self._solver.conflict
            wants = present < (low if lean else high)
            stream = streams[name] = Stream(_optional(self._property(wanted, place, name), wants=wants))
            if stream.has(0) and stream[0] is not _ABSENT:
                if size + _size(name, stream[0]) > MAX_CHARACTERS:
                    streams[name] = Stream(iter([_ABSENT]))
                else:
                    present, size = present + 1, size + _size(name, stream[0])
            self._solver.conflict = conflict  # nothing is wrong with a property that may be absent
        for name in _new_names(streams) if present < low else ():
            stream = Stream(
                self._below(wanted.schemas_of(name), place, place.key + present, is_required=True)
            )
            if not stream.has(0):
                break
            streams[name] = stream
            present, size = present + 1, size + _size(name, stream[0])
            if size > MAX_CHARACTERS:
                first = {name: stream[0] for name, stream in streams.items()}
                yield LongObject((name, value) for name, value in first.items() if value is not _ABSENT)
                return
            if present >= low:
                break
        if present < low:
            self._solver.rule_out("minProperties")
            return
        order = {name: streams[name] for name in [*wanted.names, *streams]}
        for made in _combined(list(order.values()), self._solver.steps):
            value = {name: part for name, part in zip(order, made, strict=True) if part is not _ABSENT}
            if low <= len(value) <= high:
                yield value
            else:
                self._solver.rule_out("minProperties" if len(value) < low else "maxProperties")

    def _property(self, wanted: Constraints, place: Place, name: str) -> Stream:
        key = xxh3_64(name.encode("utf-8", "replace"), place.key)
        required = name in wanted.required
        return Stream(self._below(wanted.schemas_of(name), place, key, is_required=required))


def _size(name: str, value: Any) -> int:
    """Return about the characters of a property in JSON."""
    return len(name) + len(json_of(value)) + 4


def _new_names(taken: dict[str, Stream]) -> Iterator[str]:
    names = chain(["extra"], (f"extra{index}" for index in count(1)))
    return (name for name in names if name not in taken)


def _optional(values: Stream, *, wants: bool) -> Iterator[Any]:
    """Yield the values of a property that may be absent; one that is too long is left out."""
    if wants and values.has(0) and not isinstance(values[0], TooLong):
        yield values[0]
    yield _ABSENT
    for index in count(1 if wants else 0):
        if not values.has(index) or isinstance(values[index], TooLong):
            return
        yield values[index]


def _combined(streams: list[Stream], steps: Steps) -> Iterator[list[Any]]:
    """Yield a value of each stream: the first of all, then those one more step away in total, and so on."""
    for weight in count():
        found = False
        for places in _weighted(streams, weight, 0, steps):
            found = True
            yield [stream[places.get(index, 0)] for index, stream in enumerate(streams)]
        if not found:
            return


def _weighted(streams: list[Stream], weight: int, start: int, steps: Steps) -> Iterator[dict[int, int]]:
    """Yield all places in the streams from `start` that are `weight` steps away from the first ones."""
    if weight == 0:
        yield {}
        return
    steps.take(1 + (len(streams) - start) // 4)
    for index in range(start, len(streams)):
        for place in range(1, weight + 1):
            if not streams[index].has(place):
                break
            for rest in _weighted(streams, weight - place, index + 1, steps):
                yield {index: place, **rest}


def _different(
    streams: list[Stream], chosen: list[Any], used: set[Any], solver: PartMaker
) -> Iterator[list[Any]]:
    """Yield a value of each stream, no two of them equal."""
    if len(chosen) == len(streams):
        yield chosen
        return
    for place in count():
        solver.steps.take()
        if not streams[len(chosen)].has(place):
            return
        value = streams[len(chosen)][place]
        if identity(value) not in used:
            yield from _different(streams, [*chosen, value], used | {identity(value)}, solver)
