"""Answer format of `/inference/v1/generate`: tokens in, tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy.server.api.generation import DONE
from understudy.server.api.logprobs import chat_logprobs, logprobs_at

if TYPE_CHECKING:
    from understudy.server.api.choice import Choice
    from understudy.server.api.errors import ApiError
    from understudy.server.api.generation import Generation


class GenerateStyle:
    """Formats token ids, and their text if requested."""

    def __init__(self, *, text: bool, shows_prompt: bool) -> None:
        self._text = text
        self._shows_prompt = shows_prompt

    @property
    def _mode(self) -> str:
        return "text" if self._text else "tokens"

    def begin(self, generation: Generation) -> None:
        """Do nothing: chunks have no common part."""

    def chunk(self, generation: Generation, choice: Choice, first: int, count: int, last: bool) -> bytes:
        """Format these tokens; the last chunk has the finish reason."""
        body: dict[str, Any] = {"request_id": generation.id, "usage": None, "output_mode": self._mode}
        if generation.sampling.continuous_usage:
            body["usage"] = generation.usage(nulls=False)
        if first == 0 and self._shows_prompt and choice.index == 0:
            body |= {"prompt_token_ids": choice.prompt.tolist(), "mm_placeholders": None}
        body["choices"] = [self._choice(generation, choice, first, count, last=last)]
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    def close(self, generation: Generation) -> bytes:
        """Format the usage, if requested, and the end of the stream."""
        if not generation.sampling.include_usage:
            return DONE
        usage = generation.usage(last=False, nulls=False)
        body = {"request_id": generation.id, "usage": usage, "output_mode": self._mode, "choices": []}
        return b"data: " + msgspec.json.encode(body) + b"\n\n" + DONE

    def reject(self, generation: Generation, error: ApiError) -> bytes:  # noqa: ARG002
        """Format an error as the only event."""
        return b"data: " + error.body() + b"\n\n" + DONE

    def whole(self, generation: Generation) -> bytes:
        """Format the whole answer with every key."""
        choices = [
            self._choice(generation, choice, 0, choice.emitted, last=True) for choice in generation.choices
        ]
        return msgspec.json.encode(
            {
                "request_id": generation.id,
                "model": generation.model,
                "created": generation.created,
                "usage": generation.usage(),
                "prompt_logprobs": None,
                "prompt_token_id_logprobs": None,
                "prompt_token_ids": generation.choices[0].prompt.tolist() if self._shows_prompt else None,
                "mm_placeholders": None,
                "metrics": None,
                "kv_transfer_params": generation.detail.get("kv_transfer_params"),
                "ec_transfer_params": None,
                "output_mode": self._mode,
                "choices": choices,
            }
        )

    def _choice(
        self, generation: Generation, choice: Choice, first: int, count: int, *, last: bool
    ) -> dict[str, Any]:
        plan = choice.plan
        logprobs = None
        if generation.sampling.logprobs is not None:
            write = chat_logprobs if self._text else _token_logprobs
            logprobs = write(generation, choice, first, count)
        shown: dict[str, Any] = {
            "index": choice.index,
            "finish_reason": plan.finish if last else None,
            "stop_reason": plan.stop_reason if last else None,
            "token_ids": plan.tokens[first : first + count],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
        }
        if self._text:
            texts = generation.worker.texts
            shown["text"] = plan.text(texts, first + count)[len(plan.text(texts, first)) :]
        return {**shown, "logprobs": logprobs}


def _token_logprobs(generation: Generation, choice: Choice, first: int, count: int) -> dict[str, Any]:
    """Build logprobs by token id, without text."""
    words = generation.worker.texts.words
    wanted = max(generation.sampling.logprobs or 0, 0)
    content = []
    for place, token in enumerate(choice.plan.tokens[first : first + count], first):
        value, others = logprobs_at(choice, place, max(wanted - 1, 0), words)
        tops = [(token, value), *others][: max(wanted, 1)]
        content.append(
            {
                "token_id": token,
                "logprob": value,
                "rank": 1,
                "top_logprobs": [
                    {"token_id": other, "logprob": of, "rank": rank}
                    for rank, (other, of) in enumerate(tops, 1)
                ],
            }
        )
    return {"content": content}
