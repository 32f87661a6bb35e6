"""The engine interface in Python. The core's simulated engines and real engines implement it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from understudy._core import Effects, EngineSnapshot, EventBatch, Identities, Tier


class Engine(Protocol):
    """A state machine that never reads a clock; `_core.Engine` describes the calls.

    An engine that computes returns `Effects.UNKNOWN` as the end of a step. Its driver calls `end_step` in a thread,
    where it returns when the step is computed. Other calls may come meanwhile; they take effect before the next step.
    """

    def submit(self, spec: Any, now_ns: int) -> Effects:
        """Queue a request in this engine's own form; this may end another one."""

    def cancel(self, request: int, now_ns: int) -> Effects:
        """End a request early; its record is among the effects."""

    def begin_step(self, now_ns: int) -> Effects:
        """Begin a step, which ends at the effects' `wake_ns`."""

    def end_step(self, now_ns: int) -> Effects:
        """End the open step and return its results."""

    def snapshot(self) -> EngineSnapshot:
        """Return phase, queues and block counts."""

    def never_fits(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Return why a request of this size could never run, or None."""

    def next_landing_ns(self) -> int | None:
        """Return when to call `land` if no step is open; None if the engine waits for no transfer."""

    def land(self, now_ns: int) -> Effects:
        """Finish the transfers that end by then."""

    def set_admitting(self, on: bool) -> None:
        """Stop or restart admission."""

    @property
    def drained(self) -> bool:
        """True if no request holds blocks."""

    def forget_cache(self, now_ns: int) -> None:
        """Drop every unreferenced block of the device."""

    def cached_prefix(self, identities: Identities) -> int:
        """Count the leading blocks that an admission would find."""

    def take_events(self) -> tuple[EventBatch, npt.NDArray[np.int64]]:
        """Take the visible KV events, with their times."""


@runtime_checkable
class HasLinks(Protocol):
    """An engine with tiers, whose links to them have a bandwidth."""

    def set_link_share(self, now_ns: int, tier: Tier, share: float) -> None:
        """Set the share of a tier's bandwidth that is left, above 0 and at most 1."""
