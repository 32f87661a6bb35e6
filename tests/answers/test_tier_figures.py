"""Figures of tiers and links in runs at the edge: aborted loads, no duration, no capacity."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from answers.definitions import compare
from answers.evidence import replay
from answers.hand_offs_audit import pools_are_busy_as_their_steps
from answers.random_cases import Case
from answers.tiers_audit import bytes_of_tiers_are_blocks

if TYPE_CHECKING:
    from pathlib import Path

    from answers.evidence import Evidence
    from answers.random_traces import Row

TIERS = {
    "trace-block-size": "16",
    "block-size": "16",
    "kv-bytes-per-token": "4096",
    "g2": "40",
    "g2-bandwidth-gbps": "14",
}
SHORT: Row = {"input_length": 60, "output_length": 4, "hash_ids": [1, 2, 3, 4], "timestamp": 0.0}
LATE: Row = {"input_length": 50, "output_length": 3, "hash_ids": [5, 6, 7, 8], "timestamp": 90.0}
UNUSED: Row = {**SHORT, "abort_after_ms": 0.0}
"""A request that its client aborts as it arrives: the run has no duration."""


def run(folder: Path, rows: list[Row], flags: dict[str, str], kind: str = "tiers") -> Evidence:
    return replay(Case(0, kind, tuple(rows), flags), folder, every_output=True)


def test_a_load_whose_request_is_aborted_before_its_transfer_begins_moves_no_bytes(tmp_path: Path) -> None:
    first = {"input_length": 99, "output_length": 17, "hash_ids": [*range(7)], "session_id": "s"}
    again = {
        "input_length": 138,
        "output_length": 8,
        "hash_ids": [*range(9)],
        "session_id": "s",
        "delay": 1.6,
    }
    rows = [{**first, "timestamp": 0.0, "output_in_next_turn": True}, {**again, "abort_after_ms": 0.5}]
    flags = {**TIERS, "workers": "2", "g2-bandwidth-gbps": "inf", "g3": "1000", "g3-bandwidth-gbps": "0.3"}
    found = run(tmp_path, rows, flags)
    assert found.lines[1]["status"] == "cancelled"
    assert list(compare(bytes_of_tiers_are_blocks(found))) == []
    assert found.report["tiers"]["counts"]["onboarded_blocks"] == 0


def without_value(use: dict[str, Any]) -> set[str]:
    return {name for name, value in use.items() if value in (None, [None] * 120)}


def test_a_run_without_duration_has_no_use_of_links(tmp_path: Path) -> None:
    found = run(tmp_path, [UNUSED], TIERS)
    assert found.report["duration_s"] == 0
    assert list(compare(bytes_of_tiers_are_blocks(found))) == []
    for link in found.report["tiers"]["links"]:
        assert without_value(link) == {"utilisation_mean", "utilisation_max", "window_utilisation"}
        assert (link["window_s"], sum(link["window_bytes"])) == (0, 0)
    for use in found.report["tiers"]["tiers"]:
        assert {"resident_mean"} <= without_value(use)
    assert re.search(r"G1 → G2 +14 GB/s +0 +0 B +– +–", found.printed)


@pytest.mark.parametrize("backend", [{}, {"kv-link-backend-gbps": "5"}])
def test_a_run_without_duration_has_no_use_of_links_of_hand_offs(
    backend: dict[str, str], tmp_path: Path
) -> None:
    pools = {"prefill-workers": "1", "decode-workers": "1", "kv-link-gbps": "25"}
    flags = {"trace-block-size": "16", "block-size": "16", "kv-bytes-per-token": "4096", **pools, **backend}
    found = run(tmp_path, [UNUSED], flags, "hand_offs")
    assert found.report["duration_s"] == 0
    assert list(compare(pools_are_busy_as_their_steps(found))) == []
    for link in found.report["handoff"]["links"]:
        shares = {"utilisation_mean", "utilisation_max", "window_utilisation", "busy", "peak"}
        assert without_value(link) == shares
    assert set(found.report["handoff"]["window_held"]) == {None}


@pytest.mark.parametrize("unlimited", ["g2", "g3", "g4"])
def test_an_unlimited_tier_has_no_capacity_and_no_share_of_it(unlimited: str, tmp_path: Path) -> None:
    below = {"g2": "40", "g3": "60", "g4": "200"}
    found = run(tmp_path, [SHORT, LATE], {**TIERS, **below, unlimited: "unlimited"})
    uses = {use["tier"]: use for use in found.report["tiers"]["tiers"]}
    for name, use in uses.items():
        none = {"capacity_blocks", "resident_mean", "resident_max", "resident_end"}
        assert without_value(use) == (none if name == unlimited else set())
    assert uses[unlimited]["stored_blocks"] > 0
    assert list(compare(bytes_of_tiers_are_blocks(found))) == []
    assert re.search(rf"{unlimited.upper()} .*unlimited", found.printed)
    cells = re.search(rf"<td>{unlimited.upper()}</td>(.*?)</tr>", found.page)
    assert cells is not None
    assert cells[1].count("<td>unlimited</td>") == 1
    assert cells[1].count("<td>–</td>") == 3


def test_pools_whose_tiers_are_unlimited_are_told_apart(tmp_path: Path) -> None:
    pools = {"prefill-workers": "1", "decode-workers": "1", "g3": "unlimited"}
    found = run(tmp_path, [SHORT, LATE], {**TIERS, **pools}, "hand_offs")
    for use in found.report["tiers"]["tiers"]:
        assert (use["capacity_blocks"] is None) == use["tier"].endswith("g3")
