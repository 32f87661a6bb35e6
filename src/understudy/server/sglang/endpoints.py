"""The generation endpoints of an SGLang server."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.server.api.endpoints import Endpoints
from understudy.server.api.errors import ApiError
from understudy.server.api.generation import Generation
from understudy.server.api.plan import Plan
from understudy.server.sglang.errors import error_event, is_value_error
from understudy.server.sglang.generate import GenerateStyle, read_generate
from understudy.server.sglang.lengths import room_for
from understudy.server.sglang.openai import ChatStyle, CompletionStyle
from understudy.server.sglang.reading import SglangReader

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from understudy.http import Connection, Request
    from understudy.server.api.generation import Style
    from understudy.server.api.growing import GrowingPlan
    from understudy.server.api.reading import Read
    from understudy.server.api.sampling import Sampling
    from understudy.server.worker import Worker


class RequestIds(dict[int, str]):
    """Ids of a request's choices by index; a new one for those that the client did not name."""

    def __missing__(self, index: int) -> str:
        """Make an id, and keep it."""
        self[index] = uuid.uuid4().hex
        return self[index]


class SglangEndpoints(Endpoints):
    """Generates on behalf of one SGLang worker."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.reads = SglangReader(worker)

    def generate(self, body: dict[str, Any], request: Request, connection: Connection) -> None:
        """Answer `/generate`. In a stream, an error in the values is an event."""
        try:
            read = read_generate(body, self.worker)
            sampling = read.samplings[0]
            self._headers(sampling, request)
            style = GenerateStyle(read, incremental=self.worker.settings.incremental_streaming_output)
            generation = Generation(
                self.worker,
                connection,
                sampling,
                style,
                name=read.rids[0],
                model=self.worker.settings.names[0],
            )
            generation.rids = RequestIds(enumerate(read.rids) if read.n == 1 else ())
            self._run(generation, request, read.tokens, read.n, samplings=read.samplings)
        except ApiError as error:
            if body.get("stream") is not True or not is_value_error(error):
                raise
            connection.on_close = None
            connection.start_stream()
            connection.send_event(error_event(error))
            connection.end_stream()

    # ── Differences from vLLM ──

    def _completion_style(self, read: Read) -> Style:
        return CompletionStyle(echo=read.echo, echo_text=read.echoed)

    def _chat_style(self, read: Read) -> Style:  # noqa: ARG002
        return ChatStyle()

    def _room(self, prompt_tokens: int, sampling: Sampling) -> int:
        return room_for(prompt_tokens, sampling.asked_tokens, self.worker.settings)

    def _plan(
        self, tokens: npt.NDArray[np.uint32], sampling: Sampling, index: int, *, empty: bool = False
    ) -> Plan | GrowingPlan:
        """Plan an answer: SGLang's scheduler itself ends it at a stop string."""
        plan = super()._plan(tokens, sampling, index, empty=empty)
        if not isinstance(plan, Plan):
            return plan
        if plan.stopped:
            plan = msgspec.structs.replace(plan, ends_itself=True)
        if isinstance(plan.stop_reason, int) and not sampling.include_stop:
            pieces = plan.pieces or self.worker.texts.pieces(plan.tokens[: plan.total])
            plan = msgspec.structs.replace(plan, pieces=[*pieces[: plan.total - 1], ""])
        return plan

    def _open(
        self,
        request: Request,
        connection: Connection,
        sampling: Sampling,
        style: Style,
        prefix: str,
        model: str,
    ) -> Generation:
        given = request.headers.get("x-request-id") or sampling.request_id
        generation = super()._open(request, connection, sampling, style, prefix, model)
        generation.id = given or uuid.uuid4().hex
        generation.rids = RequestIds({0: generation.id})
        return generation
