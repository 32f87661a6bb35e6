"""Interface of a server's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Tokenizer(Protocol):
    """Converts text to ids and back, without loss; never raises for a text."""

    name: str
    end_id: int

    @property
    def vocabulary(self) -> int:
        """Upper bound of the ids in a prompt."""

    def encode(self, text: str, *, enough: int | None = None) -> list[int]:
        """Tokenize a text, with its special tokens; may stop after `enough` ids."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ids."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token."""

    def render_chat(self, messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool = True) -> str:
        """Render a conversation as one text."""

    def words(self) -> list[int]:
        """List tokens of which any sequence re-tokenizes to itself."""


def open_tokenizer(name: str | None) -> Tokenizer:
    """Open the built-in tokenizer (None or `builtin`) or that of a local Hugging Face directory. ConfigError."""
    from understudy.server.tokenizer.builtin import BuiltinTokenizer, builtin

    if name in (None, "builtin", BuiltinTokenizer.name):
        return builtin()
    assert name is not None
    path = Path(name)
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(
            f"tokenizer {name!r}: no tokenizer.json there; give a local Hugging Face directory, or leave it out "
            "for the built-in one"
        )
    from understudy.server.tokenizer.hugging_face import HuggingFaceTokenizer

    return HuggingFaceTokenizer(path)
