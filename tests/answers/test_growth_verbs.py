"""Growth means users in every verb: each agrees with a replay of the trace that an independent program copied."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import understudy as us
from answers.growth_rows import SIZE, agent_rows, grow, users_by_session, write
from understudy.cli import main
from understudy.errors import ConfigError
from understudy.workload import ClosedLoop, read_mooncake

if TYPE_CHECKING:
    from pathlib import Path


def test_more_users_lower_the_hit_ratio_of_a_small_cache_and_faster_users_do_not(tmp_path: Path) -> None:
    trace = str(write(tmp_path / "agent.jsonl", agent_rows()))

    def hit_ratio(*flags: str) -> float:
        path = tmp_path / "report.json"
        fixed = [
            "--trace-block-size",
            "16",
            "--block-size",
            "16",
            "--num-gpu-blocks",
            "800",
            "--no-advice",
            "--quiet",
        ]
        assert main(["replay", trace, *fixed, *flags, "--json", str(path)]) == 0
        return float(json.loads(path.read_text())["prefix_hit_ratio"]["first_admission"])

    once, faster, doubled = hit_ratio(), hit_ratio("--arrival-rate-scale", "2"), hit_ratio("--users", "2")
    assert once > 0.8
    assert faster > once - 0.1
    assert doubled < once - 0.3


def test_sweep_replay_and_cache_agree_on_users(tmp_path: Path) -> None:
    rows = agent_rows(10)
    trace = str(write(tmp_path / "agent.jsonl", rows))
    copied = str(write(tmp_path / "copied.jsonl", grow(rows, users_by_session(rows), 2)))
    fixed = ["--trace-block-size", "16", "--num-gpu-blocks", "400"]
    out = tmp_path / "out.json"

    def result(verb: str, path: str, *flags: str) -> dict[str, Any]:
        assert main([verb, path, *fixed, *flags, "--quiet", "--json", str(out)]) == 0
        read: dict[str, Any] = json.loads(out.read_text())
        return read

    swept = result(
        "sweep", trace, "--vary", "users=1,2", "workers=1,2", "--slo-ttft-ms", "1000", "--jobs", "1"
    )
    assert [answer["load"] for answer in swept["answers"]] == [{"users": 1}, {"users": 2}]
    for trial in swept["trials"]:
        path = trace if trial["flags"]["users"] == 1 else copied
        replayed = result("replay", path, "--workers", str(trial["flags"]["workers"]), "--no-advice")
        assert trial["digest"] == replayed["run"]["digest"]
        assert trial["requests"] == len(rows) * trial["flags"]["users"]
    grown = result("replay", trace, "--users", "2", "--no-advice")
    assert grown["run"]["users"] == 2
    assert "users" not in replayed["run"] or replayed["run"]["users"] == 1
    lru = ["--policies", "lru,optimal"]  # others break ties by the ids, which the copied file numbers anew
    curve, expected = result("cache", trace, *lru, "--users", "2"), result("cache", copied, *lru)
    for name in ("unlimited_hit_ratio", "rows", "curves", "replays"):
        if name in expected:
            assert curve[name] == expected[name]


def test_live_workers_get_the_requests_of_all_users(tmp_path: Path) -> None:
    rows = [
        {
            "session_id": f"s{at}",
            "timestamp": at * 20,
            "input_length": SIZE,
            "output_length": 2,
            "hash_ids": [at],
        }
        for at in range(4)
    ]
    out = tmp_path / "out.json"
    trace = str(write(tmp_path / "trace.jsonl", rows))
    flags = ["--trace-block-size", "16", "--online", "--users", "3", "--quiet", "--json", str(out)]
    assert main(["replay", trace, *flags]) == 0
    report = json.loads(out.read_text())
    assert report["requests"]["total"] == 12
    assert report["run"]["users"] == 3


def test_events_are_those_of_all_users(tmp_path: Path) -> None:
    rows = agent_rows(4)
    trace = str(write(tmp_path / "trace.jsonl", rows))
    copied = str(write(tmp_path / "copied.jsonl", grow(rows, users_by_session(rows), 2)))
    sizes = []
    for path, flags in ((trace, ["--users", "2"]), (copied, []), (trace, [])):
        out = tmp_path / "events.jsonl"
        assert main(["events", "emit", path, "--trace-block-size", "16", *flags, "--out", str(out)]) == 0
        sizes.append(len(out.read_text().splitlines()))
    assert sizes[0] == sizes[1] > sizes[2]


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_a_number_of_users_that_is_not_finite_and_positive_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    trace = str(write(tmp_path / "trace.jsonl", agent_rows(2)))
    assert main(["replay", trace, f"--users={value}"]) == 2
    assert "--users must be a finite number above 0" in capsys.readouterr().err


def test_two_numbers_of_users_are_never_compared_as_one_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(write(tmp_path / "trace.jsonl", agent_rows(3)))
    paths = [str(tmp_path / f"{users}.json") for users in (1, 2)]
    for users, path in zip("12", paths, strict=True):
        fixed = ["--trace-block-size", "16", "--no-advice", "--quiet"]
        assert main(["replay", trace, *fixed, "--users", users, "--json", path]) == 0
    assert main(["compare", *paths]) == 2
    said = capsys.readouterr().err
    assert "users: 2 replayed 2 times the users of its trace, 1 the users of its trace" in said
    assert "the same --users" in said
    assert "--accept-different-workloads" in said
    assert main(["compare", *paths, "--accept-different-workloads"]) == 0
    shown = capsys.readouterr().out
    assert any(line.split()[:1] == ["users"] for line in shown.splitlines())
    assert "2 times the users: 6 in place of 3 sessions" in " ".join(shown.split())


def test_a_closed_loop_refuses_users_and_names_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = agent_rows(2)
    trace = str(write(tmp_path / "trace.jsonl", rows))
    for flags in (["--users", "2"], ["--set", "users=2"]):
        assert main(["replay", trace, "--concurrency", "3", *flags]) == 2
        error = capsys.readouterr().err
        assert "contradicts --concurrency" in error or "contradicts concurrency" in error
        assert "larger" in error
    with pytest.raises(ConfigError, match="users=2 contradicts concurrency"):
        us.replay(read_mooncake(trace, trace_block_size=SIZE), users=2, load=ClosedLoop(3))


def test_a_sweep_says_which_kind_of_load_it_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(write(tmp_path / "trace.jsonl", agent_rows(3)))
    fixed = [
        "sweep",
        trace,
        "--trace-block-size",
        "16",
        "--slo-ttft-ms",
        "1000",
        "--jobs",
        "1",
        "--vary",
        "workers=1",
    ]
    assert main([*fixed, "users=2"]) == 0
    assert "users=2 (2 times the users, each as fast)" in capsys.readouterr().out
    assert main([*fixed, "arrival-rate-scale=2"]) == 0
    assert "(the same users, 2 times as fast; for growth vary users)" in capsys.readouterr().out
    assert main([*fixed, "users=1"]) == 0
    assert "users=1 (those of the trace)" in capsys.readouterr().out
    assert main([*fixed, "--users", "2"]) == 0
    assert "load: 2 times the users of the trace" in capsys.readouterr().out
