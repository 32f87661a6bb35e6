"""Serve the real engine with the same driver, HTTP API, metrics and KV events as simulated engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from understudy.qwen3.live_engine import LiveEngine
from understudy.qwen3.request import Request
from understudy.qwen3.sampling import SamplingParams
from understudy.server.api.errors import ApiError
from understudy.server.api.growing import GrowingPlan
from understudy.server.core import EngineCore
from understudy.tokens import TokenBlocks

if TYPE_CHECKING:
    from understudy._core import Effects
    from understudy.qwen3.config import Qwen3Config
    from understudy.qwen3.engine import Engine
    from understudy.server.api.choice import Choice
    from understudy.server.api.sampling import Sampling
    from understudy.server.api.texts import TokenTexts
    from understudy.server.kv_events import KvEventSender
    from understudy.server.live_request import LiveRequest, StepEffects


class Qwen3Serving:
    """Implement `GivenEngine` for the real engine, which it owns; `close` ends it."""

    def __init__(self, engine: Engine, config: Qwen3Config, end_ids: frozenset[int]) -> None:
        self.engine = engine
        self.config = config
        self.end_ids = end_ids
        self._core: Qwen3Core | None = None

    def core(self, name: str, *, events: bool) -> EngineCore:
        """Implement `GivenEngine`."""
        assert self._core is None, "one engine serves one worker"
        self._core = Qwen3Core(self.engine, self.config, name, events=events)
        return self._core

    def plan(self, sampling: Sampling, texts: TokenTexts, limit: int) -> GrowingPlan:
        """Implement `GivenEngine`."""
        for name, asked in (
            ("structured outputs and forced tools", sampling.structure is not None),
            ("prompt_logprobs", sampling.prompt_logprobs is not None),
            ("penalties, min_p and logit_bias", sampling.steered),
            ("cache_hit_threshold", sampling.cache_hit_threshold is not None),
        ):
            if asked:
                raise ApiError(f"the engine qwen3 has no {name}; leave them out")
        return GrowingPlan(sampling, texts, limit, self.end_ids)

    def connect_events(self, sender: KvEventSender) -> None:
        """Implement `GivenEngine`."""
        assert self._core is not None
        self._core.sender = sender

    def close(self) -> None:
        """End the engine. Idempotent."""
        self.engine.close()


class Qwen3Core(EngineCore):
    """The real engine of a rank: requests have tokens, and answers grow by the tokens that it computes."""

    def __init__(self, engine: Engine, config: Qwen3Config, name: str, *, events: bool) -> None:
        self.model = config
        self.sender: KvEventSender | None = None
        self._chains: dict[int, TokenBlocks] = {}
        self._live_engine = LiveEngine(engine, events=events)
        manager = engine.scheduler.manager
        super().__init__(
            self._empty_engine,
            name=name,
            block_size=manager.layout.page_size,
            num_blocks=manager.total_blocks,
            events=events,
        )

    def _empty_engine(self) -> LiveEngine:
        self._live_engine.reset()
        return self._live_engine

    def find_refusal(self, request: LiveRequest) -> str | None:
        """Return why the engine can never run a request; None if it can."""
        prompt = _choice(request).prompt
        if len(prompt) and int(prompt.max()) >= self.model.vocab_size:
            return f"token {int(prompt.max())} is not one of the model's {self.model.vocab_size}"
        return super().find_refusal(request)

    def make_spec(self, request: LiveRequest) -> Request:
        """Convert a request of the server, with its tokens and sampling."""
        choice, sampling = _choice(request), _choice(request).generation.sampling
        lora = choice.generation.model if choice.generation.model in choice.generation.worker.loras else ""
        if self.sender is not None:
            self._chains[request.engine_id] = TokenBlocks(
                choice.prompt, self.block_size, salt=sampling.cache_salt, lora=lora
            )
        return Request(
            f"{request.engine_id}",
            choice.prompt,  # type: ignore[arg-type]
            request.max_tokens,
            SamplingParams(
                temperature=sampling.temperature,
                top_k=max(sampling.top_k, 0),
                top_p=sampling.top_p,
                seed=None if sampling.seed is None else sampling.seed + choice.index,
                logprobs=sampling.logprobs if sampling.logprobs is None else max(sampling.logprobs, 0),
            ),
            priority=request.priority or 0,
            salt=sampling.cache_salt,
            lora=lora,
        )

    def end(self, effects: Effects, now_ns: int) -> StepEffects:
        """Append the computed tokens to the answers, then apply the effects."""
        for output in self._live_engine.outputs:
            request = self.live.get(int(output.request_id))
            if request is not None and output.token is not None:
                last = output.finish_reason is not None
                logprobs = None if output.logprobs is None else tuple(output.logprobs)
                cast("GrowingPlan", _choice(request).plan).take(output.token, logprobs, last=last)  # type: ignore[arg-type]
                self._remember(request, output.token)
        step = super().end(effects, now_ns)
        for request in step.finished:
            request.finish_ns = now_ns
        for engine_id in self._chains.keys() - self.live.keys():
            del self._chains[engine_id]
        return step

    def _remember(self, request: LiveRequest, token: int) -> None:
        """Report the tokens of a block that the answer has filled to the event sender."""
        chain = self._chains.get(request.engine_id)
        if chain is None or self.sender is None:
            return
        before = len(chain.identities)
        chain.append(token)
        if len(chain.identities) > before:
            sampling = _choice(request).generation.sampling
            start = before * self.block_size
            self.sender.remember(
                chain.identities[before:],
                np.asarray(chain.tokens[start : start + self.block_size], np.uint32),
                salt=sampling.cache_salt,
                session=sampling.session_id,
            )


def _choice(request: LiveRequest) -> Choice:
    """Return the listener of a server request, which is one choice of its answer."""
    return cast("Choice", request.listener)
