"""One answer to a generation request: it listens to its engine request and sends the tokens in a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from understudy.server.api.errors import ApiError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from understudy._core import Identities
    from understudy.http import Connection
    from understudy.server.api.growing import GrowingPlan
    from understudy.server.api.plan import Plan
    from understudy.server.api.sampling import Sampling
    from understudy.server.live_request import LiveRequest
    from understudy.server.worker import Worker


QUEUE_FULL = "The request queue is full."


class Owner(Protocol):
    """The request of a client, which has this answer among others."""

    worker: Worker
    sampling: Sampling
    model: str
    connection: Connection
    started: bool
    has_sent: bool
    detail: dict[str, Any]

    @property
    def gone(self) -> bool:
        """True when the client has disconnected or the answer has failed."""

    def start(self) -> None:
        """Start the stream."""

    def send_chunk(self, choice: Choice, first: int, count: int, *, last: bool) -> None:
        """Send these tokens of a choice in the stream."""

    def on_choice_ended(self, choice: Choice, how: str) -> None:
        """Handle the end of a choice."""

    def refuse(self, error: ApiError) -> None:
        """End the answer with an error, because the engine took no request of it."""

    def report_failure(self) -> None:
        """Send an internal error to the client."""


class Choice:
    """One answer of a request, and the listener of its engine request."""

    __slots__ = (
        "decoded",
        "done",
        "emitted",
        "generation",
        "index",
        "named",
        "plan",
        "prompt",
        "request",
        "sampling",
        "sent",
        "tool",
        "versions",
    )

    def __init__(
        self,
        generation: Owner,
        index: int,
        prompt: npt.NDArray[np.uint32],
        plan: Plan | GrowingPlan,
        sampling: Sampling,
        tool: dict[str, Any] | None = None,
    ) -> None:
        self.sampling = sampling
        """Parameters of this answer; those of the generation, unless a batch gives each its own."""
        self.generation = generation
        self.index = index
        self.prompt = prompt
        self.plan = plan
        self.emitted = 0
        self.sent = 0
        self.decoded = 0
        self.done = False
        self.request: LiveRequest | None = None
        self.tool = tool
        self.named: Identities | None = None
        """Blocks of the request until its admission, if events are to repeat the cached ones."""
        self.versions: list[tuple[str, int]] = []
        """Labels of the weights that computed the tokens, each with the index of its first token; if requested."""

    def on_admitted(self, request: LiveRequest, now_ns: int) -> None:  # noqa: ARG002
        """Count the first scheduling of the request."""
        worker = self.generation.worker
        worker.find_metrics(request).on_admitted(request)
        if self.named is not None:
            worker.report_hits(request, self.named)
            self.named = None

    def on_tokens(self, request: LiveRequest, first: int, count: int, now_ns: int) -> None:
        """Count new tokens and send them in a stream."""
        if self.done:
            return
        plan = self.plan
        count = min(count, plan.total - first)
        if self.generation.sampling.return_weight_versions:
            self._note_version(first)
        self.emitted = first + count
        last = self.emitted >= plan.total
        generation = self.generation
        generation.worker.find_metrics(request).on_tokens(request, first, count, now_ns)
        if first == 0:
            generation.connection.notify_first_token()
        if generation.sampling.stream:
            connection = generation.connection
            if not generation.started:
                generation.start()
            sent = self.sent
            if last or sent == 0 or self.emitted - sent >= generation.sampling.stream_interval:
                self.sent = self.emitted
                generation.send_chunk(self, sent, self.emitted - sent, last=last)
                connection.due_ns = now_ns
                connection.due_of = generation.worker
                connection.due_tokens += self.emitted - sent
                generation.has_sent = True
        if last and plan.stopped:
            generation.worker.driver.cancel(request, now_ns)

    def on_end(self, request: LiveRequest, now_ns: int) -> None:  # noqa: ARG002
        """Count the end of the request and complete the answer with the last choice."""
        if self.done:
            return
        self.done = True
        generation = self.generation
        if generation.worker.on_end is not None:
            generation.worker.on_end(generation.worker.index, request)
        # Perhaps at a stop string, and the engine would go on.
        complete = self.emitted >= self.plan.total and not request.has_failed
        if request.refused and generation.worker.settings.kind.answers_full_queue:
            generation.refuse(ApiError(QUEUE_FULL, status=503, kind="503"))
            return
        if request.aborted and request.ended == "cancelled" and not complete:
            generation.worker.find_metrics(request).on_aborted(request)
            self._cut("cache_threshold" if request.below_cache_threshold else "abort")
        elif complete:
            generation.worker.find_metrics(request).on_finished(
                request, self.plan.finish, self.emitted, self.plan.limit
            )
        if request.handed is not None:
            generation.detail["kv_transfer_params"] = request.handed
        generation.on_choice_ended(self, request.ended)

    def on_error(self, request: LiveRequest) -> None:  # noqa: ARG002
        """Fail the answer after an exception in this listener."""
        self.generation.report_failure()
        self.done = True

    def _note_version(self, first: int) -> None:
        version = self.generation.worker.weight_version
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, first))

    def weight_versions(self) -> list[dict[str, Any]] | None:
        """Return the label of the weights per range of output tokens; None unless requested."""
        if not self.versions:
            return None
        ends = [*(start for _, start in self.versions[1:]), self.emitted]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(self.versions, ends, strict=True)
        ]

    def version_field(self) -> dict[str, Any]:
        """Return the field `weight_versions`, in releases that have it."""
        if not self.generation.worker.release.has_weight_versions:
            return {}
        return {"weight_versions": self.weight_versions()}

    def _cut(self, why: str) -> None:
        """End the answer with the tokens so far."""
        generation, sent = self.generation, self.sent
        self.plan = self.plan.cut(self.emitted, why)
        if generation.sampling.stream and not generation.gone:
            if not generation.started:
                generation.start()
            self.sent = self.emitted
            rest = self.emitted - sent
            generation.send_chunk(self, sent, rest, last=True)


class ContinuedChoice:
    """Listens to the engine request of a choice that goes on behind tokens that an earlier worker made."""

    __slots__ = ("_first", "choice")

    def __init__(self, choice: Choice, first: int) -> None:
        self.choice = choice
        self._first = first

    def on_admitted(self, request: LiveRequest, now_ns: int) -> None:
        """Count the scheduling of the request."""
        self.choice.on_admitted(request, now_ns)

    def on_tokens(self, request: LiveRequest, first: int, count: int, now_ns: int) -> None:
        """Pass on new tokens by their numbers in the whole answer."""
        self.choice.on_tokens(request, self._first + first, count, now_ns)

    def on_end(self, request: LiveRequest, now_ns: int) -> None:
        """Pass on the end of the request."""
        self.choice.on_end(request, now_ns)

    def on_error(self, request: LiveRequest) -> None:
        """Pass on an exception of the choice."""
        self.choice.on_error(request)
