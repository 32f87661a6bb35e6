"""Links that are slowed while transfers are under way."""

from __future__ import annotations

import math

import pytest

from tiers.link_building import MB, MS, drain, one_link
from understudy.errors import CapacityExhausted, InvalidArgument
from understudy.tiers import Links


def test_a_link_that_is_slowed_halfway_moves_the_rest_at_its_new_pace() -> None:
    links = one_link()
    links.start(0, [0], MB)
    assert links.deadline_ns(0) == 1 * MS
    links.set_share(MS // 2, 0, 0.1)
    assert links.deadline_ns(0) == MS // 2 + 5 * MS
    links.set_share(MS, 0, 1.0)  # 450,000 bytes are left
    assert drain(links) == [(MS + 450_000, 0)]


def test_a_cap_that_is_slowed_slows_both_directions() -> None:
    links = Links()
    cap = links.add_duplex("both", 2.0)
    for name in ("down", "up"):
        links.start(0, [links.add_link(name, math.inf, duplex=cap)], MB)
    assert (links.deadline_ns(0), links.deadline_ns(1)) == (MS, MS)
    links.set_duplex_share(MS // 2, cap, 0.1)
    assert drain(links) == [(MS // 2 + 5 * MS, 0), (MS // 2 + 5 * MS, 1)]
    with pytest.raises(InvalidArgument, match=r"^duplex both: a share of its bandwidth"):
        links.set_duplex_share(6 * MS, cap, 2.0)
    with pytest.raises(InvalidArgument, match="no duplex 7"):
        links.set_duplex_share(6 * MS, 7, 0.5)


def test_a_link_that_cannot_be_slowed_so_says_why() -> None:
    links = one_link()
    free = links.add_link("free", math.inf)
    with pytest.raises(
        InvalidArgument, match=r"link d2h: a share of its bandwidth is from 0.001 to 1, got 0"
    ):
        links.set_share(0, 0, 0.0)
    with pytest.raises(InvalidArgument, match="share"):
        links.set_share(0, 0, math.nan)
    with pytest.raises(InvalidArgument, match="link free has no limit"):
        links.set_share(0, free, 0.5)
    with pytest.raises(InvalidArgument, match="no link 9"):
        links.set_share(0, 9, 0.5)
    with pytest.raises(InvalidArgument, match=r"^duplex free has no limit"):
        links.set_duplex_share(0, links.add_duplex("free", math.inf), 0.5)


def test_a_link_is_not_slowed_so_far_that_its_transfers_take_years() -> None:
    links = one_link(1e-6)
    links.start(0, [0], 1 << 38)
    with pytest.raises(InvalidArgument, match=r"link d2h: .* years; give a larger share"):
        links.set_share(0, 0, 0.001)
    assert links.next_completion_ns() == (1 << 38) * 10**6  # nothing has changed


YEAR_BYTES = 365 * 24 * 3600  # at a byte a second


def test_a_link_that_has_its_bandwidth_back_takes_what_it_took_before() -> None:
    links = one_link(1e-6)
    links.set_share(0, 0, 0.001)
    with pytest.raises(CapacityExhausted, match="years"):
        links.start(0, [0], 1000 * YEAR_BYTES)
    links.set_share(0, 0, 1.0)
    links.start(0, [0], 1000 * YEAR_BYTES)
    assert drain(links) == [(YEAR_BYTES * 10**9, 0)]


def test_the_slowest_link_counts_as_long_as_it_is_slow() -> None:
    links = one_link(1e-9)
    cap = links.add_duplex("cap", 1e-9)
    other = links.add_link("h2d", 1e-9, duplex=cap)
    links.set_duplex_share(0, cap, 0.001)
    links.set_share(0, other, 0.01)
    links.set_share(0, 0, 0.1)
    with pytest.raises(CapacityExhausted, match="years"):
        links.start(0, [0], YEAR_BYTES // 2)
    links.set_share(0, other, 1.0)
    with pytest.raises(CapacityExhausted, match="years"):
        links.start(0, [0], YEAR_BYTES // 2)
    links.set_duplex_share(0, cap, 1.0)
    links.start(0, [0], YEAR_BYTES // 2)  # ten times as long
    with pytest.raises(CapacityExhausted, match="years"):
        links.start(0, [0], YEAR_BYTES // 2)
