"""A benchmark that somebody ran: its load, and what was measured, of each request or in the mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from understudy.errors import InvalidArgument

if TYPE_CHECKING:
    from understudy.calibrate.load import Load

Times = NDArray[np.float64]
DRAWS = 3
"""Of a load whose very lengths are not known."""


class Benchmark(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a load generator. Milliseconds at the client."""

    file: str
    format: str
    sha256: str
    load: Load
    other_draws: tuple[Load, ...] = ()
    """Of a file that does not have the very lengths: the load drawn otherwise. By how much they differ is chance."""
    means: dict[str, float]
    """ttft_ms, tpot_ms and e2e_ms, as far as the file has them."""
    ttft_ms: Times | None = None
    """Of every request, in the order of the load; None where the file has means only."""
    tpot_ms: Times | None = None
    e2e_ms: Times | None = None
    engine: dict[str, int] = {}
    """Settings of the engine that the file names: max_num_seqs, max_num_batched_tokens, tensor_parallel_size."""
    notes: tuple[str, ...] = ()

    @property
    def detailed(self) -> bool:
        """Whether it has times of single requests."""
        return self.ttft_ms is not None


class Fields:
    """The keys of one JSON object of a file; errors name the file and the key."""

    def __init__(self, where: str, content: dict[str, object]) -> None:
        self.where = where
        self.content = content

    def need(self, key: str, remedy: str = "") -> object:
        """The value of a key that must be there."""
        if self.content.get(key) is None:
            raise InvalidArgument(f"{self.where}: {key} is missing{f'; {remedy}' if remedy else ''}")
        return self.content[key]

    def number(self, key: str, *, least: float | None = None, remedy: str = "") -> float:
        """A finite number of at least `least`."""
        return self.as_number(key, self.need(key, remedy), least)

    def count(self, key: str, *, least: int = 1, remedy: str = "") -> int:
        """A whole number."""
        value = self.number(key, least=least, remedy=remedy)
        if value != int(value):
            raise InvalidArgument(f"{self.where}: {key} must be a whole number, got {value}")
        return int(value)

    def numbers(self, key: str, length: int | None, *, least: float | None = None) -> Times:
        """A list of finite numbers."""
        values = self.need(key)
        if not isinstance(values, list):
            raise InvalidArgument(f"{self.where}: {key} must be a list, got {type(values).__name__}")
        if length is not None and len(values) != length:
            raise InvalidArgument(
                f"{self.where}: {key} has {len(values)} entries for {length} requests; the file is cut off or mixed"
            )
        return np.array(
            [self.as_number(f"{key}[{index}]", value, least) for index, value in enumerate(values)],
            dtype=np.float64,
        )

    def as_number(self, key: str, value: object, least: float | None = None) -> float:
        """`value` as a number, or InvalidArgument."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise InvalidArgument(f"{self.where}: {key} must be a number, got {value!r}")
        if least is not None and value < least:
            raise InvalidArgument(f"{self.where}: {key} must be at least {least:g}, got {value:g}")
        return float(value)


def check_clock(where: str, key: str, seconds: Times) -> None:
    """Refuse times of starts that cannot be seconds of one run."""
    span = float(seconds.max() - seconds.min()) if len(seconds) else 0.0
    if span > 7 * 86400:
        raise InvalidArgument(
            f"{where}: {key} spans {span:.3g} s, more than a week; its unit is not that of the format"
        )


def check_units(where: str, key: str, said: float, found: float, beside: str) -> None:
    """Refuse a time that another of the same file contradicts by more than chance can: one unit is not as it says."""
    if said > 0 and found > 0 and not 0.1 < found / said < 10:
        raise InvalidArgument(
            f"{where}: {key} is {said:g}, and {beside} {found:g} ms: units are mixed, or the file is; save the "
            "benchmark again"
        )


def check_times(where: str, ttft_ms: Times, e2e_ms: Times) -> None:
    """Refuse times that run backwards: a request ends before its first token, or comes before it was sent."""
    for name, bad in (
        ("time to first token", ttft_ms < 0),
        ("end before the first token", e2e_ms < ttft_ms - 1e-6),
    ):
        if bad.any():
            raise InvalidArgument(
                f"{where}: request {int(np.flatnonzero(bad)[0])} has a negative {name}; its clock runs backwards or "
                "units are mixed: export the benchmark again"
            )
