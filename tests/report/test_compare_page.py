"""A comparison concludes in one sentence, draws latencies over each other, and repeats nothing."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

import understudy
from replay.building import crowd
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.report import Slo
from understudy.report.compare import Comparison, compare
from understudy.report.conclusion import conclude
from understudy.report.html.frame import prose
from understudy.tiers import TiersConfig
from understudy.workload import Poisson

LOAD = crowd(120, arrivals=Poisson(qps=20))
CALM = crowd(40, arrivals=Poisson(qps=5))
SLOW = VllmConfig(num_gpu_blocks=400, timing=Constant(prefill_ms=100.0, decode_ms=20.0), max_num_seqs=4)


def host(blocks: int) -> TiersConfig:
    size = blocks * 16 * 131_072
    return TiersConfig.from_dict({"tiers": [{"tier": "g2", "bytes": size}], "model": "Llama-3.1-8B"})


@pytest.fixture(scope="module")
def fleets() -> Any:
    slo = Slo(ttft_ms=500)
    return compare(
        *(understudy.replay(LOAD, SLOW, workers=workers, slo=slo) for workers in (1, 2, 8)),
        names=("one", "two", "eight"),
    )


def test_the_conclusion_names_the_best_run_and_its_gain(fleets: Any) -> None:
    said = fleets.conclusion()
    attained = [report["goodput"]["ratio"] for report in fleets.reports]
    assert said.startswith(
        f"eight is best: SLO attainment {100 * attained[0]:.1f} % → {100 * attained[2]:.1f} % ["
    )
    assert said.endswith(" points at 95 % confidence], against one.")
    assert prose(said) in fleets.to_html()


def test_a_tier_that_no_block_was_read_from_bought_nothing() -> None:
    engine = VllmConfig(num_gpu_blocks=4000)
    reports = [understudy.replay(CALM, engine), understudy.replay(CALM, engine, tiers=host(500))]
    assert compare(*reports).conclusion() == "Host memory bought nothing: no block was read back."


def run(ttft: float = 100.0, digest: str = "a", tiers: Any = None) -> dict[str, Any]:
    return {
        "run": {"digest": digest},
        "goodput": None,
        "ttft_ms": {"mean": ttft},
        "throughput": {"output_tokens_per_s": 10.0},
        "itl_ms": {"mean": 5.0},
        **({} if tiers is None else {"tiers": {"tiers": tiers}}),
    }


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([run(), run()], "The runs are equal, request by request."),
        (
            [run(), run(100.5, "b")],
            "No difference of 10 % or more in mean TTFT and mean ITL; the noise is not known",
        ),
        ([run(), run(50, "b")], "b is best: mean TTFT 100 → 50 ms (-50 %), noise not known, against a."),
        ([run(50), run(100, "b")], "a is best: mean TTFT 100 → 50 ms (-50 %), noise not known, against b."),
        (
            [run(), run(100, "b", [{"tier": "g2", "hit_tokens_total": 0}])],
            "Host memory bought nothing: no block was read back.",
        ),
        (
            [run(), run(90, "b", [{"tier": "g2", "hit_tokens_total": 9}])],
            "b is best: mean TTFT 100 → 90 ms (-10 %), noise not known, against a.",
        ),
    ],
)
def test_conclusions(reports: list[dict[str, Any]], said: str) -> None:
    assert conclude("ab", reports).startswith(said)


def test_latencies_are_drawn_over_each_other(fleets: Any) -> None:
    page = fleets.to_html()
    assert page.count("<svg") == 3
    for style in ("base", "s1", "s2"):
        assert page.count(f'class="line {style}"') == 3


def test_a_verdict_of_several_runs_is_given_once(fleets: Any) -> None:
    rules = [one["rule"] for report in fleets.reports for one in report["verdicts"]]
    assert len(set(rules)) < len(rules)
    remedies = [remedy for *_, remedy in fleets.verdicts() if remedy]
    assert len(remedies) == len(set(remedies))
    twice = compare(understudy.replay(LOAD, SLOW), understudy.replay(LOAD, SLOW), names=("a", "b"))
    assert [names for names, *_ in twice.verdicts()] == [("a", "b")] * len(twice.reports[0]["verdicts"])


def test_sizes_have_units() -> None:
    engine = VllmConfig(num_gpu_blocks=4000)
    reports = [understudy.replay(CALM, engine, tiers=host(blocks)) for blocks in (500, 900)]
    both = compare(*reports, names=("small", "large"))
    [(name, values)] = [(name, values) for name, values in both.settings() if name.endswith("bytes")]
    assert f"<td>{name}</td>" in both.to_html()
    assert str(values[0]) not in both.to_html()
    assert "1,000 MiB</td>" in both.to_html()


def test_every_run_keeps_its_own_remedy(fleets: Any) -> None:
    given = {
        (name, one["finding"], one["remedy"])
        for name, report in zip(fleets.names, fleets.reports, strict=True)
        for one in report["verdicts"]
    }
    assert len({remedy for _, _, remedy in given}) > len(
        {one["rule"] for one in fleets.reports[0]["verdicts"]}
    )
    assert {(name, *rest) for names, *rest in fleets.verdicts() for name in names} == given
    out = io.StringIO()
    fleets.print(Console(file=out, width=1000))
    for name, finding, remedy in given:
        assert f"{name}: {finding} {remedy}" in out.getvalue()
        assert f"<li>{name}: <strong>{prose(finding)}</strong> {prose(remedy)}</li>" in fleets.to_html()


def test_equal_findings_with_different_remedies_are_two_verdicts() -> None:
    reports = tuple(
        {"verdicts": [{"rule": "r", "finding": "Slow.", "remedy": remedy}]} for remedy in ("A.", "B.", "A.")
    )
    found = Comparison(("a", "b", "c"), reports).verdicts()
    assert found == [(("a", "c"), "Slow.", "A."), (("b",), "Slow.", "B.")]
