"""`Benchmark`: the load of a measured benchmark and its times, per request or as means."""

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
"""Samples of a load whose exact lengths are unknown."""


class Benchmark(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a load generator; times in milliseconds, measured at the client."""

    file: str
    format: str
    sha256: str
    load: Load
    other_draws: tuple[Load, ...] = ()
    """Other samples of the load, for a file without exact lengths; their spread estimates the sampling noise."""
    means: dict[str, float]
    """Means of ttft_ms, tpot_ms and e2e_ms, those that the file has."""
    ttft_ms: Times | None = None
    """Times of each request, in the order of the load; None if the file has only means."""
    tpot_ms: Times | None = None
    e2e_ms: Times | None = None
    engine: dict[str, int] = {}
    """Engine settings in the file: max_num_seqs, max_num_batched_tokens, tensor_parallel_size."""
    notes: tuple[str, ...] = ()

    @property
    def detailed(self) -> bool:
        """Whether the file has times of single requests."""
        return self.ttft_ms is not None


class Fields:
    """Reads the keys of one JSON object of a file; errors name the file and the key."""

    def __init__(self, where: str, content: dict[str, object]) -> None:
        self.where = where
        self.content = content

    def need(self, key: str, remedy: str = "") -> object:
        """Return the value of a required key."""
        if self.content.get(key) is None:
            raise InvalidArgument(f"{self.where}: {key} is missing{f'; {remedy}' if remedy else ''}")
        return self.content[key]

    def number(self, key: str, *, least: float | None = None, remedy: str = "") -> float:
        """Return a finite number of at least `least`."""
        return self.as_number(key, self.need(key, remedy), least)

    def count(self, key: str, *, least: int = 1, remedy: str = "") -> int:
        """Return a whole number of at least `least`."""
        value = self.number(key, least=least, remedy=remedy)
        if value != int(value):
            raise InvalidArgument(f"{self.where}: {key} must be a whole number, got {value}")
        return int(value)

    def numbers(self, key: str, length: int | None, *, least: float | None = None) -> Times:
        """Return a list of finite numbers."""
        values = self.need(key)
        if not isinstance(values, list):
            raise InvalidArgument(f"{self.where}: {key} must be a list, got {type(values).__name__}")
        if length is not None and len(values) != length:
            raise InvalidArgument(
                f"{self.where}: {key} has {len(values)} entries for {length} requests; the file is truncated or mixed"
            )
        return np.array(
            [self.as_number(f"{key}[{index}]", value, least) for index, value in enumerate(values)],
            dtype=np.float64,
        )

    def as_number(self, key: str, value: object, least: float | None = None) -> float:
        """Return `value` as a number, else raise InvalidArgument."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise InvalidArgument(f"{self.where}: {key} must be a number, got {value!r}")
        if least is not None and value < least:
            raise InvalidArgument(f"{self.where}: {key} must be at least {least:g}, got {value:g}")
        return float(value)


def check_clock(where: str, key: str, seconds: Times) -> None:
    """Raise InvalidArgument if start times span more than a week, so that their unit is not seconds."""
    span = float(seconds.max() - seconds.min()) if len(seconds) else 0.0
    if span > 7 * 86400:
        raise InvalidArgument(f"{where}: {key} spans {span:.3g} s, more than a week; check its unit")


def check_units(where: str, key: str, value_ms: float, other_ms: float, other: str) -> None:
    """Raise InvalidArgument if two times of one quantity differ tenfold, so that one has another unit."""
    if value_ms > 0 and other_ms > 0 and not 0.1 < other_ms / value_ms < 10:
        raise InvalidArgument(
            f"{where}: {key} is {value_ms:g}, and {other} {other_ms:g} ms: units or files are mixed; save the "
            "benchmark again"
        )


def check_times(where: str, ttft_ms: Times, e2e_ms: Times) -> None:
    """Raise InvalidArgument for a negative TTFT, or an end before the first token."""
    for name, bad in (
        ("time to first token", ttft_ms < 0),
        ("end before the first token", e2e_ms < ttft_ms - 1e-6),
    ):
        if bad.any():
            raise InvalidArgument(
                f"{where}: request {int(np.flatnonzero(bad)[0])} has a negative {name}: its clock ran backwards or "
                "units are mixed; export the benchmark again"
            )
