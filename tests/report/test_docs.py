from __future__ import annotations

from report.metrics_page import PAGE, written


def test_the_metrics_page_says_what_the_definitions_say() -> None:
    assert PAGE.read_text() == written(PAGE.read_text()), "run: python tests/report/metrics_page.py"
