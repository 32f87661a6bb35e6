"""The page of a sweep and the reports that it links to."""

from __future__ import annotations

import re
from pathlib import Path

from understudy.cli import main

TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"


def test_the_page_links_every_point_of_the_front_to_its_report(tmp_path: Path) -> None:
    flags = ["--vary", "workers=0..4", "routing=round_robin,kv", "--slo-ttft-ms", "100", "--gpu-hour", "2"]
    files = ["--html", str(tmp_path / "page.html"), "--reports", str(tmp_path / "reports")]
    assert main(["sweep", str(TRACE), *flags, *files, "--jobs", "1", "--quiet"]) == 0
    page = (tmp_path / "page.html").read_text()
    links = set(re.findall(r'href="(reports/[^"]+)"', page))
    assert links
    for link in links:
        assert "workers=" in (tmp_path / link).read_text()
    for part in ("Requests in time by cost", "Candidates over the varied flags", "Flags that mattered"):
        assert part in page
    assert "workers must be at least 1" in page
    assert page.count('class="many') + page.count('class="chosen') == 8
    assert "vllm serve MODEL" in page
    assert "http" not in re.sub(r"http://engine-\d|http-equiv", "", page)  # it loads nothing


def test_a_page_of_one_candidate_or_of_no_answer_has_no_empty_plot(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for limit in ("1000", "0.001"):
        flags = ["--vary", "workers=1", "--slo-ttft-ms", limit, "--jobs", "1", "--quiet", "--html", str(page)]
        assert main(["sweep", str(TRACE), *flags]) == 0
        assert "nan" not in page.read_text().lower().replace("nanosecond", "")
    assert "No fleet of the space meets the goal." in page.read_text()
