"""Hits and held blocks of workers with several KV cache groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy._core import GroupReport

_SAMPLES = 120


class GroupUse(msgspec.Struct, frozen=True):
    """Device blocks that requests hold in one group; a block that several of them share counts once."""

    kind: str
    window: int | None
    block_size: int
    held_blocks_mean: float
    """Over time, summed over workers."""
    held_blocks_peak: int
    """Most at one time on one worker."""
    held_blocks: list[int]
    """By time, as `GroupFacts.time_s`, summed over workers."""


class GroupFacts(msgspec.Struct, frozen=True):
    """Hits of all KV cache groups together and of full attention alone, as shares of tokens looked up."""

    hit_ratio: float
    """On the device and the tiers below it."""
    full_attention_hit_ratio: float | None
    """Hit ratio if only full attention had to have the tokens, as one group would show; None without such a group."""
    shortened_ratio: float
    """Share of admissions whose hit ended where a window or a state was gone."""
    time_s: list[float]
    groups: tuple[GroupUse, ...]


def summarise_groups(
    reports: Sequence[GroupReport], labels: Sequence[tuple[str, int | None, int]]
) -> GroupFacts | None:
    """Add up the workers' hits, and sample their held blocks at equal distances; None without groups."""
    found = [report for report in reports if report.samples]
    if not found or not labels:
        return None
    queries = sum(report.queries for report in found)
    admissions = sum(report.admissions for report in found)
    full = [report.full_hits for report in found]
    end_ns = max(report.samples[-1][0] for report in found)
    times = np.linspace(0, end_ns, min(_SAMPLES, max(len(report.samples) for report in found)))
    held = np.zeros((len(times), len(labels)), np.int64)
    for report in found:
        at = np.array([time_ns for time_ns, _ in report.samples])
        blocks = np.array([blocks for _, blocks in report.samples], np.int64)
        last = np.searchsorted(at, times, side="right") - 1
        held += np.where((last >= 0)[:, None], blocks[last], 0)
    peaks = np.max([report.peaks for report in found], axis=0)
    uses = tuple(
        GroupUse(kind, window, size, float(column.mean()), int(peak), column.tolist())
        for (kind, window, size), column, peak in zip(labels, held.T, peaks, strict=True)
    )
    return GroupFacts(
        sum(report.hits for report in found) / max(queries, 1),
        None if None in full else sum(hits or 0 for hits in full) / max(queries, 1),
        sum(report.shortened for report in found) / max(admissions, 1),
        (times / 1e9).round(3).tolist(),
        uses,
    )
