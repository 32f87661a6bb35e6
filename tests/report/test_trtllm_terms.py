"""Reports and verdicts of TensorRT-LLM runs name its flags and words, never vLLM's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import understudy as us
from replay.building import crowd
from report.building import Row, timeline
from report.test_sglang_terms import OF_VLLM, words
from understudy.engines.timing import Constant
from understudy.report import Report, Slo
from understudy.report.advise import advise
from understudy.report.remedies import Setup
from understudy.report.verdicts import find_verdicts, preemption_storm
from understudy.run.facts import RunFacts
from understudy.workload import OpenLoop, Poisson

SMALL = us.TrtllmConfig(
    block_size=16,
    num_gpu_blocks=64,
    layer_kv_bytes=131072,
    max_num_seqs=16,
    max_num_batched_tokens=512,
    enable_chunked_prefill=True,
    timing=Constant(prefill_ms=100.0, decode_ms=20.0),
)


@pytest.mark.parametrize("slo", [Slo(ttft_ms=50), Slo(itl_ms=21), Slo(e2e_ms=100), None])
def test_verdicts_of_a_trtllm_run_name_no_flag_of_vllm(slo: Slo | None) -> None:
    found = find_verdicts(us.replay(crowd(120, arrivals=Poisson(qps=30)), SMALL, workers=2, slo=slo))
    assert found
    assert not [name for name in OF_VLLM if name in words(found)]


def test_suspensions_are_named_with_their_remedy() -> None:
    rows = [Row([10, 20], preemptions=3)] * 20
    run = RunFacts(engine={"trtllm_version": "1.3.0rc25", "block_size": 32})
    verdict = preemption_storm(Report.build(timeline(*rows), run))
    assert verdict is not None
    assert verdict.finding.startswith("60 suspensions for 20 requests")
    assert "kv_cache_config.max_tokens" in verdict.remedy
    assert "--max_batch_size" in verdict.remedy


def test_advice_replays_its_own_remedies() -> None:
    load = crowd(120, arrivals=Poisson(qps=30))

    def replay_with(changes: dict[str, Any]) -> Report:
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
    assert {"--max-batch-size", "--max-num-tokens"} <= flags
    assert not flags & set(OF_VLLM)
