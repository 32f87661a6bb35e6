"""Benchmarks that cannot be fitted: each is refused with its file, the key and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from calibrate import files
from understudy.calibrate.readers import read_benchmarks
from understudy.errors import InvalidArgument
from understudy.timing.presets import preset

if TYPE_CHECKING:
    from collections.abc import Callable

START = preset(files.DEPLOYMENT.model, files.DEPLOYMENT.gpu, "bf16", "bf16").efficiencies


def change_vllm(tmp_path: Path, **changes: Any) -> Path:
    load = files.open_load(5)
    path = files.vllm_detailed(tmp_path / "bench.json", load, files.measure(load, START))
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))
    return path


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"failed": 2}, "failed=2: failed requests put an unknown load .* repeat the benchmark"),
        ({"errors": ["", "timeout", "", "", ""]}, "failed=1"),
        ({"output_lens": [5]}, "output_lens has 1 entries for 5 requests; the file is truncated"),
        ({"input_lens": [0, 1, 1, 1, 1]}, r"input_lens\[0\] must be at least 1, got 0"),
        ({"start_times": ..., "max_concurrency": None}, "start_times are missing"),
        ({"ttfts": [-1, 1, 1, 1, 1]}, r"ttfts\[0\] must be at least 0"),
        ({"ttfts": [9000.0, 1, 1, 1, 1]}, "must be seconds, not ms"),
        ({"start_times": [0, 1, 2, 3, 1e9]}, "more than a week; check its unit"),
        ({"input_lens": ...}, "input_lens is missing, but output_lens are present.* --save-detailed"),
        ({"ttfts": ..., "itls": ...}, "ttfts, itls are missing, but input_lens are present"),
        (
            {"ttfts": ..., "itls": ..., "mean_ttft_ms": ..., "total_input_tokens": ...},
            "ttfts, itls are missing",
        ),
        ({"itls": None}, "itls is missing"),
        ({"itls": [None] * 5}, "itls must have a list for each of 5 requests"),
        ({"itls": [[0.1, -0.2]] * 5}, r"itls\[0\]\[1\] must be at least 0, got -0.2"),
        ({"output_lens": [5, 5, 0, 5, 5]}, r"output_lens\[2\] must be at least 1, got 0"),
        ({"completed": 9}, "completed=9, but input_lens has 5 entries; the file is truncated"),
        (
            {"mean_ttft_ms": 0.02},
            r"mean_ttft_ms is 0\.02, and its list has a mean of .* units or files are mixed",
        ),
    ],
)
def test_a_bad_result_of_vllm_is_refused_with_key_and_remedy(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidArgument, match=match):
        read_benchmarks(change_vllm(tmp_path, **changes))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "is empty"),
        ('{"model_id": "x", "total_in', "may be truncated"),
        ('{"total_input_tokens": 5, "completed": 1}', "total_output_tokens is missing"),
        ('{"colour": "blue"}', r"not a known benchmark format \(its keys: colour\)"),
        ("[1, 2]", "must be a JSON object"),
        ('{"ttft_ms": {}, "run": {}}', "--requests-jsonl"),
        ('{"total_input_tokens": 5, "mean_ttft_ms": 1, "completed": 0}', "completed must be at least 1"),
        (
            '{"total_input_tokens": 5, "total_output_tokens": 5, "completed": 1, "mean_ttft_ms": 1, "mean_tpot_ms": 1}',
            "request_rate is missing",
        ),
        ('{"benchmarks": []}', "benchmarks is empty"),
        (
            '{"benchmarks": [{"requests": {"successful": [{"prompt_tokens": 5, "output_tokens": 5}]}}]}',
            "request_start is missing",
        ),
        ('{"input_config": {}, "time_to_first_token": {"unit": "ms", "avg": 1}}', "no concurrency"),
    ],
)
def test_a_file_without_lengths_or_arrivals_or_of_no_known_format_is_refused(
    tmp_path: Path, content: str, match: str
) -> None:
    path = tmp_path / "bench.json"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=match):
        read_benchmarks(path)


def test_a_log_of_lengths_alone_is_told_which_times_it_lacks() -> None:
    log = Path(__file__).parents[2] / "examples" / "logs" / "vllm_bench.json"
    with pytest.raises(InvalidArgument, match=r"vllm_bench\.json: ttfts, itls are missing, but input_lens"):
        read_benchmarks(log)


def test_records_of_aiperf_with_mixed_units_cancelled_requests_or_a_clock_that_runs_backwards(
    tmp_path: Path,
) -> None:
    load = files.open_load(3)
    path = files.aiperf_records(tmp_path / "p.jsonl", load, files.measure(load, START))
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    def refused(match: str, **metadata: Any) -> None:
        changed = json.loads(json.dumps(lines))
        changed[1]["metadata"].update(metadata)
        path.write_text("".join(json.dumps(line) + "\n" for line in changed))
        with pytest.raises(InvalidArgument, match=match):
            read_benchmarks(path)

    refused("was cancelled or failed", was_cancelled=True)
    refused("clock ran backwards", request_end_ns=5)
    lines[1]["metrics"]["time_to_first_token"]["unit"] = "fortnights"
    refused("unit 'fortnights' is not known")
    path.write_text(path.read_text() + '{"metadata": {')
    with pytest.raises(InvalidArgument, match="truncated"):
        read_benchmarks(path)


def test_requests_of_guidellm_that_failed_are_refused_and_those_cut_off_at_the_end_are_told(
    tmp_path: Path,
) -> None:
    load = files.open_load(3)
    path = files.guidellm(tmp_path / "bench.json", load, files.measure(load, START))
    content = json.loads(path.read_text())
    groups = content["benchmarks"][0]["requests"]
    groups["incomplete"] = [{"prompt_tokens": 5}]
    path.write_text(json.dumps(content))
    [found] = read_benchmarks(path)
    assert found.notes[0].startswith("1 requests were incomplete when the benchmark ended")
    groups["errored"] = [{"prompt_tokens": 5}]
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidArgument, match=r"bench\.json.*errored has 1 requests.*repeat"):
        read_benchmarks(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"output_tokens": 0}, r"requests\.jsonl:2: output_tokens must be at least 1"),
        ({"prompt_tokens": 0}, r"requests\.jsonl:2: prompt_tokens must be at least 1"),
        ({"status": "rejected"}, r"requests\.jsonl:2: status is 'rejected'"),
        ({"e2e_ms": 0.001}, "clock ran backwards or units are mixed"),
        ({"ttft_ms": "12 ms"}, r"requests\.jsonl:2: ttft_ms must be a number"),
    ],
)
def test_a_bad_line_of_our_own_is_refused(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    load = files.open_load(3)
    path = files.own_requests(tmp_path / "requests.jsonl", load, files.measure(load, START))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1].update(change)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InvalidArgument, match=match):
        read_benchmarks(path)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ("0,100,8,30,8", r"rows\.csv:2: isl must be at least"),
        ("800,100,0.5,30,8", r"rows\.csv:2: conc must be a whole number of at least 1, got 0.5"),
        ("800,100,8,30,nan", r"rows\.csv:2: mean_tpot_ms must be a number"),
        ("800,100,eight,30,8", r"rows\.csv:2: conc must be a number, got 'eight'"),
        ("800,100,8,30,", r"rows\.csv:2: mean_tpot_ms or tpot_ms is missing"),
    ],
)
def test_a_bad_row_of_summaries_is_refused(tmp_path: Path, row: str, match: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"isl,osl,conc,mean_ttft_ms,mean_tpot_ms\n{row}\n")
    with pytest.raises(InvalidArgument, match=match):
        read_benchmarks(path)


@pytest.mark.parametrize(
    "writer", [files.vllm_detailed, files.aiperf_records, files.guidellm, files.own_requests]
)
def test_every_format_is_refused_where_it_is_cut_off(writer: Callable[..., Path], tmp_path: Path) -> None:
    load = files.open_load(4)
    path = writer(tmp_path / "bench.jsonl", load, files.measure(load, START))
    whole = path.read_text()
    for keep in (0.3, 0.6, 0.9):
        path.write_text(whole[: int(len(whole) * keep)])
        with pytest.raises(InvalidArgument, match=r"bench\.jsonl.*truncated"):
            read_benchmarks(path)


@pytest.mark.parametrize(
    ("part", "key", "value", "match"),
    [
        (
            "metrics",
            "input_sequence_length",
            {"value": 0, "unit": "tokens"},
            r"p\.jsonl:2: .* must be at least 1",
        ),
        (
            "metrics",
            "output_sequence_length",
            {"value": 0, "unit": "tokens"},
            r"p\.jsonl:2: .* must be at least 1",
        ),
        (
            "metrics",
            "request_latency",
            {"value": 1e9, "unit": "s"},
            r"p\.jsonl:2: metrics.request_latency .* mixed",
        ),
        (
            "metrics",
            "time_to_first_token",
            {"value": 1e9, "unit": "ms"},
            "clock ran backwards or units are mixed",
        ),
        ("metrics", "time_to_first_token", {"value": -1, "unit": "ms"}, "must be at least 0"),
        ("metrics", "input_sequence_length", None, r"p\.jsonl:2: .*input_sequence_length is missing"),
        ("metadata", "request_start_ns", None, r"p\.jsonl:2: .*request_start_ns is missing"),
        ("metadata", "request_end_ns", 1, "request_end_ns is before request_start_ns"),
    ],
)
def test_a_bad_record_of_aiperf_is_refused(
    tmp_path: Path, part: str, key: str, value: Any, match: str
) -> None:
    load = files.open_load(3)
    path = files.aiperf_records(tmp_path / "p.jsonl", load, files.measure(load, START))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1][part][key] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InvalidArgument, match=match):
        read_benchmarks(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prompt_tokens": 0}, r"successful\[1\]: prompt_tokens must be at least 1, got 0"),
        ({"output_tokens": 0}, r"successful\[1\]: output_tokens must be at least 1, got 0"),
        ({"output_tokens": None}, "output_tokens is missing"),
        ({"request_latency": 1e-6}, "clock ran backwards or units are mixed"),
        ({"time_to_first_token_ms": -5}, "time_to_first_token_ms must be at least 0"),
        ({"request_start_time": "noon"}, "request_start_time must be a number"),
        ({"request_start_time": 1.7e12}, "spans .* more than a week; check its unit"),
    ],
)
def test_a_bad_request_of_guidellm_is_refused(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    load = files.open_load(3)
    path = files.guidellm(tmp_path / "bench.json", load, files.measure(load, START))
    content = json.loads(path.read_text())
    content["benchmarks"][0]["requests"]["successful"][1].update(change)
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidArgument, match=match):
        read_benchmarks(path)


def test_times_of_guidellm_that_contradict_its_stamps_are_refused(tmp_path: Path) -> None:
    load = files.open_load(3)
    path = files.guidellm(tmp_path / "bench.json", load, files.measure(load, START))
    content = json.loads(path.read_text())
    row = content["benchmarks"][0]["requests"]["successful"][2]
    start, seconds = row["request_start_time"], row["time_to_first_token_ms"] / 1e3
    row["info"]["timings"]["first_token_iteration"] = start + seconds
    path.write_text(json.dumps(content))
    assert len(read_benchmarks(path)) == 1
    row["time_to_first_token_ms"] = seconds
    path.write_text(json.dumps(content))
    with pytest.raises(
        InvalidArgument, match=r"successful\[2\]: time_to_first_token_ms is .* units or files are mixed"
    ):
        read_benchmarks(path)
