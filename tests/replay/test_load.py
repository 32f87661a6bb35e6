"""Load against an endpoint that answers at once: order, counts, the knee, and files that calibrate reads."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import understudy as us
from replay.test_endpoint import endpoint
from test_schemas import check
from understudy.cli import main
from understudy.cli.load import _is_open
from understudy.errors import ConfigError
from understudy.online.completions import Completions, Endpoint
from understudy.online.knee import MOST_LOADS, find_knee
from understudy.online.load import draw_requests, run_load
from understudy.online.load_result import LoadResult
from understudy.report import Slo
from understudy.workload import Workload, synthesise
from understudy.workload.distributions import Fixed
from understudy.workload.synthetic import SyntheticSpec

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]


def load(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["load", *words]) == 0
    return capsys.readouterr().out


def test_an_open_loop_sends_every_request_with_its_lengths_and_counts_what_the_endpoint_reports() -> None:
    workload = draw_requests(64, 8, 20, rate=500, least=0.5, seed=1)
    with endpoint() as (url, asked):
        found = run_load(Endpoint(url=url, model="m"), workload)
    assert sorted(len(one["prompt"]) for one in asked) == sorted(workload.prompt_tokens.tolist())
    assert found.prompt_tokens.tolist() == workload.prompt_tokens.tolist()
    assert found.output_tokens.tolist() == workload.output_tokens.tolist()
    assert (found.arrival_ns >= workload.arrival_ns).all()
    assert found.due_ns.tolist() == workload.arrival_ns.tolist()
    result = LoadResult.of(workload, found, "500 requests/s", 500.0, Slo(ttft_ms=60_000))
    assert (result.requests, result.failed, result.reported, result.in_time) == (20, 0, 20, 1.0)
    assert result.output_tokens == int(workload.output_tokens.sum())


def test_users_send_their_next_request_after_their_answer() -> None:
    workload = draw_requests(32, 4, 9, rate=None, least=1.0, seed=0)
    with endpoint() as (url, _):
        found = run_load(Endpoint(url=url, model="m"), workload, users=2)
    begins, ends = found.arrival_ns, found.finish_ns
    at_once = [int(((begins <= time) & (ends > time)).sum()) for time in begins]
    assert max(at_once) <= 2


def test_turns_follow_the_turn_before_and_its_delay() -> None:
    spec = SyntheticSpec(
        sessions=2,
        prompt_tokens=Fixed(20),
        output_tokens=Fixed(3),
        turns=Fixed(2),
        followup_tokens=Fixed(5),
        think_time_ms=Fixed(4),
        trace_block_size=16,
    )
    workload = synthesise(spec)
    with endpoint() as (url, _):
        found = run_load(Endpoint(url=url, model="m"), workload)
    for row in np.flatnonzero(workload.turn == 1).tolist():
        assert found.arrival_ns[row] >= found.finish_ns[row - 1] + 4_000_000


def test_prompts_of_different_loads_differ() -> None:
    one, other = (draw_requests(64, 8, 5, rate=None, least=1.0, seed=0, run=run) for run in (0, 1))
    assert one.prompt_tokens.tolist() == other.prompt_tokens.tolist()
    assert not set(one.hash_ids.tolist()) & set(other.hash_ids.tolist())


def test_chat_endpoints_get_words_and_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = draw_requests(16, 2, 1, rate=None, least=1.0, seed=0)
    with endpoint() as (url, asked):
        # This server counts characters of `prompt`, which a chat has not.
        found = run_load(
            Endpoint(url=url, model="m", chat=True, ignore_eos=False, api_key="k"), workload, users=1
        )
    assert "prompt" not in asked[0]
    assert len(asked[0]["messages"][0]["content"].split()) == 16
    assert "ignore_eos" not in asked[0]
    assert found.errors or found.finish_ns[0] >= 0


def a_result(level: float, capacity: float) -> LoadResult:
    """Return what an endpoint with this capacity would show: a queue that grows above it."""
    late = 50.0 if level <= capacity else 50.0 * (1 + 10 * (level / capacity - 1) + 2)
    nothing: Any = None
    return LoadResult(
        label=f"{level:g}", level=level, requests=10, failed=0, first_error=None, duration_s=1.0, ttft_ms=nothing,
        tpot_ms=nothing, e2e_ms=nothing, late_ms=nothing, prompt_tokens=0, output_tokens=0, cached_tokens=None,
        reported=10, in_time=None, early_ttft_ms=50.0, late_ttft_ms=late, rows=[],
    )  # fmt: skip


@pytest.mark.parametrize("capacity", [1.0, 3.3, 37.0, 500.0])
def test_the_knee_is_found_between_the_last_load_served_and_the_first_that_is_not(capacity: float) -> None:
    knee, results = find_knee(lambda level: a_result(level, capacity), 1.0, 0.99)
    assert knee is not None
    assert capacity / 1.16 <= knee <= capacity
    assert len(results) <= MOST_LOADS


def test_a_knee_below_the_first_load_is_said_and_whole_users_stay_whole() -> None:
    knee, results = find_knee(lambda level: a_result(level, 0.5), 1.0, 0.99)
    assert (knee, len(results)) == (None, 1)
    knee, results = find_knee(lambda level: a_result(level, 11), 1.0, 0.99, whole=True)
    assert knee in (10.0, 11.0)
    assert all(one.level == int(one.level or 0) for one in results)


def test_the_verb_writes_files_that_calibrate_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, told = tmp_path / "bench.jsonl", tmp_path / "load.json"
    with endpoint() as (url, _):
        words = [url, "--model", "m", "--rate", "200,400", "--isl", "64", "--osl", "8", "--num-prompts", "10"]
        said = load([*words, "--requests-jsonl", str(rows), "--json", str(told)], capsys)
    assert "200 requests/s" in said
    assert "400 requests/s" in said
    content = json.loads(told.read_text())
    check("load", content)
    assert [one["requests"] for one in content["loads"]] == [10, 10]
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(lines) == 10
    found = us.calibrate(rows, model="Llama-3.1-8B", gpu="H100")
    assert found.scores[0].requests == 10


def test_a_trace_is_sent_at_its_times_or_from_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"input_length": 20, "output_length": 2, "hash_ids": [1]}
    trace.write_text("".join(json.dumps({**row, "timestamp": at}) + "\n" for at in (0, 5, 9)))
    with endpoint() as (url, asked):
        assert "trace " in load([url, str(trace), "--model", "m", "--arrival-rate-scale", "2"], capsys)
        assert "2 users " in load([url, str(trace), "--model", "m", "--users", "2"], capsys)
    assert len(asked) == 6


def test_failures_are_counted_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    with endpoint(503) as (url, _):
        assert (
            main(
                [
                    "load",
                    url,
                    "--model",
                    "m",
                    "--users",
                    "1",
                    "--isl",
                    "16",
                    "--osl",
                    "1",
                    "--num-prompts",
                    "2",
                ]
            )
            == 2
        )
    assert "no request was answered (503: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--rate, --users, TRACE: no load is described"),
        (["--rate", "1"], "--isl: missing"),
        (["--rate", "1", "--users", "1"], "--rate and --users are two loads"),
        (["--rate", "fast", "--isl", "1", "--osl", "1"], "'fast' is not a list of numbers"),
        (["--users", "0", "--isl", "1", "--osl", "1"], "'0' is not a list of numbers"),
        (["--users", "1", "--isl", "1", "--osl", "1", "--first", "2"], "--first is for"),
        (["--rate", "1", "--isl", "1", "--osl", "1", "--num-prompts", "0"], "--num-prompts must be"),
        (["--users", "knee", "--isl", "1", "--osl", "1", "--first", "1.5"], "--first must be whole users"),
        (["--users", "1", "--isl", "1", "--osl", "1", "--timeout-s", "inf"], "timeout"),
    ],
)
def test_flags_that_contradict_are_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", "http://127.0.0.1:1", "--model", "m", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_trace_has_its_own_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "http://127.0.0.1:1", "trace.jsonl", "--model", "m", "--rate", "1"]) == 2
    assert "--rate: TRACE has its own requests" in capsys.readouterr().err


def test_what_cannot_be_sent_is_refused() -> None:
    make: Callable[..., Workload] = draw_requests
    with pytest.raises(ConfigError, match="the trace has no times"):
        run_load(Endpoint(url="http://h", model="m"), make(9, 1, 1, rate=None, least=1.0, seed=0))
    with pytest.raises(ConfigError, match="url must begin with http"):
        Endpoint(url="h:1", model="m")


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:abc", "http://[::1"])
def test_a_url_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        Endpoint(url=url, model="m")


def test_a_key_that_no_header_carries_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError, match="API key") as refused:
        Endpoint(url="http://h", model="m", api_key="secret\nsecret")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "chunk",
    [
        b"null",
        b'{"choices": [null]}',
        b'{"choices": [{"delta": "x"}]}',
        b'"\xff"',
        b'{"choices": [], "usage": {"prompt_tokens": null, "completion_tokens": 99999999999, "extra": {}}}',
        b'{"choices": [], "error": null}',
    ],
)
def test_a_stream_of_anything_fails_its_own_request_at_most(chunk: bytes) -> None:
    workload = draw_requests(16, 2, 1, rate=None, least=1.0, seed=0)
    client = Completions(Endpoint(url="http://h", model="m"), workload, ThreadPoolExecutor(1))
    try:
        client._read_chunk(0, chunk)
    except (ValueError, TypeError, AttributeError):
        return  # `_request` names it as this request's error
    found = client.result()
    assert (found.prompt_tokens[0], found.output_tokens[0], found.errors) == (-1, -1, {})


def test_a_knee_above_all_loads_is_open() -> None:
    results = [a_result(1.0, 100.0), a_result(2.0, 100.0)]
    assert _is_open(2.0, results)
    assert not _is_open(1.0, results)
    assert not _is_open(None, results)
