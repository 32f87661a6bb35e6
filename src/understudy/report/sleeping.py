"""Sessions between their requests: the KV that they would need, and where it was found when they returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.workload.columns import intern_ids, next_turn_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.run.timeline import Timeline
    from understudy.workload import Workload
    from understudy.workload.columns import Int64Column

PLACES = ("GPU", "G2", "G3", "G4", "computed again")
"""Where the tokens were that a session had before: on the device, on a lower tier, or nowhere."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SleepColumns:
    """One row for each request that continues a session; times in ns."""

    row: Int64Column
    """The request."""
    slept_ns: Int64Column
    """From the end of the session's request before to its arrival."""
    known_tokens: Int64Column
    """Leading tokens of its prompt that the session had before, by whole blocks of the trace."""
    found_tokens: NDArray[np.int64]
    """Of these, by place: a column per entry of `PLACES`."""
    ttft_ns: Int64Column
    """Time to its first token; −1 for none."""
    time_ns: Int64Column
    """Times at which a session falls asleep or returns."""
    sleeping_tokens: Int64Column
    """KV of all sessions that sleep from then on, in tokens: prompts and outputs of their last requests. A block that
    several of them share counts once."""
    capacity_tokens: int
    """KV that all devices hold."""

    def __len__(self) -> int:
        """Return the number of requests that continue a session."""
        return len(self.row)

    def shares(self) -> dict[str, float]:
        """Return the share of the known tokens found at each place."""
        total = max(int(self.known_tokens.sum()), 1)
        return {place: int(self.found_tokens[:, at].sum()) / total for at, place in enumerate(PLACES)}

    def mean_sleeping_tokens(self) -> float:
        """Return the mean over time of the KV of sleeping sessions."""
        if len(self.time_ns) < 2:
            return 0.0
        spans = np.diff(self.time_ns)
        return float((self.sleeping_tokens[:-1] * spans).sum() / max(int(spans.sum()), 1))

    def ttft_ms_by_place(self) -> dict[str, tuple[int, float]]:
        """Return the number of returns and their median TTFT in ms, by the slowest place of a twentieth of them."""
        much = self.found_tokens * 20 >= np.maximum(self.known_tokens, 1)[:, None]
        slowest = np.where(much.any(axis=1), len(PLACES) - 1 - much[:, ::-1].argmax(axis=1), 0)
        found = {}
        for at, place in enumerate(PLACES):
            ttft_ns = self.ttft_ns[(slowest == at) & (self.ttft_ns >= 0)]
            if len(ttft_ns):
                found[place] = len(ttft_ns), float(np.median(ttft_ns) / 1e6)
        return found

    def describe(self) -> str:
        """Return two lines: KV of sleeping sessions, and where it was when they returned."""
        if not len(self):
            return "sleeping sessions: none returned"
        mean, peak = self.mean_sleeping_tokens(), int(self.sleeping_tokens.max(initial=0))
        places = ", ".join(f"{place} {share:.1%}" for place, share in self.shares().items() if share)
        medians = ", ".join(
            f"{place} {ms:,.0f} ms ({count:,})" for place, (count, ms) in self.ttft_ms_by_place().items()
        )
        return (
            f"sleeping sessions: KV mean {mean:,.0f} tokens, peak {peak:,} "
            f"(the devices hold {self.capacity_tokens:,})\n"
            f"returns: {len(self):,}, of known tokens {places}; TTFT p50 by slowest place: {medians}"
        )


