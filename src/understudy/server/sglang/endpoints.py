"""The generation endpoints of an SGLang server."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from understudy.server.api.endpoints import Endpoints
from understudy.server.api.errors import ApiError
from understudy.server.api.generation import Generation
from understudy.server.api.reading import Read
from understudy.server.sglang.errors import error_event, is_value_error
from understudy.server.sglang.generate import GenerateStyle, read_generate
from understudy.server.sglang.openai import ChatStyle, CompletionStyle
from understudy.server.sglang.planner import SglangPlanner
from understudy.server.sglang.reading import SglangReader

if TYPE_CHECKING:
    from understudy.http import Connection, Request
    from understudy.server.api.generation import Style
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
        self.planner = SglangPlanner(worker)

    def generate(self, body: dict[str, Any], request: Request, connection: Connection) -> None:
        """Answer `/generate`. In a stream, an error in the values is an event."""
        try:
            given = read_generate(body, self.worker)
            sampling, model = given.samplings[0], self.worker.settings.names[0]
            self._headers(sampling, request)
            style = GenerateStyle(given, incremental=self.worker.settings.incremental_streaming_output)
            generation = Generation(self.worker, connection, sampling, style, name=given.rids[0], model=model)
            generation.rids = RequestIds(enumerate(given.rids) if given.n == 1 else ())
            self._run(generation, Read(sampling, model, given.tokens, given.n, given.samplings), request)
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

    def _open(
        self, read: Read, style: Style, request: Request, connection: Connection, prefix: str
    ) -> Generation:
        given = request.headers.get("x-request-id") or read.sampling.request_id
        generation = super()._open(read, style, request, connection, prefix)
        generation.id = given or uuid.uuid4().hex
        generation.rids = RequestIds({0: generation.id})
        return generation
