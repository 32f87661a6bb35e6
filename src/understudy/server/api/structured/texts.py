"""Texts that an expression matches, of a length within bounds, the shortest first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.server.api.structured.regex import START, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.server.api.structured.errors import Steps
    from understudy.server.api.structured.regex import Expressions, Node

MAX_CHARACTERS = 1 << 17
"""No answer is longer."""
_MAX_STATES = 64
"""States of one length that are followed; those that need the fewest characters stay."""
_Edges = list[dict[State, list[tuple[int, State]]]]


def texts_of(on: Expressions, node: Node, low: int, high: float, steps: Steps) -> Iterator[str]:
    """Yield texts of `low` to `high` characters that the expression matches, each once."""
    high = min(high, MAX_CHARACTERS)
    if max(node.least, low) > high:
        return
    quick = spell(on, node, low)
    if quick is not None and low <= len(quick) <= high:
        on.known.add((node.number, quick))
        yield quick
    for text in _search(on, node, low, high, steps):
        if text != quick:
            yield text


def spell(on: Expressions, node: Node, want: float) -> str | None:
    """Return one text of about `want` characters, by the expression's structure alone.

    None where that is not enough: for intersections, complements and anchors inside. A text of more than
    MAX_CHARACTERS characters may be incomplete.
    """
    out: list[str] = []
    size = 0
    while node.op == "cat" and size <= MAX_CHARACTERS:
        left, node = node.parts
        part = _spell_one(on, left, want - node.least)
        if part is None:
            return None
        out.append(part)
        size += len(part)
        want -= len(part)
    last = _spell_one(on, node, want) if size <= MAX_CHARACTERS else ""
    return None if last is None else "".join([*out, last])


def _spell_one(on: Expressions, node: Node, want: float) -> str | None:
    match node.op:
        case "empty":
            return ""
        case "set":
            mask = on.mask(node)
            return on.letter(mask) if mask else None
        case "cat":
            return spell(on, node, want)
        case "alt":
            fitting = [part for part in node.parts if part.least <= want <= part.most]
            return spell(on, min(fitting or node.parts, key=lambda part: part.least), want)
        case "repeat":
            (part,) = node.parts
            once = spell(on, part, part.least or min(want, part.most))
            if not once:
                return once
            count = min(max(want // len(once), node.low), node.high)
            return once * int(min(count, MAX_CHARACTERS // len(once) + 1))
    return None


def _search(on: Expressions, node: Node, low: int, high: float, steps: Steps) -> Iterator[str]:
    """Follow all states length by length; where the text may end, yield the paths that lead there."""
    layer: dict[State, None] = {State(node, START): None}
    edges: _Edges = []
    fruitless: set[frozenset[State]] = set()
    while layer:
        length = len(edges)
        ends = [state for state in layer if on.accepts(state)] if length >= low else []
        if ends:
            fruitless.clear()
            yield from _paths(on, edges, ends, steps)
        elif length >= low:
            seen = frozenset(layer)
            if seen in fruitless:  # the same states come again and again, and none may end
                return
            fruitless.add(seen)
        if length >= high:
            return
        following: dict[State, None] = {}
        leaving: dict[State, list[tuple[int, State]]] = {}
        for state in layer:
            steps.take(1 + len(state.node.parts) // 4)
            moves = [
                move
                for move in on.moves(state)
                if length + 1 + move[1].node.least <= high and length + 1 + move[1].node.most >= low
            ]
            leaving[state] = moves
            following.update((move[1], None) for move in moves)
        if len(following) > _MAX_STATES:
            following = dict.fromkeys(sorted(following, key=lambda state: state.node.least)[:_MAX_STATES])
        edges.append(leaving)
        layer = following


def _paths(on: Expressions, edges: _Edges, ends: list[State], steps: Steps) -> Iterator[str]:
    """Yield the texts of all paths that lead to one of the ends."""
    if not edges:
        yield ""
        return
    alive = set(ends)
    useful: _Edges = []
    for leaving in reversed(edges):
        kept = {
            state: live
            for state, moves in leaving.items()
            if (live := [move for move in moves if move[1] in alive])
        }
        useful.append(kept)
        alive = set(kept)
    useful.reverse()
    (start,) = useful[0]
    letters = on.alphabet.letters
    path: list[str] = []
    open_ends = [_letters_of(useful[0][start])]
    while open_ends:
        move = next(open_ends[-1], None)
        if move is None:
            open_ends.pop()
            if path:
                path.pop()
            continue
        place, state = move
        path.append(letters[place])
        if len(path) < len(edges):
            open_ends.append(_letters_of(useful[len(path)][state]))
        else:
            steps.take()
            yield "".join(path)
            path.pop()


def _letters_of(moves: list[tuple[int, State]]) -> Iterator[tuple[int, State]]:
    for mask, state in moves:
        left = mask
        while left:
            lowest = left & -left
            yield lowest.bit_length() - 1, state
            left ^= lowest
