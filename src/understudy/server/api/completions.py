"""Answer format of `/v1/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy.server.api.generation import DONE
from understudy.server.api.logprobs import completion_logprobs
from understudy.server.api.texts import json_text

if TYPE_CHECKING:
    from understudy.server.api.choice import Choice
    from understudy.server.api.errors import ApiError
    from understudy.server.api.generation import Generation

_RUNNING = (
    b'","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null'
)


class CompletionStyle:
    """Formats completions."""

    def __init__(self, *, echo: bool = False, echo_text: list[str] | None = None) -> None:
        self._echo = echo
        self._echo_texts = echo_text or []
        self._heads: list[bytes] = []
        self._common = b""
        self._running = _RUNNING + b"}]}\n\n"

    def begin(self, generation: Generation) -> None:
        """Prepare the common beginning of all chunks."""
        self._common = (
            b'data: {"id":"%b","object":"text_completion","created":%d,"model":"%b","choices":['
            % (json_text(generation.id), generation.created, json_text(generation.model))
        )
        if generation.worker.release.has_weight_versions:
            self._running = _RUNNING + b',"weight_versions":null}],"kv_transfer_params":null}\n\n'
        self._heads = [
            b'%b{"index":%d,"text":"' % (self._common, choice.index) for choice in generation.choices
        ]

    def chunk(self, generation: Generation, choice: Choice, first: int, count: int, last: bool) -> bytes:
        """Format the text of these tokens; the last chunk has the finish reason."""
        plan, sampling = choice.plan, generation.sampling
        if plan.pieces is None:
            plain = generation.worker.texts.plain
            text = (
                plain[plan.tokens[first]]
                if count == 1
                else b"".join(plain[token] for token in plan.tokens[first : first + count])
            )
        else:
            text = json_text("".join(plan.pieces[first : first + count]))
        if first == 0 and self._echo:
            text = json_text(self._prompt(generation, choice)) + text
        shows_prompt = first == 0 and (sampling.return_token_ids or self._echo)
        if (
            not last
            and not shows_prompt
            and sampling.logprobs is None
            and not sampling.continuous_usage
            and not sampling.return_token_ids
        ):
            return self._heads[choice.index] + text + self._running if text else b""
        logprobs: Any = None
        if sampling.logprobs is not None:
            logprobs = completion_logprobs(generation, choice, first, count)
        ids = plan.tokens[first : first + count] if sampling.return_token_ids else None
        prompt = choice.prompt.tolist() if shows_prompt else None
        tail = {
            "logprobs": logprobs,
            "finish_reason": plan.finish if last else None,
            "stop_reason": plan.stop_reason if last else None,
            "prompt_token_ids": prompt,
            "token_ids": ids,
        }
        if generation.worker.release.has_weight_versions:
            tail["weight_versions"] = choice.weight_versions() if last else None
        usage = b""
        if sampling.continuous_usage:
            done = generation.completion_tokens
            usage = b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (
                generation.prompt_tokens,
                generation.prompt_tokens + done,
                done,
            )
        rest = msgspec.json.encode(tail)
        end = end_of_chunk(generation, last=last)
        return b"".join((self._heads[choice.index], text, b'",', rest[1:], b"]", usage, end, b"}\n\n"))

    def close(self, generation: Generation) -> bytes:
        """Format the usage, if requested, and the end of the stream."""
        return end_of_stream(self._common, generation)

    def reject(self, generation: Generation, error: ApiError) -> bytes:  # noqa: ARG002
        """Format an error as the only event."""
        return b"data: " + error.body() + b"\n\n" + DONE

    def whole(self, generation: Generation) -> bytes:
        """Format the whole answer with every key."""
        sampling = generation.sampling
        choices = []
        for choice in generation.choices:
            text = choice.plan.text(generation.worker.texts, choice.emitted)
            if self._echo:
                text = self._prompt(generation, choice) + text
            logprobs = None
            if sampling.logprobs is not None:
                choice.decoded = 0
                logprobs = completion_logprobs(generation, choice, 0, choice.emitted)
            choices.append(
                {
                    "index": choice.index,
                    "text": text,
                    "logprobs": logprobs,
                    "finish_reason": choice.plan.finish,
                    "stop_reason": choice.plan.stop_reason,
                    "token_ids": choice.plan.tokens[: choice.emitted] if sampling.return_token_ids else None,
                    "prompt_logprobs": prompt_logprobs(generation, choice),
                    "prompt_token_ids": choice.prompt.tolist() if sampling.return_token_ids else None,
                    "routed_experts": None,
                    **choice.version_field(),
                }
            )
        return msgspec.json.encode(
            {
                "id": generation.id,
                "object": "text_completion",
                "created": generation.created,
                "model": generation.model,
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": generation.worker.release.fingerprint,
                "usage": generation.usage(),
                "kv_transfer_params": generation.detail.get("kv_transfer_params"),
                "ec_transfer_params": None,
                "metrics": generation.metrics(),
            }
        )

    def _prompt(self, generation: Generation, choice: Choice) -> str:
        place = choice.index // max(generation.sampling.n, 1)
        return self._echo_texts[place] if place < len(self._echo_texts) else ""


def end_of_chunk(generation: Generation, *, last: bool) -> bytes:
    """Format the fields after a chunk's choice: the fingerprint if no usage follows, and transfer parameters."""
    release = generation.worker.release
    end = b""
    if last and not generation.sampling.include_usage:
        end = b',"system_fingerprint":"%b"' % release.fingerprint.encode()
    if release.has_weight_versions:
        params = generation.detail.get("kv_transfer_params") if last else None
        end += b',"kv_transfer_params":' + msgspec.json.encode(params)
    return end


def end_of_stream(common: bytes, generation: Generation, created: int | None = None) -> bytes:
    """Format usage and known times, if requested, and the end. `created`: see `Generation.usage`."""
    if not generation.sampling.include_usage:
        return DONE
    usage = msgspec.json.encode(generation.usage(last=False, nulls=False, created=created))
    known = {name: value for name, value in (generation.metrics() or {}).items() if value is not None}
    times = b',"metrics":' + msgspec.json.encode(known) if known else b""
    fingerprint = generation.worker.release.fingerprint.encode()
    return b'%b],"usage":%b,"system_fingerprint":"%b"%b}\n\n%b' % (common, usage, fingerprint, times, DONE)


def prompt_logprobs(generation: Generation, choice: Choice) -> list[Any] | None:
    """Build one entry per prompt token; None for the first."""
    from understudy.server.api.logprobs import logprob_of

    if generation.sampling.prompt_logprobs is None:
        return None
    tokenizer = generation.worker.tokenizer
    return [
        None
        if place == 0
        else {
            str(token): {
                "logprob": logprob_of(token),
                "rank": 1,
                "decoded_token": tokenizer.decode([token], skip_special=False),
            }
        }
        for place, token in enumerate(choice.prompt.tolist())
    ]
