"""Numbers of benchmarks that a page repeats are those of benchmarks/results."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from harness.result import BenchmarkResult, Number, read_results  # noqa: E402

RESULTS = read_results()


class Quote(NamedTuple):
    """A sentence of a page, with `{}` for each number, and where the numbers are: result, row and column."""

    page: str
    template: str
    numbers: tuple[tuple[str, str, str], ...]

    def render(self) -> str:
        return self.template.format(*(find_number(*one) for one in self.numbers))


def find_number(result: str, row: str, column: str) -> Number:
    return RESULTS[result].number(row, column)


def of(result: str, *cells: tuple[str, str]) -> tuple[tuple[str, str, str], ...]:
    return tuple((result, row, column) for row, column in cells)


def in_row(result: str, row: str, *columns: str) -> tuple[tuple[str, str, str], ...]:
    return tuple((result, row, column) for column in columns)


DEFAULT = "retention 0 (vLLM's default)"
PEER = "ai-dynamo-runtime 1.6.1"
README = (
    Quote(
        "README.md",
        "**{:,} of {:,}** | random schedules of the real vLLM were reproduced step for step: the same requests, "
        "tokens, preemptions and blocks in each of {:,} steps",
        in_row("exact_schedules", "vLLM 0.32.0", "identical", "of", "steps"),
    ),
    Quote(
        "README.md",
        "**{:.2f} s** | to replay 12,031 requests on four workers, in {} MB; NVIDIA Dynamo's simulator takes {:.1f} s "
        "and {} MB |",
        in_row("replay_vs_dynamo", "Understudy, 1 thread", "time", "peak")
        + in_row("replay_vs_dynamo", PEER, "time", "peak"),
    ),
    Quote(
        "README.md",
        "**{} %** | median error of the time per output token over {} measured deployments of Llama-3.1-70B on H100, "
        "H200 and B200, to which the times were fitted; {} % on loads left out of the fit",
        in_row("accuracy", "Llama-3.1-70B", "TPOT or ITL", "measured deployments", "TPOT, left out"),
    ),
    Quote(
        "README.md",
        "**{:,}** | recorded decisions of NVIDIA Dynamo's KV router, each reproduced at the same cost",
        in_row("router_choices", "recorded decisions", "equal"),
    ),
    Quote(
        "README.md",
        "**{:.0f}×** | the tokens per second that vLLM's own front end streams: {:,} at 256 streams |",
        in_row("live_load", "Understudy", "tokens per second of the peer", "delivered"),
    ),
    Quote(
        "README.md",
        "**{} %** | largest error of the mean time to first token that a simulated twin predicts for a real engine "
        "(Qwen3-4B on an H200), on four workloads that it was not fitted to |",
        in_row("qwen3_twin", "the four that were not fitted", "largest error of TTFT"),
    ),
)
DOCS = (
    Quote(
        "docs/qwen3.md",
        "On one H200 a decode step takes {}× (batch 1) to {}× (batch 256) of that bound, a prefill of 16,384 tokens "
        "{}× of torch's own matrix products and attention, and the first token of 8,192 cached ones {:.1f} ms instead "
        "of {:.1f}",
        of(
            "qwen3_bench",
            ("decode step, batch 1, context 1,024; bound", "ratio"),
            ("decode step, batch 256; bound", "ratio"),
            ("prefill, 16,384 tokens; torch's matrix products and attention", "ratio"),
            ("first token, 8,192 tokens, all cached but a page; cold", "time"),
            ("first token, 8,192 tokens, all cached but a page; cold", "reference"),
        ),
    ),
    Quote(
        "docs/qwen3.md",
        "{} against {} tokens/s at batch 1 ({}×), {:,} against {:,} at batch 64 ({}×)",
        in_row("qwen3_vs_transformers", "1", "Understudy", "transformers", "ratio")
        + in_row("qwen3_vs_transformers", "64", "Understudy", "transformers", "ratio"),
    ),
    Quote(
        "docs/qwen3.md",
        "took {} and {} ms per step",
        of("qwen3_vs_transformers", ("1", "their step"), ("64", "their step")),
    ),
    Quote(
        "docs/qwen3.md",
        "the engine takes {:.2f} and {:.2f}",
        of("qwen3_vs_transformers", ("1", "our step"), ("64", "our step")),
    ),
    Quote(
        "docs/qwen3.md",
        "{} tokens/s with one client; {:,} tokens/s with 64 clients",
        of("qwen3_http", ("1", "delivered"), ("64", "delivered")),
    ),
    Quote(
        "docs/qwen3.md",
        "the largest error of the four is {} % of mean TTFT and {} % of mean TPOT",
        in_row(
            "qwen3_twin", "the four that were not fitted", "largest error of TTFT", "largest error of TPOT"
        ),
    ),
    Quote(
        "docs/sglang.md",
        "four workers with page size 64 take {} CPU seconds and {} MB; Dynamo 1.6.1's own SGLang replay takes {} s "
        "and {} MB, {} times as long. Page size 1 takes {} times as long",
        in_row("sglang_vs_dynamo", "SGLang, 4 workers, page size 64", "time", "peak")
        + in_row("sglang_vs_dynamo", "Dynamo 1.6.1's SGLang, 4 workers, page size 64", "time", "peak")
        + in_row("sglang_vs_dynamo", "SGLang, 4 workers, page size 64", "Dynamo's time / ours")
        + in_row("sglang_vs_dynamo", "SGLang, 4 workers, page size 1", "time of page size 64, or of vLLM"),
    ),
    Quote(
        "docs/disaggregation.md",
        "the replay is {}× (2P + 2D) and {}× (4P + 4D) as fast as Dynamo's",
        of("disaggregation_vs_dynamo", ("2P + 2D round robin", "ratio"), ("4P + 4D round robin", "ratio")),
    ),
    Quote(
        "docs/live.md",
        "A second costs the server {} ms of CPU time at 200 workers with a page open, {} % of a core",
        in_row("fleet_page", "200 workers", "CPU per second", "share of a core"),
    ),
    Quote(
        "docs/routing.md",
        "the KV router is within 0.3 % of Dynamo's TTFT and {} % of its hit ratio",
        in_row("router_parity", "conversation, 16, kv", "difference of hits"),
    ),
)
AGREEMENT = tuple(
    Quote(
        "docs/disaggregation.md",
        f"= {{:.1f}} | {{:.1f}} | +{{}} % | {{:.2f}} − {token} = {{:.2f}} | {{:.2f}} | +{{}} % |",
        in_row(
            "disaggregation_agreement",
            f"{fleet} round robin",
            *("TTFT without polls and token", "peer's TTFT", "difference of that TTFT", "ITL"),
            *("ITL without the token", "peer's ITL", "difference of that ITL"),
        ),
    )
    for fleet, token in (("2P + 2D", "0.27"), ("4P + 4D", "0.10"))
)


def in_one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("quote", [*README, *DOCS, *AGREEMENT], ids=lambda quote: quote.template[:40])
def test_a_page_repeats_the_numbers_of_the_results(quote: Quote) -> None:
    text = in_one_line((ROOT / quote.page).read_text(encoding="utf-8"))
    assert quote.render() in text, f"{quote.page}: write: {quote.render()}"


def test_every_number_of_the_readme_is_checked() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Six numbers")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| **")]
    checked = [row for row in rows if any(quote.render() in row for quote in README)]
    assert rows == checked
    assert len(rows) == len(README) == 6


def test_the_cost_of_checks_is_within_the_range_that_the_page_names() -> None:
    ratios = {row.name: row.numbers["ratio"] for row in RESULTS["check_cost"].rows}
    plain = [limit(ratio) for name, ratio in ratios.items() if "deep" not in name and "400,000" not in name]
    deep = [limit(ratio) for name, ratio in ratios.items() if "deep" in name]
    large = limit(ratios["--check, no tier, 400,000 blocks of 16"])
    text = in_one_line((ROOT / "docs/replay.md").read_text(encoding="utf-8"))
    wanted = (
        f"takes 6 to 10 times the CPU time of a plain run ({large:.0f} times with 400,000 blocks per worker), "
        "`--check deep` 6 to 15 times"
    )
    assert wanted in text
    assert [min(plain) >= 6, max(plain) <= 10, min(deep) >= 6, max(deep) <= 15] == [True] * 4


def limit(number: Number) -> float:
    return max(number) if isinstance(number, tuple) else number


def cells_of(result: BenchmarkResult) -> dict[str, dict[str, Number]]:
    return {row.name: row.numbers for row in result.rows}


def table_rows(page: str, head: str) -> list[list[str]]:
    """The rows of every table of the page whose head begins so."""
    rows, inside = [], False
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        inside = line.startswith("|") and (inside or line.startswith(head))
        if inside and not line.startswith((head, "| -", "|-")):
            rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


def test_the_table_of_offload_modes_is_that_of_the_results() -> None:
    for mode, hit, _, ttft, stored, loads, cpu in table_rows("docs/tiers.md", "| mode | prefix hit, first"):
        numbers = cells_of(RESULTS["vllm_host_offload"])[mode]
        assert f"{numbers['prefix hit, first']} %" == hit
        assert f"{numbers['TTFT, mean']} ms" == ttft
        assert f"{numbers['time']:.2f} s" == cpu
        assert [f"{numbers[name]:,}" for name in ("blocks stored", "loads") if name in numbers] == [
            cell for cell in (stored, loads) if cell
        ]


def test_the_table_of_split_fleets_is_that_of_the_results() -> None:
    results = cells_of(RESULTS["disaggregation_study"])
    rows = table_rows("docs/disaggregation.md", "| fleet | TTFT mean / p99 ms")
    assert [row[0] for row in rows] == list(results)
    for fleet, ttft, itl, e2e, good, _ in rows:
        numbers = results[fleet]
        assert ttft == f"{numbers['TTFT, mean']:,} / {numbers['TTFT, p99']:,}"
        assert itl == f"{numbers['ITL, mean']} / {numbers['ITL, p99']}"
        assert e2e == f"{numbers['E2E, mean']:,}"
        assert good == f"{numbers['within goals']} %"


def test_the_tables_of_groups_are_those_of_the_results() -> None:
    hits = cells_of(RESULTS["hybrid_hits"])
    for model, memory, _, *cells in table_rows("docs/hybrid.md", "| model | memory | groups"):
        numbers = hits[f"{model}, {memory}"]
        assert cells == [
            f"{numbers[f'{way}: hit rate']:.3f} ({numbers[f'{way}: TTFT']:,})"
            for way in ("vLLM's default", "retention none", "one group")
        ]


@pytest.mark.parametrize(
    ("result", "head", "settings"),
    [
        (
            "hybrid_study",
            "| KV memory | blocks |",
            (DEFAULT, "retention none", "hybrid manager off: one group"),
        ),
        (
            "hybrid_study_kv",
            "| KV memory | retention 0 | retention none | one group |",
            (
                DEFAULT,
                "retention none",
                "hybrid manager off: one group",
                "retention 0, first group indexed",
                "retention 0, prefill_load_scale 16",
            ),
        ),
    ],
)
def test_the_tables_of_conversations_are_those_of_the_results(
    result: str, head: str, settings: tuple[str, ...]
) -> None:
    results = cells_of(RESULTS[result])
    for memory, *cells in table_rows("docs/hybrid.md", head):
        wanted = [results[f"{memory}, {setting}"] for setting in settings]
        assert cells[-len(settings) :] == [
            f"{one['hit rate']:.3f}, {one['TTFT, mean']:,}"
            + (f", {one['preemptions']}" if "preemptions" in one else "")
            for one in wanted
        ]
