"""Advice on prefill and decode workers: the bottleneck, and the splits, rules and links that fix it, replayed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from understudy.cli import main
from understudy.cli.split_advice import advise_on_split
from understudy.engines.vllm_config import VllmConfig
from understudy.report.goodput import Slo
from understudy.report.report import Report
from understudy.run.disaggregation import Disaggregation
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload.mooncake import read_mooncake

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.report.advice import Advice
    from understudy.workload import Workload

ENGINE = VllmConfig(block_size=16, num_gpu_blocks=2000, max_num_batched_tokens=512, max_num_seqs=16)
LONG, SHORT = 60, 2
"""Blocks of a prompt."""


def make(tmp_path: Path, *lengths: int, output: int, gap_ms: float, requests: int = 60) -> Workload:
    """Requests of these lengths in turn, in blocks, without common prefixes, at random times."""
    draw = random.Random(1)
    lines, now = [], 0.0
    for row in range(requests):
        now += draw.expovariate(1 / gap_ms)
        ids = [row * 1000 + block for block in range(lengths[row % len(lengths)])]
        lengths_text = f'"input_length": {len(ids) * 16}, "output_length": {output}'
        lines.append(f'{{"timestamp": {round(now)}, {lengths_text}, "hash_ids": {ids}}}')
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_mooncake(path, trace_block_size=16)


def replayer(
    workload: Workload, total: int, engine: VllmConfig = ENGINE, slo: Slo | None = None
) -> Callable[[Disaggregation | None], Report]:
    """Replay a workload with a split, or with `total` workers that do all."""

    def replay_with(split: Disaggregation | None) -> Report:
        how: dict[str, Any] = {"workers": total} if split is None else {"disaggregation": split}
        found = run_offline(RunPlan(workload, engine, routing="least_loaded", **how))
        return Report.build(found.timeline, found.facts, slo)

    return replay_with


def advise(replay_with: Callable[[Disaggregation | None], Report], **split: Any) -> Advice:
    """Advise on a split without a limit of time."""
    given = Disaggregation(**({"kv_bytes_per_token": 1000} | split))
    advice = advise_on_split(replay_with(given), given, replay_with, limit_s=1e9)
    assert advice is not None
    return advice


def test_prefill_is_the_bottleneck_and_more_prefill_workers_fix_it(tmp_path: Path) -> None:
    advice = advise(
        replayer(make(tmp_path, LONG, output=2, gap_ms=30.0), 4), prefill_workers=1, decode_workers=3
    )
    first = advice.verdicts[0]
    assert first.rule == "handoff_bottleneck"
    assert first.finding.startswith("Prefill workers are the bottleneck: prefill queue takes ")
    assert "1P+3D → 3P+1D: mean E2E " in first.remedy
    changes = [trial.change for trial in advice.trials]
    assert "--prefill-workers 2 --decode-workers 2" in changes
    assert "--prefill-workers 3 --decode-workers 1" in changes  # further, because 2P+2D helped


def test_decode_is_the_bottleneck_and_more_decode_workers_fix_it(tmp_path: Path) -> None:
    few = VllmConfig(block_size=16, num_gpu_blocks=12, max_num_batched_tokens=512, max_num_seqs=16)
    advice = advise(
        replayer(make(tmp_path, SHORT, output=60, gap_ms=40.0), 4, few), prefill_workers=3, decode_workers=1
    )
    first = advice.verdicts[0]
    assert first.finding.startswith("Decode workers are the bottleneck: decode queue takes ")
    assert "3P+1D → 1P+3D: mean E2E " in first.remedy
    assert first.remedy.count("(replayed)") >= 1


def test_fewer_workers_on_the_side_of_the_bottleneck_are_not_replayed(tmp_path: Path) -> None:
    workload = make(tmp_path, LONG, output=2, gap_ms=12.0)
    advice = advise(replayer(workload, 4), prefill_workers=2, decode_workers=2)
    first = next(verdict for verdict in advice.verdicts if verdict.rule == "handoff_bottleneck")
    assert first.finding.startswith("Prefill workers are the bottleneck: ")
    changes = [trial.change for trial in advice.trials]
    assert "--prefill-workers 3 --decode-workers 1" in changes
    assert "--prefill-workers 1 --decode-workers 3" not in changes
    assert "1P+3D" not in first.remedy


def test_the_link_is_the_bottleneck_and_a_faster_one_fixes_it(tmp_path: Path) -> None:
    advice = advise(
        replayer(make(tmp_path, LONG, output=20, gap_ms=400.0), 4),
        prefill_workers=2,
        decode_workers=2,
        link_gbps=0.002,
    )
    first = advice.verdicts[0]
    assert first.rule == "handoff_link"
    assert first.finding.startswith(
        "The hand-offs' link is the bottleneck: --kv-link-gbps 0.002 (prefill out) is busy "
    )
    assert "--kv-link-gbps 0.004: mean E2E " in first.remedy


def test_a_backend_that_is_the_bottleneck_is_named(tmp_path: Path) -> None:
    advice = advise(
        replayer(make(tmp_path, LONG, output=20, gap_ms=400.0), 4),
        prefill_workers=2,
        decode_workers=2,
        link_gbps=1.0,
        backend_gbps=0.002,
    )
    assert "--kv-link-backend-gbps 0.002 (backend) is busy " in advice.verdicts[0].finding
    assert "--kv-link-backend-gbps 0.004: " in advice.verdicts[0].remedy


def test_failed_hand_offs_are_remedied_by_what_a_replay_shows(tmp_path: Path) -> None:
    workload = make(tmp_path, LONG, output=2, gap_ms=200.0)
    sizes = {"prefill_workers": 2, "decode_workers": 2}
    failing: dict[str, Any] = {**sizes, "transfer_failure_rate": 0.3}
    replay_with = replayer(workload, 4)
    advice = advise(replay_with, **failing)
    [verdict] = [one for one in advice.verdicts if one.rule == "handoff_failures"]
    recomputed = replay_with(
        Disaggregation(kv_bytes_per_token=1000, kv_load_failure_policy="recompute", **failing)
    )
    before = replay_with(Disaggregation(kv_bytes_per_token=1000, **failing))
    assert before.handoff is not None
    assert recomputed.requests.completed == 60 > before.requests.completed
    assert verdict.remedy == (
        f"--kv-load-failure-policy recompute: failed or late hand-offs {before.handoff.failed} → 0 (replayed)."
    )
    advice = advise(replay_with, **failing, kv_load_failure_policy="recompute")
    [verdict] = [one for one in advice.verdicts if one.rule == "handoff_failures"]
    assert verdict.remedy.startswith("Repair the transfers; ")
    advice = advise(replay_with, **sizes, hop_ms=2500.0, lease_s=1)
    [verdict] = [one for one in advice.verdicts if one.rule == "handoff_failures"]
    assert verdict.remedy == "--kv-lease-duration 8: failed or late hand-offs 60 → 0 (replayed)."


def test_a_rule_that_helps_is_named(tmp_path: Path) -> None:
    """Short prompts wait behind long ones for the prefill worker, while decode workers have time."""
    workload = make(tmp_path, LONG, SHORT, SHORT, SHORT, output=2, gap_ms=14.0)
    advice = advise(replayer(workload, 2), prefill_workers=1, decode_workers=1)
    trial = next(trial for trial in advice.trials if trial.change == "--disaggregation uncached:512")
    assert trial.helps
    assert f"--disaggregation uncached:512: mean E2E {trial.before:,.0f} → {trial.after:,.0f} ms" in (
        advice.verdicts[0].remedy
    )


def test_a_rule_that_hands_nothing_off_is_no_remedy(tmp_path: Path) -> None:
    workload = make(tmp_path, LONG, output=2, gap_ms=30.0)
    advice = advise(replayer(workload, 4), prefill_workers=1, decode_workers=3)
    trial = next(trial for trial in advice.trials if trial.change == "--disaggregation uncached:2048")
    assert trial.after < trial.before
    assert not trial.helps


def test_a_fleet_without_roles_is_named_where_it_is_faster(tmp_path: Path) -> None:
    advice = advise(
        replayer(make(tmp_path, LONG, output=2, gap_ms=60.0), 2), prefill_workers=1, decode_workers=1
    )
    assert "2 workers without roles: mean E2E " in advice.verdicts[0].remedy
    assert next(trial for trial in advice.trials if trial.change == "--workers 2").helps


def test_remedies_are_ordered_by_their_effect_and_only_those_that_help_are_named(tmp_path: Path) -> None:
    workload = make(tmp_path, LONG, output=2, gap_ms=30.0)
    advice = advise(replayer(workload, 4, slo=Slo(ttft_ms=100.0)), prefill_workers=2, decode_workers=2)
    helpful = [trial for trial in advice.trials if trial.helps]
    assert len(helpful) < len(advice.trials)
    named = [part.split(": ")[0] for part in advice.verdicts[0].remedy.split(" (replayed).")[:-1]]
    assert [name.lstrip() for name in named] == [
        "4 workers without roles",
        "2P+2D → 4P+2D",
        "2P+2D → 3P+1D",
    ]
    by_flag = {trial.change: trial.after for trial in helpful}
    assert by_flag["--workers 4"] > by_flag["--prefill-workers 3 --decode-workers 1"]


def test_findings_that_share_remedies_name_those_and_no_failure(tmp_path: Path) -> None:
    workload = make(tmp_path, LONG, output=2, gap_ms=30.0)
    replay_with = replayer(workload, 4, slo=Slo(ttft_ms=1000.0))
    advice = advise(replay_with, prefill_workers=1, decode_workers=3, link_gbps=0.016)
    by_rule = {verdict.rule: verdict.remedy for verdict in advice.verdicts}
    assert {"handoff_bottleneck", "handoff_link", "goal_missed"} <= set(by_rule)
    assert "1P+3D → 2P+2D: attainment " in by_rule["handoff_bottleneck"]
    for rule, remedy in by_rule.items():
        assert "(replayed)" in remedy or "help with it too" in remedy, rule
        assert "No replayed change" not in remedy
    shared = "The remedies for the bottleneck, the link and the overload help with it too."
    assert by_rule["goal_missed"] == shared


def test_a_bottleneck_whose_goals_are_met_is_judged_by_latency(tmp_path: Path) -> None:
    workload = make(tmp_path, LONG, output=2, gap_ms=30.0)
    replay_with = replayer(workload, 4, slo=Slo(e2e_ms=1e7))
    advice = advise(replay_with, prefill_workers=1, decode_workers=3)
    [remedy] = (one.remedy for one in advice.verdicts if one.rule == "handoff_bottleneck")
    assert "1P+3D → 3P+1D: mean E2E " in remedy


def test_a_verdict_whose_remedies_all_fail_is_named_with_what_was_replayed(tmp_path: Path) -> None:
    workload = make(tmp_path, LONG, output=2, gap_ms=30.0)
    given = Disaggregation(prefill_workers=1, decode_workers=3)
    report = replayer(workload, 4)(given)
    advice = advise_on_split(report, given, lambda _: report)
    assert advice is not None
    first = advice.verdicts[0]
    assert first.remedy.startswith(
        "No replayed change lowers mean E2E by 5 % or more: --disaggregation uncached:2048 or "
    )


def test_a_split_that_is_too_large_is_named_with_a_smaller_one(tmp_path: Path) -> None:
    workload = make(tmp_path, SHORT, output=4, gap_ms=500.0)
    replay_with = replayer(workload, 8, slo=Slo(ttft_ms=5_000.0))
    advice = advise(replay_with, prefill_workers=4, decode_workers=4)
    first = advice.verdicts[0]
    assert first.finding == "Oversized: 2 workers would do instead of 8."
    assert first.remedy.startswith("--prefill-workers 1 --decode-workers 1: attainment 100.0 % → 100.0 %")


def test_a_fleet_that_is_idle_gets_no_verdict(tmp_path: Path) -> None:
    advice = advise(
        replayer(make(tmp_path, SHORT, output=400, gap_ms=9000.0, requests=25), 2),
        prefill_workers=1,
        decode_workers=1,
    )
    assert not [verdict for verdict in advice.verdicts if verdict.rule.startswith("handoff")]


def test_after_the_limit_no_replay_is_started(tmp_path: Path) -> None:
    replay_with = replayer(make(tmp_path, LONG, output=2, gap_ms=30.0), 4)
    given = Disaggregation(prefill_workers=1, decode_workers=3)
    advice = advise_on_split(replay_with(given), given, replay_with, limit_s=0.0)
    assert advice is not None
    assert not advice.trials
    assert advice.untried == 6


def test_changes_that_a_users_router_cannot_serve_are_no_remedies(tmp_path: Path) -> None:
    given = Disaggregation(prefill_workers=1, decode_workers=3)
    replay_given = replayer(make(tmp_path, LONG, output=2, gap_ms=30.0), 4)

    def replay_with(split: Disaggregation | None) -> Report:
        if split is None or (split.prefill_workers, split.decode_workers) != (1, 3):
            raise ValueError("the router has a place for each of its workers")
        return replay_given(split)

    advice = advise_on_split(replay_given(given), given, replay_with, limit_s=1e9)
    assert advice is not None
    assert all("--prefill-workers" not in trial.change for trial in advice.trials)


@pytest.mark.parametrize("settings", [{}, {"rule": "uncached:100"}])
def test_pools_with_roles_have_no_numbers_to_change(tmp_path: Path, settings: dict[str, Any]) -> None:
    replay_with = replayer(make(tmp_path, SHORT, output=2, gap_ms=30.0), 2)
    report = replay_with(Disaggregation(prefill_workers=1, decode_workers=1))
    assert advise_on_split(report, Disaggregation(**settings), replay_with) is None


def test_a_live_replay_with_roles_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    demo = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"
    flags = ["--online", "--prefill-workers", "1", "--decode-workers", "1"]
    assert main(["replay", str(demo), *flags]) == 2
    assert "understudy fleet --disaggregate" in capsys.readouterr().err


def test_remedies_keep_the_tiers_of_the_run(tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"
    flags = ["--num-gpu-blocks", "480", "--num-g2-blocks", "20000", "--kv-bytes-per-token", "131072"]
    flags += ["--block-size", "64", "--max-num-batched-tokens", "8192"]
    split, plain = tmp_path / "split.json", tmp_path / "plain.json"
    roles = ["--prefill-workers", "1", "--decode-workers", "1"]
    assert main(["replay", str(demo), *flags, *roles, "--json", str(split), "--quiet"]) == 0
    assert main(["replay", str(demo), *flags, "--workers", "2", "--json", str(plain), "--quiet"]) == 0
    mean_ms = json.loads(plain.read_text(encoding="utf-8"))["e2e_ms"]["mean"]
    assert f"{mean_ms:,.0f} ms" in split.read_text(encoding="utf-8")
