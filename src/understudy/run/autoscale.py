"""Settings of a fleet whose workers join and leave during a run."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import msgspec

from understudy.checks import whole_number
from understudy.errors import ConfigError
from understudy.scaling.names import ScalerSite, make_scaler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from understudy.run.pools import WorkerPool
    from understudy.scaling.capabilities import WorkerCapabilities
    from understudy.scaling.estimates import PassTime
    from understudy.scaling.scaler import Scaler

MOST_WORKERS = 8
"""Workers of each role that a built-in scaler may order if no limit is given."""


class Autoscale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scaler, its limits, and how long a worker takes to start.

    Errors: ConfigError names a field out of range.

    Example:
        us.replay("trace.jsonl", workers=2, autoscale=Autoscale(scaler="backlog", max_workers=16, startup_s=40))
    """

    scaler: Any = "backlog"
    """A name with settings (`hpa,metric=kv_use,target=0.7`), `FILE.py:CLASS`, or an object with the two methods."""
    min_workers: int = 1
    """Least workers of each role."""
    max_workers: int | None = None
    """Most workers of each role (default: 8, or as many as at the start); a `schedule` has no limit unless given."""
    startup_s: float = 0.0
    """Time from the order of a worker until it is ready; time to load its weights is added."""
    weights_gbps: float | None = None
    """Link from which a worker loads its weights, in 10^9 bytes per second; None: loading takes no time."""
    weight_bytes: int | None = None
    """Weights of a worker (default: those of the model on its GPUs)."""
    gpus_per_worker: int = 1
    price_per_gpu_hour: float | None = None
    """For the cost in the report."""

    def __post_init__(self) -> None:
        if not isinstance(self.scaler, str) and not (
            callable(getattr(self.scaler, "initial_tick_ms", None))
            and callable(getattr(self.scaler, "on_tick", None))
        ):
            raise ConfigError(
                "autoscale: scaler must be a name, FILE.py:CLASS, or an object with initial_tick_ms() and "
                f"on_tick(metrics), got {self.scaler!r}"
            )
        whole_number("min_workers", self.min_workers, 1)
        whole_number("gpus_per_worker", self.gpus_per_worker, 1)
        if (
            self.max_workers is not None
            and whole_number("max_workers", self.max_workers, 1) < self.min_workers
        ):
            raise ConfigError(
                f"max_workers: {self.max_workers} is below min_workers, which is {self.min_workers}"
            )
        if not 0 <= self.startup_s < 1e6:
            raise ConfigError(f"startup_s: {self.startup_s} is not a time in seconds; give 0 or more")
        if self.price_per_gpu_hour is not None and not 0 <= self.price_per_gpu_hour < 1e9:
            raise ConfigError(f"price_per_gpu_hour: {self.price_per_gpu_hour} must be 0 or more")
        if self.weights_gbps is not None and not 0 < self.weights_gbps < 1e6:
            raise ConfigError(f"weights_gbps: {self.weights_gbps} must be above 0")
        if self.weight_bytes is not None:
            whole_number("weight_bytes", self.weight_bytes, 0)
            if self.weights_gbps is None:
                raise ConfigError("weight_bytes: needs weights_gbps, the link that they are loaded over")

    @property
    def start_ns(self) -> int:
        """Time from the order of a worker until it is ready. ConfigError if the weights are not known."""
        if self.weights_gbps is None:
            return round(self.startup_s * 1e9)
        if self.weight_bytes is None:
            raise ConfigError("weights_gbps: the size of the weights is not known; give weight_bytes")
        return round((self.startup_s + self.weight_bytes / (self.weights_gbps * 1e9)) * 1e9)

    @property
    def is_limited(self) -> bool:
        """Whether targets are kept within `min_workers` and `max_workers`."""
        return not (isinstance(self.scaler, str) and self.scaler.partition(",")[0] == "schedule")

    def most_workers(self, starting_with: int) -> int:
        """Return the most workers of a role that begins with so many."""
        return max(MOST_WORKERS, starting_with) if self.max_workers is None else self.max_workers

    def make(
        self,
        capabilities: Mapping[str, WorkerCapabilities],
        pass_time: PassTime | None,
        *,
        most_workers: int,
    ) -> Scaler:
        """Make a scaler for one run, without the state of an earlier one. ConfigError names a wrong setting."""
        if not isinstance(self.scaler, str):
            return cast("Scaler", deepcopy(self.scaler))
        return make_scaler(
            self.scaler,
            ScalerSite(capabilities, pass_time, self.min_workers, most_workers),
            field="autoscale",
        )

    def check_fleet(self, pools: Sequence[WorkerPool]) -> None:
        """Raise ConfigError if a pool begins outside the limits, or cannot change."""
        for pool in pools:
            if pool.engine.data_parallel_size > 1:
                raise ConfigError(
                    "autoscale does not work with data-parallel ranks yet; leave data_parallel_size out"
                )
            most = self.max_workers
            if self.is_limited and (pool.workers < self.min_workers or (most and pool.workers > most)):
                raise ConfigError(
                    f"workers: {pool.workers} is outside min_workers {self.min_workers} to max_workers {most}"
                )

    def describe(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        name = self.scaler if isinstance(self.scaler, str) else type(self.scaler).__qualname__
        given = {field: getattr(self, field) for field in self.__struct_fields__ if field != "scaler"}
        return {"scaler": name} | {field: value for field, value in given.items() if value is not None}
