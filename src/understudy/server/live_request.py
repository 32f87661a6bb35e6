"""A request in a live engine, its listener, and the effects of a step on requests."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import numpy as np
    import numpy.typing as npt

    from understudy._core import Identities, RequestRecord
    from understudy.server.push.settings import Bootstrap

log = logging.getLogger("understudy.server")


class Listener(Protocol):
    """Receives the progress of a request. Called between steps only."""

    def on_admitted(self, request: LiveRequest, now_ns: int) -> None:
        """Handle the first scheduling of a request; `request.cached_tokens` is known."""

    def on_tokens(self, request: LiveRequest, first: int, count: int, now_ns: int) -> None:
        """Handle outputs `first` … `first + count − 1`, which became visible."""

    def on_end(self, request: LiveRequest, now_ns: int) -> None:
        """Handle the end of a request, the last call; `request.ended` says how it ended."""

    def on_error(self, request: LiveRequest) -> None:
        """Handle an exception of this listener: fail the answer, so that its client does not wait."""


class ErrorCount(Protocol):
    """Counts the errors of listeners: the engine that serves a request."""

    errors: int


class SessionPart(Protocol):
    """A request's part in a session whose KV is kept."""

    def on_submit(self, core: Any, request: LiveRequest) -> None:
        """Handle the submission of the request to an engine."""

    def on_end(self, request: LiveRequest, now_ns: int) -> None:
        """Handle the end of the request."""


class LiveRequest:
    """A request in one engine, with the times of its transitions (ns, −1: not yet)."""

    __slots__ = (
        "__weakref__",
        "aborted",
        "adapter",
        "admitted_ns",
        "arrival_ns",
        "below_cache_threshold",
        "below_tokens",
        "bootstrap",
        "cache_hit_threshold",
        "cached_tokens",
        "emitted",
        "ended",
        "engine_id",
        "eos_at",
        "failure",
        "finish_ns",
        "first_token_ns",
        "handed",
        "identities",
        "last_token_ns",
        "leg",
        "listener",
        "max_tokens",
        "name",
        "peer",
        "peer_request",
        "preemptions",
        "priority",
        "prompt_tokens",
        "pulled_tokens",
        "rank",
        "record",
        "refused",
        "salt",
        "session",
        "streams",
        "tokens",
    )

    def __init__(
        self,
        name: str,
        prompt_tokens: int,
        max_tokens: int,
        identities: Identities | None,
        listener: Listener,
        *,
        priority: int | None = 0,
        eos_at: int | None = None,
        adapter: int = 0,
        cache_hit_threshold: float = 0.0,
        streams: bool = False,
    ) -> None:
        self.name = name
        self.eos_at = eos_at
        self.adapter = adapter
        self.streams = streams
        """True when the client gets its answer in a stream."""
        self.cache_hit_threshold = cache_hit_threshold
        """Least share of the prompt that must be cached on arrival; with less the request is not computed here."""
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.identities = identities
        self.listener = listener
        self.priority = priority
        """None: the client gave none."""
        self.tokens: npt.NDArray[np.uint32] | None = None
        """Tokens of prompt and planned outputs, for engines that find parts of blocks."""
        self.salt: int | None = None
        """The engine's number of their salt."""
        self.leg = "whole"
        """"prefill": another server decodes it; "decode": another server has computed its prompt."""
        self.peer = self.peer_request = 0
        """Worker that has the prompt's blocks, and its id of the request; for a decode."""
        self.bootstrap: Bootstrap | None = None
        """Where the two servers of an SGLang request meet; None: it has one server."""
        self.failure = ""
        """Why a request between two servers has failed, for its client."""
        self.handed: dict[str, Any] | None = None
        """`kv_transfer_params` of the answer, once a prefill has ended."""
        self.rank: ErrorCount | None = None
        self.record: RequestRecord | None = None
        """The engine's record of the request, once it has ended there."""
        self.engine_id = -1
        self.emitted = 0
        self.cached_tokens = 0
        self.below_tokens: Sequence[int] = (0, 0, 0)
        """Cached tokens that came from G2, G3 and G4."""
        self.pulled_tokens = 0
        """Cached tokens that were read from a prefill server."""
        self.preemptions = 0
        self.arrival_ns = self.admitted_ns = self.first_token_ns = self.last_token_ns = self.finish_ns = -1
        self.aborted = False
        """True when the server or the engine ended the request; its client gets the outputs so far."""
        self.refused = False
        """True when the engine ended the request because its queue was full."""
        self.session: SessionPart | None = None
        """Its part in a session whose KV is kept; None: it has none."""
        self.below_cache_threshold = False
        """True when too little of the prompt was cached; the request was not submitted to the engine."""
        self.ended = ""
        """"finished", "cancelled", "lost" (its engine was killed, or has failed), "failed" (the blocks of its prompt
        could not be read), or "" while in flight."""

    @property
    def has_failed(self) -> bool:
        """True when it has ended without all of its work: its KV has not arrived, whatever tokens it has."""
        return bool(self.failure) or (self.bootstrap is not None and self.ended == "lost")

    def notify_admitted(self, now_ns: int) -> None:
        """Set the time of admission and notify the listener; log its errors."""
        self.admitted_ns = now_ns
        try:
            self.listener.on_admitted(self, now_ns)
        except Exception:
            self.report_failure()

    def notify_end(self, now_ns: int) -> None:
        """Notify session and listener that the request has ended; log the listener's errors."""
        if self.session is not None:
            self.session.on_end(self, now_ns)
        try:
            self.listener.on_end(self, now_ns)
        except Exception:
            self.report_failure()

    def report_failure(self) -> None:
        """Log and count the exception being handled, and notify the listener."""
        log.exception("the answer to request %s failed", ascii(self.name))
        if self.rank is not None:
            self.rank.errors += 1
        try:
            self.listener.on_error(self)
        except Exception:
            log.exception("the failure of request %s could not be sent to its client", ascii(self.name))


class StepEffects(NamedTuple):
    """Effects of a call for the listeners of live requests."""

    tokens: list[tuple[LiveRequest, int, int]]
    """(request, first output, count), in the order of the batch."""

    finished: list[LiveRequest]
    batch_tokens: int
    """Tokens that the step computed; 0 if the engine does not report them."""

    def notify_listeners(self, now_ns: int) -> None:
        """Notify the listeners of these requests."""
        for request, first, count in self.tokens:
            try:
                request.listener.on_tokens(request, first, count, now_ns)
            except Exception:
                request.report_failure()
            request.last_token_ns = now_ns
        for request in self.finished:
            request.notify_end(now_ns)
