"""Random deployments give answers that independent programs recompute; audits notice an answer that is wrong."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import pytest

from answers.campaign import AUDITS, RARE, audit, campaign, describe, examine
from answers.definitions import compare
from answers.evidence import replay
from answers.random_cases import KINDS, random_case
from answers.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BATCH = 20
SOAK = int(os.environ.get("UNDERSTUDY_SOAK_OPS", "0")) // 500


@pytest.mark.parametrize("first", range(0, 60, BATCH))
def test_answers_of_random_deployments_are_those_of_independent_programs(first: int, tmp_path: Path) -> None:
    _, differences = campaign(first, BATCH, tmp_path, quiet=True)
    assert not differences, "\n".join(differences)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(20))
def test_answers_of_thousands_of_deployments(part: int, tmp_path: Path) -> None:
    count = max(SOAK // 20, 1)
    _, differences = campaign(100_000 + part * count, count, tmp_path, quiet=True)
    assert not differences, "\n".join(differences)


def test_every_kind_and_rule_comes_up() -> None:
    seeds = range(3 * len(KINDS) * len(RULES))
    assert {random_case(seed).kind for seed in seeds} == set(KINDS)
    assert set(RARE) <= set(AUDITS)
    assert random_case(7) == random_case(7)


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of all numbers."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, (*path, key))
    elif isinstance(value, list):
        for index, part in enumerate(value[:3]):
            yield from leaves(part, (*path, index))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def changed(report: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    """The report with another figure there."""
    report = copy.deepcopy(report)
    part: Any = report
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] += 1 if isinstance(part[path[-1]], int) else abs(part[path[-1]]) / 1000 + 1e-3
    return report


UNAUDITED = {
    # by tests/answers/test_kv_usage.py, and (stored, evicted) by an audit of events that this test leaves out
    *("kv.usage_mean", "kv.usage_max", "kv.cached_mean", "kv.stored_blocks", "kv.evictions"),
    *("kv.phantom_hit_blocks", "drafted_tokens", "wasted_drafts"),
    # how long copies hold blocks, and what tiers decided
    *("tiers.onboard_ms.count", "tiers.held_mean", "tiers.held_max"),
    *(
        f"tiers.counts.{name}"
        for name in ("dropped_blocks", "onboards", "joined_loads", "slow_loads", "failed_loads", "room_waits")
    ),
    *(f"tiers.counts.{name}" for name in ("deferred_lookups", "refused_stores", "flushed_copies")),
    *(f"tiers.tiers.N.{name}" for name in ("resident_mean", "resident_max")),
    *(f"handoff.pools.N.{name}" for name in ("kv_usage_mean", "held_mean", "held_max")),
    *("handoff.expired_leases", "handoff.late_notifications", "handoff.window_s", "handoff.window_held.N"),
    "handoff.ttft_parts_ms.hop",  # added to the sum where it is 0
    # within bounds only: bytes in flight
    *(
        f"{kind}.links.N.{name}"
        for kind in ("tiers", "handoff")
        for name in ("transfers", "bytes", "busy_s", "busy", "peak", "utilisation_max", "window_bytes.N")
    ),
}
"""Figures of a report that no audit recomputes exactly."""


@pytest.mark.parametrize("kind", ["plain", "tiers", "hand_offs", "pools"])
def test_an_audit_notices_every_figure_that_is_wrong(kind: str, tmp_path: Path) -> None:
    cases = (
        case
        for case in map(random_case, range(1000))
        if case.kind == kind and any(name.startswith("slo") for name in case.flags) and len(case.rows) > 8
    )
    evidence = replay(next(cases), tmp_path, every_output=True)
    names = [
        name
        for name in AUDITS
        if name not in RARE and "says_the_same" not in name and "waterfalls" not in name
        if not name.startswith(("curves_", "a_prediction_"))  # of other verbs
    ]
    true = evidence.report
    missed = set()
    for path in leaves(
        {key: part for key, part in true.items() if key not in ("run", "advice", "definitions")}
    ):
        evidence.__dict__["report"] = changed(true, path)
        if not any(any(compare(AUDITS[name](evidence))) for name in names):
            missed.add(".".join("N" if isinstance(key, int) else key for key in path))
    assert missed - UNAUDITED == set()


def test_a_difference_is_shrunk_and_names_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(AUDITS, "attainment", lambda evidence: [("rows", len(evidence.lines) < 3, True)])
    seed = next(seed for seed in range(1, 100) if len(audit(seed, tmp_path).case.rows) > 10)
    result = audit(seed, tmp_path)
    assert "attainment" in result.found
    said = describe(result, tmp_path)  # the smallest case has three rows
    assert f"campaign.py --first {seed} --count 1" in said
    assert said.count("hash_ids") == 3
    assert "attainment" in examine(result.case, tmp_path, ("attainment",))
