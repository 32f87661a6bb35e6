"""How far step times are from the goals that were set for them, on data that the fits did not see where there is some.

    python benchmarks/timing_goals.py --data PATH [--only WORDS] [--json [FOLDER]]

PATH holds the tables of docs/accuracy.md: `blis_fit.csv` and `more/` with `silicon_more.csv`, `gpustack_saturated.csv`
and `speculation_h200.csv`. Errors of whole deployments are those that benchmarks/leave_one_out.py found and that
tools/write_accuracy.py stored.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from harness.publish import add_json_flag, publish
from measured.goals import (
    blis_errors,
    block_errors,
    deployment_errors,
    left_out_medians,
    mtp_errors,
    refused_share,
    saturated_errors,
    speculation_errors,
)
from understudy.calibrate.tables import Table

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="measurements that have WORDS in their name"
    )
    add_json_flag(parser)
    args = parser.parse_args()
    began = time.process_time()
    more = args.data / "more"
    parts: dict[str, Callable[[], dict[str, dict[str, float]]]] = {
        "deployments": deployment_errors,
        "medians": left_out_medians,
        "blis": lambda: blis_errors(Table.read(args.data / "blis_fit.csv")),
        "speculation": lambda: speculation_errors(Table.read(more / "speculation_h200.csv")),
        "mtp": lambda: mtp_errors(Table.read(more / "silicon_more.csv")),
        "saturated": lambda: saturated_errors(Table.read(more / "gpustack_saturated.csv")),
        "blocks": block_errors,
        "refused": lambda: refused_share(Table.read(more / "silicon_more.csv")),
    }
    measured: dict[str, dict[str, float]] = {}
    for name, part in parts.items():
        if args.only in name:
            measured |= part()
            print(f"{name}: {time.process_time() - began:,.0f} s of CPU so far", flush=True)
    publish("timing_goals", measured, args.json)


if __name__ == "__main__":
    main()
