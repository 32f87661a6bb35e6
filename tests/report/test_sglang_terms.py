"""Reports and verdicts of SGLang runs name SGLang's flags and words, never vLLM's."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from rich.console import Console

import understudy as us
from replay.building import crowd
from report.building import Row, timeline
from understudy.engines.timing import Constant
from understudy.report import Report, Slo
from understudy.report.advise import advise
from understudy.report.engine_terms import flags_of
from understudy.report.remedies import Setup
from understudy.report.verdicts import find_verdicts, preemption_storm
from understudy.run.facts import PoolFacts, RunFacts
from understudy.workload import OpenLoop, Poisson

if TYPE_CHECKING:
    from understudy.report.verdict import Verdict

OF_VLLM = (
    "--num-gpu-blocks",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--watermark",
    "preempt",
    "offload.",
)
SLOW = Constant(prefill_ms=100.0, decode_ms=20.0)
SMALL = us.SglangConfig(
    block_size=16, num_gpu_blocks=40, max_num_seqs=16, timing=SLOW, chunked_prefill_size=256
)


def words(verdicts: tuple[Verdict, ...]) -> str:
    return " ".join(f"{verdict.finding} {verdict.remedy}" for verdict in verdicts)


@pytest.mark.parametrize("slo", [Slo(ttft_ms=50), Slo(itl_ms=21), Slo(e2e_ms=100), None])
def test_verdicts_of_an_sglang_run_name_no_flag_of_vllm(slo: Slo | None) -> None:
    load = crowd(200, arrivals=Poisson(qps=30))
    found = find_verdicts(us.replay(load, SMALL, workers=2, slo=slo))
    assert found
    assert not [name for name in OF_VLLM if name in words(found)]


def test_a_full_pool_is_remedied_with_sglangs_flags() -> None:
    found = find_verdicts(
        us.replay(crowd(200, arrivals=Poisson(qps=30)), SMALL, workers=2, slo=Slo(ttft_ms=50))
    )
    assert "--max-total-tokens or --mem-fraction-static" in words(found)


def test_retractions_are_named_with_their_remedy() -> None:
    rows = [Row([10, 20], preemptions=3)] * 20
    run = RunFacts(engine={"sglang_version": "0.5.23", "block_size": 16})
    verdict = preemption_storm(Report.build(timeline(*rows), run))
    assert verdict is not None
    assert verdict.finding == "60 retractions for 20 requests; retracted requests recompute their tokens."
    assert "--schedule-conservativeness" in verdict.remedy
    assert not [name for name in OF_VLLM if name in str(verdict)]


def test_pools_of_both_kinds_name_the_flags_of_both() -> None:
    engines: list[dict[str, Any]] = [
        {"sglang_version": "0.5.23", "block_size": 16},
        {"block_size": 16, "max_num_seqs": 256},
    ]
    pools = [PoolFacts(name=str(i), workers=1, scheduling="", engine=one) for i, one in enumerate(engines)]
    report = Report.build(timeline(Row([10, 20])), RunFacts(pools=tuple(pools)))
    assert flags_of(report, "requests") == "--max-num-seqs (vLLM) and --max-running-requests (SGLang)"


def test_the_table_speaks_of_token_usage_and_retractions() -> None:
    report = us.replay(crowd(20, arrivals=Poisson(qps=5)), SMALL)
    out = io.StringIO()
    report.print(Console(file=out, width=120, highlight=False))
    text = out.getvalue()
    assert "Token usage, mean / max" in text
    assert "Retractions" in text
    assert "Evicted pages" in text
    assert "Preemptions" not in text


def test_regret_and_charts_count_pages() -> None:
    report = us.replay(crowd(60, arrivals=Poisson(qps=5)), SMALL, workers=2, routing="kv")
    out = io.StringIO()
    report.print(Console(file=out, width=400, highlight=False))
    assert re.search(r"cache regret \S+ pages a request", out.getvalue())
    assert "blocks a request" not in out.getvalue()
    text = re.sub(r"<[^>]*>", " ", report.to_html())
    charts = text[: text.index("Stored blocks")]
    assert "× 40 pages of 16 tokens" in charts
    assert "share of 80 pages" in charts
    assert "; active pages, mean" in charts
    assert " blocks" not in charts
    assert re.search(r"cache regret\s+\S+\s+pages", text)


def test_advice_replays_sglangs_own_remedies() -> None:
    load = crowd(200, arrivals=Poisson(qps=30))
    replayed: list[dict[str, Any]] = []

    def replay_with(changes: dict[str, Any]) -> Report:
        replayed.append(changes)
        given = dict(changes)
        fleet = {name: given.pop(name) for name in ("workers", "routing", "load") if name in given}
        return us.replay(
            load, msgspec.structs.replace(SMALL, **given), slo=Slo(itl_ms=21), **{"workers": 2, **fleet}
        )

    report = us.replay(load, SMALL, workers=2, slo=Slo(itl_ms=21))
    setup = Setup(
        workers=2,
        routing="round_robin",
        load=OpenLoop(),
        engine=SMALL,
        can_add_blocks=True,
        has_sessions=False,
    )
    advice = advise(report, setup, replay_with, limit_s=60).advice
    assert advice is not None
    flags = {trial.change.split()[0] for trial in advice.trials}
    assert {"--max-running-requests", "--chunked-prefill-size"} <= flags
    assert not flags & set(OF_VLLM)
    assert {"chunked_prefill_size": 128} in replayed
