"""Audit that all outputs say the same: JSON, table, page, saved run, sweep of one candidate and comparison."""

from __future__ import annotations

import html
import json
import re
from typing import TYPE_CHECKING, Any

from answers.evidence import run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from answers.definitions import Difference
    from answers.evidence import Evidence

_NUMBER = re.compile(r"-?[\d,]+(?:\.\d+)?")
_DISTRIBUTIONS = {
    "TTFT (ms)": "ttft_ms",
    "TTFT queued (ms)": "ttft_queued_ms",
    "TTST (ms)": "ttst_ms",
    "ITL (ms)": "itl_ms",
    "TPOT (ms)": "tpot_ms",
    "E2E (ms)": "e2e_ms",
    "Queue (ms)": "queue_ms",
    "Per user (tok/s)": "output_tokens_per_s_per_user",
    "Input (tok)": "prompt_tokens",
    "Output (tok)": "output_tokens",
}
_CELLS = {
    r"Completed requests +([\d,]+) of": "requests.completed",
    r"Completed requests +[\d,]+ of ([\d,]+)": "requests.total",
    r"Rejected +([\d,]+)": "requests.rejected",
    r"Request throughput +([\d.,]+) req/s": "throughput.requests_per_s",
    r"Input throughput +([\d.,]+) tok/s": "throughput.input_tokens_per_s",
    r"Output throughput +([\d.,]+) tok/s": "throughput.output_tokens_per_s",
    r"Total throughput +([\d.,]+) tok/s": "throughput.total_tokens_per_s",
    r"Request goodput +([\d.,]+) req/s": "goodput.requests_per_s",
    r"SLO attainment +([\d.]+ %)": "goodput.ratio",
    r"Prefix hit, first +([\d.]+ %)": "prefix_hit_ratio.first_admission",
    r"Prefix hit, all +([\d.]+ %)": "prefix_hit_ratio.total",
    r"KV usage, mean / max +([\d.]+ %)": "kv.usage_mean",
    r"KV usage, mean / max +[\d.]+ % / ([\d.]+ %)": "kv.usage_max",
    r"Preemptions +([\d,]+)": "preemptions",
    r"Evicted blocks +([\d,]+)": "kv.evictions",
    r"Digest +(\w+)": "run.digest",
}


def shows(text: str, value: float | str | None) -> bool:
    """Return whether a printed figure is the value, rounded to the digits that are printed."""
    text = text.strip()
    if value is None or isinstance(value, str):
        return text == (value or "–")
    found = _NUMBER.match(text)
    if found is None:
        return False
    digits = found[0].replace(",", "")
    scale = 0.01 if "%" in text else 1.0
    unit = 10.0 ** -len(digits.partition(".")[2]) * scale
    return abs(float(digits) * scale - value) <= unit * 0.5000001


def at(report: dict[str, Any], path: str) -> Any:
    """Return the figure at a path of the JSON."""
    found: Any = report
    for key in path.split("."):
        found = found[key]
    return found


def the_table_says_the_same(evidence: Evidence) -> Iterator[Difference]:
    """Every cell of the printed table is a figure of the JSON."""
    report, printed = evidence.report, evidence.printed
    if report["requests"]["completed"] == 0:
        return  # the table has long names then, and only dashes
    heading = next((line.split() for line in printed.splitlines() if line.split()[:1] == ["Metric"]), [])
    for label, name in _DISTRIBUTIONS.items():
        found = re.search(rf"^ {re.escape(label)} +(.*)$", printed, re.MULTILINE)
        yield f"row {label}", found is not None, True
        for column, text in zip(heading[1:], found[1].split() if found else (), strict=True):
            value = report[name]["mean" if column == "avg" else column]
            yield f"{label}, {column}: {text} is {value}", shows(text, value), True
    for pattern, path in _CELLS.items():
        cell = re.search(pattern, printed)
        if cell is not None:
            yield f"{path}: {cell[1]} is {at(report, path)}", shows(cell[1], at(report, path)), True


