"""Data-parallel ranks of an offline run: separate engines, and the front of a deployment, which chooses among them."""

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


def ranks_of(pools: Sequence[WorkerPool], routing: object) -> int:
    """How many ranks a deployment has; ConfigError where this version cannot play them."""
    ranks = max(pool.engine.data_parallel_size for pool in pools)
    if ranks > 1 and len(pools) > 1:
        raise ConfigError("data_parallel_size above 1 needs a fleet of one pool; leave it out, or pools")
    if ranks > 1 and routing == "session_affinity":
        raise ConfigError("data_parallel_size above 1 does not go with routing session_affinity")
    return ranks


class RankFront(Router):
    """Deployments by a policy of the fleet, and in each its ranks as vLLM's front chooses them.

    Engine d · ranks + r is rank r of deployment d. The front takes the rank with the lowest score, from a place that
    moves on with every request: what was sent there and has not ended, or what runs and waits if that is more; who
    waits at a rank whose KV cache is more than half full counts up to four times. Before 0.27 the score was
    4 · waiting + running, and before 0.25 the place was always rank 0. The front of vLLM hears of the ranks every
    100 ms; this one knows them as they are.
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
        self._from = [0] * deployments

    def choose(self, request: RouteRequest, view: FleetView) -> int:
        """See `Router`."""
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
            crowded = 6.0 * np.maximum(0.0, view.used_blocks[own] / view.total_blocks[own] - 0.5)
            score = np.maximum(sent[deployment], waiting + running) + waiting * crowded
        first = self._from[deployment]
        if self._profile.front_rotates:
            self._from[deployment] = (first + 1) % self._ranks
        return own.start + (first + int(np.argmin(np.roll(score, -first)))) % self._ranks
