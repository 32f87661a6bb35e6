"""Several KV groups with tiers against the slow model: random requests one after another."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.grouped_device import Group
from model.tiered_groups import TieredGroups
from tiers.building import MS
from tiers.group_building import GroupWorker, below, chain
from understudy import _core

WINDOWS = [
    ([Group(16, window=64), Group(16)], 0),
    ([Group(16), Group(16, window=40)], 0),
    ([Group(16, window=33), Group(16, window=80), Group(16)], 0),
    ([Group(16, window=64), Group(32)], 0),
    ([Group(32, window=48), Group(16)], 0),
    ([Group(16, chunk=64), Group(16)], 0),
    ([Group(16, window=20), Group(16, window=20), Group(16)], 0),
]
STATE = Group(32, kind="mamba")
STATES = [
    ([STATE, Group(32)], 0),
    ([STATE, STATE, STATE, Group(32)], 0),
    ([Group(32), Group(16, kind="mamba")], 0),  # hits end inside blocks of full attention
    ([STATE, Group(32)], 8),
    ([STATE, Group(32), Group(8, window=20)], 0),
    ([Group(32, kind="mamba", checkpoint=True), Group(32)], 0),
    ([Group(32, kind="mamba", checkpoint=True), Group(32)], 8),
    ([Group(16, kind="mamba"), Group(32), Group(16, window=40)], 0),
]
OTHERS = [
    ([Group(16, window=40, kind="rswa"), Group(16)], 0),
    ([Group(16, window=20, kind="rswa"), Group(16, window=64)], 0),
    ([Group(16), Group(48, kind="circular")], 0),
    ([Group(16, window=24, kind="sliding_window_mla"), Group(32)], 0),
    ([Group(8, window=40, kind="sliding_window_mla"), Group(16), Group(16, window=30), STATE], 0),
]
MOST_TOKENS = 320


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """Tag, units shared with stem, stem, prompt tokens and outputs."""
    outputs = draw(st.integers(1, 40))
    return (
        draw(st.integers(10, 13)),
        draw(st.sampled_from([0, 3, 8, 16, 30])),
        draw(st.integers(0, 1)),
        draw(st.integers(2, MOST_TOKENS - outputs)),
        outputs,
    )


def most_blocks(groups: list[Group]) -> int:
    """Blocks that a request and the copies of its last blocks need at most."""
    return sum(4 if group.is_state else -(-MOST_TOKENS // group.block) + 2 for group in groups)


def compare(
    layout: tuple[list[Group], int],
    spare: int,
    lower: tuple[int, int | None],
    mode: str,
    retention: int | None,
    load: list[tuple[int, int, int, int, int]],
) -> Counter[str]:
    """Compare the engine with the model; count the requests that hit each tier."""
    seen: Counter[str] = Counter()
    host, disk = lower
    groups, match_unit = layout
    blocks = most_blocks(groups) + spare
    how = {"write_through": mode == "write_through", "exclusive": mode == "exclusive"}
    worker = GroupWorker(groups, blocks, below(host, disk, **how), retention, match_unit=match_unit)
    model = TieredGroups(groups, blocks, host, disk, retention=retention, match_unit=match_unit, **how)
    for tag, shared_units, stem, prompt, outputs in load:
        identities = chain(tag, MOST_TOKENS // model.sizes.hash, shared_units, stem)
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
    return seen


def test_requests_one_after_another_go_as_the_model_says_and_hit_every_tier() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=160, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        layout=st.sampled_from(WINDOWS + 2 * STATES + OTHERS),
        spare=st.integers(0, 30),
        lower=st.tuples(st.integers(1, 120), st.none() | st.integers(1, 400)),
        mode=st.sampled_from(["write_through", "evict", "exclusive"]),
        retention=st.sampled_from([0, None]),
        # Short loads are shrunk well; requests return to evicted blocks in long ones only.
        load=st.lists(requests(), min_size=2, max_size=8) | st.lists(requests(), min_size=10, max_size=24),
    )
    def run(
        layout: tuple[list[Group], int],
        spare: int,
        lower: tuple[int, int | None],
        mode: str,
        retention: int | None,
        load: list[tuple[int, int, int, int, int]],
    ) -> None:
        seen.update(compare(layout, spare, lower, mode, retention, load))

    run()
    assert min(seen[tier] for tier in ("device", "host", "disk")) > 10, seen
