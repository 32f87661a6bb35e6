"""What a server needs of a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Tokenizer(Protocol):
    """Text to ids and back. Implementations lose nothing and never raise for a text."""

    name: str
    end_id: int

    @property
    def vocabulary(self) -> int:
        """Ids below this may stand in a prompt."""

    def encode(self, text: str, *, enough: int | None = None) -> list[int]:
        """The ids of a text; special tokens in it are parsed. Who has `enough` ids need not read on."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ids."""

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for."""

    def render_chat(self, messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The conversation as one text."""

    def words(self) -> list[int]:
        """Tokens of which any run re-tokenizes to itself."""


def open_tokenizer(name: str | None) -> Tokenizer:
    """The built-in one for None or `builtin`, else that of a local Hugging Face directory. ConfigError if neither."""
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
