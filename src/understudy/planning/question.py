"""`Question`: what a plan is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from understudy.checks import share, whole_number
from understudy.defaults import GOAL
from understudy.errors import ConfigError
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import find_gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.planning.price_list import PriceList
    from understudy.report.goodput import Slo

NODE_GPUS = 8
"""GPUs of one machine: the largest engine."""
MOST_GPUS = 64
LINK_GBPS = 50.0
"""Link of a machine for hand-offs and 400 Gbit/s network cards, in 10^9 bytes per second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A model, the GPUs to choose from, and the goal. ConfigError names a wrong field."""

    model: str
    gpus: tuple[str, ...]
    """Names of data sheets, each once."""
    slo: Slo
    prices: PriceList
    goal: float = GOAL
    """Share of requests that must meet the objectives."""
    goal_window_s: float | None = None
    """Length of the windows in each of which the goal must hold; None for the whole alone."""
    kv_dtype: str | None = None
    most_gpus: int = MOST_GPUS
    node_gpus: int = NODE_GPUS
    link_gbps: float = LINK_GBPS
    """Bandwidth of each worker's link for hand-offs between prefill and decode workers."""
    host_gib: int | None = None
    """Host memory per GPU for KV blocks, which fleets may use; None: no host tier is tried."""
    splits: bool = True
    """Whether fleets of prefill and decode workers are tried."""
    assignments: tuple[str, ...] = ()
    """Settings that all fleets share, each `A.B=V`."""
    seed: int = 0

    def __post_init__(self) -> None:
        find_architecture(self.model)
        share("--goal", self.goal)
        whole_number("--most-gpus", self.most_gpus, 1, 4096)
        whole_number("--node-gpus", self.node_gpus, 1, 64)
        if self.host_gib is not None:
            whole_number("--host-gib", self.host_gib, 1, 100_000)
        if not self.link_gbps > 0:
            raise ConfigError(f"--kv-link-gbps must be above 0, got {self.link_gbps:g}")


def read_gpus(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return the data sheets that are named, in a list or with commas, each once. ConfigError for an unknown one."""
    listed = [names] if isinstance(names, str) else list(names)
    texts = [name.strip() for each in listed for name in each.split(",") if name.strip()]
    if not texts:
        raise ConfigError("--gpu: no GPU to choose from; name one or more, such as H100,H200")
    return tuple(dict.fromkeys(find_gpu(text).name for text in texts))
