"""Data-parallel ranks of an offline run: separate engines, and a front end that chooses among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from understudy._core import native_router
from understudy.errors import ConfigError
from understudy.router.router import Router

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy._core import FleetView, RouteRequest
    from understudy.engines.profiles import VersionProfile
    from understudy.run.pools import WorkerPool
    from understudy.workload import Workload


def count_ranks(pools: Sequence[WorkerPool], routing: object) -> int:
    """Return the number of ranks per deployment; ConfigError for unsupported combinations."""
    ranks = max(pool.engine.data_parallel_size for pool in pools)
    if ranks > 1 and len(pools) > 1:
        raise ConfigError("data_parallel_size above 1 needs a fleet of one pool; leave it out, or pools")
    if ranks > 1 and routing == "session_affinity":
        raise ConfigError(
            "data_parallel_size above 1 contradicts routing session_affinity; choose another routing"
        )
    return ranks


class RankFront(Router):
    """Choose a deployment by the fleet's policy, and a rank in it as vLLM's front end does.

    Engine d · ranks + r is rank r of deployment d. The front end takes the rank with the lowest score, searching from a
    start that rotates with every request. The score is the larger of requests sent there that have not ended, and
    running plus waiting ones; waiting requests of a rank whose KV cache is more than half full count up to four times.
    Before 0.27 the score was 4 · waiting + running, and before 0.25 the search always started at rank 0. vLLM's front
    end receives the ranks' state every 100 ms; this one always has the current state.
    """

    def __init__(
        self,
        policy: str,
        workload: Workload,
        deployments: int,
        ranks: int,
        *,
        seed: int,
        profile: VersionProfile,
    ) -> None:
        self._native = native_router(policy, seed)
        self._session = workload.session
        self._deployments = deployments
        self._ranks = ranks
        self._profile = profile
        self._start = [0] * deployments

    def choose(self, request: RouteRequest, view: FleetView) -> int:
        """Choose an engine, as `Router` describes."""
        shape = (self._deployments, self._ranks)
        sent = view.outstanding_requests.reshape(shape)
        deployment = 0
        if self._deployments > 1 and self._native is not None:
            tokens = view.outstanding_tokens.reshape(shape)
            session = int(self._session[request.row])
            deployment = self._native.pick(request.row, session, sent.sum(axis=1), tokens.sum(axis=1))
        own = slice(deployment * self._ranks, (deployment + 1) * self._ranks)
        running, waiting = view.running[own], view.waiting[own]
        score = 4.0 * waiting + running
        if self._profile.front_counts_sent:
            penalty = 6.0 * np.maximum(0.0, view.used_blocks[own] / view.total_blocks[own] - 0.5)
            score = np.maximum(sent[deployment], waiting + running) + waiting * penalty
        first = self._start[deployment]
        if self._profile.front_rotates:
            self._start[deployment] = (first + 1) % self._ranks
        return own.start + (first + int(np.argmin(np.roll(score, -first)))) % self._ranks
