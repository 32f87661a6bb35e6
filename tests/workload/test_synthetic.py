from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from understudy.errors import ConfigError
from understudy.workload import (
    Constant,
    Distribution,
    Fixed,
    LogNormal,
    Normal,
    Poisson,
    SharedRatio,
    SyntheticSpec,
    SystemPrompts,
    Workload,
    synthesise,
)
from workload.building import assert_same

CHAT: dict[str, Any] = {
    "sessions": 40,
    "prompt_tokens": LogNormal(mean=300, std=200, max=2_000),
    "followup_tokens": Normal(mean=50, std=30),
    "output_tokens": Normal(mean=80, std=40),
    "turns": Normal(mean=3, std=1, max=6),
    "think_time_ms": LogNormal(mean=1_000, std=500),
    "arrivals": Poisson(5),
    "prefixes": SystemPrompts(groups=3, tokens=128),
}


def spec(**settings: Any) -> SyntheticSpec:
    defaults: dict[str, Any] = {"sessions": 10, "prompt_tokens": Fixed(100), "output_tokens": Fixed(20)}
    return SyntheticSpec(**(defaults | settings))


def prompts(workload: Workload) -> list[list[int]]:
    """Every prompt's tokens, as ids."""
    return [
        workload.prompt_hash_ids(row)[
            np.arange(workload.prompt_tokens[row]) // workload.trace_block_size
        ].tolist()
        for row in range(len(workload))
    ]


def test_fixed_lengths_are_exact() -> None:
    w = synthesise(spec(arrivals=Constant(10)))
    assert w.prompt_tokens.tolist() == [100] * 10
    assert w.output_tokens.tolist() == [20] * 10
    assert (w.arrival_ns / 1e6).tolist() == [100 * session for session in range(10)]
    assert len(set(w.hash_ids.tolist())) == len(w.hash_ids) == 20  # nothing is shared


@pytest.mark.parametrize("distribution", [Normal(mean=500, std=50), LogNormal(mean=500, std=250)])
def test_drawn_lengths_have_the_mean_and_deviation_asked_for(distribution: Normal | LogNormal) -> None:
    lengths = synthesise(spec(sessions=50_000, prompt_tokens=distribution)).prompt_tokens
    assert lengths.mean() == pytest.approx(500, rel=0.02)
    assert lengths.std() == pytest.approx(distribution.std, rel=0.05)


def test_values_out_of_bounds_are_drawn_again_not_clamped() -> None:
    lengths = synthesise(spec(sessions=20_000, prompt_tokens=Normal(100, 50, min=80, max=120))).prompt_tokens
    assert [lengths.min(), lengths.max()] == [80, 120]
    assert np.mean(lengths == 80) < 0.05  # clamping would put a third of them there


def test_without_a_minimum_a_prompt_has_at_least_one_token() -> None:
    assert synthesise(spec(sessions=5_000, prompt_tokens=Normal(2, 5))).prompt_tokens.min() == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_tokens": Fixed(0)}, "prompt_tokens must be a whole number of at least 1, got 0"),
        ({"prompt_tokens": Fixed(1.5)}, "prompt_tokens must be a whole number of at least 1, got 1.5"),
        ({"prompt_tokens": Normal(5, 1, min=0)}, "prompt_tokens: min must be at least 1, got 0"),
        ({"output_tokens": Fixed(-1)}, "output_tokens must be a whole number of at least 0"),
        ({"output_tokens": LogNormal(5, 1, max=-1)}, "output_tokens: max must be at least 0, got -1"),
        ({"turns": Fixed(0)}, "turns must be a whole number of at least 1"),
        ({"turns": Fixed(2)}, "followup_tokens is required"),
        ({"think_time_ms": Fixed(-1)}, "think_time_ms must be a number of at least 0"),
        ({"sessions": -1}, "sessions must be a whole number of at least 0"),
        ({"trace_block_size": 0}, "trace_block_size must be a whole number of at least 1"),
        ({"content_seed": -1}, "content_seed must be a whole number of at least 0"),
        ({"prefixes": SystemPrompts(1, 100)}, "prefixes.tokens must be a multiple of trace_block_size"),
    ],
)
def test_a_specification_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec(**settings)


