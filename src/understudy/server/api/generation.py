"""One generation request over HTTP: makes its engine requests, and ends the answer with the last of them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from understudy.errors import InvalidArgument
from understudy.server.api.choice import Choice, ContinuedChoice
from understudy.server.api.errors import SHUTTING_DOWN, ApiError, form_of
from understudy.server.api.plan import CHOICE_COST
from understudy.server.live_request import LiveRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from understudy.http import Connection
    from understudy.server.api.planner import PlannedAnswers
    from understudy.server.api.sampling import Sampling
    from understudy.server.sessions import SessionHints
    from understudy.server.worker import Worker

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_FAILURES = {
    "lost": "the engine has died",
    "failed": "Internal server error",  # vLLM's words
    "broken": "an error inside the server",
}


class Style(Protocol):
    """Formats the answers of an endpoint."""

    def begin(self, generation: Generation) -> None:
        """Prepare the common part of a stream's chunks."""

    def chunk(self, generation: Generation, choice: Choice, first: int, count: int, last: bool) -> bytes:
        """Format the SSE events for these tokens of a choice."""

    def close(self, generation: Generation) -> bytes:
        """Format the SSE events after the last token of the last choice."""

    def whole(self, generation: Generation) -> bytes:
        """Format the whole answer as one body."""

    def reject(self, generation: Generation, error: ApiError) -> bytes:
        """Format the SSE events of a stream that ends with an error before its first token."""


