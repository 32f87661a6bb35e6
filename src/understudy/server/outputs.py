"""Output text of a simulated model: filler words, the prompt, or answers from a file; fixed before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from understudy._core import xxh3_64
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from understudy.server.tokenizer import Tokenizer

Mode = Literal["filler", "echo", "recorded"]

_TABLE = 1 << 16
_MEAN_WORDS = 128


class Answer(msgspec.Struct, frozen=True):
    """Tokens of an answer, and whether it ends with a stop token."""

    tokens: npt.NDArray[np.uint32]
    stops: bool
    room: int
    """Most tokens that the answer could have."""


class Outputs:
    """Generates the answers of one model. Equal prompt, seed and choice give equal answers on every machine."""

    def __init__(
        self, tokenizer: Tokenizer, mode: Mode = "filler", *, recorded: Path | None = None, seed: int = 0
    ) -> None:
        self.mode = mode
        self._tokenizer = tokenizer
        self._seed = seed
        words = np.array(tokenizer.words(), dtype=np.uint32)
        draws = np.random.Generator(np.random.PCG64(seed)).integers(0, len(words), _TABLE)
        table = words[draws]
        self._table = np.concatenate([table, table])
        self._recorded: dict[str, npt.NDArray[np.uint32]] = {}
        if mode == "recorded":
            if recorded is None:
                raise ConfigError("--response-mode recorded needs --response-file")
            self._recorded = _read_answers(recorded, tokenizer)

    def answer(
        self,
        prompt: npt.NDArray[np.uint32],
        limit: int,
        *,
        asked: int | None,
        choice: int = 0,
        seed: int | None = None,
        ignore_eos: bool = False,
        min_tokens: int = 0,
    ) -> Answer:
        """Generate at most `limit` tokens. Without `asked`, a length is drawn and the answer stops there."""
        key = xxh3_64(prompt.tobytes(), (self._seed if seed is None else seed) + (choice << 32))
        if self.mode == "echo":
            return _fit(prompt, limit, ends=not ignore_eos, repeat=ignore_eos, at_least=min_tokens)
        if self.mode == "recorded":
            text = self._tokenizer.decode(prompt.tolist())
            found = self._recorded.get(text)
            if found is None:
                found = next((value for part, value in self._recorded.items() if part and part in text), None)
            if found is not None:
                return _fit(found, limit, ends=not ignore_eos, repeat=ignore_eos, at_least=min_tokens)
        stops = False
        count = limit
        if asked is None and not ignore_eos:
            natural = max(_natural_length(key), min_tokens, 1)
            stops = natural <= limit
            count = min(limit, natural)
        return Answer(self._filler(key, count), stops, limit)

    def text_tokens(self, text: str) -> npt.NDArray[np.uint32]:
        """Tokenize a literal answer."""
        return np.array(self._tokenizer.encode(text), dtype=np.uint32)

    def _filler(self, key: int, count: int) -> npt.NDArray[np.uint32]:
        start = key % _TABLE
        if count <= _TABLE:
            return self._table[start : start + count]
        return np.resize(self._table[start : start + _TABLE], count)


def _natural_length(key: int) -> int:
    """Draw an exponentially distributed length from the key."""
    share = ((key >> 11) + 1) / float(1 << 53)
    return min(int(-np.log(share) * _MEAN_WORDS) + 1, 16 * _MEAN_WORDS)


def _fit(tokens: npt.NDArray[np.uint32], limit: int, *, ends: bool, repeat: bool, at_least: int) -> Answer:
    wanted = limit if repeat else min(limit, max(len(tokens), at_least))
    fitted = tokens[:wanted] if wanted <= len(tokens) else np.resize(tokens, wanted)
    return Answer(fitted, ends and len(tokens) <= limit, limit)


def _read_answers(path: Path, tokenizer: Tokenizer) -> dict[str, npt.NDArray[np.uint32]]:
    """Read JSON lines of {"prompt": …, "response": …}. A row also answers prompts that contain its prompt."""
    answers: dict[str, npt.NDArray[np.uint32]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--response-file {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_AnswerRow)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise ConfigError(f"--response-file {path}, line {number}: {error}") from error
        answers[row.prompt] = np.array(tokenizer.encode(row.response), dtype=np.uint32)
        if not len(answers[row.prompt]):
            raise ConfigError(f"--response-file {path}, line {number}: the response is empty")
    if not answers:
        raise ConfigError(f"--response-file {path} holds no answers")
    return answers


class _AnswerRow(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    response: str