def test_a_distribution_that_cannot_be_is_refused() -> None:
    for make, message in (
        (lambda: Normal(5, -1), "std must be at least 0"),
        (lambda: Normal(float("nan"), 1), "mean must be a finite number"),
        (lambda: Normal(5, 1, min=9, max=3), "min 9 is above max 3"),
        (lambda: LogNormal(0, 1), "mean of a lognormal must be above 0"),
        (lambda: Fixed(float("inf")), "value must be a finite number"),
        (lambda: SharedRatio(1, 1.5), "ratio must lie in 0 … 1"),
        (lambda: SharedRatio(0, 0.5), "groups must be a whole number of at least 1"),
        (lambda: SystemPrompts(1, 0), "tokens must be a whole number of at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


def test_bounds_that_are_never_met_are_an_error_not_a_hang() -> None:
    with pytest.raises(ConfigError, match=r"prompt_tokens: .* rarely falls into"):
        synthesise(spec(prompt_tokens=Normal(10, 1, min=1_000)))


def test_a_prompt_that_outgrows_32_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"past 2\^31"):
        synthesise(spec(sessions=1, turns=Fixed(3), followup_tokens=Fixed(2**30)))


def test_the_same_specification_gives_the_same_workload() -> None:
    assert_same(synthesise(SyntheticSpec(**CHAT)), synthesise(SyntheticSpec(**CHAT)))


def test_content_and_arrival_seeds_are_independent() -> None:
    base = synthesise(SyntheticSpec(**CHAT))
    moved = synthesise(SyntheticSpec(**CHAT, arrival_seed=1))
    assert_same(moved, base, but=("arrival_ns", "delay_ns"))
    assert moved.arrival_ns.tolist() != base.arrival_ns.tolist()
    other = synthesise(SyntheticSpec(**CHAT, content_seed=1))
    assert np.unique(other.arrival_ns).tolist() == np.unique(base.arrival_ns).tolist()
    assert other.prompt_tokens.tolist() != base.prompt_tokens.tolist()


def test_changing_one_distribution_leaves_the_other_draws_alone() -> None:
    base = synthesise(SyntheticSpec(**CHAT))
    longer = synthesise(SyntheticSpec(**CHAT | {"output_tokens": Fixed(500)}))
    assert longer.session.tolist() == base.session.tolist()
    firsts = base.turn == 0
    assert longer.prompt_tokens[firsts].tolist() == base.prompt_tokens[firsts].tolist()


def test_sessions_of_a_group_share_their_system_prompt_and_nothing_else() -> None:
    w = synthesise(spec(sessions=30, prefixes=SystemPrompts(groups=2, tokens=128)))
    assert w.prompt_tokens.tolist() == [228] * 30
    heads = {tuple(w.prompt_hash_ids(row)[:2].tolist()) for row in range(30)}
    tails = [block for row in range(30) for block in w.prompt_hash_ids(row)[2:].tolist()]
    assert len(heads) == 2
    assert len(set(tails)) == len(tails) == 60
    assert not {block for head in heads for block in head} & set(tails)


@pytest.mark.parametrize(("ratio", "shared"), [(0, 0), (0.5, 2), (0.4, 1), (1, 3)])
def test_a_shared_ratio_counts_full_blocks(ratio: float, shared: int) -> None:
    w = synthesise(
        spec(sessions=6, prompt_tokens=Fixed(3 * 64 + 10), prefixes=SharedRatio(groups=1, ratio=ratio))
    )
    assert w.prompt_tokens.tolist() == [202] * 6
    blocks = np.array([w.prompt_hash_ids(row) for row in range(6)])
    same = (blocks == blocks[0]).all(axis=0)
    assert same.tolist() == [True] * shared + [False] * (4 - shared)


def test_groups_are_all_used() -> None:
    w = synthesise(spec(sessions=200, prefixes=SystemPrompts(groups=5, tokens=64)))
    assert len({int(w.prompt_hash_ids(row)[0]) for row in range(200)}) == 5


def test_turn_k_holds_turn_before_its_output_and_new_text() -> None:
    w = synthesise(spec(sessions=3, turns=Fixed(3), followup_tokens=Fixed(7), think_time_ms=Fixed(1.5)))
    assert w.prompt_tokens.tolist() == [100, 127, 154] * 3
    assert w.turn.tolist() == [0, 1, 2] * 3
    assert w.session.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert w.delay_ns.tolist() == [0, 1_500_000, 1_500_000] * 3


def test_every_prompt_begins_with_the_previous_prompt_and_the_output_it_told_the_engine_to_make() -> None:
    w = synthesise(SyntheticSpec(**CHAT))
    tokens = prompts(w)
    followed = np.flatnonzero(w.next_turn >= 0)
    assert len(followed) > 20
    for row in followed:
        output = w.known_output_tokens(int(row))
        assert output is not None
        quoted = tokens[row] + output.tolist()
        assert tokens[w.next_turn[row]][: len(quoted)] == quoted
    last = np.flatnonzero(w.next_turn < 0)
    assert all(w.known_output_tokens(int(row)) is None for row in last)


def test_outputs_that_do_not_recur_are_unknown() -> None:
    w = synthesise(SyntheticSpec(**CHAT, outputs_recur=False))
    assert w.output_in_next is None


def test_hash_ids_are_numbered_by_first_appearance() -> None:
    ids = synthesise(SyntheticSpec(**CHAT)).hash_ids
    _, first_seen = np.unique(ids, return_index=True)
    assert (np.diff(first_seen) > 0).all()


def test_no_sessions_make_an_empty_workload() -> None:
    assert len(synthesise(SyntheticSpec(**CHAT | {"sessions": 0}))) == 0


def test_a_specification_reads_from_plain_data() -> None:
    config = {
        "sessions": 40,
        "prompt_tokens": {"kind": "lognormal", "mean": 300, "std": 200, "max": 2_000},
        "followup_tokens": {"kind": "normal", "mean": 50, "std": 30},
        "output_tokens": {"kind": "normal", "mean": 80, "std": 40},
        "turns": {"kind": "normal", "mean": 3, "std": 1, "max": 6},
        "think_time_ms": {"kind": "lognormal", "mean": 1_000, "std": 500},
        "arrivals": {"kind": "poisson", "qps": 5},
        "prefixes": {"kind": "system_prompts", "groups": 3, "tokens": 128},
    }
    assert SyntheticSpec.from_config(config) == SyntheticSpec(**CHAT)
    assert msgspec.convert(msgspec.to_builtins(SyntheticSpec(**CHAT)), SyntheticSpec) == SyntheticSpec(**CHAT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sesions": 4}, "unknown field `sesions`"),
        ({"sessions": "4"}, r"Expected `int`, got `str` - at `\$.sessions`"),
        ({"arrivals": {"kind": "weibull", "qps": 1}}, r"Invalid value 'weibull' - at `\$.arrivals.kind`"),
        ({"arrivals": {"kind": "poisson", "qps": -1}}, "qps must be a finite number above 0"),
        ({"output_tokens": {"kind": "fixed", "value": 3, "std": 1}}, "unknown field `std`"),
    ],
)
def test_plain_data_that_makes_no_specification_is_refused(change: dict[str, Any], message: str) -> None:
    good = {"sessions": 1, "prompt_tokens": {"kind": "fixed", "value": 3}}
    good |= {"output_tokens": {"kind": "fixed", "value": 3}}
    assert SyntheticSpec.from_config(good).sessions == 1
    with pytest.raises(ConfigError, match=message):
        SyntheticSpec.from_config(good | change)


@pytest.mark.parametrize("distribution", [Fixed(5), Normal(5, 0), LogNormal(5, 0)])
def test_a_deviation_of_zero_is_a_fixed_value(distribution: Distribution) -> None:
    assert set(synthesise(spec(prompt_tokens=distribution)).prompt_tokens.tolist()) == {5}
