"""Data-parallel ranks of an offline run: separate engines, and a front end that chooses among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy.engines.kinds.registry import kind_of
from understudy.errors import ConfigError
from understudy.router.router import Router
from understudy.run.stages import join_stages

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeVar

    from understudy._core import FleetView, RouteRequest
    from understudy.engines.engine_config import EngineConfig
    from understudy.engines.profiles import VersionProfile
    from understudy.run.pools import WorkerPool
    from understudy.tiers.gpu import GpuSettings

    _Engine = TypeVar("_Engine", bound=EngineConfig)


def count_ranks(pools: Sequence[WorkerPool]) -> int:
    """Return the number of ranks per deployment; ConfigError for unsupported combinations."""
    if len(pools) > 1:
        refuse_ranks_of_pools(pools)
    return max(pool.engine.data_parallel_size for pool in pools)


def refuse_ranks_of_pools(pools: Sequence[WorkerPool]) -> None:
    """Raise ConfigError for ranks in a fleet of pools."""
    if any(pool.engine.data_parallel_size > 1 for pool in pools):
        raise ConfigError("data_parallel_size above 1 needs a fleet of one pool; leave it out, or pools")


def join_ranks(engine: _Engine, gpu: GpuSettings | None) -> tuple[_Engine, GpuSettings | None]:
    """Give engine and GPUs the same number of ranks and stages, however they were asked for.

    ConfigError if both give one.
    """
    if gpu is None:
        return engine, gpu
    engine, gpu = join_stages(engine, gpu)
    own, asked = engine.data_parallel_size, gpu.data_parallel_size
    if own > 1 and asked not in (1, own):
        raise ConfigError(
            f"engine.data_parallel_size={own} contradicts gpu.data_parallel_size={asked} (--data-parallel-size); give "
            "one"
        )
    if own == 1:
        return msgspec.structs.replace(engine, data_parallel_size=asked), gpu
    return engine, msgspec.structs.replace(gpu, data_parallel_size=own) if gpu.is_known else gpu


def check_stepping_together(engine: EngineConfig, *, together: bool) -> None:
    """Raise ConfigError for ranks that share experts in an engine that cannot step them together."""
    if together and (why := kind_of(engine).steps_apart) is not None:
        raise ConfigError(
            f"data_parallel_size: ranks of a model with experts step together, and {why}; leave it out, or choose "
            "--engine vllm"
        )


def refuse_ranks_of_stages(engine: EngineConfig) -> None:
    """Raise ConfigError for ranks of prefill and decode workers."""
    if engine.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size={engine.data_parallel_size}: prefill and decode workers of several ranks are not "
            "simulated yet; leave it out, or leave out disaggregation (--prefill-workers, --decode-workers)"
        )


def has_front(engines: int, routing: object) -> bool:
    """Whether vLLM's own front end chooses the rank: of one engine without a router, that is with `round_robin`.

    Any other policy, and one in front of several engines, is that of a router to which every rank is a worker.
    """
    return engines == 1 and routing == "round_robin"


class RankFront(Router):
    """Choose a rank of an engine as vLLM's front end does.

    It takes the rank with the lowest score, searching from a start that rotates with every request. The score is the
    larger of requests sent there that have not ended, and running plus waiting ones; waiting requests of a rank whose
    KV cache is more than half full count up to four times. Before 0.27 the score was 4 · waiting + running, and before
    0.25 the search always started at rank 0. vLLM's front end receives the ranks' state every 100 ms; this one always
    has the current state.
    """

    def __init__(self, profile: VersionProfile) -> None:
        self._profile = profile
        self._first = 0

    def choose(self, request: RouteRequest, view: FleetView) -> int:  # noqa: ARG002
        """Choose a rank, as `Router` describes."""
        running, waiting = view.running, view.waiting
        score = 4.0 * waiting + running
        if self._profile.front_counts_sent:
            penalty = 6.0 * np.maximum(0.0, view.used_blocks / view.total_blocks - 0.5)
            score = np.maximum(view.outstanding_requests, waiting + running) + waiting * penalty
        first = self._first
        if self._profile.front_rotates:
            self._first = (first + 1) % len(score)
        return (first + int(np.argmin(np.roll(score, -first)))) % len(score)
