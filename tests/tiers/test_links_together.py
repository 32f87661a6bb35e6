"""Transfers that start together, and lanes that a backend holds back."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.links import ModelCap, ModelLink, ModelTransfer, completions
from tiers.link_building import drain, one_link
from tiers.test_links_exact import Network, build, networks
from understudy.errors import CapacityExhausted, InvalidArgument
from understudy.tiers import Links


@given(network=networks(), data=st.data())
def test_many_at_once_are_as_many_one_after_the_other(network: Network, data: st.DataObject) -> None:
    """To the bit, in times and in what the links have carried."""
    together, apart = build(network), build(network)
    path = st.lists(st.integers(0, len(network[1]) - 1), min_size=1, max_size=2, unique=True)
    sizes = st.lists(st.integers(0, 2) | st.integers(0, 20_000), max_size=6)
    batches = st.lists(st.tuples(st.integers(0, 900), path, sizes, st.booleans()), min_size=1, max_size=6)
    now = 0
    for gap, crossed, num_bytes, background in data.draw(batches):
        now += gap
        assert together.pop_due(now) == apart.pop_due(now)
        first = together.start_all(now, crossed, num_bytes, background=background)
        ids = [apart.start(now, crossed, size, background=background) for size in num_bytes]
        assert ids == list(range(first, first + len(num_bytes)))
        together.check()
        assert together.next_wake_ns() == apart.next_wake_ns()
    for link in range(len(network[1])):
        assert together.usage(link).bucket_bytes.tolist() == apart.usage(link).bucket_bytes.tolist()
    assert drain(together) == drain(apart)
    for link in range(len(network[1])):
        ours, theirs = together.usage(link), apart.usage(link)
        assert ours.bucket_bytes.tolist() == theirs.bucket_bytes.tolist()
        assert ours.busy_ns == theirs.busy_ns
        assert (ours.transfers_started, ours.bytes_started) == (
            theirs.transfers_finished,
            theirs.bytes_finished,
        )


def test_all_of_them_start_or_none() -> None:
    links = one_link()
    with pytest.raises(InvalidArgument):
        links.start_all(0, [0], [1000, 1 << 39])
    with pytest.raises(CapacityExhausted):
        links.start_all(0, [0], [1] * ((1 << 19) + 1))
    assert links.idle
    assert links.usage(0).bytes_started == 0
    assert links.start_all(0, [0], [1000, 500]) == 0
    assert drain(links) == [(1000, 1), (1500, 0)]


def test_a_link_that_was_alone_shares_with_those_who_come_to_it() -> None:
    """Its first path is over it only; later ones join it with another link, above it and below."""
    links = Links()
    near, far, third = (links.add_link(name, 1.0) for name in ("near", "far", "third"))
    links.start(0, [near], 4000)
    links.start(1000, [near, far], 1000)  # half of the near one each, from 1000 on
    links.start(1000, [third, near], 1000)  # a third each
    assert drain(links) == [(4000, 1), (4000, 2), (6000, 0)]


def test_one_that_a_backend_begins_to_hold_back_at_its_very_end_still_ends() -> None:
    """A rounding had it move more than all of its bytes by then, and the rest that it had to go wrapped around."""
    links = Links()
    cap = links.add_duplex("cap", 10.0)
    own = [
        links.add_link(f"worker {i}", gbps, duplex=cap) for i, gbps in enumerate([6.0, 1.0, 6.0, 6.0, 1.0])
    ]
    backend = links.add_link("backend", 7.0)
    starts = [
        (0, 1, 14983, True),
        (33, 2, 5545, False),
        (126, 3, 3512, True),
        (177, 4, 5545, False),
        (177, 3, 5545, True),
        (177, 0, 14021, False),
        (177, 0, 5545, False),
        (254, 4, 14021, False),
    ]
    transfers = []
    for now_ns, worker, num_bytes, background in starts:
        links.start(now_ns, [own[worker], backend], num_bytes, background=background)
        transfers.append(ModelTransfer(now_ns, (worker, backend), num_bytes, background))
    links.set_share(254, backend, 0.001)
    links.check()
    rates = [Fraction(6), Fraction(1), Fraction(6), Fraction(6), Fraction(1)]
    expected = completions(
        [*(ModelLink(rate, cap=0) for rate in rates), ModelLink(Fraction(7))],
        [ModelCap(Fraction(10))],
        transfers,
        [(254, "link", backend, Fraction(7, 1000))],
    )
    assert links.pop_due(2**50) == expected
    links.check()
    assert links.idle


def test_a_fleet_on_one_backend_costs_operations_by_the_transfer_not_by_the_worker() -> None:
    def operations(workers: int) -> float:
        links = Links()
        own = [links.add_link(f"worker {i}", 6.0) for i in range(workers)]
        backend = links.add_link("backend", 40.0)
        for i, link in enumerate(own):
            links.start(0, [link, backend], 10_000_000 + 1000 * i)
        before = links.operations
        for _ in range(200):
            due = links.next_completion_ns()
            assert due is not None
            for now_ns, ended in links.pop_due(due):
                links.start(now_ns, [own[ended % workers], backend], 10_000_000)
        links.check()
        return (links.operations - before) / 200

    assert math.isclose(operations(1000), operations(100), rel_tol=0.2)
