"""Numbers that a fit holds at the preset: those that the data do not determine, and those above a peak."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.timing.efficiencies import PEAKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.calibrate.benchmark import Benchmark
    from understudy.timing.efficiencies import Efficiencies
    from understudy.timing.timing_file import TimingFile

DETERMINED = 0.6
"""A parameter is determined if the data left less than this share of the prior's uncertainty."""


def find_undetermined(
    efficiencies: Efficiencies, start: Efficiencies, deviations: dict[str, float], prior: dict[str, float]
) -> str | None:
    """Return the number to hold: the least determined, or one above its peak; None if all are determined."""
    worst = max(deviations, key=lambda name: deviations[name] / prior[name])
    if deviations[worst] >= DETERMINED * prior[worst]:
        return worst
    impossible = [name for name in deviations if is_above_peak(name, efficiencies, start)]
    return max(impossible, key=lambda name: float(getattr(efficiencies, name)), default=None)


def is_above_peak(name: str, efficiencies: Efficiencies, start: Efficiencies) -> bool:
    """Whether a share of a peak exceeds 1; a preset above 1 covers unmodelled effects."""
    return name in PEAKS and bool(getattr(efficiencies, name) > 1 >= getattr(start, name))


def list_notes(file: TimingFile, benchmarks: Sequence[Benchmark]) -> tuple[str, ...]:
    """List the benchmarks' notes, and the efficiencies above 1 that the data asked for."""
    notes = [f"{one.file}: {note}" for one in benchmarks for note in one.notes]
    for one in file.fitted:
        above = one.times_peak
        if above is None and one.name in PEAKS and one.value > 1 >= one.preset:  # files of earlier versions
            above = one.value
        if above is None:
            continue
        held = "; it is held at the preset" if one.value == one.preset else ""
        notes.append(
            f"{one.name} would be {above:.3g} times the peak of a {file.gpu.name}, which is impossible{held}: the "
            "benchmark did not run with these flags (check model, data types, GPU, sizes, prefix caching)"
        )
    return tuple(notes)
