from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from report.building import Row, crowd, timeline
from understudy.errors import InvalidArgument
from understudy.report import METRICS, PERCENTILE_METHOD, Report, Slo, Statistics
from understudy.run.facts import RunFacts
from understudy.run.timeline import Status

if TYPE_CHECKING:
    from pathlib import Path


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=refuse)


REPORTS = {
    "a crowd": Report.build(crowd(300), RunFacts(workload="crowd", engine={"x": math.nan}), Slo(ttft_ms=500)),
    "nobody": Report.build(timeline()),
    "all rejected": Report.build(
        timeline(Row(status=Status.REJECTED, worker=-1), reject_reasons={0: "too long"})
    ),
    "no output": Report.build(timeline(Row(finish_ms=5)), slo=Slo(itl_ms=1)),
}


@pytest.mark.parametrize("name", REPORTS)
def test_json_round_trips_without_nan(name: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    REPORTS[name].to_json(path)
    assert strict(path.read_text()) == REPORTS[name].to_dict()


def test_json_says_what_the_report_says() -> None:
    report = REPORTS["a crowd"]
    data = report.to_dict()
    assert data["ttft_ms"]["p99"] == report.ttft_ms.p99
    assert data["throughput"]["output_tokens_per_s"] == report.throughput.output_tokens_per_s
    assert data["goodput"]["slo"] == {"ttft_ms": 500, "itl_ms": None, "e2e_ms": None}
    assert data["percentile_method"] == PERCENTILE_METHOD
    assert data["run"] == {"workload": "crowd", "engine": {"x": None}}
    assert REPORTS["nobody"].to_dict()["goodput"] is None
    assert REPORTS["nobody"].to_dict()["ttft_ms"]["mean"] is None


def leaves(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict) and "p99" not in value:
        return [
            leaf for key, item in value.items() for leaf in leaves(item, f"{path}.{key}" if path else key)
        ]
    return [path]


def test_every_number_is_defined_and_every_definition_has_its_number() -> None:
    report = REPORTS["a crowd"]
    data = report.to_dict()
    definitions = data.pop("definitions")
    for key in ("schema", "run", "percentile_method", "groups", "verdicts"):
        del data[key]
    del data["goodput"]["slo"]
    assert sorted(leaves(data)) == sorted(definitions)
    for metric in METRICS:
        value: Any = report
        for name in metric.key.split("."):
            value = getattr(value, name)
        assert isinstance(value, (int, float, Statistics)), metric.key
        assert metric.definition.endswith(".")
        assert "\n" not in metric.definition


def test_requests_become_one_line_each(tmp_path: Path) -> None:
    report = Report.build(
        timeline(
            Row([10, 11, 12, 110], arrival_ms=2, queued_ms=4, admit_ms=5, prompt_tokens=40, cached_first=16),
            Row(arrival_ms=3, status=Status.REJECTED, worker=-1, requested=7),
            reject_reasons={1: "needs 9 blocks, a worker has 4"},
            request_ids=["a", "b"],
        )
    )
    path = tmp_path / "requests.jsonl"
    report.requests_jsonl(path)
    first, second = (strict(line) for line in path.read_text().splitlines())
    assert first == {
        "request": 0,
        "request_id": "a",
        "session": 0,
        "turn": 0,
        "status": "completed",
        "finish_reason": "length",
        "reason": None,
        "worker": 0,
        "arrival_ms": 2,
        "queued_ms": 4,
        "first_admit_ms": 5,
        "first_token_ms": 10,
        "second_token_ms": 11,
        "last_token_ms": 110,
        "finish_ms": 110,
        "queue_ms": 3,
        "ttft_ms": 8,
        "ttft_queued_ms": 6,
        "ttst_ms": 1,
        "tpot_ms": 100 / 3,
        "e2e_ms": 108,
        "prompt_tokens": 40,
        "requested_output_tokens": 4,
        "output_tokens": 4,
        "cached_tokens_first": 16,
        "cached_tokens_total": 16,
        "looked_up_tokens": 40,
        "preemptions": 0,
    }
    assert (second["status"], second["reason"]) == ("rejected", "needs 9 blocks, a worker has 4")
    assert second["worker"] is second["ttft_ms"] is second["first_admit_ms"] is second["e2e_ms"] is None
    assert (second["arrival_ms"], second["requested_output_tokens"]) == (3, 7)


def test_rows_are_written_in_parts_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.report.requests.CHUNK_ROWS", 7)
    path = tmp_path / "requests.jsonl"
    report = REPORTS["a crowd"]
    report.requests_jsonl(path)
    rows = [strict(line) for line in path.read_text().splitlines()]
    assert [row["request"] for row in rows] == list(range(300))
    assert [row["prompt_tokens"] for row in rows] == report.columns.prompt_tokens.tolist()
    assert sum(row["status"] == "completed" for row in rows) == report.requests.completed


def test_nobody_leaves_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    REPORTS["nobody"].requests_jsonl(path)
    assert path.read_bytes() == b""


def test_request_ids_must_name_every_request() -> None:
    with pytest.raises(InvalidArgument, match="request_ids has 1 entries for 2 requests"):
        timeline(Row([1]), Row([2]), request_ids=["a"])
