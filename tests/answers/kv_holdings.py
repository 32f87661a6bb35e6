"""Blocks that requests hold over time, recomputed from the steps of a run, its requests and the bytes of a link.

Prompts have unique content and pools are large: no block is shared, evicted or preempted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.run.step_columns import StepColumns
    from understudy.run.timeline import Timeline

FOREVER = 1 << 62


@dataclass
class Step:
    """A step of one worker, and its batch: (row, tokens before, tokens computed)."""

    begin_ns: int
    end_ns: int
    entries: list[tuple[int, int, int]]


@dataclass
class Series:
    """A number over time, as changes."""

    changes: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def hold(self, blocks: int, from_ns: int, until_ns: int) -> None:
        if until_ns > from_ns:
            self.changes[from_ns] += blocks
            self.changes[until_ns] -= blocks

    def at(self, times: list[int]) -> list[int]:
        """Values from each of the ascending times on."""
        changes = sorted(self.changes.items())
        values: list[int] = []
        value = place = 0
        for time_ns in times:
            while place < len(changes) and changes[place][0] <= time_ns:
                value += changes[place][1]
                place += 1
            values.append(value)
        return values


def read_steps(steps: StepColumns, worker: int) -> list[Step]:
    batches: dict[int, list[tuple[int, int, int, bool]]] = defaultdict(list)
    columns = (
        steps.entry_batch,
        steps.entry_request,
        steps.entry_before,
        steps.entry_tokens,
        steps.entry_decodes,
    )
    for batch, row, before, tokens, decodes in zip(*(column.tolist() for column in columns), strict=True):
        batches[batch].append((row, before, tokens, bool(decodes)))
    out: list[Step] = []
    passed: dict[int, int] = defaultdict(int)  # steps so far of a batch that several steps share
    rows = (steps.step_worker, steps.step_begin_ns, steps.step_end_ns, steps.step_batch)
    for its, begin_ns, end_ns, batch in zip(*(column.tolist() for column in rows), strict=True):
        later = passed[batch]
        passed[batch] += 1
        if its == worker:
            entries = [(row, before + later * tokens, tokens) for row, before, tokens, _ in batches[batch]]
            out.append(Step(begin_ns, end_ns, entries))
    return out


def when_vllm_copies(
    timeline: Timeline, steps: list[Step], block: int, block_ns: int
) -> dict[int, list[int]]:
    """When the copy of each full block of a row lands on the host, one block after another over the link."""
    landings: dict[int, list[int]] = defaultdict(list)
    free_ns = 0
    for step in steps:
        for row, before, tokens in step.entries:
            if timeline.finish_ns[row] < step.end_ns:  # aborted meanwhile: its step computes nothing
                continue
            while len(landings[row]) < (before + tokens) // block:
                free_ns = max(free_ns, step.end_ns) + block_ns
                landings[row].append(free_ns)
    return landings


def vllm_holdings(timeline: Timeline, steps: list[Step], block: int, block_ns: int | None) -> Series:
    """Blocks of requests from the begin of the step that computes them; until the end and, copied, the landing."""
    held = Series()
    landings = {} if block_ns is None else when_vllm_copies(timeline, steps, block, block_ns)
    known: dict[int, int] = defaultdict(int)
    for step in steps:
        for row, before, tokens in step.entries:
            end_ns = int(timeline.finish_ns[row])
            for place in range(known[row], -(-(before + tokens) // block)):
                copied = landings.get(row, [])
                landed_ns = copied[place] if place < len(copied) else 0
                held.hold(1, step.begin_ns, max(end_ns, landed_ns))
            known[row] = max(known[row], -(-(before + tokens) // block))
    return held


def sglang_holdings(timeline: Timeline, steps: list[Step], page: int, page_ns: int | None) -> Series:
    """Pages of requests; under HiCache those of an ended request until its loop sees that their copies have landed."""
    held = Series()
    known: dict[int, int] = defaultdict(int)
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by row: (from, pages)
    written: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by row: (pages of a copy, when it lands)
    free_ns = 0
    for step in steps:
        copied = 0
        nodes: list[tuple[int, int]] = []
        for row, before, tokens in step.entries:
            total = before + tokens
            pages = -(-total // page)
            if pages > known[row]:
                spans[row].append((step.begin_ns, pages - known[row]))
            known[row] = max(known[row], pages)
            prompt = int(timeline.prompt_tokens[row])
            ends = int(timeline.finish_ns[row]) == step.end_ns
            if page_ns is None or not (ends or total == prompt):
                continue
            node = (
                total // page - sum(size for size, _ in written[row]) - sum(n for r, n in nodes if r == row)
            )
            if node > 0:
                nodes.append((row, node))
                copied += node
        if copied and page_ns is not None:
            free_ns = max(free_ns, step.end_ns) + copied * page_ns
            for row, node in nodes:
                written[row].append((node, free_ns))
    for row, taken in spans.items():
        end_ns = int(timeline.finish_ns[row])
        locked: list[tuple[int, int]] = []  # a later node keeps those before it
        until_ns = 0
        for size, landed_ns in reversed(written[row]):
            until_ns = max(until_ns, _seen(timeline, steps, landed_ns))
            locked.append((size, max(end_ns, until_ns)))
        _hold_spans(held, taken, list(reversed(locked)), end_ns)
    return held


def _hold_spans(
    held: Series, taken: list[tuple[int, int]], nodes: list[tuple[int, int]], end_ns: int
) -> None:
    """Hold pages from when they were taken, in order, until their nodes are free; those without a node, to the end."""
    ends = [until_ns for size, until_ns in nodes for _ in range(size)]
    place = 0
    for from_ns, pages in taken:
        for _ in range(pages):
            held.hold(1, from_ns, ends[place] if place < len(ends) else end_ns)
            place += 1


def _seen(timeline: Timeline, steps: list[Step], landed_ns: int) -> int:
    """When the engine's loop sees a landing: at once if it is idle, else before its next step or after its last."""
    rows = {row for step in steps for row, *_ in step.entries}
    arrivals = [int(timeline.arrival_ns[row]) for row in rows]
    ends = [int(timeline.finish_ns[row]) for row in rows]
    live = any(begin <= landed_ns < end for begin, end in zip(arrivals, ends, strict=True))
    if not live:
        return landed_ns
    begins = [step.begin_ns for step in steps if step.begin_ns >= landed_ns]
    idle = [
        end
        for end in ends
        if end >= landed_ns and not any(b <= end < e for b, e in zip(arrivals, ends, strict=True))
    ]
    return min([*begins, *idle, FOREVER])
