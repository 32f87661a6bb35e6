"""The built-in tokenizer: byte-level pairs learnt from a list of words. Needs no download; loses nothing.

`export` writes the same tokenizer in Hugging Face's form. Pieces have bounded lengths, so that no text is slow.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PIECES = r" ?[A-Za-z]{1,32}| ?[0-9]{1,16}| ?[^ \t\r\nA-Za-z0-9]{1,16}|[ \t\r\n]{1,16}"
"""Pattern that splits text before pairs are merged; equal in Python and Hugging Face."""

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
MODEL_VOCABULARY = 262_144
"""Token ids below this are accepted in prompts, as by a model whose embedding is larger than its tokenizer."""

_CACHED_PIECES = 65_536


class BuiltinTokenizer:
    """Ids 0 … 255 are bytes, then the merges in the order of their rank, then the special tokens."""

    name = "understudy/tok"

    def __init__(self) -> None:
        self.merges = read_merges()
        self.tokens: list[bytes] = [bytes([value]) for value in range(256)]
        self._ranks: dict[tuple[bytes, bytes], int] = {}
        for rank, (left, right) in enumerate(self.merges):
            self._ranks[left, right] = rank
            self.tokens.append(left + right)
        self._ids = {token: index for index, token in enumerate(self.tokens)}
        self.special = {text: len(self.tokens) + index for index, text in enumerate(SPECIAL)}
        self.tokens += [text.encode() for text in SPECIAL]
        self.end_id = self.special[END_OF_TEXT]
        self._pieces = re.compile(PIECES)
        self._split = re.compile("(" + "|".join(map(re.escape, SPECIAL)) + ")")
        self._cache: dict[str, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def vocabulary(self) -> int:
        """Upper bound of the ids in a prompt."""
        return MODEL_VOCABULARY

    def encode(self, text: str, *, enough: int | None = None) -> list[int]:
        """Tokenize a text, with its special tokens; stop after `enough` ids."""
        most = sys.maxsize if enough is None else enough
        if "<|" not in text:
            return self._encode_plain(text, most)
        out: list[int] = []
        for part in self._split.split(text):
            if len(out) >= most:
                break
            if part in self.special:
                out.append(self.special[part])
            elif part:
                out += self._encode_plain(part, most - len(out))
        return out

    def _encode_plain(self, text: str, enough: int) -> list[int]:
        known = self._cache
        out: list[int] = []
        for piece in self._pieces.findall(text):
            ids = known.get(piece)
            if ids is None:
                if len(known) >= _CACHED_PIECES:
                    known.clear()
                ids = known[piece] = tuple(self._encode_piece(piece.encode("utf-8", "replace")))
            out += ids
            if len(out) >= enough:
                break
        return out

    def _encode_piece(self, data: bytes) -> Iterable[int]:
        symbols = [data[place : place + 1] for place in range(len(data))]
        while len(symbols) > 1:
            pairs = pairwise(symbols)
            rank, place = min(
                (self._ranks.get(pair, len(self._ranks)), place) for place, pair in enumerate(pairs)
            )
            if rank == len(self._ranks):
                break
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        return [self._ids[symbol] for symbol in symbols]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; b"" for ids that only the model has."""
        return self.tokens[token] if token < len(self.tokens) else b""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        special = len(self.tokens) - len(SPECIAL) if skip_special else len(self.tokens)
        return b"".join(self.tokens[token] for token in ids if token < special).decode("utf-8", "replace")

    def render_chat(self, messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool = True) -> str:
        """Render a conversation as one text, turn by turn."""
        turns = [f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in messages]
        return "".join(turns) + (f"{TURN_START}assistant\n" if add_generation_prompt else "")

    def words(self) -> list[int]:
        """List tokens of a space and a word; any sequence of them re-tokenizes to itself."""
        return list(_word_ids(self))


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def builtin() -> BuiltinTokenizer:
    """Return the process's shared tokenizer."""
    return BuiltinTokenizer()


def read_merges() -> list[tuple[bytes, bytes]]:
    """Read the merge pairs in the order of their rank."""
    text = files(__package__).joinpath("merges.txt").read_text(encoding="ascii")
    pairs = (line.split(" ") for line in text.splitlines())
    return [(left.replace("_", " ").encode(), right.replace("_", " ").encode()) for left, right in pairs]


@cache
def _word_ids(tokenizer: BuiltinTokenizer) -> tuple[int, ...]:
    words = files(__package__).joinpath("words.txt").read_text(encoding="ascii").split()
    ids = [tokenizer.encode(f" {word}") for word in words]
    return tuple(found[0] for found in ids if len(found) == 1)