def measure_sleep(workload: Workload, timeline: Timeline) -> SleepColumns:
    """Measure the sessions of a run between their requests."""
    following = next_turn_rows(workload.session)
    before = np.flatnonzero(following >= 0)
    after = following[before]
    came = (
        (timeline.finish_ns[before] >= 0) & (timeline.arrival_ns[after] >= 0) & (timeline.worker[after] >= 0)
    )
    before, after = before[came], after[came]
    known = np.minimum(
        _common_tokens(workload, before, after), timeline.prompt_tokens[after].astype(np.int64) - 1
    )
    found = np.zeros((len(after), len(PLACES)), np.int64)
    left = np.minimum(timeline.cached_tokens_first[after], known)
    if timeline.tiers is not None:
        for at, tokens in enumerate(timeline.tiers.below_tokens_first):
            found[:, at + 1] = np.minimum(tokens[after], left)
            left = left - found[:, at + 1]
    found[:, 0] = left
    found[:, -1] = known - found[:, :-1].sum(axis=1)
    first_ns = timeline.first_token_ns[after]
    time_ns, tokens = _sleeping_tokens(workload, timeline, before, after)
    return SleepColumns(
        row=after,
        slept_ns=timeline.arrival_ns[after] - timeline.finish_ns[before],
        known_tokens=known,
        found_tokens=found,
        ttft_ns=np.where(first_ns >= 0, first_ns - timeline.arrival_ns[after], -1),
        time_ns=time_ns,
        sleeping_tokens=tokens,
        capacity_tokens=int(timeline.worker_blocks.sum()) * timeline.block_size,
    )


def _sleeping_tokens(
    workload: Workload, timeline: Timeline, before: Int64Column, after: Int64Column
) -> tuple[Int64Column, Int64Column]:
    """Return times, and the KV of sleeping sessions from each on, in tokens; each block once.

    Answers, and tokens without a block, count for each session.
    """
    offsets, size, ids = workload.hash_offsets, workload.trace_block_size, workload.hash_ids
    if int(ids.max(initial=0)) > 2 * len(ids) + 2**16:
        ids = intern_ids(ids)
    users = np.zeros(int(ids.max(initial=0)) + 1, np.int32)
    times = np.concatenate([timeline.finish_ns[before], timeline.arrival_ns[after]])
    order = np.argsort(times, kind="stable")
    levels = np.zeros(len(times), np.int64)
    level = 0
    for at, change in enumerate(order.tolist()):
        row = int(before[change % len(before)])
        prompt = int(timeline.prompt_tokens[row])
        blocks = ids[offsets[row] : min(offsets[row + 1], offsets[row] - prompt // -size)]
        if change < len(before):  # it falls asleep
            fresh, sign = users[blocks] == 0, 1
            users[blocks] += 1
        else:
            users[blocks] -= 1
            fresh, sign = users[blocks] == 0, -1
        tokens = int(np.count_nonzero(fresh)) * size + max(int(timeline.output_tokens[row]), 0)
        surplus = len(blocks) * size - prompt  # of the last block; below 0: tokens without a block
        if surplus < 0 or (len(blocks) and fresh[-1]):
            tokens -= surplus
        level += sign * tokens
        levels[at] = level
    if not len(times):
        return np.empty(0, np.int64), levels
    last = np.append(np.flatnonzero(np.diff(times[order])), len(times) - 1)
    return times[order][last], levels[last]


def _common_tokens(workload: Workload, before: Int64Column, after: Int64Column) -> Int64Column:
    """Return the tokens of the leading blocks that the prompts of each two requests share, and quoted answers."""
    offsets, ids, size = workload.hash_offsets, workload.hash_ids, workload.trace_block_size
    common = np.zeros(len(before), np.int64)
    for at, (one, other) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
        if workload.output_in_next is not None and workload.output_in_next[one]:
            common[at] = int(workload.prompt_tokens[one]) + int(workload.output_tokens[one])
            continue
        ours, theirs = ids[offsets[one] : offsets[one + 1]], ids[offsets[other] : offsets[other + 1]]
        length = min(len(ours), len(theirs))
        differs = np.flatnonzero(ours[:length] != theirs[:length])
        blocks = int(differs[0]) if len(differs) else length
        common[at] = min(blocks * size, int(workload.prompt_tokens[one]), int(workload.prompt_tokens[other]))
    return common
