"""`understudy diff A B`: why two saved runs of one workload differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.outputs import check_outputs, create, is_stdout
from understudy.text import visible

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from understudy.cli.verbs import Verbs

EXAMPLES = """\
examples:
  understudy replay trace.jsonl --workers 4 --save-run a.npz
  understudy replay trace.jsonl --workers 4 --routing kv --save-run b.npz
  understudy diff a.npz b.npz
  understudy diff a.npz b.npz --json - | jq .first_difference
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy diff`."""
    verb = verbs.add_parser(
        "diff",
        help="say why two saved runs differ",
        description="Compare two saved runs of one workload: settings, the first differing decision, and the requests "
        "whose latency changed most, by cause.",
        epilog=EXAMPLES,
    )
    verb.add_argument("a", type=Path, metavar="A", help="file that `replay --save-run` wrote")
    verb.add_argument("b", type=Path, metavar="B", help="another one, of the same trace")
    verb.add_argument("--most", type=int, metavar="N", default=10, help="requests to list (default: 10)")
    verb.add_argument(
        "--json", type=Path, metavar="PATH", help="write JSON (docs/schema/diff.json); -: standard output"
    )


def run(args: argparse.Namespace) -> int:
    """Print the comparison; with --json, write it too."""
    import msgspec
    from rich.console import Console

    from understudy.errors import InvalidArgument
    from understudy.explain.diff import compare_runs
    from understudy.explain.saved_run import read_run

    check_outputs({"--json": args.json}, {"A": args.a, "B": args.b})
    if args.most < 0:
        raise InvalidArgument(f"--most must not be negative, got {args.most}")
    compared = compare_runs(read_run(args.a), read_run(args.b), args.most)
    if args.json is not None:
        with create(args.json) as file:
            file.write(msgspec.json.format(msgspec.json.encode(compared), indent=2) + b"\n")
    if args.json is None or not is_stdout(args.json):
        _print(compared, Console(highlight=False, markup=False))
    return 0


def _print(compared: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    from understudy.explain.text import ms
    from understudy.explain.waterfall import PARTS

    def table(*columns: str) -> Table:
        made = Table(box=None, pad_edge=False, header_style="bold")
        for name in columns:
            made.add_column(name, justify="right" if name in ("change", "share") else "left", overflow="fold")
        return made

    if compared["settings"]:
        settings = table("setting", "A", "B")
        for one in compared["settings"]:
            settings.add_row(one["name"], str(one["a"]), str(one["b"]))
        console.print(settings)
    else:
        console.print("settings: equal")
    first = compared["first_difference"]
    console.print()
    if first is None:
        console.print("decisions: equal")
    else:
        console.print(
            f"first difference at {ms(first['time_ns'])}, after {first['after_equal_decisions']:,} equal decisions:"
        )
        for name in ("a", "b"):
            did = first[name]
            said = (
                "ended"
                if did is None
                else f"{ms(did['time_ns'])}, worker {did['worker']}: {visible(did['what'])}"
            )
            console.print(f"  {name.upper()}  {said}", soft_wrap=True)
    total = compared["latency_ns"]
    console.print(
        f"\n{compared['changed']:,} of {compared['ended']['both']:,} requests changed; sum of latencies "
        f"{ms(total['a'])} → {ms(total['b'])}",
        soft_wrap=True,
    )
    if (mean := compared["mean_change"]) is not None:
        verdict = "" if mean["above_noise"] else ": no difference above the noise"
        console.print(
            f"mean change {mean['mean_ms']:+,.3f} ms a request [{mean['low_ms']:+,.3f} to {mean['high_ms']:+,.3f} ms "
            f"at {100 * mean['confidence']:g} % confidence]{verdict}",
            soft_wrap=True,
        )
    causes = compared["causes"]
    if causes["parts"]:
        console.print(f"by cause, over the {causes['requests']:,} that changed most:")
        listed = table("change", "part")
        for part, value in sorted(causes["parts"].items(), key=lambda item: -abs(item[1])):
            listed.add_row(f"{value / 1e6:+,.3f} ms", PARTS[part])
        console.print(listed)
    if compared["requests"]:
        console.print()
        listed = table("request", "worker", "A", "B", "change", "cause")
        for one in compared["requests"]:
            workers, latency = one["worker"], one["latency_ns"]
            moved = workers["a"] != workers["b"]
            where = f"{workers['a']} → {workers['b']}" if moved else str(workers["a"])
            change = f"{one['change_ns'] / 1e6:+,.3f} ms"
            cause = f"{PARTS[one['cause']]} {one['parts'][one['cause']] / 1e6:+,.3f} ms"
            listed.add_row(visible(one["request"]), where, ms(latency["a"]), ms(latency["b"]), change, cause)
        console.print(listed)
