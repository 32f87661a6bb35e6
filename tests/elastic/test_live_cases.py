"""Random fault plans in live fleets; `make chaos` plays hundreds."""

from __future__ import annotations

import asyncio
from collections import Counter

from elastic.live_cases import play_live_case, random_live_case


def test_all_requests_of_random_plans_complete_and_all_checks_hold() -> None:
    async def main() -> Counter[str]:
        losses: Counter[str] = Counter()
        for seed, policy in ((3, "retry"), (4, "migrate"), (11, "migrate")):
            losses += Counter(await play_live_case(random_live_case(seed, on_loss=policy)))
        return losses

    losses = asyncio.run(main())
    assert losses["retried"] + losses["migrated"] > 0
    assert not losses["failed"]
