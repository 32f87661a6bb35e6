"""Times of links equal exact processor sharing, whatever else one asks."""

from __future__ import annotations

import math
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.links import ModelCap, ModelLink, ModelTransfer, completions
from tiers.link_building import drain, one_link
from understudy.tiers import Links

BANDWIDTHS = st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.0, 55.0, math.inf])


Network = tuple[list[tuple[float, bool]], list[tuple[float, int, bool, int | None]]]
"""Caps over links, and links under them."""


@st.composite
def networks(draw: st.DrawFn) -> Network:
    caps = draw(st.lists(st.tuples(BANDWIDTHS, st.booleans()), max_size=2))
    cap = st.none() if not caps else st.none() | st.integers(0, len(caps) - 1)
    link = st.tuples(BANDWIDTHS, st.sampled_from([0, 0, 10, 333]), st.booleans(), cap)
    return caps, draw(st.lists(link, min_size=1, max_size=4))


def build(network: Network) -> Links:
    """The links of a network, by its numbers."""
    caps, specs = network
    links = Links()
    for i, (gbps, first) in enumerate(caps):
        links.add_duplex(f"cap {i}", gbps, demand_first=first)
    for i, (gbps, fixed_ns, first, duplex) in enumerate(specs):
        links.add_link(f"link {i}", gbps, fixed_ns=fixed_ns, demand_first=first, duplex=duplex)
    return links


@given(network=networks(), data=st.data())
def test_completion_times_equal_exact_processor_sharing(network: Network, data: st.DataObject) -> None:
    def exact(gbps: float) -> Fraction | None:
        return None if math.isinf(gbps) else Fraction(gbps)

    caps, specs = network
    links = build(network)
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
