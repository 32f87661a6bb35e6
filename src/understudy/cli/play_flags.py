"""Outputs of a replay about plays: a row per play, and a picture of one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from understudy.report import Report

OUTPUTS = ("plays_jsonl", "play_svg")


def add_play_flags(out: Any) -> None:
    """Add the flags to the group of outputs."""
    out.add_argument(
        "--plays-jsonl",
        type=Path,
        metavar="PATH",
        help="agents: write a line per play, with its makespan and critical path",
    )
    out.add_argument(
        "--play-svg",
        type=Path,
        metavar="PATH",
        help="agents: draw one play over time, the slowest unless --play",
    )
    out.add_argument("--play", metavar="NAME", help="the play that --play-svg draws")


def check_play_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for a flag without effect."""
    from understudy.errors import ConfigError

    if args.play is not None and args.play_svg is None:
        raise ConfigError("--play has no effect without --play-svg; give the picture's path")


def write_plays(report: Report, args: argparse.Namespace) -> None:
    """Write the outputs that the flags name. InvalidArgument for a workload without plays, or an unknown play."""
    if args.plays_jsonl is None and args.play_svg is None:
        return
    import msgspec

    from understudy.errors import InvalidArgument
    from understudy.report.play_picture import draw_play, find_play
    from understudy.report.plays import measure_plays
    from understudy.workload.files import create_trace

    assert report.workload is not None
    plays = measure_plays(report.workload, report.columns)
    if args.plays_jsonl is not None:
        with create_trace(args.plays_jsonl) as file:
            file.write(msgspec.json.Encoder().encode_lines(plays.rows()))
    if args.play_svg is None:
        return
    play = plays.slowest() if args.play is None else find_play(report.workload, args.play)
    if play is None:
        raise InvalidArgument("--play-svg: no play ended; inspect the requests (--requests-jsonl)")
    with create_trace(args.play_svg) as file:
        file.write(draw_play(report.workload, report.columns, play).encode())


def describe_plays(report: Report) -> list[str]:
    """Return lines on the plays of a report and their sleeping sessions; none without a graph."""
    if report.workload is None or report.workload.graph is None:
        return []
    from understudy.report.plays import measure_plays
    from understudy.report.sleeping import measure_sleep

    lines = [measure_plays(report.workload, report.columns).describe()]
    lines += measure_sleep(report.workload, report.columns).describe().splitlines()
    done = report.run.session_kv.get("done")
    if done:
        held = done["held_block_s"] * report.columns.block_size
        lines.append(
            f"session KV: {done['holds']:,} holds ({done['yielded_holds']:,} yielded, {held:,.0f} token-seconds), "
            f"{done['dropped_blocks']:,} blocks dropped, {done['offloaded_blocks']:,} offloaded, "
            f"{done['prefetched_blocks']:,} prefetched"
        )
    return lines
