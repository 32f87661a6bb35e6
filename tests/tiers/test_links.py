"""Links: transfers share bandwidth, and end when arithmetic says."""

from __future__ import annotations

import math

import pytest

from tiers.link_building import MB, MS, drain, one_link
from understudy.tiers import Links

# --- golden numbers -----------------------------------------------------------------------------------


def test_one_megabyte_alone_at_one_gigabyte_a_second_takes_a_millisecond() -> None:
    links = one_link()
    links.start(0, [0], MB)
    assert drain(links) == [(1 * MS, 0)]


def test_two_together_take_twice_as_long_and_end_in_order_of_start() -> None:
    links = one_link()
    for _ in range(2):
        links.start(0, [0], MB)
    assert links.next_completion_ns() == 2 * MS
    assert drain(links) == [(2 * MS, 0), (2 * MS, 1)]


def test_a_second_one_halfway_delays_the_first() -> None:
    links = one_link()
    links.start(0, [0], MB)
    assert links.deadline_ns(0) == 1 * MS
    links.start(MS // 2, [0], MB)
    assert (links.deadline_ns(0), links.deadline_ns(1)) == (3 * MS // 2, 2 * MS)
    assert drain(links) == [(3 * MS // 2, 0), (2 * MS, 1)]


def test_ten_together_take_ten_times_as_long() -> None:
    links = one_link()
    for _ in range(10):
        links.start(0, [0], MB)
    assert drain(links) == [(10 * MS, i) for i in range(10)]


def test_the_smaller_of_two_ends_first() -> None:
    links = one_link()
    links.start(0, [0], 2 * MB)
    links.start(0, [0], MB)
    assert drain(links) == [(2 * MS, 1), (3 * MS, 0)]


def test_the_two_directions_do_not_disturb_each_other() -> None:
    links = Links()
    down, up = links.add_link("d2h", 1.0), links.add_link("h2d", 1.0)
    links.start(0, [down], MB)
    links.start(0, [up], 2 * MB)
    assert drain(links) == [(1 * MS, 0), (2 * MS, 1)]


def test_two_copies_on_a_host_link_of_55_gigabytes_get_half_each() -> None:
    links = one_link(55.0)
    for _ in range(2):
        links.start(0, [0], 275 * MB)
    assert links.next_completion_ns() == 10 * MS


def test_an_idle_network_has_no_next_completion() -> None:
    links = one_link()
    assert links.next_completion_ns() is None
    assert links.next_wake_ns() is None
    assert links.pop_due(5) == []


# --- fixed cost, zero bytes, no limit -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "measured_gbps", "fixed_ns"), [(64 << 10, 7.0, 8171), (2304 << 10, 53.0, 1619)]
)
def test_a_fixed_cost_explains_why_small_copies_are_slow(
    num_bytes: int, measured_gbps: float, fixed_ns: int
) -> None:
    # On a link of 55 GB/s: bytes / measured = fixed + bytes / 55.
    assert math.isclose(num_bytes / measured_gbps - num_bytes / 55, fixed_ns, abs_tol=1)
    links = one_link(55.0, fixed_ns=fixed_ns)
    links.start(0, [0], num_bytes)
    assert math.isclose(num_bytes / drain(links)[0][0], measured_gbps, rel_tol=1e-3)


def test_bytes_do_not_flow_during_the_fixed_cost() -> None:
    links = one_link(fixed_ns=1000)
    links.start(0, [0], 1000)
    links.start(500, [0], 1000)  # flows from 1500 on; the first has 500 bytes to go
    assert links.next_wake_ns() == 1000
    assert links.next_completion_ns() == 2500
    assert drain(links) == [(2500, 0), (3000, 1)]


def test_fixed_costs_of_two_links_add_up() -> None:
    links = Links()
    path = [links.add_link("worker", 1.0, fixed_ns=10), links.add_link("backend", 1.0, fixed_ns=100)]
    links.start(0, path, 5)
    assert drain(links) == [(115, 0)]


def test_no_bytes_and_no_limit_end_after_the_fixed_cost() -> None:
    links = Links()
    free = links.add_link("free", math.inf)
    slow = links.add_link("slow", 1.0, fixed_ns=7)
    links.start(3, [free], 1 << 38)
    assert links.deadline_ns(0) == 3
    links.start(3, [slow], 0)
    assert links.deadline_ns(1) == 10
    assert links.next_completion_ns() == 3
    assert links.pop_due(3) == [(3, 0)]
    assert drain(links) == [(10, 1)]


def test_a_link_without_limit_leaves_the_other_one_in_charge() -> None:
    links = Links()
    path = [links.add_link("worker", math.inf), links.add_link("backend", 1.0)]
    links.start(0, path, MB)
    assert drain(links) == [(1 * MS, 0)]


# --- two links, duplex, priority ----------------------------------------------------------------------


def test_a_transfer_over_two_links_moves_at_the_lesser_of_its_shares() -> None:
    links = Links()
    worker, backend = links.add_link("worker", 4.0), links.add_link("backend", 3.0)
    links.start(0, [worker, backend], 3000)  # alone on the backend: 3 bytes/ns of min(4, 3)
    assert links.deadline_ns(0) == 1000
    links.start(0, [worker], 4000)  # the worker's link has two: 2 bytes/ns for both
    assert drain(links) == [(1500, 0), (1750, 1)]  # at 1500 the second has 1000 to go, alone at 4


def test_workers_contend_for_a_shared_backend() -> None:
    links = Links()
    backend = links.add_link("backend", 1.0)
    workers = [links.add_link(f"worker {i}", 1.0) for i in range(4)]
    for worker in workers:
        links.start(0, [worker, backend], MB)
    links.start(0, [workers[0]], MB // 2)  # half of its own link, whatever the backend does
    assert drain(links) == [(1 * MS, 4), (4 * MS, 0), (4 * MS, 1), (4 * MS, 2), (4 * MS, 3)]


def test_a_duplex_cap_binds_only_when_both_directions_move() -> None:
    links = Links()
    cap = links.add_duplex("pcie", 80.0)
    down, up = links.add_link("d2h", 55.0, duplex=cap), links.add_link("h2d", 55.0, duplex=cap)
    links.start(0, [down], 55_000)
    assert links.deadline_ns(0) == 1000
    links.start(0, [up], 40_000)
    # Both at 40 until the second ends at 1000; then the first has 15,000 to go at 55.
    assert drain(links) == [(1000, 1), (1273, 0)]


@pytest.mark.parametrize(("demand_first", "ends"), [(False, [1500, 2000]), (True, [2000, 1500])])
def test_background_waits_for_demand_where_demand_goes_first(demand_first: bool, ends: list[int]) -> None:
    links = one_link(demand_first=demand_first)
    background = links.start(0, [0], 1000, background=True)
    demand = links.start(500, [0], 1000)
    assert [links.deadline_ns(background), links.deadline_ns(demand)] == ends
    drain(links)


def test_background_shares_what_demand_leaves() -> None:
    links = one_link(demand_first=True)
    links.start(0, [0], 300, background=True)
    links.start(0, [0], 300, background=True)
    links.start(100, [0], 500)
    links.start(200, [0], 100)
    # Background has moved 100 of its 600 bytes when demand comes, and goes on when the last of it has left.
    assert drain(links) == [(400, 3), (700, 2), (1200, 0), (1200, 1)]
    assert links.usage(0).busy_ns == 1200


# --- many -------------------------------------------------------------------------------------------------


def test_ten_thousand_transfers_cost_a_few_operations_each_and_lose_no_time() -> None:
    links = one_link(3.0)
    count = 10_000
    sizes = [1_000_000 + 7919 * i % 1000 for i in range(count)]
    for i, num_bytes in enumerate(sizes):
        links.start(i, [0], num_bytes)
    assert links.in_flight == count
    ended = drain(links)
    assert len(ended) == count
    assert links.operations < 8 * count
    # The link was never idle: whatever shares were rounded to, the last byte leaves when all have been served.
    assert ended[-1][0] == math.ceil(sum(sizes) / 3)


def test_other_workers_do_not_make_a_link_slower_to_compute() -> None:
    def operations(others: int) -> int:
        links = Links()
        for i in range(1 + others):
            links.add_link(f"worker {i}", 1.0)
        for i in range(others):
            links.start(0, [1 + i], 1 << 30)
        before = links.operations
        for i in range(100):
            links.start(i, [0], 1000)
        links.pop_due(10**6)
        return links.operations - before

    assert operations(1000) == operations(0)


# --- accounting ---------------------------------------------------------------------------------------


def test_usage_says_what_was_carried_and_when() -> None:
    links = one_link()
    links.start(0, [0], 1_500_000)
    links.pop_due(1_250_000)
    usage = links.usage(0)
    assert (usage.name, usage.bandwidth_gbps, usage.bytes_started, usage.bytes_finished) == (
        "d2h",
        1.0,
        1_500_000,
        0,
    )
    assert usage.bucket_ns == MS
    assert usage.bucket_bytes.tolist() == [1_000_000, 250_000]
    links.start(3_000_000, [0], 1_000_000)
    links.pop_due(9_000_000)
    usage = links.usage(0)
    assert usage.bytes_finished == usage.bytes_started == 2_500_000
    assert (usage.transfers_started, usage.transfers_finished, usage.busy_ns) == (2, 2, 2_500_000)
    assert usage.bucket_bytes.tolist()[:4] == [1_000_000, 500_000, 0, 1_000_000]


def test_samples_stay_bounded_however_long_the_run() -> None:
    links = one_link()
    for hour in range(24):
        links.start(hour * 3600 * 10**9, [0], 10**9 * (hour + 1))
    links.pop_due(25 * 3600 * 10**9)
    usage = links.usage(0)
    assert len(usage.bucket_bytes) <= 1024
    assert math.isclose(usage.bucket_bytes.sum(), usage.bytes_finished)
    per_hour = 3600 * 10**9 / usage.bucket_ns
    busiest = sorted(range(len(usage.bucket_bytes)), key=lambda i: -usage.bucket_bytes[i])[0]
    assert busiest == int(23 * per_hour)
