"""A report at a prompt, in a notebook and as a data frame."""

from __future__ import annotations

import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from report.building import Row, crowd, timeline
from report.tier_building import tiered
from understudy.errors import ConfigError
from understudy.report import Report
from understudy.report.requests import _rows_as_columns
from understudy.report.table import timing_model
from understudy.run.facts import RunFacts

if TYPE_CHECKING:
    from pathlib import Path


def test_a_report_at_a_prompt_is_one_line() -> None:
    shown = repr(Report.build(timeline(Row([10, 20, 30])), RunFacts(workload="t.jsonl")))
    assert shown == (
        "<Report t.jsonl: 1 of 1 requests in 0.0 s, TTFT p50 10 ms, p99 10 ms, 100 output tokens/s, 0 verdicts; "
        "times from an unnamed source>"
    )
    assert "\n" not in repr(Report.build(crowd(300)))


def test_a_notebook_shows_a_table_and_escapes_names() -> None:
    html = Report.build(timeline(Row([10, 20])), RunFacts(workload="<script>"))._repr_html_()
    assert "&lt;script&gt;" in html
    assert "Time to first token" in html
    assert html.count("<td>") == 7 * 6


@pytest.mark.parametrize("columns", [crowd(50), tiered()])
def test_a_data_frame_has_a_row_a_request(monkeypatch: pytest.MonkeyPatch, columns: Any) -> None:
    report = Report.build(columns)
    fake: Any = SimpleNamespace(DataFrame=lambda data: data)
    monkeypatch.setitem(sys.modules, "pandas", fake)
    frame = report.to_pandas()
    assert {len(values) for values in frame.values()} == {len(columns)}
    assert frame == _rows_as_columns(report, slice(None))
    assert list(frame["prompt_tokens"]) == columns.prompt_tokens.tolist()


def test_pandas_itself_reads_the_frame() -> None:
    pandas = pytest.importorskip("pandas", reason="to_pandas needs pandas, which is nobody's dependency here")
    columns = crowd(50)
    frame = Report.build(columns).to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["prompt_tokens"].tolist() == columns.prompt_tokens.tolist()
    assert int(frame["output_tokens"].sum()) == int(columns.output_tokens.sum())
    assert len(frame.describe()) == 8


def test_without_pandas_a_data_frame_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"pip install .understudy\[pandas\]"):
        Report.build(timeline()).to_pandas()


def test_text_is_returned_where_no_file_is_named(tmp_path: Path) -> None:
    report = Report.build(crowd(20), RunFacts(workload="t.jsonl"))
    report.to_json(tmp_path / "report.json")
    report.to_html(tmp_path / "report.html")
    assert report.to_json() == (tmp_path / "report.json").read_text()
    assert report.to_html() == (tmp_path / "report.html").read_text()


def test_fields_of_a_report_are_typed_values_and_no_closures() -> None:
    hints = {one.name: str(one.type) for one in fields(Report)}
    assert not [name for name, hint in hints.items() if "Any" in hint or "Callable" in hint or "dict" in hint]


def test_the_report_says_which_timing_model_ran() -> None:
    assert (
        timing_model(Report.build(timeline(), RunFacts(engine={"timing": {"kind": "constant"}})))
        == "constant"
    )
    assert timing_model(Report.build(timeline(), RunFacts(timing="MyModel"))) == "MyModel"
    assert timing_model(Report.build(timeline())) is None
