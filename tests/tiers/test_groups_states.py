"""States, rswa and groups that are not cached, with tiers: rule by rule. A block is 1 MB and needs 1 ms to come up."""

from __future__ import annotations

from typing import Any

import pytest

from model.grouped_device import Group
from tiers.building import MS, way
from tiers.group_building import GroupWorker, below, chain

STATE, FULL = Group(32, kind="mamba"), Group(32)
HYBRID = [STATE, STATE, FULL]
STATES = 2


def worker(
    groups: list[Group] | None = None, blocks: int = 60, tiers: dict[str, Any] | None = None, **settings: Any
) -> GroupWorker:
    return GroupWorker(HYBRID if groups is None else groups, blocks, below(1000, **(tiers or {})), **settings)


def push_out(one: GroupWorker) -> None:
    """Fill the device with blocks that no other request uses."""
    for tag in (900, 901):
        one.run(chain(tag, 200), 40 * 32)


def onboarded(one: GroupWorker) -> int:
    return one.engine.tier_totals.onboarded_blocks


@pytest.mark.parametrize("write_through", [True, False])
def test_a_load_brings_one_state_of_each_group_and_the_whole_prefix_of_full_attention(
    write_through: bool,
) -> None:
    one = worker(tiers={"write_through": write_through})
    one.run(chain(1, 64), 300)
    push_out(one)
    before = onboarded(one)
    record = one.run(chain(1, 64), 300)
    assert record.cached_first == 288
    assert onboarded(one) - before == 9 + STATES
    assert record.parked_ns == (9 + STATES) * MS
    assert list(record.below_total) == [288, 0, 0]


def test_a_state_that_the_device_has_lost_is_loaded_alone() -> None:
    """States leave the table when the prompt goes on, so they are evicted before full attention."""
    one = worker(blocks=40)
    one.run(chain(1, 64), 300, outputs=40)
    one.run(chain(2, 64), 27 * 32)
    record = one.run(chain(1, 64), 300)
    assert record.cached_first == 288
    assert onboarded(one) == STATES
    assert list(record.below_total) == [32, 0, 0]  # the tokens of the states' blocks


def test_a_hit_ends_at_the_last_state_that_a_tier_has() -> None:
    one = worker(tiers={"offload_filter": DropStates(behind=128)})
    for prompt in (129, 300):
        one.run(chain(1, 64), prompt)
    push_out(one)
    assert one.run(chain(1, 64), 300).cached_first == 128


def test_a_prompt_without_a_state_on_any_tier_hits_nothing() -> None:
    one = worker(tiers={"offload_filter": DropStates(behind=0)})
    one.run(chain(1, 64), 300)
    push_out(one)
    record = one.run(chain(1, 64), 300)
    assert (record.cached_first, record.parked_ns) == (0, 0)


class DropStates:
    """An offload policy without states that end behind some tokens."""

    def __init__(self, behind: int) -> None:
        self.behind = behind

    def select(self, lineages: list[int], _reuse: object) -> list[bool]:
        keep = []
        for lineage in lineages:
            bits = (54, 46, 38)[lineage >> 126]
            end, group = divmod(lineage >> (64 + bits) & (1 << 24) - 1, len(HYBRID))
            keep.append(group == STATES or (end + 1) * 32 <= self.behind)
        return keep


# ── Hits that end inside a block ──


def test_a_hit_inside_a_block_loads_the_keys_of_its_end() -> None:
    one = worker(match_unit=8)
    one.run(chain(1, 200), 109)
    push_out(one)
    before = onboarded(one)
    record = one.run(chain(1, 200), 109)
    assert record.cached_first == 104
    assert onboarded(one) - before == 3 + 1 + STATES
    assert list(record.below_total) == [104, 0, 0]


def test_a_longer_key_of_full_attention_serves_a_hit_inside_its_block() -> None:
    """The first answer fills the block in which the prompt ends: the second prompt continues it."""
    one = worker(match_unit=8, tiers={"write_through": False})
    one.run(chain(1, 200), 109, outputs=40)
    push_out(one)
    before = onboarded(one)
    assert one.run(chain(1, 200), 180).cached_first == 104
    assert onboarded(one) - before == 3 + 1 + STATES


def test_evict_copies_a_block_with_two_keys_under_the_longer_one() -> None:
    """The same prompt again cannot use the block that its answer has filled, and ends at the last whole block."""
    for write_through, hit in ((True, 104), (False, 96)):
        one = worker(match_unit=8, tiers={"write_through": write_through})
        one.run(chain(1, 200), 109, outputs=40)
        push_out(one)
        assert one.run(chain(1, 200), 109).cached_first == hit


