"""Several KV groups with tiers against the slow model: random requests one after another."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.tiered_groups import Group, TieredGroups
from tiers.building import MS
from tiers.group_building import GroupWorker, below, chain
from understudy import _core

LAYOUTS = [
    [Group(16, window=64), Group(16)],
    [Group(16), Group(16, window=40)],
    [Group(16, window=33), Group(16, window=80), Group(16)],
    [Group(16, window=64), Group(32)],
    [Group(32, window=48), Group(16)],
    [Group(16, chunk=64), Group(16)],
    [Group(16, window=20), Group(16, window=20), Group(16)],
]
MOST_TOKENS = 320
seen: Counter[str] = Counter()


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """Tag, units shared with stem, stem, prompt tokens and outputs."""
    outputs = draw(st.integers(1, 40))
    return (
        draw(st.integers(10, 14)),
        draw(st.sampled_from([0, 3, 8, 12, 16])),
        draw(st.integers(0, 1)),
        draw(st.integers(2, MOST_TOKENS - outputs)),
        outputs,
    )


def most_blocks(groups: list[Group]) -> int:
    return sum(-(-MOST_TOKENS // group.block) + 1 for group in groups)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    groups=st.sampled_from(LAYOUTS),
    spare=st.integers(0, 40),
    host=st.integers(1, 160),
    disk=st.one_of(st.none(), st.integers(1, 250)),
    write_through=st.booleans(),
    retention=st.sampled_from([0, None]),
    load=st.lists(requests(), min_size=2, max_size=14),
)
def test_requests_one_after_another_go_as_the_model_says(
    groups: list[Group],
    spare: int,
    host: int,
    disk: int | None,
    write_through: bool,
    retention: int | None,
    load: list[tuple[int, int, int, int, int]],
) -> None:
    blocks = most_blocks(groups) + spare
    worker = GroupWorker(groups, blocks, below(host, disk, write_through=write_through), retention)
    model = TieredGroups(groups, blocks, host, disk, write_through=write_through, retention=retention)
    for tag, shared_units, stem, prompt, outputs in load:
        identities = chain(tag, MOST_TOKENS // model.hash, shared_units, stem)
        contents = [block.sequence_hash for block in identities]
        expected = model.run(contents, prompt, outputs)
        record = worker.run(identities, prompt, outputs)
        assert record.cached_first == expected.hit
        assert list(record.below_total) == expected.below
        assert record.parked_ns == expected.parked_ms * MS
        free, active, cached, held = worker.engine.tier_blocks(_core.Tier.G1)
        assert (free, active, cached, held) == (model.device.empty, 0, len(model.device.cached), 0)
        assert worker.engine.tier_blocks(_core.Tier.G2)[2] == len(model.host.order)
        totals = worker.engine.tier_totals
        assert (totals.offloaded_blocks, totals.onboarded_blocks) == (model.offloaded, model.onboarded)
        seen.update(
            host=sum(expected.below[:1]) > 0,
            disk=expected.below[1] > 0,
            device=expected.hit > sum(expected.below),
        )


def test_the_random_requests_hit_every_tier() -> None:
    assert all(seen[tier] for tier in ("device", "host", "disk"))
