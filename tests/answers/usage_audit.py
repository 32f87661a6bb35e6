"""Audit counts of KV blocks, by the KV events of the same run."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

from answers.evidence import run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from answers.definitions import Difference
    from answers.evidence import Evidence


def usage_is_a_share(evidence: Evidence) -> Iterator[Difference]:
    """Used and cached blocks are shares of the capacity (tests/answers/test_kv_usage.py recomputes them)."""
    usage = evidence.report["kv"]
    yield "usage", 0 <= (usage["usage_mean"] or 0) <= (usage["usage_max"] or 0) <= 1, True
    yield "cached", 0 <= (usage["cached_mean"] or 0) <= 1, True


def stored_and_evicted_blocks_are_those_of_events(evidence: Evidence) -> Iterator[Difference]:
    """The KV events of the GPUs name every block that was stored or evicted."""
    if evidence.report["run"].get("kv_groups") or evidence.case.kind in ("groups", "models"):
        return  # a block of several groups has an event of each
    trace = str(evidence.folder / "trace.jsonl")
    events = run("replay", trace, *evidence.case.arguments(), "--raw-events", "-", "--quiet", "--allow-empty")
    blocks = Counter[str]()
    for line in events.splitlines():
        event = json.loads(line)
        if event.get("tier", "G1") == "G1":
            blocks[event["type"]] += len(event.get("blocks") or event.get("sequence_hashes") or ())
    yield "kv.stored_blocks", evidence.report["kv"]["stored_blocks"], blocks["stored"]
    yield "kv.evictions", evidence.report["kv"]["evictions"], blocks["removed"]
