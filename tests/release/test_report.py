"""The report of a release, the page of releases, and the comparison of sources."""

from __future__ import annotations

import json
import re
from pathlib import Path

from release.golden import count_recordings
from release.report import FamilyResult, Smallest, compare_facts, update_results, write_page, write_report
from release.sources import compare_sources
from understudy.engines.profiles import NEWEST

ROOT = Path(__file__).parents[2]

OLD = {
    "flags": {"--a": "default 1", "--b": "default 2", "--enable-d/--no-enable-d": "default 4"},
    "metrics": ["vllm:x", "vllm:y"],
    "events": {"BlockStored": ["block_hashes", "medium"]},
    "errors": {},
}
NEW = {
    "flags": {"--a": "default 3", "--c": "default None", "--enable-d/--disable-d": "default 4"},
    "metrics": ["vllm:y", "vllm:z"],
    "events": {"BlockStored": ["block_hashes", "medium", "lookahead"], "BlockMoved": []},
    "errors": {},
}


def test_facts_name_what_was_added_is_gone_or_changed() -> None:
    facts = compare_facts(OLD, NEW)
    assert facts.flags == [
        "added `--c` (default None)",
        "gone `--b`",
        "changed `--a`: default 1 → default 3",
        "1 flags with other alternative names, as `--enable-d/--no-enable-d` → `--enable-d/--disable-d`: --enable-d",
    ]
    assert facts.metrics == ["added `vllm:z`", "gone `vllm:x`"]
    assert facts.events == ["added `BlockMoved`", "added `BlockStored.lookahead`"]


def test_facts_that_could_not_be_read_say_why() -> None:
    facts = compare_facts(OLD, {**NEW, "errors": {"flags": "ImportError: moved"}})
    assert facts.flags == ["could not be read: ImportError: moved"]
    assert facts.metrics


def test_changed_sources_are_named_by_function_and_line(tmp_path: Path) -> None:
    for release, body in (("old", "        return 1\n"), ("new", "        x = 2\n        return x\n")):
        folder = tmp_path / release / "v1" / "core"
        folder.mkdir(parents=True)
        (folder / "same.py").write_text("a = 1\n", encoding="utf-8")
        text = f"class Scheduler:\n    def schedule(self):\n{body}"
        (folder / "sched.py").write_text(text, encoding="utf-8")
    (tmp_path / "new" / "v1" / "core" / "fresh.py").write_text("", encoding="utf-8")
    fresh, changed = compare_sources(tmp_path / "old", tmp_path / "new", tmp_path / "build" / "source.diff")
    assert (fresh.path, fresh.status) == ("v1/core/fresh.py", "new")
    assert (changed.path, changed.places) == ("v1/core/sched.py", {"Scheduler.schedule": [(3, 4)]})
    assert "+        x = 2" in (tmp_path / "build" / "source.diff").read_text(encoding="utf-8")


def test_a_report_has_counts_scenarios_sources_and_facts() -> None:
    scenario = {
        "name": "n",
        "config": {"num_blocks": 9},
        "max_steps": 4,
        "requests": [{"id": "a"}, {"id": "b"}],
    }
    text = write_report(
        "0.34.0",
        "0.33",
        range(60),
        [FamilyResult("caps", 60), FamilyResult("lora", 60, 2, {"ValueError: no": 1}, {"cached": 2})],
        [Smallest("lora", "lora_7", scenario, 4, "step 3: cached is 0, recorded 1")],
        [],
        compare_facts(OLD, NEW),
    )
    assert "**2 of 120 schedules differ, in 1 of 2 families.**" in text
    assert "| lora | 60 | 2 | `cached` 2 |" in text
    assert "From lora_7: 2 requests, 4 steps.\nFirst difference: step 3: cached is 0, recorded 1" in text
    assert '{"config": {"num_blocks": 9}, "max_steps": 4}\n{"id": "a"}\n{"id": "b"}\n```' in text
    assert "* lora, 1: `ValueError: no`" in text
    assert "None of the watched files changed." in text
    assert "* gone `vllm:x`" in text


def test_a_report_without_differences_says_so() -> None:
    text = write_report("0.34.0", "0.33", range(60), [FamilyResult("caps", 60)], [], None, None)
    assert "**0 of 60 schedules differ: the profile is exact.**" in text
    assert "##" not in text


def test_results_replace_those_of_the_same_release_and_profile(tmp_path: Path) -> None:
    path = tmp_path / "releases" / "results.json"
    update_results(path, "0.33.0", "0.32", range(9), [FamilyResult("caps", 9, 4)])
    update_results(path, "0.34.0", "0.33", range(9), [FamilyResult("caps", 9, 1)])
    entries = update_results(path, "0.33.0", "0.32", range(9), [FamilyResult("caps", 9, 2)])
    assert [(entry["release"], entry["families"]["caps"]["differ"]) for entry in entries] == [
        ("0.34.0", 1),
        ("0.33.0", 2),
    ]
    page = write_page(entries, [("0.33.0", "caps", 3)])
    assert "| [0.34.0](releases/0.34.md) | 0.33 | 8 of 9 |" in page
    assert "| 0.33.0 | caps | 3 |" in page


def test_the_page_in_docs_is_that_of_the_results_and_recordings() -> None:
    entries = json.loads((ROOT / "docs" / "releases" / "results.json").read_text(encoding="utf-8"))
    page = write_page(entries, count_recordings(ROOT / "tests" / "golden"))
    assert (ROOT / "docs" / "releases.md").read_text(encoding="utf-8") == page


def test_the_makefile_knows_the_newest_profile() -> None:
    known = re.search(r"^KNOWN := (\S+)\.\d+$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert known is not None
    assert known[1] == NEWEST
