"""Links that tests make, and play to their end."""

from __future__ import annotations

from understudy.tiers import Links

MB = 1_000_000
MS = 1_000_000


def one_link(bandwidth_gbps: float = 1.0, *, fixed_ns: int = 0, demand_first: bool = False) -> Links:
    links = Links()
    links.add_link("d2h", bandwidth_gbps, fixed_ns=fixed_ns, demand_first=demand_first)
    return links


def drain(links: Links) -> list[tuple[int, int]]:
    out = []
    while (due := links.next_completion_ns()) is not None:
        popped = links.pop_due(due)
        assert popped
        assert {time for time, _ in popped} == {due}
        out += popped
        links.check()
    assert links.idle
    return out