def test_the_state_of_a_prompt_is_copied_that_moved_before_its_step_has_ended() -> None:
    """Asynchronously the next schedule moves the key to a copy of the block while the step runs."""
    one = worker(match_unit=8, settings={"async_scheduling": True})
    one.run(chain(1, 200), 109, outputs=3)
    push_out(one)
    assert one.run(chain(1, 200), 109).cached_first == 104


def test_a_state_kept_inside_a_step_is_found_again() -> None:
    one = worker([Group(32, kind="mamba", checkpoint=True), FULL], 50)
    one.run(chain(1, 64), 300)
    push_out(one)
    before = onboarded(one)
    assert one.run(chain(1, 64), 300).cached_first == 288
    assert onboarded(one) - before == 9 + 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_preempts_itself_continues_when_a_copy_has_landed(is_async: bool) -> None:
    """Prompts take no time here: without a wait it would be admitted and preempted at one time, without end."""
    groups = [Group(64, kind="mamba", checkpoint=True), FULL, Group(16, window=40)]
    settings = {"max_num_batched_tokens": 64, "async_scheduling": is_async}
    slow = below(400, host=way(50.0))
    one = GroupWorker(groups, 42, slow, None, settings, match_unit=16)
    sent = [(0, 16, 227, 15), (1, 16, 305, 14), (1, 0, 463, 11)]
    for tag, shared_units, prompt, outputs in sent:
        one.submit(chain(tag, 40, shared_units), prompt, outputs)
    one.play()
    assert sum(record.preemptions for record in one.records.values()) > 0


def test_another_request_does_not_wait_for_the_copies_of_one_that_preempted_itself() -> None:
    groups = [Group(64, kind="mamba", checkpoint=True), FULL, Group(16, window=40)]
    one = GroupWorker(
        groups, 46, below(400, host=way(0.001)), None, {"max_num_batched_tokens": 64}, match_unit=16
    )
    number = one.submit(chain(0, 40), 463, 40)
    while one.engine.preemptions == 0:  # copies take seconds
        one.engine.begin_step(one.now_ns)
        assert not one.engine.asleep
        one.now_ns = one.engine.now_ns
        one.engine.end_step(one.now_ns)
    one.engine.cancel(number, one.now_ns)
    one.submit(chain(1, 40), 20, 1)
    one.engine.begin_step(one.now_ns)
    assert not one.engine.asleep
    one.now_ns = one.engine.now_ns
    one.engine.end_step(one.now_ns)
    one.play()


# ── Other kinds ──


def test_rswa_is_kept_as_full_attention() -> None:
    one = worker([Group(32, window=40, kind="rswa"), FULL], 90)
    one.run(chain(1, 64), 300, outputs=100)
    push_out(one)
    before = onboarded(one)
    assert one.run(chain(1, 64), 300).cached_first == 288
    assert onboarded(one) - before == 2 * 9


def test_a_group_that_is_not_cached_takes_no_part() -> None:
    one = worker([FULL, Group(64, kind="circular")], 45)
    one.run(chain(1, 64), 300)
    push_out(one)
    before = onboarded(one)
    assert one.run(chain(1, 64), 300).cached_first == 256  # a multiple of all block sizes
    assert onboarded(one) - before == 8


def test_a_window_that_is_computed_again_shortens_a_hit_from_the_host() -> None:
    replayed = Group(16, window=40, kind="sliding_window_mla")
    one = worker([FULL, replayed], 130)
    one.run(chain(1, 64), 300)
    push_out(one)
    before = onboarded(one)
    record = one.run(chain(1, 64), 300)
    assert record.cached_first == 288 - 40
    assert onboarded(one) - before == 9
    assert list(record.below_total) == [248, 0, 0]
    one.run(chain(2, 64), 40)
    push_out(one)
    record = one.run(chain(2, 64), 40)  # not longer than the window
    assert (record.cached_first, record.parked_ns) == (0, 0)


@pytest.mark.parametrize(("groups", "blocks"), [(HYBRID, 60), ([Group(32, window=64), FULL], 90)])
def test_an_exclusive_host_gives_the_blocks_of_all_groups_away(groups: list[Group], blocks: int) -> None:
    one, other = (
        worker(groups, blocks, {"write_through": False, "exclusive": exclusive})
        for exclusive in (True, False)
    )
    for each in (one, other):
        each.run(chain(1, 64), 300)
        push_out(each)
        assert each.run(chain(1, 64), 300).cached_first == 288
    assert onboarded(one) == onboarded(other) >= 9
    assert one.cached_on_host() == other.cached_on_host() - onboarded(one)
    push_out(one)  # they are on the device alone, and go down again
    assert one.run(chain(1, 64), 300).cached_first == 288
