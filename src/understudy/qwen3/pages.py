"""Who carries pages between the device and host memory: for real, or on a clock that only counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from understudy.timing.recorded.load import LinkTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.qwen3.buffer import KvBuffer


class Carrier(Protocol):
    """Copies whole pages, those of one direction in order. A copy that was begun cannot be called back."""

    @property
    def num_blocks(self) -> int:
        """Pages of host memory."""

    def mark(self) -> object:
        """What the device was given so far, which may still use pages that a copy asked for now reads or writes."""

    def carry(
        self, target: Sequence[int], source: Sequence[int], after: object, *, down: bool
    ) -> Callable[[], bool]:
        """Begin to copy, behind a mark; what is returned says whether all have come."""

    def wait(self) -> None:
        """Until all have come."""

    @property
    def next_ms(self) -> float | None:
        """When the next copy ends, where that can be known."""


class PinnedPages:
    """Pinned memory, and streams of their own beside the one that computes."""

    def __init__(self, num_blocks: int, buffer: KvBuffer) -> None:
        cuda = buffer.pages.device.type == "cuda"
        self.buffer = buffer
        shape = (num_blocks, *buffer.pages.shape[1:])
        self.pages = torch.empty(shape, dtype=buffer.pages.dtype, pin_memory=cuda)
        self._streams = (torch.cuda.Stream(), torch.cuda.Stream()) if cuda else None

    @property
    def num_blocks(self) -> int:
        """See `Carrier`."""
        return int(self.pages.shape[0])

    @property
    def next_ms(self) -> float | None:
        """See `Carrier`."""
        return None

    def mark(self) -> object:
        """See `Carrier`."""
        return None if self._streams is None else torch.cuda.current_stream().record_event()

    def carry(
        self, target: Sequence[int], source: Sequence[int], after: object, *, down: bool
    ) -> Callable[[], bool]:
        """A page is one range of bytes on both sides, and pages that follow each other on both are one transfer."""
        to, of = (self.pages, self.buffer.pages) if down else (self.buffer.pages, self.pages)
        if self._streams is None:
            for there, here, count in runs(target, source):
                to[there : there + count].copy_(of[here : here + count])
            return lambda: True
        stream = self._streams[0 if down else 1]
        assert isinstance(after, torch.cuda.Event)
        stream.wait_event(after)
        with torch.cuda.stream(stream), torch.inference_mode():
            for there, here, count in runs(target, source):
                to[there : there + count].copy_(of[here : here + count], non_blocking=True)
            ended = torch.cuda.Event()
            ended.record(stream)
        return ended.query

    def wait(self) -> None:
        """See `Carrier`."""
        for stream in self._streams or ():
            stream.synchronize()


class SimulatedPages:
    """No bytes: a copy ends when the link would have carried it, and to begin it takes the host its time."""

    def __init__(self, num_blocks: int, times: LinkTimes, clock: Counting) -> None:
        self.num_blocks = num_blocks
        self.times = times
        self.clock = clock
        self._free_ms = [0.0, 0.0]
        self._ends: list[float] = []

    def mark(self) -> object:
        """See `Carrier`."""
        return None

    def carry(
        self,
        target: Sequence[int],
        source: Sequence[int],  # noqa: ARG002
        after: object,  # noqa: ARG002
        *,
        down: bool,
    ) -> Callable[[], bool]:
        """See `Carrier`."""
        self.clock.now_ms += self.times.copy_ms + len(target) * self.times.page_ms
        each = self.times.down_ms if down else self.times.up_ms
        way = 0 if down else 1
        end_ms = self._free_ms[way] = max(self._free_ms[way], self.clock.now_ms) + len(target) * each
        return self._until(end_ms)

    def wait(self) -> None:
        """See `Carrier`."""
        self.clock.now_ms = max([self.clock.now_ms, *self._ends])

    @property
    def next_ms(self) -> float | None:
        """See `Carrier`."""
        return min((end for end in self._ends if end > self.clock.now_ms), default=None)

    def _until(self, end_ms: float) -> Callable[[], bool]:
        self._ends = [end for end in self._ends if end > self.clock.now_ms]
        self._ends.append(end_ms)
        return lambda: self.clock.now_ms >= end_ms


class RecordedPages(SimulatedPages):
    """Each copy ends when the recorded engine saw the same one end."""

    def __init__(self, num_blocks: int, seen_ms: Sequence[float], clock: Counting) -> None:
        super().__init__(num_blocks, LinkTimes(0.0, 0.0, 0.0, 0.0), clock)
        self._seen = list(reversed(seen_ms))

    def carry(
        self,
        target: Sequence[int],  # noqa: ARG002
        source: Sequence[int],  # noqa: ARG002
        after: object,  # noqa: ARG002
        *,
        down: bool,  # noqa: ARG002
    ) -> Callable[[], bool]:
        """See `Carrier`."""
        return self._until(self._seen.pop() if self._seen else float("inf"))


class Counting(Protocol):
    """A clock that is told how late it is."""

    now_ms: float


def runs(target: Sequence[int], source: Sequence[int]) -> list[tuple[int, int, int]]:
    """(to, from, pages) of what lies end to end on both sides."""
    found: list[tuple[int, int, int]] = []
    for there, here in zip(target, source, strict=True):
        if found and (there, here) == (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]):
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + 1)
        else:
            found.append((there, here, 1))
    return found
