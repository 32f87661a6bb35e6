"""What links refuse, by name and before anything changes; and what they keep."""

from __future__ import annotations

import math

import pytest

from tiers.link_building import drain, one_link
from understudy.errors import CapacityExhausted, ConfigError, InvalidArgument
from understudy.tiers import Links


@pytest.mark.parametrize("bandwidth", [-1.0, math.nan, 1e-12, 1e9, -math.inf])
def test_a_bandwidth_that_makes_no_sense_is_refused_by_name(bandwidth: float) -> None:
    with pytest.raises(ConfigError, match=r"^link h2d: bandwidth_gbps must be"):
        Links().add_link("h2d", bandwidth)
    with pytest.raises(ConfigError, match=r"^duplex pcie: bandwidth_gbps must be"):
        Links().add_duplex("pcie", bandwidth)


def test_zero_bandwidth_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"for no limit say inf .Dynamo reads 0 as unlimited"):
        Links().add_link("h2d", 0)


def test_time_never_goes_backwards() -> None:
    links = one_link()
    links.start(10, [0], 100)
    for call in (lambda: links.start(9, [0], 1), lambda: links.pop_due(9)):
        with pytest.raises(InvalidArgument, match="now_ns 9 is before 10"):
            call()
    assert drain(links) == [(110, 0)]


@pytest.mark.parametrize(
    ("path", "num_bytes", "match"),
    [
        ([], 1, "one link or two"),
        ([0, 1, 2], 1, "one link or two"),
        ([0, 0], 1, "twice"),
        ([9], 1, "no link 9"),
        ([0], (1 << 38) + 1, "at most"),
        ([0], -1, "num_bytes"),
    ],
)
def test_a_transfer_that_cannot_be_is_refused_and_changes_nothing(
    path: list[int], num_bytes: int, match: str
) -> None:
    links = Links()
    for i in range(3):
        links.add_link(f"link {i}", 1.0)
    with pytest.raises(InvalidArgument, match=match):
        links.start(5, path, num_bytes)
    assert (links.now_ns, links.in_flight, links.usage(0).bytes_started) == (0, 0, 0)


def test_what_would_take_years_is_refused() -> None:
    links = one_link(1e-9)
    with pytest.raises(CapacityExhausted, match=r"link d2h: .* years; check bandwidth_gbps"):
        links.start(0, [0], 1 << 38)
    links.start(0, [0], 10**8)
    with pytest.raises(CapacityExhausted):
        links.start(1, [0], 2 * 10**8)
    assert (links.now_ns, links.usage(0).bytes_started) == (0, 10**8)
    assert drain(links) == [(10**17, 0)]


def test_what_has_ended_by_then_is_no_longer_in_the_way() -> None:
    links = one_link(1e-9)
    links.start(0, [0], 2 * 10**8)
    with pytest.raises(CapacityExhausted, match="years"):
        links.start(2 * 10**17 - 1, [0], 10**8)
    assert links.now_ns == 0
    assert links.start(2 * 10**17, [0], 10**8) == 1
    assert drain(links) == [(2 * 10**17, 0), (3 * 10**17, 1)]


def test_a_link_is_slowed_once_what_would_have_taken_years_has_ended() -> None:
    links = one_link(1e-6)
    links.start(0, [0], 10**10)
    with pytest.raises(InvalidArgument, match="years; give a larger share"):
        links.set_share(10**16 - 10, 0, 1e-3)
    assert links.now_ns == 0
    links.set_share(10**16, 0, 1e-3)
    assert drain(links) == [(10**16, 0)]


def test_a_cap_that_does_not_exist_and_a_negative_cost_are_refused() -> None:
    links = Links()
    with pytest.raises(ConfigError, match="link d2h: there is no duplex 3"):
        links.add_link("d2h", 1.0, duplex=3)
    with pytest.raises(InvalidArgument, match="fixed_ns"):
        links.add_link("d2h", 1.0, fixed_ns=-1)


def test_only_transfers_under_way_have_a_deadline() -> None:
    links = one_link()
    links.start(0, [0], 100)
    links.start(0, [0], 300)
    with pytest.raises(InvalidArgument, match="transfer 2 is not in flight"):
        links.deadline_ns(2)
    assert links.deadline_ns(0) == 200
    links.pop_due(250)
    assert links.deadline_ns(1) == 400
    with pytest.raises(InvalidArgument, match="transfer 0 is not in flight"):
        links.deadline_ns(0)


def test_a_completion_that_nobody_fetched_is_kept() -> None:
    links = one_link()
    links.start(0, [0], 100)
    links.start(500, [0], 100)
    assert links.deadline_ns(0) == 100
    assert links.next_completion_ns() == 500
    assert links.next_wake_ns() == 500
    assert not links.idle
    assert links.pop_due(500) == [(100, 0)]


@pytest.mark.parametrize(
    ("cap_first", "link_first"), [(False, True), (True, False), (True, True), (False, False)]
)
def test_who_waits_for_demand_and_slows_it_all_the_same_counts(cap_first: bool, link_first: bool) -> None:
    links = Links()
    cap = links.add_duplex("cap", 1e-9, demand_first=cap_first)
    link = links.add_link("d2h", 2e-9, duplex=cap, demand_first=link_first)
    links.start_all(0, [link], [1] * 1000, background=True)
    eight_years = 8 * 365 * 24 * 3600  # bytes
    if cap_first == link_first:
        links.start(0, [link], eight_years)
        assert links.deadline_ns(1000) < 2**58
        return
    # Where one of the two shares with everybody, those who do not move make it a thousand times as slow.
    with pytest.raises(CapacityExhausted, match="years"):
        links.start(0, [link], eight_years)
    links.start(0, [link], eight_years // 2000)
    assert max(links.deadline_ns(i) for i in range(1001)) < 2**58


def test_links_of_both_orders_that_no_transfer_crosses_both_of_are_no_reason_to_refuse() -> None:
    links = Links()
    share, first = links.add_link("share", 1.0), links.add_link("first", 1.0, demand_first=True)
    for _ in range(20_000):
        links.start(0, [share], 10**9)  # a second each: five and a half hours in all
    links.start(0, [first], 10**9)
    assert links.in_flight == 20_001
