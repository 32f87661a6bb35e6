"""Choose the bytes of an answer among those that the library allows, so that it ends soon."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

from understudy.structured.formed import Formed, FormError
from understudy.structured.hints import WORDS, Hints, quoted, spell
from understudy.structured.library import compile_grammar, read_form, write_grammar
from understudy.structured.limits import refuse_panics
from understudy.structured.optional_properties import require_properties

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_STEPS = 20_000
"""Steps for one answer: about half a second of CPU time, several times as much inside of many lists."""
_STEP_BYTES = 8
"""Bytes that are read in the time of a step."""
_MAX_DEPTH = 4
_PATIENCE = 48
"""Steps within one string after which every second byte is drawn from all that are allowed."""


def _mask(letters: bytes) -> int:
    return sum(1 << byte for byte in set(letters))


_CLOSING = [_mask(one) for one in (b"}", b"]", b",")]
_AFTER_NUMBER = _mask(b",}]")
_QUOTE = _mask(b'"')
_DIGITS = _mask(b"0123456789")
_IN_NUMBER = b"0123456789.-+eE"
_SHALLOW = [_mask(one) for one in (b'"', b"0123456789", b"-", b"{", b"[", b"tf", b"n", b":")]
"""First bytes of values, the preferred ones first; `_DEEP` is for values inside of many others."""
_DEEP = [_mask(one) for one in (b"n", b"tf", b"0123456789", b"-", b'"', b"[", b"{", b":")]
_PADDING = [
    _mask(one) for one in (b"x", b"abcdefghijklmnopqrstuvwyz", b"0123456789", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
]
_PLAIN = [
    _mask(one)
    for one in (b")}]>;", b"0123456789abcdefghijklmnopqrstuvwxyz", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"\"'")
]
_VISIBLE = _mask(bytes(range(33, 127)))
_ASCII = _mask(bytes(range(32, 127)))


class Chooser:
    """Makes answers of one form. FormError says why the library refuses it."""

    @refuse_panics()
    def __init__(self, kind: str, value: Any) -> None:
        self._kind = kind
        self._begins: list[bytes] = []
        value = read_form(kind, value)
        self._hints = Hints(value if kind in ("json", "structural_tag") else None)
        self._plain = value
        self._requires_more = False
        """Whether the first matcher requires optional properties."""
        self._matchers: list[LLMatcher] = []
        if kind == "regex":
            self._begins = [spell(value).encode()]
        elif kind == "structural_tag":
            self._begins = [one["begin"].encode(errors="ignore") for one in value["structures"]]
        with suppress(FormError, RecursionError):  # what is optional may contradict the rest
            required = _require(kind, value)
            if required != value:
                self._matchers = [compile_grammar(write_grammar(kind, required))]
                self._requires_more = True
        if not self._matchers or self._hints.limits_properties:
            self._matchers.append(compile_grammar(write_grammar(kind, value)))

    @refuse_panics()
    def choose(self, key: int, most: int) -> Formed:
        """Return an answer of at most `most` characters; equal keys give equal answers."""
        try:
            return self._walk(self._matchers[0], key, most)
        except FormError:
            if not self._requires_more:
                raise
            self._requires_more = False
            self._matchers = [compile_grammar(write_grammar(self._kind, self._plain))]
            return self._walk(self._matchers[0], key, most)

    def _walk(self, matcher: LLMatcher, key: int, most: int) -> Formed:
        matcher.reset()
        walk = (JsonWalk if self._kind in ("json", "structural_tag") else Walk)(matcher, self._hints, key)
        if self._begins:
            walk.begin(self._begins[key % len(self._begins)][:most])
        has_ended = walk.run(most)
        text = walk.out.decode(errors="ignore")
        if self._kind == "json":
            # A text that looks like a special token would be dropped from the answer: escape its first character.
            text = text.replace("<", "\\u003c")
        return Formed(text[:most], has_ended and len(text) <= most, walk.steps)


def _require(kind: str, value: Any) -> Any:
    """Return the form with the optional properties of its schemas required."""
    if kind == "json":
        return require_properties(value)
    if kind == "structural_tag":
        tags = [{**one, "schema": require_properties(one["schema"])} for one in value["structures"]]
        return {**value, "structures": tags}
    return value


class Walk:
    """One answer: the bytes so far, and a choice of the next ones."""

    def __init__(self, matcher: LLMatcher, hints: Hints, key: int) -> None:
        self.out = bytearray()
        self.steps = 0
        self._matcher = matcher
        self._hints = hints
        self._key = key
        self._draws = 0
        self._random = Random(key)

    def run(self, most: int) -> bool:
        """Choose until the answer may end, or has `most` bytes; return whether it ended."""
        matcher = self._matcher
        while len(self.out) < most:
            if forced := matcher.compute_ff_bytes():
                self.put(forced)
            if matcher.is_accepting():
                return True
            self.steps += 1
            if self.steps > MAX_STEPS:
                break
            allowed = int.from_bytes(matcher.compute_bitmask(), "little") & ((1 << 256) - 1)
            if not allowed:
                break
            self.step(allowed)
        if matcher.is_error():
            raise FormError(f"Grammar error: {matcher.get_error()}")
        if len(self.out) < most:
            raise FormError("Grammar error: no answer was found in time; simplify the form")
        return False

    def step(self, allowed: int) -> None:
        """Add at least one of the allowed bytes."""
        if self.steps % _PATIENCE:
            self.put(self.first_of(_PLAIN, allowed))
        else:
            self.put(self.draw(allowed & _VISIBLE or allowed))

    def begin(self, text: bytes) -> None:
        """Begin with a text, as far as it is allowed."""
        text = text[: self._matcher.validate_tokens(list(text))]
        Walk.put(self, text)

    def put(self, text: bytes) -> None:
        """Add bytes that are allowed."""
        self._matcher.consume_tokens(list(text))
        self.out += text
        self.steps += len(text) // _STEP_BYTES

    def try_text(self, text: bytes) -> bool:
        """Add a text if all of it is allowed."""
        fits = len(text) > 0 and self._matcher.validate_tokens(list(text)) == len(text)
        if fits:
            self.put(text)
        return fits

    def first_of(self, masks: list[int], allowed: int) -> bytes:
        """Draw a byte from the first of the sets of which one is allowed."""
        for mask in masks:
            if allowed & mask:
                return self.draw(allowed & mask)
        return self.draw(allowed & _VISIBLE or allowed)

    def draw(self, allowed: int) -> bytes:
        """Draw one of the allowed bytes: the first ones of an answer in order of the key, the others at random."""
        if (count := allowed.bit_count()) > 1:
            place = (self._key + self._draws) % count if self._draws < 8 else self._random.randrange(count)
            self._draws += 1
            for _ in range(place):
                allowed &= allowed - 1
        return bytes([(allowed & -allowed).bit_length() - 1])


class JsonWalk(Walk):
    """An answer in JSON. Strings are words or hints, numbers the smallest that fit, and lists have one item."""

    def __init__(self, matcher: LLMatcher, hints: Hints, key: int) -> None:
        super().__init__(matcher, hints, key)
        self._words = key
        self._is_quoted = self._is_escaped = False
        self._depth = 0
        self._since = 0
        """Steps since the current string began."""

    def put(self, text: bytes) -> None:
        """Add bytes that are allowed; follow quotes and brackets."""
        super().put(text)
        for byte in text:
            if self._is_quoted:
                if self._is_escaped:
                    self._is_escaped = False
                elif byte == 0x5C:
                    self._is_escaped = True
                elif byte == 0x22:
                    self._is_quoted, self._since = False, 0
            elif byte == 0x22:
                self._is_quoted, self._since = True, 0
            elif byte in b"{[":
                self._depth += 1
            elif byte in b"}]":
                self._depth -= 1

    def step(self, allowed: int) -> None:
        """Add to the string or number, or begin the next one."""
        if self._is_quoted:
            self._since += 1
            self._write_string(allowed)
            return
        is_shallow = self._depth <= _MAX_DEPTH
        fills = is_shallow and self.out[-1:] == b"[" and allowed & ~_AFTER_NUMBER
        if allowed & _AFTER_NUMBER and not fills:
            self.put(self.first_of(_CLOSING, allowed))
        elif self.out and self.out[-1] in _IN_NUMBER:
            self._continue_number(allowed)
        else:
            kinds = _SHALLOW if is_shallow else _DEEP
            kind = next((kind for kind in kinds if allowed & kind), allowed)
            if kind != _DIGITS or not any(self._try_number(number) for number in self._hints.numbers):
                self.put(self.draw(allowed & kind))

    def _write_string(self, allowed: int) -> None:
        begins = self._since == 1 and self.out[-1:] == b'"'
        if begins and self._try_strings():
            return
        if allowed & _QUOTE:
            self.put(b'"')
        elif self._since == 2 and any(self._try_length(length) for length in sorted(self._hints.lengths)):
            return
        elif self._since > _PATIENCE and self._since % 2:
            self.put(self.draw(allowed & _ASCII or allowed))
        elif self._since % 2 or not any(self.try_text(quoted(text)[:-1]) for text in self._shuffled()):
            self.put(self.first_of(_PADDING, allowed))

    def _try_length(self, length: int) -> bool:
        """Fill the string up to a length, and end it."""
        begun = len(self.out) - self.out.rindex(b'"') - 1
        return length > begun and self.try_text(b"x" * (length - begun) + b'"')

    def _try_strings(self) -> bool:
        """Add a whole string, or the beginning of one that may become longer."""
        word = WORDS[self._words % len(WORDS)].encode()
        if self.try_text(word + b'"'):
            self._words += 1
            return True
        if any(self.try_text(quoted(text)) for text in self._hints.texts):
            return True
        return not self._hints.texts and self.try_text(word)

    def _shuffled(self) -> list[str]:
        return self._random.sample(list(self._hints.texts), min(len(self._hints.texts), 4))

    def _continue_number(self, allowed: int) -> None:
        if self.out[-1:] == b"-":
            negative = [number[1:] for number in self._hints.numbers if number[0] == "-"]
            if any(self._try_number(number) for number in negative):
                return
        self.put(self.first_of([_DIGITS], allowed))

    def _try_number(self, number: str) -> bool:
        """Add a number if it may end there."""
        if not self.try_text(number.encode()):
            return False
        if self._matcher.is_accepting():
            return True
        if int.from_bytes(self._matcher.compute_bitmask(), "little") & _AFTER_NUMBER:
            return True
        self._matcher.rollback(len(number))
        del self.out[-len(number) :]
        return False
