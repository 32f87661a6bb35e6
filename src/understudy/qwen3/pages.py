"""Copy pages between the device and host memory: real copies, or simulated ones on a virtual clock."""

from __future__ import annotations

from math import isinf
from typing import TYPE_CHECKING, Protocol

import torch

from understudy.timing.recorded.load import LinkTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.clock import ScriptedClock
    from understudy.qwen3.buffer import KvBuffer

NEVER_NS = 1 << 62
"""End of a recorded copy that was never detected."""


class PageCopier(Protocol):
    """Copies whole pages, in order per direction. A copy that has begun cannot be cancelled."""

    @property
    def num_blocks(self) -> int:
        """Number of pages of host memory."""

    def mark(self) -> object:
        """Mark the device's queue: earlier work may still use pages that a copy requested now reads or writes."""

    def begin_copy(
        self, target: Sequence[int], source: Sequence[int], after: object, *, down: bool
    ) -> Callable[[], bool]:
        """Begin to copy after a mark; return a function that says whether the copy has ended."""

    def wait(self) -> None:
        """Wait until all copies have ended."""

    @property
    def next_ns(self) -> int | None:
        """End of the next copy, if known."""


class PinnedPages:
    """Pinned host memory, with a stream per direction in addition to the compute stream."""

    def __init__(self, num_blocks: int, buffer: KvBuffer) -> None:
        cuda = buffer.pages.device.type == "cuda"
        self.buffer = buffer
        shape = (num_blocks, *buffer.pages.shape[1:])
        self.pages = torch.empty(shape, dtype=buffer.pages.dtype, pin_memory=cuda)
        self._streams = (torch.cuda.Stream(), torch.cuda.Stream()) if cuda else None

    @property
    def num_blocks(self) -> int:
        """Implement `PageCopier`."""
        return int(self.pages.shape[0])

    @property
    def next_ns(self) -> int | None:
        """Implement `PageCopier`."""
        return None

    def mark(self) -> object:
        """Implement `PageCopier`."""
        return None if self._streams is None else torch.cuda.current_stream().record_event()

    def begin_copy(
        self, target: Sequence[int], source: Sequence[int], after: object, *, down: bool
    ) -> Callable[[], bool]:
        """Begin to copy; pages that are consecutive on both sides are one transfer."""
        to, of = (self.pages, self.buffer.pages) if down else (self.buffer.pages, self.pages)
        if self._streams is None:
            for there, here, count in merge_runs(target, source):
                to[there : there + count].copy_(of[here : here + count])
            return lambda: True
        stream = self._streams[0 if down else 1]
        assert isinstance(after, torch.cuda.Event)
        stream.wait_event(after)
        with torch.cuda.stream(stream), torch.inference_mode():
            for there, here, count in merge_runs(target, source):
                to[there : there + count].copy_(of[here : here + count], non_blocking=True)
            ended = torch.cuda.Event()
            ended.record(stream)
        return ended.query

    def wait(self) -> None:
        """Implement `PageCopier`."""
        for stream in self._streams or ():
            stream.synchronize()


class SimulatedPages:
    """Simulated copies: each ends when the link would have copied it; beginning it takes host time."""

    def __init__(self, num_blocks: int, times: LinkTimes, clock: ScriptedClock) -> None:
        self.num_blocks = num_blocks
        self.times = times
        self.clock = clock
        self._free_ns = [0, 0]
        self._ends: list[int] = []

    def mark(self) -> object:
        """Implement `PageCopier`."""
        return None

    def begin_copy(
        self,
        target: Sequence[int],
        source: Sequence[int],  # noqa: ARG002
        after: object,  # noqa: ARG002
        *,
        down: bool,
    ) -> Callable[[], bool]:
        """Implement `PageCopier`."""
        self.clock.time_ns += round((self.times.copy_ms + len(target) * self.times.page_ms) * 1e6)
        each_ms = self.times.down_ms if down else self.times.up_ms
        way = 0 if down else 1
        start_ns = max(self._free_ns[way], self.clock.time_ns)
        end_ns = self._free_ns[way] = start_ns + round(len(target) * each_ms * 1e6)
        return self._until(end_ns)

    def wait(self) -> None:
        """Implement `PageCopier`."""
        self.clock.time_ns = max([self.clock.time_ns, *self._ends])

    @property
    def next_ns(self) -> int | None:
        """Implement `PageCopier`."""
        return min((end for end in self._ends if end > self.clock.time_ns), default=None)

    def _until(self, end_ns: int) -> Callable[[], bool]:
        self._ends = [end for end in self._ends if end > self.clock.time_ns]
        self._ends.append(end_ns)
        return lambda: self.clock.time_ns >= end_ns


class RecordedPages(SimulatedPages):
    """Simulated copies that end at the times that were recorded from the real engine."""

    def __init__(self, num_blocks: int, seen_ms: Sequence[float], clock: ScriptedClock) -> None:
        super().__init__(num_blocks, LinkTimes(0.0, 0.0, 0.0, 0.0), clock)
        self._seen = [NEVER_NS if isinf(ms) else round(ms * 1e6) for ms in reversed(seen_ms)]

    def begin_copy(
        self,
        target: Sequence[int],  # noqa: ARG002
        source: Sequence[int],  # noqa: ARG002
        after: object,  # noqa: ARG002
        *,
        down: bool,  # noqa: ARG002
    ) -> Callable[[], bool]:
        """Implement `PageCopier`."""
        return self._until(self._seen.pop() if self._seen else NEVER_NS)


def merge_runs(target: Sequence[int], source: Sequence[int]) -> list[tuple[int, int, int]]:
    """Merge pages that are consecutive on both sides; return (to, from, pages) of each run."""
    found: list[tuple[int, int, int]] = []
    for there, here in zip(target, source, strict=True):
        if found and (there, here) == (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]):
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + 1)
        else:
            found.append((there, here, 1))
    return found
