"""Build a small HTML table of a report, for notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from understudy.report.metrics import DISTRIBUTIONS
from understudy.report.no_verdict import describe_no_verdict
from understudy.run.times import format_times
from understudy.text import duration, fixed

if TYPE_CHECKING:
    from understudy.report.judged import JudgedReport

_SHOWN = ("mean", "p50", "p90", "p99", "max")


def summary(report: JudgedReport) -> str:
    """Build a table of latencies, with request counts, the source of the times and the verdicts."""
    head = "".join(f"<th>{name}</th>" for name in _SHOWN)
    rows = "".join(
        f"<tr><td>{escape(metric.name)} ({escape(metric.unit)})</td>"
        + "".join(f"<td>{fixed(getattr(getattr(report, metric.key), name))}</td>" for name in _SHOWN)
        + "</tr>"
        for metric in DISTRIBUTIONS
        if metric.unit == "ms"
    )
    found = [str(verdict) for verdict in report.verdicts] or [describe_no_verdict(report)]
    verdicts = "".join(f"<li>{escape(text)}</li>" for text in found if text)
    return (
        f"<b>{escape(report.run.workload or 'Replay')}</b>: {report.requests.completed:,} of "
        f"{report.requests.total:,} requests in {duration(report.duration_s)}"
        f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f"<p>times from {escape(format_times(report.run.times))}</p>"
        + (f"<ul>{verdicts}</ul>" if verdicts else "")
    )
