"""Prices of GPUs per hour."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from understudy.errors import ConfigError
from understudy.run.fleet_size import list_sizes
from understudy.timing.gpus import find_gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.run.fleet_size import GroupSize
    from understudy.sweep.candidate import Candidate


class Prices(msgspec.Struct, frozen=True):
    """Price of every GPU by name, per hour; the name "" is for every other GPU."""

    by_name: dict[str, float]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Prices:
        """Parse `NAME=PRICE` or `PRICE`. ConfigError names an unknown GPU or an invalid price."""
        prices: dict[str, float] = {}
        for text in texts:
            name, _, number = text.rpartition("=")
            gpu = find_gpu(name).name if name else ""
            try:
                price = float(number)
            except ValueError:
                price = math.nan
            if not (math.isfinite(price) and price > 0):
                raise ConfigError(f"--gpu-hour {text}: no positive price; write it as H200=3.5")
            if gpu in prices:
                raise ConfigError(
                    f"--gpu-hour {text}: the price of {gpu or 'all GPUs'} is given twice; give it once"
                )
            prices[gpu] = price
        return cls(prices)

    @property
    def are_given(self) -> bool:
        """Whether any price is known."""
        return bool(self.by_name)

    def check(self, candidate: Candidate) -> None:
        """Raise ConfigError if prices are given, but not that of a GPU of this candidate."""
        for size in list_sizes(candidate.settings):
            if self.are_given and self._price(size) is None:
                raise ConfigError(
                    f"--gpu-hour: no price of {size.gpu_name}; give it too"
                    if size.gpu_name is not None
                    else "--gpu-hour: no price of GPUs without a name; name the GPU (--gpu, or a timing file), or give "
                    "a number alone"
                )

    def cost(self, candidate: Candidate) -> float:
        """Return the price of a fleet per hour; without prices, its number of GPUs."""
        cost = 0.0
        for size in list_sizes(candidate.settings):
            price = self._price(size) if self.are_given else 1.0
            assert price is not None
            cost += size.gpus * price
        return cost

    def _price(self, size: GroupSize) -> float | None:
        return self.by_name.get(size.gpu_name or "", self.by_name.get(""))
