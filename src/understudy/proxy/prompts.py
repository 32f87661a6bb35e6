"""Tokenizes the prompts of requests as the engines do."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from understudy._core import TokenBlocks
from understudy.proxy.upstream import UpstreamError
from understudy.server.api.errors import ApiError
from understudy.server.api.fields import Fields
from understudy.server.api.prompts import read_messages

if TYPE_CHECKING:
    from understudy._core import Identities
    from understudy.proxy.upstream import Upstream
    from understudy.server.tokenizer import Tokenizer

_KEPT = 4096


class Prompt(NamedTuple):
    """The parts of a request that define its blocks."""

    tokens: list[int]
    output_tokens: int
    salt: str
    model: str

    def blocks(self, block_size: int, adapters: set[str]) -> Identities:
        """Compute the identities of the prompt's full blocks, as in events."""
        lora = self.model if self.model in adapters else ""
        ids = np.array(self.tokens, dtype=np.uint32)
        return TokenBlocks(ids, block_size, salt=self.salt, lora=lora).identities


class PromptReader:
    """Reads bodies of `/v1/completions`, `/v1/chat/completions`, `/v1/responses`, `/v1/messages` and `/generate`.

    Token ids are taken as they are. Text is tokenized by a tokenizer here, or by an engine's `/tokenize`.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: OrderedDict[bytes, list[int]] = OrderedDict()

    async def read(self, body: Any, upstream: Upstream) -> Prompt | None:
        """Read the first prompt; None when there is none, or it cannot be tokenized."""
        if not isinstance(body, dict):
            return None
        tokens = await self._tokens(body, upstream)
        if tokens is None:
            return None
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or body.get("max_output_tokens")
        parameters = body.get("sampling_params")
        if limit is None and isinstance(parameters, dict):
            limit = parameters.get("max_new_tokens")
        salt = body.get("cache_salt")
        return Prompt(
            tokens,
            limit if isinstance(limit, int) and limit > 0 else 0,
            salt if isinstance(salt, str) else "",
            str(body.get("model") or ""),
        )

    async def _tokens(self, body: dict[str, Any], upstream: Upstream) -> list[int] | None:
        prompt = body.get("prompt") or body.get("text") or body.get("input_ids")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
            prompt = prompt[0]
        if isinstance(prompt, list):
            return _ids(prompt)
        question: dict[str, Any] = {}
        if isinstance(prompt, str):
            question = {"prompt": prompt}
        else:
            messages = body.get("messages", body.get("input"))
            if isinstance(messages, str):
                messages = [{"role": "user", "content": messages}]
            if not isinstance(messages, list) or not messages:
                return None
            system = body.get("system", body.get("instructions"))
            if isinstance(system, str):
                messages = [{"role": "system", "content": system}, *messages]
            question = {"messages": messages}
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
                if name in body:
                    question[name] = body[name]
        if "add_special_tokens" in body:
            question["add_special_tokens"] = body["add_special_tokens"]
        return (
            self._here(question)
            if self._tokenizer is not None
            else await self._there(question, body, upstream)
        )

    def _here(self, question: dict[str, Any]) -> list[int] | None:
        assert self._tokenizer is not None
        if "prompt" in question:
            return self._tokenizer.encode(question["prompt"])
        fields = Fields(question)
        try:
            messages = read_messages(fields, "messages", "")
            fields.done()
        except ApiError:
            return None
        add = question.get("add_generation_prompt", True) is not False
        return self._tokenizer.encode(self._tokenizer.render_chat(messages, add_generation_prompt=add))

    async def _there(
        self, question: dict[str, Any], body: dict[str, Any], upstream: Upstream
    ) -> list[int] | None:
        if isinstance(body.get("model"), str):
            question["model"] = body["model"]
        key = msgspec.json.encode(question)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        try:
            status, answer = await upstream.post("/tokenize", key)
            tokens = msgspec.json.decode(answer)["tokens"] if status == 200 else None
        except (UpstreamError, msgspec.DecodeError, KeyError, TypeError):
            return None
        tokens = _ids(tokens)
        if tokens is None:
            return None
        self._known[key] = tokens
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return tokens


def _ids(value: Any) -> list[int] | None:
    """Return the list if it has only token ids, else None."""
    fits = isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 32 for token in value)
    return value if fits else None
