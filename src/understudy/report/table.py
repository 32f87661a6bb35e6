"""Print the report on a terminal: metrics by statistics, as aiperf prints them, and a summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from understudy.engines.kinds.registry import kind_of_saved
from understudy.report.engine_terms import terms_of
from understudy.report.fault_report import describe_faults
from understudy.report.fleet_use import describe_use
from understudy.report.handoff_table import build_handoff_tables, list_handoff_facts
from understudy.report.metrics import BY_KEY, DISTRIBUTIONS, STATISTICS
from understudy.report.no_verdict import describe_no_verdict, is_calm
from understudy.report.tier_table import (
    build_comparison,
    build_link_table,
    build_tier_table,
    list_tier_facts,
)
from understudy.run.fleet_size import describe_engines
from understudy.run.times import format_lateness, format_times
from understudy.text import duration, fixed, quantity, significant

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from understudy.report.judged import JudgedReport
    from understudy.report.verdict import Verdict

# Columns to drop on a narrow terminal, in this order.
DROPPED_FIRST = ("p75", "p95", "std", "min", "max", "p90")
COLUMN_GAP = 2

SHORT_LABELS = {
    "ttft_ms": "TTFT (ms)",
    "ttft_queued_ms": "TTFT queued (ms)",
    "ttst_ms": "TTST (ms)",
    "itl_ms": "ITL (ms)",
    "tpot_ms": "TPOT (ms)",
    "e2e_ms": "E2E (ms)",
    "queue_ms": "Queue (ms)",
    "output_tokens_per_s_per_user": "Per user (tok/s)",
    "prompt_tokens": "Input (tok)",
    "output_tokens": "Output (tok)",
}


class ReportTable:
    """Renders a report within the console's width."""

    def __init__(self, report: JudgedReport) -> None:
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table of distributions, the summary, and the tiers if there are any."""
        first = [verdict for verdict in self.report.verdicts if verdict.rule == "machine_late"]
        yield from map(_format_verdict, first)  # before any number
        yield build_distributions(self.report, options.max_width)
        yield Padding(build_summary(_list_facts(self.report), options.max_width - 2), (0, 1), expand=False)
        if (hour := self.report.worst_hour) is not None:
            words = hour.describe(self.report.throughput.requests_per_s)
            yield Padding(Text.assemble(("Worst hour  ", "dim"), words), (0, 1), expand=False)
        if (tiers := self.report.tiers) is not None:
            yield build_tier_table(tiers, options.max_width)
            yield build_link_table(tiers, options.max_width)
            yield Padding(build_summary(list_tier_facts(tiers), options.max_width - 2), (0, 1), expand=False)
        if (handoff := self.report.handoff) is not None:
            yield from build_handoff_tables(handoff, options.max_width)
            facts = list_handoff_facts(handoff)
            yield Padding(build_summary(facts, options.max_width - 2), (0, 1), expand=False)
        if (use := self.report.fleet_use) is not None:
            words = describe_use(use)
            yield Padding(Text.assemble(("Workers  ", "dim"), words), (0, 1), expand=False)
        if (faults := self.report.fault_report) is not None:
            words = describe_faults(faults)
            yield Padding(Text.assemble(("Faults  ", "dim"), words), (0, 1), expand=False)
        if (without := self.report.without_tiers) is not None:
            yield build_comparison(self.report, without, options.max_width)
        yield from (_format_verdict(verdict) for verdict in self.report.verdicts if verdict not in first)
        if none := describe_no_verdict(self.report):
            mark = ("✓ ", "bold green") if is_calm(self.report) else ("• ", "bold yellow")
            yield Padding(Text.assemble(mark, none), (0, 1), expand=False)
        if (advice := self.report.advice) is not None and (advice.trials or advice.untried):
            yield Padding(Text.assemble(("Advice  ", "dim"), str(advice)), (0, 1), expand=False)
        if routed := _format_routing(self.report):
            yield Padding(Text.assemble(("Routing  ", "dim"), routed), (0, 1), expand=False)
        for note in self.report.run.notes:
            yield Padding(Text.assemble(("Note  ", "yellow"), note), (0, 1), expand=False)
        words = format_times(self.report.run.times)
        yield Padding(Text.assemble(("Times from  ", "dim"), words), (0, 1), expand=False)
        if self.report.run.lateness_ms:
            late = format_lateness(self.report.run.lateness_ms)
            yield Padding(Text.assemble(("Machine late  ", "dim"), late), (0, 1), expand=False)
        if self.report.run.digest is not None:
            digest = Text.assemble(("Digest  ", "dim"), self.report.run.digest, overflow="fold")
            yield Padding(digest, (0, 1), expand=False)


def _format_verdict(verdict: Verdict) -> Padding:
    text = Text.assemble(("▲ ", "bold red"), (verdict.finding, "bold"), " ", verdict.remedy)
    return Padding(text, (0, 1), expand=False)


def _format_routing(report: JudgedReport) -> str:
    """Describe the cached tokens of the chosen and of the best workers; empty without recorded choices."""
    statistics = report.run.router
    if "mean_cache_regret_blocks" not in statistics:
        return ""
    return (
        f"prompt tokens cached at the choice: {statistics['held_hit']:.1%} on the chosen workers, "
        f"{statistics['best_hit']:.1%} on the best; cache regret {significant(statistics['mean_cache_regret_blocks'])} "
        f"{terms_of(report).block}s a request (above 0 for {statistics['cache_regretted']:.1%} of choices)"
    ).replace("%", " %")


def build_distributions(report: JudgedReport, width: int) -> Table:
    """Build a table of metrics by statistics; shorten names and drop columns to fit `width`."""
    labels = {metric.key: f"{metric.name} ({metric.unit})" for metric in DISTRIBUTIONS}
    labels = {key: label.replace(") (", ", ") for key, label in labels.items()}
    cells = {
        key: {name: fixed(getattr(getattr(report, key), field)) for name, field in STATISTICS.items()}
        for key in labels
    }
    widths = {name: max(len(row[name]) for row in cells.values()) + COLUMN_GAP for name in STATISTICS}

    columns = list(STATISTICS)
    candidates = iter(DROPPED_FIRST)
    while _table_width(labels, columns, widths) > width:
        if labels is not SHORT_LABELS:
            labels = SHORT_LABELS
        elif (dropped := next(candidates, None)) is not None:
            columns.remove(dropped)
        else:
            break  # no more columns to drop: the text wraps

    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        header_style="bold",
        caption=" percentiles exact, nearest rank",
        caption_justify="left",
    )
    table.add_column("Metric", overflow="fold", style="cyan")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for key, row in cells.items():
        table.add_row(Text(labels[key]), *(row[name] for name in columns))
    return table


def _table_width(labels: dict[str, str], columns: list[str], widths: dict[str, int]) -> int:
    return max(map(cell_len, labels.values())) + sum(widths[name] for name in columns) + 2


def build_summary(facts: list[tuple[str, str]], width: int) -> Table:
    """Build a table of labels and values, with as many pairs per row as fit into `width`."""
    for pairs in (3, 2, 1):
        rows = -(-len(facts) // pairs)
        stacks = [facts[start : start + rows] for start in range(0, len(facts), rows)]
        widths = [max(len(text) for text in texts) for stack in stacks for texts in zip(*stack, strict=True)]
        if sum(widths) + COLUMN_GAP * (len(widths) - 1) <= width:
            break
    table = Table.grid(padding=(0, 0, 0, COLUMN_GAP), pad_edge=False)
    for _ in stacks:
        table.add_column(style="dim")
        table.add_column(justify="right")
    for row in range(rows):
        table.add_row(*(Text(text) for stack in stacks for text in (stack[row] if row < len(stack) else ())))
    return table


def timing_model(report: JudgedReport) -> str | None:
    """Return the name of the timing model; None if it is unknown."""
    if report.run.timing is not None:
        return report.run.timing
    timing = report.run.engine.get("timing", {})
    return str(timing["kind"]) if isinstance(timing, dict) and "kind" in timing else None


def _describe_limits(engine: dict[str, Any]) -> str | None:
    """Describe the most tokens and requests of a step; None for engines that have none, and for pools."""
    terms = kind_of_saved(engine).terms
    units = {terms.step_setting: "tok", terms.requests_setting: "req"}
    said = [f"{engine[name]:,} {unit}" for name, unit in units.items() if engine.get(name) not in (None, -1)]
    return ", ".join(said) or None


def describe_size(report: JudgedReport) -> str | None:
    """Return the engines and their data-parallel ranks, such as `2 engines x 8 ranks`; None without ranks."""
    ranks = report.run.data_parallel_size
    return None if ranks is None else describe_engines(report.columns.num_workers // ranks, ranks)


def _list_facts(report: JudgedReport) -> list[tuple[str, str]]:
    requests = report.requests
    facts = [("Completed requests", f"{requests.completed:,} of {requests.total:,}")]
    facts += [
        (BY_KEY[f"requests.{name}"].name, f"{getattr(requests, name):,}")
        for name in ("rejected", "cancelled", "failed", "unfinished")
        if getattr(requests, name)
    ]
    if (size := describe_size(report)) is not None:
        facts.append(("Fleet", size))
    facts.append(("Duration", duration(report.duration_s)))
    if (timing := timing_model(report)) is not None:
        facts.append(("Timing model", timing))
    if report.run.scheduling is not None:
        facts.append(("Scheduling", report.run.scheduling))
    if report.run.wall_time_s is not None:
        facts.append(("Wall time", duration(report.run.wall_time_s)))
    throughput = report.throughput
    facts.append(("Request throughput", f"{fixed(throughput.requests_per_s)} req/s"))
    facts.append(("Input throughput", f"{fixed(throughput.input_tokens_per_s)} tok/s"))
    facts.append(("Output throughput", f"{fixed(throughput.output_tokens_per_s)} tok/s"))
    facts.append(("Total throughput", f"{fixed(throughput.total_tokens_per_s)} tok/s"))
    if report.goodput is not None:
        facts.append(("Request goodput", f"{fixed(report.goodput.requests_per_s)} req/s"))
        facts.append(("SLO attainment", quantity(report.goodput.ratio, "ratio")))
    facts.append(("Prefix hit, first", quantity(report.prefix_hit_ratio.first_admission, "ratio")))
    facts.append(("Prefix hit, all", quantity(report.prefix_hit_ratio.total, "ratio")))
    usage = f"{quantity(report.kv.usage_mean, 'ratio')} / {quantity(report.kv.usage_max, 'ratio')}"
    terms = terms_of(report)
    facts.append((f"{terms.usage}, mean / max", usage))
    if len(set(report.columns.worker_blocks.tolist())) == 1 and report.columns.block_size > 1:
        blocks = f"{report.columns.blocks_per_worker:,} of {report.columns.block_size} tok"
        facts.append((f"{terms.block.capitalize()}s per worker", blocks))
    if (limits := _describe_limits(report.run.engine)) is not None:
        facts.append(("Limits of a step", limits))
    facts.append((terms.requeued.capitalize(), f"{report.preemptions:,}"))
    if report.columns.burst_steps or report.columns.draft_rounds:
        facts.append(("Accept length", f"{fixed(report.accept_length)} tok"))
    if report.drafted_tokens:
        facts.append(("Wasted drafts", f"{report.wasted_drafts:,} of {report.drafted_tokens:,}"))
    facts.append((f"Evicted {terms.block}s", f"{report.kv.evictions:,}"))
    if report.kv.phantom_hit_blocks:
        facts.append(("Phantom hit blocks", f"{report.kv.phantom_hit_blocks:,}"))
    return facts
