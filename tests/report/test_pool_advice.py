"""Verdicts try their remedies for fleets of pools too: one pool at a time, and for each by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from understudy.cli import main

TRACE = str(Path(__file__).parents[2] / "examples" / "demo_trace.jsonl")
SMALL = {"num_gpu_blocks": 512, "block_size": 64}
LARGE = {"num_gpu_blocks": 2048, "block_size": 64, "max_num_batched_tokens": 8192}


def replayed(tmp_path: Path, settings: dict[str, Any], *flags: str) -> dict[str, Any]:
    """The saved report of a replay with these settings."""
    config, saved = tmp_path / "fleet.yaml", tmp_path / "report.json"
    config.write_text(yaml.safe_dump(settings))
    argv = ["replay", TRACE, "--config", str(config), "--json", str(saved), "--quiet", *flags]
    assert main(argv) == 0
    content: dict[str, Any] = json.loads(saved.read_text())
    return content


def pool(name: str, workers: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "workers": workers, "engine": SMALL, **more}


def test_a_remedy_names_its_pool_and_equals_a_replay_of_the_changed_file(tmp_path: Path) -> None:
    goal = ("--slo-ttft-ms", "500")
    found = replayed(tmp_path, {"pools": [pool("fast", 1), pool("slow", 1)]}, *goal)
    trials = {one["change"]: one for one in found["advice"]["trials"]}
    assert {f"workers {n} in pool {name}" for n in (2, 4) for name in ("fast", "slow")} <= set(trials)
    changed = replayed(tmp_path, {"pools": [pool("fast", 1), pool("slow", 4)]}, *goal, "--no-advice")
    trial = trials["workers 4 in pool slow"]
    assert trial["after"] == changed["goodput"]["ratio"]
    assert trial["helps"]
    remedies = " ".join(verdict["remedy"] for verdict in found["verdicts"])
    assert f"workers 4 in pool slow: attainment {100 * trial['before']:.1f} % → " in remedies


def test_settings_of_an_engine_change_in_one_pool_under_its_own_names(tmp_path: Path) -> None:
    sglang = {"engine_type": "sglang", "page_size": 64, "max_total_tokens": 32_768}
    pools = [pool("one", 1), {"name": "two", "workers": 1, "engine": sglang}]
    found = replayed(tmp_path, {"pools": pools}, "--slo-ttft-ms", "300", "--slo-itl-ms", "5")
    changes = {one["change"] for one in found["advice"]["trials"]}
    assert "num_gpu_blocks 1024 in pool one" in changes
    assert "max_total_tokens 65536 in pool two" in changes
    assert "max_num_seqs 128 in pool one" in changes
    assert any(one.startswith("--routing ") for one in changes)


def test_a_pool_that_is_not_needed_is_named(tmp_path: Path) -> None:
    pools = [{"name": name, "workers": 2, "engine": {"num_gpu_blocks": 8192}} for name in ("old", "new")]
    found = replayed(tmp_path, {"pools": pools}, "--slo-e2e-ms", "10000000")
    [verdict] = [one for one in found["verdicts"] if one["rule"] == "oversized"]
    assert verdict["finding"] == "Oversized: 2 workers would do instead of 4."
    assert verdict["remedy"] == "without pool old: attainment 100.0 % → 100.0 % (replayed)."


def test_pools_with_roles_keep_one_of_each_and_try_other_splits(tmp_path: Path) -> None:
    engine = {"num_gpu_blocks": 2048}
    pools: list[dict[str, Any]] = [
        {"name": "front", "role": "prefill", "workers": 1, "engine": engine},
        {"name": "back", "role": "decode", "workers": 3, "engine": engine},
    ]
    goal = ("--slo-ttft-ms", "200", "--arrival-rate-scale", "4")
    found = replayed(tmp_path, {"pools": pools, "disaggregation": {}}, *goal)
    changes = {one["change"]: one for one in found["advice"]["trials"]}
    assert "workers 2 in pool front" in changes
    split = changes["workers 2 in pool back, 2 in front"]
    assert "workers 4 in pool back, 0 in front" not in changes
    pools[0]["workers"] = pools[1]["workers"] = 2
    changed = replayed(tmp_path, {"pools": pools, "disaggregation": {}}, *goal, "--no-advice")
    assert split["after"] == changed["goodput"]["ratio"]
    calm = replayed(tmp_path, {"pools": pools, "disaggregation": {}}, "--slo-e2e-ms", "10000000")
    assert not any("without pool" in one["change"] for one in calm["advice"]["trials"])


def test_workers_move_only_to_the_side_of_the_bottleneck(tmp_path: Path) -> None:
    pools = [
        {"name": name, "role": role, "workers": 2, "engine": LARGE}
        for name, role in (("front", "prefill"), ("back", "decode"))
    ]
    flags = ("--slo-ttft-ms", "200", "--arrival-rate-scale", "8")
    found = replayed(tmp_path, {"pools": pools, "disaggregation": {}}, *flags)
    assert "decode workers' steps are the bottleneck" in "".join(one["finding"] for one in found["verdicts"])
    changes = {one["change"] for one in found["advice"]["trials"]}
    assert "workers 1 in pool back, 3 in front" not in changes
    assert "workers 1 in pool front, 3 in back" in changes


def test_failed_hand_offs_between_pools_are_remedied_by_what_a_replay_shows(tmp_path: Path) -> None:
    pools = [
        {"name": role, "role": role, "workers": 2, "engine": {"num_gpu_blocks": 2048}}
        for role in ("prefill", "decode")
    ]
    found = replayed(tmp_path, {"pools": pools, "disaggregation": {"transfer_failure_rate": 0.3}})
    [verdict] = [one for one in found["verdicts"] if one["rule"] == "handoff_failures"]
    count = verdict["finding"].split()[0]
    assert (
        verdict["remedy"]
        == f"--kv-load-failure-policy recompute: failed or late hand-offs {count} → 0 (replayed)."
    )


@pytest.mark.parametrize("flag", ["--no-advice", "--digest"])
def test_no_remedy_is_replayed_if_it_is_not_wanted(flag: str, tmp_path: Path) -> None:
    config, saved = tmp_path / "fleet.yaml", tmp_path / "report.json"
    config.write_text(yaml.safe_dump({"pools": [pool("fast", 1), pool("slow", 1)]}))
    assert main(["replay", TRACE, "--config", str(config), "--json", str(saved), "--quiet", flag]) == 0
    assert "advice" not in json.loads(saved.read_text())
