"""Links: transfers share bandwidth, and end at exact times whatever else one asks."""

from __future__ import annotations

import math
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.links import ModelCap, ModelLink, ModelTransfer, completions
from understudy.errors import CapacityExhausted, ConfigError, InvalidArgument
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
    with pytest.raises(InvalidArgument, match="link both: a share of its bandwidth"):
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


def test_a_link_is_not_slowed_so_far_that_its_transfers_take_years() -> None:
    links = one_link(1e-6)
    links.start(0, [0], 1 << 38)
    with pytest.raises(CapacityExhausted, match="link d2h"):
        links.set_share(0, 0, 0.001)
    assert links.next_completion_ns() == (1 << 38) * 10**6  # nothing has changed


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


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bandwidth", [-1.0, math.nan, 1e-12, 1e9, -math.inf])
def test_a_bandwidth_that_makes_no_sense_is_refused_by_name(bandwidth: float) -> None:
    with pytest.raises(ConfigError, match=r"link h2d: bandwidth_gbps must be"):
        Links().add_link("h2d", bandwidth)
    with pytest.raises(ConfigError, match=r"link pcie: bandwidth_gbps must be"):
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
    with pytest.raises(CapacityExhausted, match=r"link d2h: .* years; is bandwidth_gbps right"):
        links.start(0, [0], 1 << 38)
    links.start(0, [0], 10**8)
    with pytest.raises(CapacityExhausted):
        links.start(1, [0], 2 * 10**8)
    assert (links.now_ns, links.usage(0).bytes_started) == (0, 10**8)
    assert drain(links) == [(10**17, 0)]


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
    with pytest.raises(InvalidArgument, match="transfer 2 is not under way"):
        links.deadline_ns(2)
    assert links.deadline_ns(0) == 200
    links.pop_due(250)
    assert links.deadline_ns(1) == 400
    with pytest.raises(InvalidArgument, match="transfer 0 is not under way"):
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


# --- against the model --------------------------------------------------------------------------------

BANDWIDTHS = st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.0, 55.0, math.inf])


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[tuple[float, bool]], list[tuple[float, int, bool, int | None]]]:
    caps = draw(st.lists(st.tuples(BANDWIDTHS, st.booleans()), max_size=2))
    cap = st.none() if not caps else st.none() | st.integers(0, len(caps) - 1)
    link = st.tuples(BANDWIDTHS, st.sampled_from([0, 0, 10, 333]), st.booleans(), cap)
    return caps, draw(st.lists(link, min_size=1, max_size=4))


@given(network=networks(), data=st.data())
def test_completion_times_equal_exact_processor_sharing(
    network: tuple[list[tuple[float, bool]], list[tuple[float, int, bool, int | None]]], data: st.DataObject
) -> None:
    def exact(gbps: float) -> Fraction | None:
        return None if math.isinf(gbps) else Fraction(gbps)

    caps, specs = network
    links = Links()
    for i, (gbps, first) in enumerate(caps):
        links.add_duplex(f"cap {i}", gbps, demand_first=first)
    for i, (gbps, fixed_ns, first, duplex) in enumerate(specs):
        links.add_link(f"link {i}", gbps, fixed_ns=fixed_ns, demand_first=first, duplex=duplex)
    path = st.lists(st.integers(0, len(specs) - 1), min_size=1, max_size=2, unique=True)
    limited = [("link", i) for i, (gbps, *_) in enumerate(specs) if not math.isinf(gbps)]
    limited += [("cap", i) for i, (gbps, _) in enumerate(caps) if not math.isinf(gbps)]
    slowed = st.tuples(st.sampled_from(limited), st.sampled_from([1.0, 0.5, 0.3, 0.001]))
    transfer = st.tuples(
        st.integers(0, 400),
        path,
        st.integers(0, 3) | st.integers(0, 20_000),
        st.booleans(),
        st.booleans(),
        st.none() | slowed if limited else st.none(),
    )
    transfers = []
    changes = []
    now = 0
    popped = []
    for gap, links_crossed, num_bytes, background, look, slow in data.draw(
        st.lists(transfer, min_size=1, max_size=12)
    ):
        if slow is not None:
            (kind, slowed_one), share = slow
            at = now + gap // 3
            usual = round((specs if kind == "link" else caps)[slowed_one][0] * 1e9)
            (links.set_share if kind == "link" else links.set_duplex_share)(at, slowed_one, share)
            links.check()
            bandwidth = usual if share == 1 else max(int(usual * share), 1)
            changes.append((at, kind, slowed_one, Fraction(bandwidth, 10**9)))
        now += gap
        if look:
            popped += links.pop_due(now - gap // 2)
            links.next_completion_ns()
        links.start(now, links_crossed, num_bytes, background=background)
        links.check()
        transfers.append(ModelTransfer(now, tuple(links_crossed), num_bytes, background))
    deadlines = {
        i: links.deadline_ns(i) for i in range(len(transfers)) if i not in {done for _, done in popped}
    }
    late = links.pop_due(now)
    popped += late
    popped += drain(links)
    expected = completions(
        [ModelLink(exact(gbps), fixed, first, cap) for gbps, fixed, first, cap in specs],
        [ModelCap(exact(gbps), first) for gbps, first in caps],
        transfers,
        changes,
    )
    assert popped == expected
    assert deadlines == {i: time for time, i in expected if i in deadlines}
    for i in range(len(specs)):
        usage = links.usage(i)
        carried = sum(t.num_bytes for t in transfers if i in t.path)
        assert usage.bytes_started == usage.bytes_finished == carried
        assert math.isclose(usage.bucket_bytes.sum(), carried, rel_tol=1e-9, abs_tol=1e-3)


@given(
    starts=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 10**6)), min_size=1, max_size=40),
    bandwidth=st.floats(0.001, 100),
    looks=st.lists(st.integers(1, 10**6), max_size=30),
)
def test_looking_in_between_changes_nothing(
    starts: list[tuple[int, int]], bandwidth: float, looks: list[int]
) -> None:
    def run(looks: list[int]) -> list[tuple[int, int]]:
        links = one_link(bandwidth)
        now, out, glances = 0, [], iter(looks)
        for gap, num_bytes in starts:
            if (glance := next(glances, None)) is not None:
                out += links.pop_due(now + glance % (gap + 1))
            now += gap
            links.start(now, [0], num_bytes)
        for glance in glances:
            now += glance
            out += links.pop_due(now)
        return out + links.pop_due(2**60)

    assert run(looks) == run([])


@pytest.mark.parametrize("seed", range(60))
def test_an_end_just_after_a_whole_nanosecond_is_not_told_before_it(seed: int) -> None:
    """Bandwidths a few bytes off a whole number make ends that are barely later than a nanosecond."""
    rng = Random(f"barely late {seed}")
    links = Links()
    bandwidths = [rng.choice([1, 2, 4, 8, 16, 32]) * 10**9 + rng.randrange(-50, 50) for _ in range(2)]
    for i, bandwidth in enumerate(bandwidths):
        links.add_link(f"link {i}", bandwidth / 1e9)
    transfers, popped, now = [], [], 0
    for _ in range(12):
        now += rng.randrange(2000)
        path = rng.choice([(0,), (1,), (0, 1)])
        num_bytes = 16 * rng.randrange(1, 4096)
        popped += links.pop_due(now)
        links.start(now, list(path), num_bytes)
        transfers.append(ModelTransfer(now, path, num_bytes))
    popped += drain(links)
    exact = [ModelLink(Fraction(bandwidth, 10**9)) for bandwidth in bandwidths]
    assert popped == completions(exact, [], transfers)
