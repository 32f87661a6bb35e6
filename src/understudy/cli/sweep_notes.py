"""Notes below the answers of `understudy sweep`: on its search, its load and the settings of its candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.run.fleet_size import names_gpus
from understudy.sweep.answer import find_answers
from understudy.sweep.candidate import format_flags
from understudy.workload import OpenLoop

if TYPE_CHECKING:
    from understudy.sweep.trials import Trials
    from understudy.workload import Workload


def collect_notes(trials: Trials, workload: Workload, search: str, goal: float) -> list[str]:
    """Return notes on the search, on the workload, those that all candidates share, and others of the answers."""
    notes = [
        {*trial.candidate.settings.notes, *trial.candidate.settings.engine.notes()}
        for trial in trials.whole.values()
    ]
    shared = set.intersection(*notes) if notes else set()
    for trial in trials.whole.values():  # also if candidates differ in it
        for engine in [pool.engine for pool in trial.candidate.settings.pools] or [
            trial.candidate.settings.engine
        ]:
            shared |= {note for note in engine.notes() if note.startswith("speculation")}
    owners: dict[str, list[str]] = {}
    for answer in find_answers((trials.whole[point] for point in sorted(trials.whole)), goal):
        named = answer.best or answer.smaller
        if named is not None:
            for note in named.candidate.settings.notes:
                owners.setdefault(note, []).append(format_flags(named.flags))
    own = [
        f"{'; '.join(dict.fromkeys(flags))}: {note}" for note, flags in owners.items() if note not in shared
    ]
    part = len(trials.whole), trials.space.size - len(trials.invalid)
    partial = (
        f"search {search} replayed {part[0]:,} of {part[1]:,} combinations whole; the front and the shares of variance "
        "describe only these"
    )
    unnamed = (
        "no GPU is named: each worker counts as one GPU; give --model and --gpu, or a timing file, for a bill of real "
        "GPUs"
    )
    is_named = all(names_gpus(trial.candidate.settings) for trial in trials.whole.values())
    return [
        *([partial] if search != "grid" else []),
        *([] if is_named else [unnamed]),
        *workload.notes,
        *_describe_load(trials),
        *sorted(shared),
        *own,
    ]


def _describe_load(trials: Trials) -> list[str]:
    """Say by how much the load of all candidates differs from the trace, unless it is varied."""
    settings = [trial.candidate.settings for trial in trials.whole.values()]
    users = {one.users for one in settings}
    rates = {one.load.arrival_rate_scale for one in settings if isinstance(one.load, OpenLoop)}
    notes = []
    if len(users) == 1 and (factor := users.pop()) != 1:
        notes.append(f"load: {factor:g} times the users of the trace, each as fast as there (--users)")
    if len(rates) == 1 and (factor := rates.pop()) != 1:
        notes.append(
            f"load: the users of the trace, {factor:g} times as fast (--arrival-rate-scale); for growth give --users"
        )
    return notes
