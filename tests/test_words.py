"""Identifiers of the old private language do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1]
GONE = {
    "advance_lazily": "advance with LastStep.Unopened",
    "advance_through": "advance with LastStep.Complete",
    "ageing": "decay",
    "catch_up": "run_deferred_steps, or run until",
    "foresee": "predict, lookahead",
    "foreseen": "predicted",
    "found_all_the_same": "keep_matchable",
    "ghosts": "evicted-key history",
    "greet": "sync_to",
    "leap": "fast_forward",
    "leaping": "fast_forward",
    "no_finish_before": "next_visible_ns",
    "play_turn": "begin_recorded_step, end_recorded_step",
    "rest_on": "run_deferred_samples",
    "rouse": "run_deferred_steps",
    "somebody_came_or_went": "on_requests_changed",
    "turns_": "call_flag_",
    "unheard_": "discarded_",
    "unseen_": "may_run_ahead_",
    "untold_changes": "unpublished_changes",
}


@pytest.mark.parametrize("room", ["core", "src"])
def test_no_identifier_is_of_the_old_language(room: str) -> None:
    found = []
    pattern = re.compile(rf"\b({'|'.join(GONE)})\b", re.IGNORECASE)
    for path in sorted((HOUSE / room).rglob("*")):
        if path.suffix not in {".py", ".hpp", ".cpp"}:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = re.sub(r'//.*|#(?!include).*|"(?:\\.|[^"\\])*"', "", line)
            found += [
                f"{path.relative_to(HOUSE)}:{number}: {m[1]} → {GONE[m[1].lower()]}"
                for m in pattern.finditer(code)
            ]
    assert not found, "\n".join(found)
