"""What a transfer is expected to take, against what the links then do."""

from __future__ import annotations

from random import Random

import pytest

from tiers.building import INF, MS, tiers, way
from understudy import _core
from understudy.tiers import Links

MB = 1_000_000


def end_beside(links: Links, path: list[int], num_bytes: int, others: list[tuple[list[int], int]]) -> int:
    """When a transfer ends that starts now, beside others that start at the same time."""
    for other, size in others:
        links.start(0, other, size)
    ours = links.start(0, path, num_bytes)
    return links.deadline_ns(ours)


@pytest.mark.parametrize("copies", range(4))
def test_a_copy_beside_equal_ones_takes_what_it_is_expected_to(copies: int) -> None:
    config = tiers(host=way(3.0, down_fixed_ns=700))
    links = Links()
    down = links.add_link("down", 3.0, fixed_ns=700)
    expected = _core.TransferEstimate(config).copy_ns(5 * MB, copies)
    assert expected == end_beside(links, [down], 5 * MB, [([down], 5 * MB)] * copies)


@pytest.mark.parametrize("loads", range(3))
@pytest.mark.parametrize("copies", range(3))
@pytest.mark.parametrize("duplex", [INF, 4.0])
def test_a_load_beside_equal_ones_takes_what_it_is_expected_to(
    loads: int, copies: int, duplex: float
) -> None:
    config = tiers(host=way(2.0, 3.0, up_fixed_ns=500, duplex_gbps=duplex))
    links = Links()
    cap = links.add_duplex("both", duplex)
    down = links.add_link("down", 2.0, duplex=cap)
    up = links.add_link("up", 3.0, fixed_ns=500, duplex=cap)
    # What shares the cap for as long, from when our bytes flow: more than it can move meanwhile.
    others = [([up], 5 * MB)] * loads + [([down], 500 * MB)] * copies
    expected = _core.TransferEstimate(config).load_ns(5 * MB, loads, copies)
    assert expected == pytest.approx(end_beside(links, [up], 5 * MB, others), abs=1)


@pytest.mark.parametrize("loads", range(4))
def test_a_load_from_a_shared_tier_takes_what_it_is_expected_to(loads: int) -> None:
    """Other workers load from the same backend, each over a link of its own."""
    tier = _core.SharedTierConfig(
        num_blocks=10, worker=way(2.0, up_fixed_ns=100), backend=way(3.0, up_fixed_ns=50)
    )
    links = Links()
    backend = links.add_link("backend", 3.0, fixed_ns=50)
    workers = [links.add_link(f"worker {i}", 2.0, fixed_ns=100) for i in range(loads + 1)]
    others = [([worker, backend], 6 * MB) for worker in workers[1:]]
    expected = _core.TransferEstimate(tiers(g3=tier)).stage_ns(tier, 6 * MB, loads, 0)
    assert expected == end_beside(links, [workers[0], backend], 6 * MB, others)


@pytest.mark.parametrize("copies", range(3))
def test_a_copy_to_a_shared_tier_takes_what_it_is_expected_to(copies: int) -> None:
    tier = _core.SharedTierConfig(num_blocks=10, worker=way(2.0, down_fixed_ns=100), backend=way(1.0))
    links = Links()
    path = [links.add_link("worker", 2.0, fixed_ns=100), links.add_link("backend", 1.0)]
    expected = _core.TransferEstimate(tiers(g3=tier)).lower_copy_ns(tier, 4 * MB, copies)
    assert expected == end_beside(links, path, 4 * MB, [(path, 4 * MB)] * copies)


@pytest.mark.parametrize("seed", range(40))
def test_beside_any_others_it_takes_no_longer_than_expected(seed: int) -> None:
    """Those that end earlier give their share back; nobody comes."""
    rng = Random(f"estimate {seed}")
    others = [rng.randrange(1, 20) * MB for _ in range(rng.randrange(6))]
    links = Links()
    up = links.add_link("up", 2.0)
    ours = rng.randrange(1, 20) * MB
    expected = _core.TransferEstimate(tiers(host=way(2.0))).load_ns(ours, len(others), 0)
    actual = end_beside(links, [up], ours, [([up], size) for size in others])
    assert actual <= expected
    if all(size >= ours for size in others):
        assert actual == expected


def test_demand_that_goes_first_does_not_count_copies() -> None:
    config = tiers(host=way(2.0, duplex_gbps=2.0), demand_first=True)
    assert _core.TransferEstimate(config).load_ns(4 * MB, 0, 7) == 2 * MS
    config = tiers(host=way(2.0, duplex_gbps=2.0))
    assert _core.TransferEstimate(config).load_ns(4 * MB, 0, 1) == 4 * MS
