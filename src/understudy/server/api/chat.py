"""Answer format of `/v1/chat/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy.server.api.completions import end_of_chunk, end_of_stream, prompt_logprobs
from understudy.server.api.errors import error_body
from understudy.server.api.generation import DONE
from understudy.server.api.logprobs import chat_logprobs
from understudy.server.api.texts import json_text

if TYPE_CHECKING:
    from understudy.server.api.choice import Choice
    from understudy.server.api.errors import ApiError
    from understudy.server.api.generation import Generation

_RUNNING = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]'


class ChatStyle:
    """Formats chat answers. A stream sends the roles of all choices with the first token."""

    def __init__(self, role: str = "assistant") -> None:
        self._role = role
        self._heads: list[bytes] = []
        self._common = b""
        self._running = _RUNNING + b"}\n\n"
        self._roles_sent = False

    def begin(self, generation: Generation) -> None:
        """Prepare the common beginning of all chunks."""
        self._common = (
            b'data: {"id":"%b","object":"chat.completion.chunk","created":%d,"model":"%b","choices":['
            % (json_text(generation.id), generation.created, json_text(generation.model))
        )
        if generation.worker.release.has_weight_versions:
            self._running = _RUNNING + b',"kv_transfer_params":null}\n\n'
        self._heads = [
            b'%b{"index":%d,"delta":{' % (self._common, choice.index) for choice in generation.choices
        ]

    def chunk(self, generation: Generation, choice: Choice, first: int, count: int, last: bool) -> bytes:
        """Format the text of these tokens; the last chunk has the finish reason."""
        plan, sampling = choice.plan, generation.sampling
        head = self._heads[choice.index]
        role = b"" if self._roles_sent else self._roles(generation)
        if plan.pieces is None:
            plain = generation.worker.texts.plain
            text = (
                plain[plan.tokens[first]]
                if count == 1
                else b"".join(plain[token] for token in plan.tokens[first : first + count])
            )
        else:
            text = json_text("".join(plan.pieces[first : first + count]))
        if (
            not last
            and sampling.logprobs is None
            and not sampling.continuous_usage
            and not sampling.return_token_ids
        ):
            body = b"".join((head, b'"content":"', text, self._running)) if text else b""
            return role + body if choice.tool is None else role
        logprobs: Any = None
        if sampling.logprobs is not None:
            logprobs = chat_logprobs(generation, choice, first, count)
        tail: dict[str, Any] = {"logprobs": logprobs, "finish_reason": None}
        delta = b'"content":"' + text + b'"'
        if choice.tool is not None:
            delta = b""
            if last:
                delta = b'"tool_calls":' + msgspec.json.encode([{"index": 0, **choice.tool}])
        if last:
            tail |= {"finish_reason": finish_reason(choice), "stop_reason": plan.stop_reason}
        tail["token_ids"] = plan.tokens[first : first + count] if sampling.return_token_ids else None
        if last:
            tail |= choice.version_field()
        rest = msgspec.json.encode(tail)
        usage = self._usage(generation, generation.completion_tokens)
        end = end_of_chunk(generation, last=last)
        return b"".join((role, head, delta, b"},", rest[1:], b"]", usage, end, b"}\n\n"))

    def _roles(self, generation: Generation) -> bytes:
        """Format the role chunks of all choices; sent once."""
        self._roles_sent = True
        sampling = generation.sampling
        prompt = generation.choices[0].prompt.tolist() if sampling.return_token_ids else None
        text = generation.detail.get("prompt_text")
        about = msgspec.json.encode({"prompt_token_ids": prompt, "prompt_text": text})[1:]
        usage = self._usage(generation, 0)
        middle = b'"role":"%b","content":""},"logprobs":null,"finish_reason":null}]%b,%b\n\n' % (
            json_text(self._role),
            usage,
            about,
        )
        return b"".join(head + middle for head in self._heads)

    def _usage(self, generation: Generation, done: int) -> bytes:
        if not generation.sampling.continuous_usage:
            return b""
        prompt = generation.prompt_tokens
        return (
            b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"completion_tokens_details":null}'
            % (prompt, prompt + done, done)
        )

    def close(self, generation: Generation) -> bytes:
        """Format the usage, if requested, and the end of the stream."""
        return end_of_stream(self._common, generation, created=0)

    def reject(self, generation: Generation, error: ApiError) -> bytes:  # noqa: ARG002
        """Format an error as the only event; vLLM's chat streams have one type for all errors."""
        body = error_body(error.status, str(error), "InternalServerError")
        return b"data: " + body + b"\n\n" + DONE

    def whole(self, generation: Generation) -> bytes:
        """Format the whole answer with every key; tool keys only with a tool call."""
        sampling = generation.sampling
        choices = []
        for choice in generation.choices:
            message: dict[str, Any] = {
                "role": self._role,
                "content": choice.plan.text(generation.worker.texts, choice.emitted),
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
            }
            if choice.tool is not None:
                message["content"] = None
                message["tool_calls"] = [choice.tool]
            message["reasoning"] = None
            logprobs = None
            if sampling.logprobs is not None:
                logprobs = chat_logprobs(generation, choice, 0, choice.emitted)
            choices.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": finish_reason(choice),
                    "stop_reason": choice.plan.stop_reason,
                    "token_ids": choice.plan.tokens[: choice.emitted] if sampling.return_token_ids else None,
                    "routed_experts": None,
                    **choice.version_field(),
                }
            )
        first = generation.choices[0]
        return msgspec.json.encode(
            {
                "id": generation.id,
                "object": "chat.completion",
                "created": generation.created,
                "model": generation.model,
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": generation.worker.release.fingerprint,
                "usage": generation.usage(created=0) if generation.prompts == 1 else generation.plain_usage(),
                "prompt_logprobs": prompt_logprobs(generation, first),
                "prompt_token_ids": first.prompt.tolist() if sampling.return_token_ids else None,
                "prompt_text": generation.detail.get("prompt_text"),
                "kv_transfer_params": generation.detail.get("kv_transfer_params"),
                "ec_transfer_params": None,
                "metrics": generation.metrics(),
            }
        )


def finish_reason(choice: Choice) -> str:
    """Return the finish reason; a finished tool call is "tool_calls"."""
    return "tool_calls" if choice.tool is not None and choice.plan.finish == "stop" else choice.plan.finish