class Generation:
    """The request of one client. Its answer is sent when its choices have ended, or as a stream."""

    def __init__(
        self,
        worker: Worker,
        connection: Connection,
        sampling: Sampling,
        style: Style,
        *,
        name: str,
        model: str,
    ) -> None:
        self.worker = worker
        self.connection = connection
        self.sampling = sampling
        self.style = style
        self.id = name
        self.model = model
        self.created = int(time.time())
        self.choices: list[Choice] = []
        self.prompts = 0
        self.prompt_tokens = 0
        self.started = self.has_sent = False  # has_sent: a chunk was sent since the last keep-alive check
        self.on_done: Callable[[Generation, str], None] | None = None
        self._left = 0
        self._gone = False
        self.load_format = ""
        self.session: SessionHints | None = None
        """What the client tells about its session; None: its KV is not kept."""
        self.rids: dict[int, str] | None = None
        """Ids of the choices' requests by index; None: made from `id`."""
        self.detail: dict[str, Any] = {}

    def take(self, planned: PlannedAnswers) -> None:
        """Take the planned answers as choices."""
        self.prompts, self.prompt_tokens = planned.prompts, planned.prompt_tokens
        self.choices = [
            Choice(self, index, answer.prompt, answer.plan, answer.sampling, answer.tool)
            for index, answer in enumerate(planned.answers)
        ]

    def request_name(self, choice: Choice) -> str:
        """Return the id of a choice's engine request."""
        if self.rids is not None:
            return self.rids[choice.index]
        return self.id if len(self.choices) == 1 else f"{choice.index}_{self.id}"

    def prepare(self, rank: int) -> Generator[int]:
        """Make the engine's request of each choice; yield the cost of each, in tokens."""
        lora = self.model if self.model in self.worker.loras else ""
        for choice in self.choices:
            self._prepare(choice, rank, lora)
            yield CHOICE_COST + len(choice.plan.tokens) // 8

    def _prepare(self, choice: Choice, rank: int, lora: str, first: int = 0) -> None:
        """Make the engine's request of a choice; with `first`, behind so many tokens that it has already."""
        worker, sampling, plan = self.worker, choice.sampling, choice.plan
        tokens = np.array(plan.tokens, dtype=np.uint32)
        prompt = np.concatenate([choice.prompt, tokens[:first]]) if first else choice.prompt
        identities = worker.identities(
            prompt,
            tokens[first:],
            rank,
            salt=sampling.cache_salt,
            lora=lora,
            session=sampling.session_id,
        )
        choice.named = identities if sampling.reports_hits else None
        choice.request = LiveRequest(
            self.request_name(choice),
            len(prompt),
            plan.max_tokens - first,
            identities,
            ContinuedChoice(choice, first) if first else choice,
            priority=sampling.priority if sampling.priority_given else None,
            eos_at=None if plan.eos_at is None else plan.eos_at - first,
            adapter=worker.adapter_number(lora),
            cache_hit_threshold=sampling.cache_hit_threshold or 0.0,
            streams=sampling.stream,
        )
        if self.session is not None and worker.sessions is not None and choice.index == 0:
            choice.request.session = worker.sessions.open(self.session, identities)
        if worker.handoff is not None and sampling.kv_transfer_params:
            if len(self.choices) > 1:
                raise ApiError(
                    "kv_transfer_params: a hand-off has one answer; set n to 1", param="kv_transfer_params"
                )
            worker.handoff.prepare(choice.request, sampling.kv_transfer_params)
        if worker.push is not None:
            worker.push.prepare(choice.request, sampling.bootstrap, choice.index, len(self.choices))
        worker.retain_tokens(choice.request, rank)

    def resubmit(self, worker: Worker, choices: Sequence[Choice], rank: int, *, migrates: bool) -> None:
        """Submit choices that have lost their worker to another one: anew, or behind the tokens that they have.

        ApiError if the engine could never run one.
        """
        self.worker = worker
        self.connection.on_close = self.client_gone
        lora = self.model if self.model in worker.loras else ""
        for choice in choices:
            lost, first = choice.request, choice.emitted if migrates else 0
            assert lost is not None
            choice.emitted = first
            self._prepare(choice, rank, lora, first)
            request = choice.request
            assert request is not None
            if lost.session is not None:
                request.session = lost.session
            try:
                worker.submit(request, rank)
            except InvalidArgument as error:
                raise ApiError(str(error)) from None
            if request.session is not None:
                request.session.on_submit(worker.cores[rank], request)
            request.arrival_ns = lost.arrival_ns  # as its client sees it
            if first:
                request.first_token_ns, request.last_token_ns = lost.first_token_ns, lost.last_token_ns

    def lose(self) -> None:
        """End the answer with an error, because no worker takes a request of it that was lost."""
        if not self._gone:
            self._fail("lost")

    def run(self, rank: int) -> None:
        """Submit the prepared choices to the engine. ApiError if it could never run one."""
        self._left = len(self.choices)
        self.connection.on_close = self.client_gone
        for choice in self.choices:
            assert choice.request is not None
            try:
                self.worker.submit(choice.request, rank)
                if choice.request.session is not None:
                    choice.request.session.on_submit(self.worker.cores[rank], choice.request)
            except InvalidArgument as error:
                raise ApiError(str(error)) from None
        if self.sampling.stream:
            self.style.begin(self)
            if self.worker.settings.sse_keep_alive_interval_s > 0:
                self._keep_alive()

    def _keep_alive(self) -> None:
        """Send a comment after every interval in which no chunk was sent."""
        interval_s = self.worker.settings.sse_keep_alive_interval_s

        def send_if_silent() -> None:
            if self._left == 0 or self._gone:
                return
            if not self.has_sent:
                if not self.started:
                    self.start()
                self.connection.send_event(KEEP_ALIVE)
                self.connection.flush()
            self.has_sent = False
            asyncio.get_running_loop().call_later(interval_s, send_if_silent)

        asyncio.get_running_loop().call_later(interval_s, send_if_silent)

    def start(self) -> None:
        """Start the stream, at the first token."""
        self.started = True
        self.connection.start_stream()

    def send_chunk(self, choice: Choice, first: int, count: int, *, last: bool) -> None:
        """Send these tokens of a choice in the stream."""
        self.connection.send_event(self.style.chunk(self, choice, first, count, last))

    def client_gone(self) -> None:
        """Cancel the engine requests, because the client has disconnected."""
        self._gone = True
        for choice in self.choices:
            if choice.request is not None and not choice.done:
                self.worker.driver.cancel(choice.request)

    def cancel_before_run(self) -> None:
        """Cancel the generation before the engine has received it."""
        self._gone = True
        self._notify_done("cancelled")

    def on_choice_ended(self, choice: Choice, how: str) -> None:
        """Handle the end of a choice; after the last one, complete the answer."""
        self._left -= 1
        has_failed = choice.request is not None and choice.request.has_failed
        complete = choice.emitted >= choice.plan.total and not has_failed
        if not complete and not self._gone:
            self._fail(how)
            return
        if self._left or self._gone:
            if self._left == 0:
                self._notify_done("cancelled")
            return
        if len(self.choices):
            metrics = self.worker.find_metrics(self.choices[0].request or LiveRequest("", 1, 1, None, choice))
            metrics.params_n.observe(self.sampling.n)
            metrics.request_max_generation.observe(max(one.emitted for one in self.choices))
        if self.sampling.stream:
            if not self.started:
                self.start()
            self.connection.send_event(self.style.close(self))
            self.connection.end_stream()
        else:
            self.connection.respond(200, self.style.whole(self), headers=self._load_header())
        self._notify_done("completed")

    def reject(self, message: str) -> None:
        """Answer 503 before the engine has received the request; in a stream, as its only event."""
        error = ApiError(message, status=503, kind="ServiceUnavailableError")
        if not self.sampling.stream:
            raise error
        self._gone = True
        self.start()
        self.connection.send_event(self.style.reject(self, error))
        self.connection.end_stream()
        self._notify_done("failed")

    def report_failure(self) -> None:
        """Send an internal error to the client, unless it has disconnected."""
        if not self._gone:
            self._fail("broken")

    def shut_down(self) -> None:
        """End the answer with an error, because the server stops."""
        self.client_gone()
        self.connection.end_early(503, SHUTTING_DOWN)
        self._notify_done("failed")

    def _fail(self, how: str) -> None:
        """End the answer with an error, within the stream if it has started."""
        self.client_gone()
        requests = [choice.request for choice in self.choices if choice.request is not None]
        for request in requests:
            if request.failure:
                self._end_with(ApiError(request.failure, status=500, kind="500"))
                return
        text = _FAILURES.get(how, "the request was aborted by the engine")
        self._end_with(ApiError(text, status=500, kind="InternalServerError"))

    def refuse(self, error: ApiError) -> None:
        """End the answer with an error, because the engine took no request of it."""
        if not self._gone:
            self.client_gone()
            self._end_with(error)

    def _end_with(self, error: ApiError) -> None:
        body = form_of(error, self.connection)
        if self.started:
            self.connection.has_failed = True
            self.connection.send_event(b"data: " + body + b"\n\n" + DONE)
            self.connection.end_stream()
        else:
            self.connection.on_close = None
            self.connection.respond(error.status, body)
        self._notify_done("failed")

    def _notify_done(self, how: str) -> None:
        on_done, self.on_done = self.on_done, None
        if on_done is not None:
            on_done(self, how)

    def _load_header(self) -> bytes:
        """Build the load header that load balancers request."""
        if self.load_format not in ("TEXT", "JSON"):
            return b""
        cores = self.worker.cores
        values = {
            "num_requests_waiting": float(sum(core.num_waiting for core in cores)),
            "kv_cache_usage_perc": max(core.usage for core in cores),
        }
        if self.load_format == "JSON":
            return b"endpoint-load-metrics: JSON " + msgspec.json.encode({"named_metrics": values}) + b"\r\n"
        text = ", ".join(f"named_metrics.{name}={value}" for name, value in values.items())
        return f"endpoint-load-metrics: TEXT {text}\r\n".encode()

    @property
    def gone(self) -> bool:
        """True when the client has disconnected or the answer has failed."""
        return self._gone

    @property
    def completion_tokens(self) -> int:
        """Total of output tokens over all choices so far."""
        return sum(choice.emitted for choice in self.choices)

    def cached_tokens(self, *, last: bool) -> int:
        """Return the cached tokens of the last prompt, or of the first."""
        request = self.choices[-1 if last else 0].request
        return (
            0 if request is None else min(request.cached_tokens, len(self.choices[-1 if last else 0].prompt))
        )

    def metrics(self) -> dict[str, Any] | None:
        """Return the request's times if enabled and there is one choice; unknown values are None."""
        request = self.choices[0].request
        if not self.worker.settings.enable_per_request_metrics or len(self.choices) != 1 or request is None:
            return None
        if request.first_token_ns < 0:  # it was never computed
            return None
        tokens = self.choices[0].emitted
        generation_ms = (request.last_token_ns - request.first_token_ns) / 1e6
        inference_ms = (request.last_token_ns - request.admitted_ns) / 1e6
        return {
            "time_to_first_token_ms": (request.first_token_ns - request.admitted_ns) / 1e6,
            "generation_time_ms": generation_ms,
            "queue_time_ms": (request.admitted_ns - request.arrival_ns) / 1e6,
            "mean_itl_ms": generation_ms / (tokens - 1) if tokens > 1 else None,
            "tokens_per_second": tokens / inference_ms * 1e3 if inference_ms > 0 else None,
            "speculative_decoding": None,
        }

    def plain_usage(self) -> dict[str, Any]:
        """Return the usage without cache details."""
        return {**self.usage(), "prompt_tokens_details": None}

    def usage(self, *, last: bool = True, nulls: bool = True, created: int | None = None) -> dict[str, Any]:
        """Return the usage. `created`: tokens added to the cache, for endpoints that report them."""
        completion = self.completion_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion,
            "completion_tokens": completion,
        }
        if self.worker.settings.enable_prompt_tokens_details:
            details: dict[str, Any] = {"cached_tokens": self.cached_tokens(last=last)}
            if nulls or created is not None:
                details["created_cache_tokens"] = created
            if nulls:
                details["multimodal_tokens"] = None
            usage["prompt_tokens_details"] = details
        elif nulls:
            usage["prompt_tokens_details"] = None
        if nulls:
            usage["completion_tokens_details"] = None
        return usage
