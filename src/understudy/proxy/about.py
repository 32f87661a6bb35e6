"""Introspection routes of a standalone router: its engines, its view of their caches, and its health."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec

from understudy._core import Tier
from understudy.errors import ConfigError
from understudy.proxy.address import WorkerAddress
from understudy.server.api.errors import ApiError

if TYPE_CHECKING:
    from understudy.proxy.prompts import PromptReader
    from understudy.proxy.workers import Rank, Workers
    from understudy.router.dispatch import Dispatcher

_TIERS = {"device": Tier.G1, "host": Tier.G2, "disk": Tier.G3, "external": Tier.G4}


class About:
    """Answers `/query`, `/register`, `/unregister` and `/dump`."""

    def __init__(self, workers: Workers, dispatcher: Dispatcher, prompts: PromptReader) -> None:
        self._workers = workers
        self._dispatcher = dispatcher
        self._prompts = prompts

    async def query(self, body: Any) -> dict[str, Any]:
        """Return each engine's expected cache hits for a prompt; no request is sent or counted.

        `held` is None where the routing reads no events, or where an engine has several KV cache groups. What only
        routing kv counts is None for others.
        """
        kv, index = self._dispatcher.kv, self._dispatcher.index
        if not isinstance(body, dict):
            raise ApiError("a query has token_ids, or a prompt or messages as a request has")
        if isinstance(body.get("token_ids"), list):
            body = {**body, "prompt": body["token_ids"]}
        up = self._workers.any_up()
        prompt = await self._prompts.read(body, up.upstream)
        if prompt is None:
            raise ApiError("a query has token_ids, or a prompt or messages as a request has")
        blocks = prompt.blocks(self._workers.block_size or 16, up.adapters)
        held: dict[int, list[int]] = {}
        if index is not None:
            found = index.find(blocks.sequence_hashes)
            held = {
                worker: tiers for (worker, _), tiers in zip(found.workers, found.blocks.tolist(), strict=True)
            }
        return {
            "tokens": len(prompt.tokens),
            "blocks": len(blocks),
            "block_size": self._workers.block_size,
            "workers": [
                {
                    **self._described(rank),
                    "held": None
                    if index is None or rank.has_groups  # the index alone has runs of one group
                    else dict(zip(_TIERS, held.get(rank.number, [0, 0, 0, 0]), strict=True)),
                    "prefill_tokens": None if kv is None else int(kv.prefill_tokens[rank.number]),
                    "active_blocks": None if kv is None else int(kv.active_blocks[rank.number]),
                }
                for rank in self._workers.each_rank
            ],
        }

    async def register(self, body: Any) -> dict[str, Any]:
        """Register an engine."""
        try:
            worker = await self._workers.add(msgspec.convert(body, WorkerAddress))
        except (msgspec.ValidationError, ConfigError) as error:
            raise ApiError(str(error)) from None
        return {"registered": [self._described(rank) for rank in worker.ranks]}

    def unregister(self, body: Any) -> dict[str, Any]:
        """Unregister an engine."""
        if not isinstance(body, dict) or not isinstance(body.get("url"), str):
            raise ApiError("name the url of an engine")
        try:
            self._workers.remove(body["url"])
        except ConfigError as error:
            raise ApiError(str(error), status=404, kind="NotFoundError") from None
        return {"unregistered": body["url"]}

    def dump(self, query: str) -> dict[str, Any]:
        """Describe engines, their views and awaited engines; with `?blocks=1`, also each block in the index."""
        index = self._dispatcher.index
        hashes = parse_qs(query).get("blocks", ["0"])[0] not in ("", "0")
        self._workers.look()
        rows = []
        columns = index.dump_columns() if index is not None and hashes else None
        for rank in self._workers.each_rank:
            row = {**self._described(rank), "routed": rank.routed}
            if index is not None:
                row["blocks"] = {
                    name: index.num_blocks(rank.number, tier=tier) for name, tier in _TIERS.items()
                }
            if columns is not None:
                mine = columns[0] == rank.number
                for name, tier in _TIERS.items():
                    row[f"{name}_hashes"] = columns[3][mine & (columns[2] == int(tier))].tolist()
            rows.append(row)
        return {
            "routing": self._dispatcher.policy,
            "block_size": self._workers.block_size,
            "waiting": self._dispatcher.num_waiting,
            "degraded": [
                rank.number
                for rank in self._workers.each_rank
                if rank.follower.degraded or self._dispatcher.is_degraded(rank.number)
            ],
            "failure": None if self._dispatcher.failure is None else str(self._dispatcher.failure),
            "workers": rows,
            "awaited": [{"url": one.url, "why": why} for one, why in self._workers.awaited.items()],
        }

    def _described(self, rank: Rank) -> dict[str, Any]:
        return {
            "worker": rank.number,
            "url": rank.worker.upstream.url,
            "rank": rank.rank,
            "up": rank.worker.up,
            **({"why_down": rank.worker.why_down} if rank.worker.why_down else {}),
            "outstanding_requests": self._dispatcher.outstanding.requests[rank.number],
            "outstanding_tokens": self._dispatcher.outstanding.tokens[rank.number],
            "missed_batches": self._dispatcher.missed_batches.get(rank.number, 0),
            "view": rank.follower.describe(),
        }
