"""The tokenizer of a local Hugging Face directory. Needs the extra `tokenizers`."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.server.tokenizer.builtin import TURN_END, TURN_START

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_WORD = re.compile(r"^ [a-z]{3,12}$")


class HuggingFaceTokenizer:
    """Tokenizer from `tokenizer.json`, with its chat template (default: ChatML)."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise ConfigError(
                "a Hugging Face tokenizer needs: pip install 'understudy[tokenizers]'"
            ) from error
        self.name = str(path)
        self._inner = Tokenizer.from_file(str(path / "tokenizer.json"))
        settings: dict[str, Any] = {}
        if (path / "tokenizer_config.json").is_file():
            settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        end = settings.get("eos_token")
        end_text = end.get("content") if isinstance(end, dict) else end
        end_id = self._inner.token_to_id(end_text) if isinstance(end_text, str) else None
        self.end_id: int = 0 if end_id is None else end_id
        template = path / "chat_template.jinja"
        self._template: str | None = (
            template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
        )
        self._end_text = end_text

    @property
    def vocabulary(self) -> int:
        """Upper bound of the ids in a prompt."""
        return max(int(self._inner.get_vocab_size(with_added_tokens=True)), 1)

    def encode(self, text: str, *, enough: int | None = None) -> list[int]:  # noqa: ARG002 (the library cannot stop early)
        """Tokenize a whole text, without the tokens that a template would add."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ids."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token decoded alone."""
        return self.decode([token], skip_special=False).encode()

    def render_chat(self, messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool = True) -> str:
        """Render a conversation with the directory's template, which needs jinja2; default: ChatML."""
        if self._template is None:
            turns = [f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in messages]
            return "".join(turns) + (f"{TURN_START}assistant\n" if add_generation_prompt else "")
        return str(
            self._compiled.render(
                messages=[{"role": role, "content": content} for role, content in messages],
                add_generation_prompt=add_generation_prompt,
                eos_token=self._end_text,
            )
        )

    @cached_property
    def _compiled(self) -> Any:
        try:
            from jinja2.sandbox import (  # type: ignore[import-not-found, unused-ignore]
                ImmutableSandboxedEnvironment,
            )
        except ImportError as error:
            raise ConfigError("the tokenizer's chat template needs: pip install jinja2") from error
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(self._template or "")

    def words(self) -> list[int]:
        """List tokens of a space and a word that re-tokenize to themselves in sequence."""
        found = [token for token in range(self.vocabulary) if _WORD.match(self.decode([token]))][:2000]
        while found:
            again = self.encode(self.decode(found))
            if again == found:
                return found
            kept = set(again) & set(found)
            if len(kept) == len(found):
                break
            found = [token for token in found if token in kept]
        raise ConfigError(f"{self.name}: no words of this tokenizer re-tokenize to themselves")
