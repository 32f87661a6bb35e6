"""The page leads with the goal's verdict, folds notes, and shows percentiles first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import understudy as us
from understudy.report import Slo

TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"


def page(slo: Slo | None) -> str:
    report = us.replay(us.read_trace(TRACE).head(60), model="Llama-3.1-8B", gpu="H100", slo=slo)
    text = report.to_html()
    assert text is not None
    return text


@pytest.mark.parametrize(
    ("slo", "style", "said", "limits"),
    [
        (Slo(ttft_ms=5000, itl_ms=100), "met", "Goal met", ["ok", "ok"]),
        (Slo(ttft_ms=1, itl_ms=100), "missed", "Goal missed", ["late", "ok"]),
        (Slo(e2e_ms=1), "missed", "Goal missed", ["late"]),
    ],
)
def test_the_verdict_on_the_goal_stands_before_all_numbers(
    slo: Slo, style: str, said: str, limits: list[str]
) -> None:
    text = page(slo)
    (line,) = re.findall(r'<section class="goal .*?</section>', text)
    assert line.startswith(f'<section class="goal {style}"><b class="said">{said}</b>')
    assert "99 % wanted" in line
    assert re.findall(r'class="limit (\w+)"', line) == limits
    assert text.index(line) < text.index('<div class="tiles">')


def test_without_objectives_there_is_no_goal() -> None:
    assert 'class="goal' not in page(None)


def test_notes_are_folded_apart_from_verdicts_and_the_source_of_times_is_said_once() -> None:
    text = page(None)
    (notes,) = re.findall(r'<details class="notes">.*?</details>', text)
    count = notes.count("<li>")
    assert f"<summary>{count} note{'s' * (count > 1)}</summary>" in notes
    header = text[text.index("<header>") : text.index("</header>")]
    assert header.count("times from") == 1
    assert '<div class="source">times from' in header


def test_percentiles_lead_the_table() -> None:
    text = page(None)
    table = text[text.index("<h2>Distributions</h2>") :]
    names = re.findall(r"<th>([\w ]+)</th>", table[: table.index("</thead>")])
    assert names[:2] == ["Metric", "p99"]
    assert names.index("p50") < names.index("avg")
