"""The generation endpoints of a TensorRT-LLM server, and how it reads requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.engines.trtllm_salt import derive_salt
from understudy.server.api.endpoints import Endpoints
from understudy.server.api.errors import ApiError, Problem, invalid_body
from understudy.server.api.generation import Generation
from understudy.server.api.planner import Planner
from understudy.server.api.reading import Reader
from understudy.server.api.sampling import check_choices, check_sampling
from understudy.server.trtllm.block_hash import find_hasher
from understudy.server.trtllm.cache_events import CacheEventLog
from understudy.server.trtllm.openai import ChatStyle, CompletionStyle

if TYPE_CHECKING:
    import numpy.typing as npt

    from understudy.server.api.choice import Choice
    from understudy.server.api.fields import Fields
    from understudy.server.api.generation import Style
    from understudy.server.api.reading import Read
    from understudy.server.api.sampling import Sampling
    from understudy.server.worker import Worker

_CHARACTERS_A_TOKEN = 16


class TrtReader(Reader):
    """Reads the requests of one TensorRT-LLM worker."""

    def model(self, fields: Fields) -> str:
        """Return the name that the request gives: trtllm-serve answers under any."""
        name = fields.text("model")
        if not name:
            raise invalid_body([Problem("missing", "body.model", "must be given")])
        return name

    def check(self, fields: Fields, sampling: Sampling) -> None:
        """Check the sampling parameters. ApiError for the first problem."""
        sampling.priority_given = fields.raw("priority") is not None
        check_choices(sampling.n)
        n, sampling.n = sampling.n, 1
        check_sampling(fields, sampling, max_logprobs=-1, vocabulary=self.worker.tokenizer.vocabulary)
        sampling.n = n

    def check_tools(self, fields: Fields) -> dict[str, Any] | None:
        """Return the function that must be called, if any; without a parser of tool calls there is none."""
        if self.worker.settings.tool_call_parser is None or fields.raw("tool_choice") in (None, "auto"):
            return None
        return super().check_tools(fields)

    def tokens(self, prompt: str | list[int], sampling: Sampling) -> npt.NDArray[np.uint32]:  # noqa: ARG002
        """Tokenize a prompt. ApiError if it is empty, out of vocabulary or too long."""
        tokenizer, engine = self.worker.tokenizer, self.worker.settings.engine
        longest = self.worker.settings.max_model_len
        if isinstance(prompt, str):
            bounded = len(prompt) > longest * _CHARACTERS_A_TOKEN
            ids = tokenizer.encode(prompt, enough=longest + 1) if bounded else tokenizer.encode(prompt)
        else:
            ids = prompt
            if ids and max(ids) >= tokenizer.vocabulary:
                raise ApiError(f"Token ID out of range: the vocabulary has {tokenizer.vocabulary} tokens")
        if not ids:
            raise ApiError("prompt token ids should not be empty")
        most = engine.max_num_batched_tokens
        if not getattr(engine, "enable_chunked_prefill", False) and most is not None and len(ids) > most:
            raise ApiError(
                f"The sum of prompt length ({float(len(ids))}), query length (0) should not exceed max_num_tokens "
                f"({most})"
            )
        return np.array(ids, dtype=np.uint32)


class TrtPlanner(Planner):
    """Plans the answers of one TensorRT-LLM worker."""

    def room_for(self, prompt_tokens: int, sampling: Sampling) -> int:
        """Return the most tokens of an answer; more than the rest of the sequence are cut. ApiError without a rest."""
        longest = self.worker.settings.max_model_len
        room = longest - prompt_tokens
        if room <= 0:
            raise ApiError(
                f"`default_max_tokens` ({room}) should be greater than 0, `default_max_tokens` ({room}) = max_seq_len "
                f"({longest}) - `splited_prompt_len` ({prompt_tokens}) - `query_token_len` (0)"
            )
        return room if sampling.asked_tokens is None else min(sampling.asked_tokens, room)


class TrtGeneration(Generation):
    """An answer whose engine gets its tokens, because it finds parts of blocks."""

    def _prepare(self, choice: Choice, rank: int, lora: str, first: int = 0) -> None:
        super()._prepare(choice, rank, lora, first)
        if (request := choice.request) is not None and request.identities is not None:
            outputs = np.array(choice.plan.tokens, dtype=np.uint32)
            request.tokens = np.concatenate([choice.prompt, outputs])
            salt = choice.sampling.cache_salt
            request.salt = derive_salt(salt) if salt else None


class TrtEndpoints(Endpoints):
    """Generates on behalf of one TensorRT-LLM worker."""

    make_generation = TrtGeneration

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.reads = TrtReader(worker)
        self.planner = TrtPlanner(worker)
        engine: Any = worker.settings.engine
        self.logs: tuple[CacheEventLog, ...] = ()
        """KV events by rank; empty without `event_buffer_max_size`."""
        if engine.event_buffer_max_size:
            hasher = find_hasher(engine)
            self.logs = tuple(CacheEventLog(core, hasher) for core in worker.cores)

    def _completion_style(self, read: Read) -> Style:
        return CompletionStyle(echo=read.echo, echo_text=read.echoed)

    def _chat_style(self, read: Read) -> Style:
        return ChatStyle(read.role)
