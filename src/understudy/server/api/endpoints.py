"""The generation endpoints: read a body, plan its answers, make their engine requests, run them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from understudy.server.api.chat import ChatStyle
from understudy.server.api.completions import CompletionStyle
from understudy.server.api.errors import PAUSED, ApiError
from understudy.server.api.fields import whole_number
from understudy.server.api.generation import Generation
from understudy.server.api.ids import new_id
from understudy.server.api.planner import Planner
from understudy.server.api.reading import Reader
from understudy.server.api.scoring import ScoringStyle
from understudy.server.api.session_headers import read_hints
from understudy.server.api.time_slices import run_in_slices

if TYPE_CHECKING:
    from collections.abc import Generator

    from understudy.http import Connection, Request
    from understudy.server.api.generation import Style
    from understudy.server.api.reading import Read
    from understudy.server.api.sampling import Sampling
    from understudy.server.worker import Worker


class Endpoints:
    """Generates on behalf of one worker."""

    make_generation: type[Generation] = Generation
    """Class of the answers."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.reads = Reader(worker)
        self.planner = Planner(worker)
        self.in_flight: set[Generation] = set()

    def completions(
        self,
        body: dict[str, Any],
        request: Request,
        connection: Connection,
        style: Style | None = None,
        prefix: str = "cmpl-",
    ) -> Generation:
        """Answer `/v1/completions`, or a route that formats completions in another style."""
        read = self.reads.completion(body)
        style = self._completion_style(read) if style is None else style
        return self._answer(read, style, request, connection, prefix)

    def chat(
        self,
        body: dict[str, Any],
        request: Request,
        connection: Connection,
        style: Style | None = None,
        prefix: str = "chatcmpl-",
    ) -> Generation:
        """Answer `/v1/chat/completions`, or a route that formats chats in another style."""
        read = self.reads.chat(body, checked=style is not None)
        if read.tool is not None:
            read.sampling.structure = {"json": read.tool.get("parameters") or {"type": "object"}}
        style = self._chat_style(read) if style is None else style
        return self._answer(read, style, request, connection, prefix)

    def batch(self, body: dict[str, Any], request: Request, connection: Connection) -> Generation:
        """Answer `/v1/chat/completions/batch`: several conversations, one answer each."""
        return self._answer(self.reads.batch(body), ChatStyle(), request, connection, "chatcmpl-")

    def scoring(self, body: dict[str, Any], request: Request, connection: Connection) -> Generation:
        """Answer `/generative_scoring`: score the labels after each item, from a prefill and one token."""
        read = self.reads.scoring(body)
        style = ScoringStyle(read.labels, softmax=read.softmax)
        generation = self._open(read, style, request, connection, "generative-scoring-")
        return self._run(generation, read, request)

    # ── Parts ──

    def _completion_style(self, read: Read) -> Style:
        return CompletionStyle(echo=read.echo, echo_text=read.echoed)

    def _chat_style(self, read: Read) -> Style:
        return ChatStyle(read.role)

    def _headers(self, sampling: Sampling, request: Request) -> None:
        priority = whole_number(request.headers.get("x-vllm-priority", ""), 9)
        if priority is not None:
            sampling.priority = priority
        if sampling.cache_hit_threshold is None:
            sampling.cache_hit_threshold = self.worker.settings.global_cache_hit_threshold
        if request.headers.get("x-cache-threshold-finish-reason", "").lower() == "true":
            sampling.cache_hit_threshold = math.inf  # no cache reaches it
        sampling.session_id = sampling.session_id or request.headers.get("x-session-id", "")
        sampling.priority = max(min(sampling.priority, 2**62), -(2**62))
        if self.worker.settings.enable_force_include_usage and sampling.stream:
            sampling.include_usage = sampling.continuous_usage = True

    def _open(
        self, read: Read, style: Style, request: Request, connection: Connection, prefix: str
    ) -> Generation:
        sampling = read.sampling
        given = request.headers.get("x-request-id") or sampling.request_id or new_id()
        generation = self.make_generation(
            self.worker, connection, sampling, style, name=f"{prefix}{given}", model=read.model
        )
        generation.load_format = request.headers.get("endpoint-load-metrics-format", "").upper()
        params = sampling.kv_transfer_params
        if params is not None and params.get("do_remote_decode") and self.worker.handoff is None:
            generation.detail["kv_transfer_params"] = {
                **params,
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": f"understudy-{self.worker.index}",
                "remote_block_ids": [],
                "remote_host": "127.0.0.1",
                "remote_port": self.worker.settings.port,
                "tp_size": 1,
            }
        if read.text is not None:
            generation.detail["prompt_text"] = read.text
        return generation

    def _answer(
        self, read: Read, style: Style, request: Request, connection: Connection, prefix: str
    ) -> Generation:
        self._headers(read.sampling, request)
        hints = read_hints(request.headers, read.sampling.session_id, self.worker.settings.session_kv)
        generation = self._open(read, style, request, connection, prefix)
        generation.session = hints
        return self._run(generation, read, request)

    def _run(self, generation: Generation, read: Read, request: Request) -> Generation:
        """Plan the answers and submit them to the engine, in time slices."""

        def work() -> Generator[int]:
            generation.take((yield from self.planner.plan(read)))
            self._admit(generation)
            rank = self._rank(request)
            if self.worker.pauses.rejects:
                generation.reject(PAUSED)
                return
            yield from generation.prepare(rank)
            generation.run(rank)

        generation.on_done = self._done
        run_in_slices(work(), generation, lambda: self.in_flight.add(generation))
        if generation.gone:  # rejected
            self.in_flight.discard(generation)
        return generation

    def _rank(self, request: Request) -> int:
        number = whole_number(request.headers.get("x-data-parallel-rank", ""))
        if number is not None and number < 0:  # ignored, like a value that is not a number
            number = None
        ranks = self.worker.settings.data_parallel_size
        if number is not None and number >= ranks:
            raise ApiError(f"X-data-parallel-rank must be in 0 … {ranks - 1}, got {number}")
        return self.worker.pick_rank(number)

    def _admit(self, generation: Generation) -> None:
        settings = self.worker.settings
        if settings.max_num_queued_reqs is None and settings.max_num_queued_tokens is None:
            return
        waiting = [
            choice.request
            for other in self.in_flight
            for choice in other.choices
            if choice.request is not None and choice.request.admitted_ns < 0
        ]
        requests, tokens = len(waiting), sum(request.prompt_tokens for request in waiting)
        reason = ""
        if settings.max_num_queued_reqs is not None and requests >= settings.max_num_queued_reqs:
            reason = "max_num_queued_reqs"
        elif (
            settings.max_num_queued_tokens is not None
            and tokens + generation.prompt_tokens > settings.max_num_queued_tokens
        ):
            reason = "max_num_queued_tokens"
        if reason:
            self.worker.admission_rejections[reason].add()
            raise ApiError(
                f"the queue is full ({reason}); try again later", status=503, kind="Service Unavailable"
            )

    def adopt(self, generation: Generation) -> None:
        """Count a generation as in flight here, which another worker has lost."""
        self.in_flight.add(generation)
        generation.on_done = self._done

    def release(self, generation: Generation) -> None:
        """Count a generation as in flight here no more."""
        self.in_flight.discard(generation)

    def _done(self, generation: Generation, how: str) -> None:  # noqa: ARG002
        self.in_flight.discard(generation)
