"""Regular expressions as values: built in a normal form, and matched by Brzozowski's derivatives.

Derivatives need no expansion of counted repetitions, take linear time, and know intersection and complement.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

from understudy.server.api.structured.charset import Alphabet, CharSet, is_word

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from understudy.server.api.structured.errors import Steps

Op = Literal["none", "empty", "set", "cat", "alt", "and", "not", "repeat", "at"]
START, WORD, OTHER, END = 0, 1, 2, 3
"""The neighbour of a place between two characters: a side of the text, a word character or another one."""


class Node:
    """One expression. Equal expressions of one `Expressions` are the same object."""

    __slots__ = ("anchored", "chars", "high", "least", "low", "most", "number", "op", "parts", "place")

    def __init__(self, op: Op, number: int, parts: tuple[Node, ...], *, anchored: bool) -> None:
        self.op = op
        self.number = number
        self.parts = parts
        self.anchored = anchored
        """Whether a match depends on the characters around it."""
        self.chars: CharSet = CharSet()
        self.place = ""
        self.low: int = 0
        self.high: float = 0
        self.least: float = 0
        """No match is shorter, in characters."""
        self.most: float = 0
        """No match is longer."""


class State(NamedTuple):
    """The expression that the rest of a text has to match, and the kind of the character before it."""

    node: Node
    before: int


class Expressions:
    """Build expressions over one alphabet, and match texts with them."""

    def __init__(self) -> None:
        self.alphabet = Alphabet()
        self.known: set[tuple[int, str]] = set()
        """Numbers of expressions and texts that they match by construction."""
        self._made: dict[tuple[object, ...], Node] = {}
        self._derived: dict[tuple[int, str, int], Node] = {}
        self._masks: dict[int, int] = {}
        self._moves: dict[State, list[tuple[int, State]]] = {}
        self.none = self._make("none", ())
        self.none.least, self.none.most = math.inf, 0
        self.empty = self._make("empty", ())
        self.any = self.chars(CharSet(negated=True))
        self.anything = self.repeat(self.any, 0, math.inf)

    # ── Building ──

    def _make(self, op: Op, parts: tuple[Node, ...], *extra: object) -> Node:
        key = (op, *(part.number for part in parts), *extra)
        node = self._made.get(key)
        if node is None:
            anchored = op == "at" or any(part.anchored for part in parts)
            node = self._made[key] = Node(op, len(self._made), parts, anchored=anchored)
        return node

    def chars(self, chars: CharSet) -> Node:
        """Match one character of the set."""
        node = self._make("set", (), chars.key())
        if not node.least:
            self.alphabet.add(chars)
            node.chars, node.least, node.most = chars, 1, 1
        return node

    def at(self, place: str) -> Node:
        """Match at a place: "start", "end", "boundary" or "inside" of a word."""
        node = self._make("at", (), place)
        node.place = place
        return node

    def cat(self, left: Node, right: Node) -> Node:
        """Match one expression after the other."""
        if left is self.none or right is self.none:
            return self.none
        if left is self.empty:
            return right
        if right is self.empty:
            return left
        parts: list[Node] = []
        while left.op == "cat":
            parts.append(left.parts[0])
            left = left.parts[1]
        for part in (left, *reversed(parts)):
            node = self._make("cat", (part, right))
            node.least, node.most = part.least + right.least, part.most + right.most
            right = node
        return right

    def alt(self, parts: Iterable[Node]) -> Node:
        """Match any of the expressions."""
        kept = self._flat("alt", parts, self.none)
        if self.anything in kept:
            return self.anything
        if len(kept) <= 1:
            return kept[0] if kept else self.none
        node = self._make("alt", kept)
        node.least = min(part.least for part in kept)
        node.most = max(part.most for part in kept)
        return node

    def both(self, parts: Iterable[Node]) -> Node:
        """Match all of the expressions."""
        kept = self._flat("and", parts, self.anything)
        least = max((part.least for part in kept), default=0)
        most = min((part.most for part in kept), default=math.inf)
        if self.none in kept or least > most:
            return self.none
        if len(kept) <= 1:
            return kept[0] if kept else self.anything
        node = self._make("and", kept)
        node.least, node.most = least, most
        return node

    def other(self, part: Node) -> Node:
        """Match whatever the expression does not."""
        if part.op == "not":
            return part.parts[0]
        if part is self.none or part is self.anything:
            return self.anything if part is self.none else self.none
        node = self._make("not", (part,))
        node.least, node.most = 0, math.inf
        return node

    def repeat(self, part: Node, low: int, high: float) -> Node:
        """Match the expression from `low` to `high` times."""
        if high == 0 or part is self.empty:
            return self.empty
        if part is self.none:
            return self.empty if low == 0 else self.none
        if (low, high) == (1, 1):
            return part
        node = self._make("repeat", (part,), low, high)
        node.low, node.high = low, high
        node.least = part.least * low
        node.most = part.most * high if part.most else 0
        return node

    def _flat(self, op: Op, parts: Iterable[Node], neutral: Node) -> tuple[Node, ...]:
        kept: dict[int, Node] = {}
        for part in parts:
            for one in part.parts if part.op == op else (part,):
                if one is not neutral:
                    kept[one.number] = one
        return tuple(kept[number] for number in sorted(kept))

    # ── Matching ──

    def matches(self, node: Node, text: str, steps: Steps) -> bool:
        """Return whether the expression matches the whole text."""
        if (node.number, text) in self.known:
            return True
        steps.take(len(text) // 64)
        state = State(node, START)
        for letter in text:
            if state.node is self.none or state.node is self.anything:
                break
            made = len(self._derived)
            state = self._after(state, letter)
            if len(self._derived) > made:
                steps.take(1 + len(state.node.parts) // 4)
        return self.accepts(state)

    def accepts(self, state: State) -> bool:
        """Return whether the text may end here."""
        return _is_nullable(state.node, state.before, END)

    def moves(self, state: State) -> list[tuple[int, State]]:
        """Return the next states, each with the mask of the letters that lead there. Masks are disjoint."""
        found = self._moves.get(state)
        if found is None:
            sets: dict[int, Node] = {}
            _first_sets(state.node, sets)
            masks = [self.mask(node) for node in sets.values()]
            if state.node.anchored:
                masks.append(self.mask(self.chars(CharSet(categories=["WORD"]))))
            blocks = [(1 << len(self.alphabet.letters)) - 1]
            for mask in masks:
                blocks = [part for block in blocks for part in (block & mask, block & ~mask) if part]
            blocks.sort(key=lambda block: block & -block)  # preferred letters first
            after = [(block, self._after(state, self.letter(block))) for block in blocks]
            found = self._moves[state] = [move for move in after if move[1].node is not self.none]
        return found

    def mask(self, node: Node) -> int:
        """Return the letters of a set."""
        found = self._masks.get(node.number)
        if found is None:
            found = self._masks[node.number] = self.alphabet.mask(node.chars)
        return found

    def letter(self, mask: int) -> str:
        """Return the preferred one of the letters."""
        return self.alphabet.letters[(mask & -mask).bit_length() - 1]

    def _after(self, state: State, letter: str) -> State:
        following = WORD if is_word(letter) else OTHER
        node = self._derive(state.node, letter, state.before, following)
        return State(node, following if node.anchored else OTHER)

    def _derive(self, node: Node, letter: str, before: int, following: int) -> Node:
        """Return what the rest has to match once `node` has consumed the letter."""
        if node.op == "set":
            return self.empty if letter in node.chars else self.none
        if node.op in ("none", "empty", "at"):
            return self.none
        key = (node.number, letter, before if node.anchored else OTHER)
        found = self._derived.get(key)
        if found is not None:
            return found
        if node.op == "cat":
            result = self.alt(self._derive_cat(node, letter, before, following))
        elif node.op == "repeat":
            rest = self.repeat(node.parts[0], max(node.low - 1, 0), node.high - 1)
            result = self.cat(self._derive(node.parts[0], letter, before, following), rest)
        else:
            parts = [self._derive(part, letter, before, following) for part in node.parts]
            if node.op == "not":
                result = self.other(parts[0])
            else:
                result = self.alt(parts) if node.op == "alt" else self.both(parts)
        self._derived[key] = result
        return result

    def _derive_cat(self, node: Node, letter: str, before: int, following: int) -> Iterator[Node]:
        """Let the first part consume the letter, or, where it may match nothing, a later one."""
        while node.op == "cat":
            left, right = node.parts
            yield self.cat(self._derive(left, letter, before, following), right)
            if not _is_nullable(left, before, following):
                return
            node = right
        yield self._derive(node, letter, before, following)


def _is_nullable(node: Node, before: int, following: int) -> bool:
    """Return whether the expression matches nothing at a place with these neighbours."""
    while node.op == "cat":
        if node.least > 0 or not _is_nullable(node.parts[0], before, following):
            return False
        node = node.parts[1]
    match node.op:
        case "empty":
            return True
        case "none" | "set":
            return False
        case "at":
            return _is_at(node.place, before, following)
        case "not":
            return not _is_nullable(node.parts[0], before, following)
        case "alt":
            return any(_is_nullable(part, before, following) for part in node.parts)
        case "repeat":
            return node.low == 0 or _is_nullable(node.parts[0], before, following)
        case _:
            return all(_is_nullable(part, before, following) for part in node.parts)


def _is_at(place: str, before: int, following: int) -> bool:
    if place == "start":
        return before == START
    if place == "end":
        return following == END
    if (before, following) == (START, END):  # Python and ECMAScript differ on an empty text
        return False
    return ((before == WORD) != (following == WORD)) == (place == "boundary")


def _first_sets(node: Node, found: dict[int, Node]) -> None:
    """Collect the sets that may match the next character."""
    while node.op == "cat":
        _first_sets(node.parts[0], found)
        if node.parts[0].least > 0:
            return
        node = node.parts[1]
    if node.op == "set":
        found[node.number] = node
    for part in node.parts:
        _first_sets(part, found)