def the_page_says_the_same(evidence: Evidence) -> Iterator[Difference]:
    """Every figure of the page's distributions, totals and rates is one of the JSON."""
    report = evidence.report
    page = html.unescape(re.sub(r' data-tip="[^"]*" tabindex="0"', "", evidence.page))
    begin, end = page.index("<h2>Distributions</h2>"), page.index("<h2>Configuration</h2>")
    heads = page[begin : page.index("</tr>", begin)]
    columns = ["mean" if head == "avg" else head for head in re.findall(r"<th>(.*?)</th>", heads)[1:]]
    yield "columns", sorted(columns), sorted(("mean", "min", "max", "p99", "p95", "p90", "p75", "p50", "std"))
    rows = dict(re.findall(r"<tr><td><span>(.*?)</span>.*?</td>(.*?)</tr>", page[begin:end]))
    totals = dict(
        re.findall(r"<div><span>(.*?)</span><span>(.*?)(?: <span.*?)?</span></div>", page[begin:end])
    )
    shown = 0
    for path, definition in report["definitions"].items():
        name = definition["name"]
        if path.endswith("[]") or path.startswith(("tiers", "handoff")):
            continue
        if name in rows and path in _DISTRIBUTIONS.values():
            for column, text in zip(columns, re.findall(r"<td>(.*?)</td>", rows[name]), strict=True):
                value = report[path][column]
                yield f"page, {path}.{column}: {text} is {value}", shows(text, value), True
        elif name in totals:
            value = at(report, path)
            yield f"page, {path}: {totals[name]} is {value}", shows(totals[name], value), True
        shown += name in rows or name in totals
    yield "figures on the page", shown >= 30, True


def a_saved_run_says_the_same(evidence: Evidence) -> Iterator[Difference]:
    """A saved run does not differ from itself, and its latencies are those of the requests."""
    path = str(evidence.folder / "run.npz")
    diff = json.loads(run("diff", path, path, "--json", "-"))
    yield "settings that differ", diff["settings"], []
    yield "first difference", diff["first_difference"], None
    yield "requests that differ", diff["changed"], 0
    ended = [line for line in evidence.lines if line["status"] == "completed"]
    if len(ended) == diff["ended"]["both"]:
        yield "sum of latencies", diff["latency_ns"]["a"] / 1e6, sum(line["e2e_ms"] for line in ended)


def a_sweep_of_one_says_the_same(evidence: Evidence) -> Iterator[Difference]:
    """A sweep of one candidate has the figures of its replay, counts its GPUs and prices them."""
    case, report = evidence.case, evidence.report
    flags = dict(case.flags)
    workers = flags.pop("workers", None)
    if workers is None or report["goodput"] is None or not report["requests"]["completed"]:
        return
    arguments = [part for name, value in flags.items() for part in (f"--{name}", value) if part]
    answer = run(
        *("sweep", str(evidence.folder / "trace.jsonl"), *arguments, "--vary", f"workers={workers}"),
        *("--jobs", "1", "--gpu-hour", "2.5", "--json", "-"),
    )
    sweep = json.loads(answer)
    yield "candidates", (len(sweep["trials"]), sweep["invalid"], sweep["failed"]), (1, [], [])
    trial = sweep["trials"][0]
    gpus = int(workers) * int(flags.get("tensor-parallel-size", 1))
    yield "GPUs", trial["gpus"], gpus
    yield "cost per hour", trial["cost_per_hour"], gpus * 2.5
    yield "digest", trial["digest"], report["run"]["digest"]
    yield "good", trial["good"], report["goodput"]["ratio"]
    yield "goodput", trial["goodput_per_s"], report["goodput"]["requests_per_s"]
    yield "requests", trial["requests"], report["requests"]["total"]
    yield "rejected", trial["rejected"], report["requests"]["rejected"]
    yield "preemptions", trial["preemptions"], report["preemptions"]
    yield "duration", trial["duration_s"], report["duration_s"]
    yield "tokens", trial["output_tokens_per_s"], report["throughput"]["output_tokens_per_s"]
    yield "hits", trial["prefix_hit_ratio"], report["prefix_hit_ratio"]["first_admission"]
    for name, of in (("ttft_ms", "ttft_ms"), ("e2e_ms", "e2e_ms"), ("itl_ms", "tpot_ms")):
        for key in ("p50", "p90", "p99"):
            yield f"{name}.{key}", trial[name][key], report[of][key]
    best = sweep["answers"][0]["best"]
    yield "meets the goal", best is not None, report["goodput"]["ratio"] >= sweep["goal"]


def a_comparison_with_itself_has_no_winner(evidence: Evidence) -> Iterator[Difference]:
    """Equal reports do not differ in any row, and no one is called best."""
    path = evidence.folder / "report.json"
    twin = evidence.folder / "twin.json"
    twin.write_bytes(path.read_bytes())
    printed = run("compare", str(path), str(twin))
    yield "a winner", " is best" in printed, False
    rows = re.findall(r"^ \S.*? {2,}([\d.,]+(?: %)?) {2,}(\S.*)$", printed, re.MULTILINE)
    for a, b in rows:
        change = b.removeprefix(a).strip()
        yield f"row {a} | {b}", b.startswith(a) and (change == "=" or float(change.split()[0]) == 0), True
