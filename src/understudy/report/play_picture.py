"""Picture of one play as SVG: its sessions, requests and critical path over time."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from understudy.errors import InvalidArgument
from understudy.report.plays import critical_path

if TYPE_CHECKING:
    from understudy.report.plays import PlayTimes
    from understudy.workload import Workload

COLORS = {"queue": "#c9b458", "transfer": "#8e6bbf", "prefill": "#3d7ebf", "decode": "#4a9d6e"}
_WIDTH, _LEFT, _LANE, _TOP = 1200, 210, 22, 58


def draw_play(workload: Workload, timeline: PlayTimes, play: int) -> str:
    """Return an SVG: a lane per session, a bar per request by phases, and a line along the critical path.

    Errors: InvalidArgument if the play did not end.
    """
    graph = workload.graph
    if graph is None:
        raise InvalidArgument("the workload has no plays: its requests do not wait for one another")
    rows = np.flatnonzero(graph.play == play)
    name = (graph.play_ids or [f"play_{number}" for number in range(graph.plays)])[play]
    if not len(rows) or (timeline.finish_ns[rows] < 0).any() or (timeline.arrival_ns[rows] < 0).any():
        raise InvalidArgument(f"play {name!r} did not end, so that there is no picture of it")
    start_ns = int(timeline.arrival_ns[rows].min())
    span_ns = max(int(timeline.finish_ns[rows].max()) - start_ns, 1)
    sessions = {int(own): lane for lane, own in enumerate(dict.fromkeys(workload.session[rows].tolist()))}
    height = _TOP + _LANE * len(sessions) + 34

    def x(time_ns: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - 12) * (time_ns - start_ns) / span_ns

    def y(row: int) -> float:
        return _TOP + _LANE * sessions[int(workload.session[row])]

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18" font-size="14">{escape(name)}: {len(rows):,} requests in {span_ns / 1e9:,.1f} s</text>',
        *_legend(),
    ]
    for own, lane in sessions.items():
        label = (
            str(own) if workload.session_ids is None else workload.session_ids[own].removeprefix(f"{name}:")
        )
        at = _TOP + _LANE * lane
        parts.append(f'<text x="8" y="{at + 13}">{escape(label[-32:])}</text>')
        parts.append(f'<line x1="{_LEFT}" y1="{at + 9}" x2="{_WIDTH - 12}" y2="{at + 9}" stroke="#e4e4e4"/>')
    for row in rows.tolist():
        title = str(row) if workload.request_ids is None else workload.request_ids[row]
        ends = dict(_phases(timeline, row))
        parts.append(f"<g><title>{escape(title)}: {_describe(ends)}</title>")
        for phase, (begin_ns, end_ns) in ends.items():
            if end_ns > begin_ns:
                width = max(x(end_ns) - x(begin_ns), 0.4)
                parts.append(
                    f'<rect x="{x(begin_ns):.1f}" y="{y(row) + 3}" width="{width:.1f}" height="12" '
                    f'fill="{COLORS[phase]}"/>'
                )
        parts.append("</g>")
    last = int(rows[timeline.finish_ns[rows].argmax()])
    points = [f"{x(int(timeline.finish_ns[last])):.1f},{y(last) + 17}"]
    for row, ends_at_finish in critical_path(graph, timeline, last):
        time_ns = int(timeline.finish_ns[row]) if ends_at_finish else int(timeline.arrival_ns[row])
        points += [f"{x(time_ns):.1f},{y(row) + 17}", f"{x(int(timeline.arrival_ns[row])):.1f},{y(row) + 17}"]
    parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="#c0392b" stroke-width="1.4"/>')
    for tick in range(6):
        at_ns = start_ns + span_ns * tick // 5
        parts.append(
            f'<text x="{x(at_ns):.1f}" y="{height - 10}" text-anchor="{"end" if tick == 5 else "middle"}">'
            f"{(at_ns - start_ns) / 1e9:,.1f} s</text>"
        )
    return "\n".join([*parts, "</svg>\n"])


def find_play(workload: Workload, name: str) -> int:
    """Return the number of a play by its name. Errors: InvalidArgument if there is none."""
    names = [] if workload.graph is None else workload.graph.play_ids or []
    if name not in names:
        some = ", ".join(names[:3])
        raise InvalidArgument(
            f"--play {name!r} is not in the trace; its plays are {some}{', …' * (len(names) > 3)}"
        )
    return names.index(name)


def _legend() -> list[str]:
    entries = [*COLORS.items(), ("critical path", "#c0392b")]
    parts = []
    for place, (label, color) in enumerate(entries):
        at = _LEFT + place * 110
        parts.append(f'<rect x="{at}" y="28" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{at + 14}" y="37">{label}</text>')
    return parts


def _phases(timeline: PlayTimes, row: int) -> list[tuple[str, tuple[int, int]]]:
    """Return begin and end of each phase of a request."""
    arrival, finish = int(timeline.arrival_ns[row]), int(timeline.finish_ns[row])
    admitted, first = int(timeline.first_admit_ns[row]), int(timeline.first_token_ns[row])
    admitted = finish if admitted < 0 else admitted
    first = finish if first < 0 else first
    tiers = getattr(timeline, "tiers", None)
    loading = 0 if tiers is None else min(int(tiers.parked_ns[row]), admitted - arrival)
    return [
        ("queue", (arrival, admitted - loading)),
        ("transfer", (admitted - loading, admitted)),
        ("prefill", (admitted, first)),
        ("decode", (first, finish)),
    ]


def _describe(phases: dict[str, tuple[int, int]]) -> str:
    return ", ".join(
        f"{name} {(end_ns - begin_ns) / 1e6:,.0f} ms"
        for name, (begin_ns, end_ns) in phases.items()
        if end_ns > begin_ns
    )
