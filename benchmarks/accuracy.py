"""How far simulated times are from measured ones, beside what others reach on the same kind of data.

    python benchmarks/accuracy.py --data PATH

PATH holds `silicon_fit.csv`, `blis_fit.csv` and `llmservingsim/` (docs/accuracy.md says what they are). Every number
comes from the engine that `understudy replay` runs. Without more it prints presets on the rows that they were fitted
on, and recorded runs; each of the others is a table of its own:

    --runs        recorded runs alone
    --calibrate   each deployment fitted to three of its rows, the others scored (--only: of one family)
    --halves      fitted to the first half of recorded runs, the second scored
    --refit       families fitted anew to a part of their rows, from the same round numbers for all, and scored on rows
                  that the fit did not see: other concurrencies, another size of tensor parallelism, GPU or model (long;
                  a word behind it: families that have it in their name)
    --stand-ins   presets without what was measured on a GPU, scored there
    --more FILE   rows of other engines, GPUs and models, in the columns of docs/accuracy.md, by stratum
    --speculation FILE [HEAD]
                  runs with an EAGLE3 head and their measured acceptance; HEAD is its config.json
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console

from measured.fit_set import STRATA, on_the_fit_set
from measured.left_out import refitted, stand_ins
from measured.more import on_more, read_more
from measured.runs import halves, recorded_runs
from measured.speculation import speculated
from measured.three_rows import three_rows
from understudy.calibrate.tables import Table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="needed by all but --speculation and --more")
    parser.add_argument("--runs", action="store_true")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--only", choices=sorted(set(STRATA.values())), help="of --calibrate: one family")
    parser.add_argument("--halves", action="store_true")
    parser.add_argument("--refit", nargs="?", const="", metavar="FAMILY")
    parser.add_argument("--stand-ins", action="store_true")
    parser.add_argument("--more", type=Path)
    parser.add_argument("--speculation", nargs="+", metavar=("FILE", "HEAD"))
    args = parser.parse_args()
    console = Console(width=140, highlight=False)
    began = time.process_time()
    if args.speculation:
        console.print(speculated(Table.read(Path(args.speculation[0])), *args.speculation[1:2]))
        print(f"{time.process_time() - began:,.0f} s of CPU")
        return
    if args.more is not None:
        table = read_more(args.more)
        grid, refused = on_more(table)
        console.print(grid)
        print(f"{refused.total()} of {len(table.rows)} rows are refused")
        for reason, count in refused.most_common():
            print(f"  {count}: {reason}")
        print(f"{time.process_time() - began:,.0f} s of CPU")
        return
    if args.data is None:
        parser.error("--data is needed")
    closed, stages = (Table.read(args.data / f"{name}_fit.csv") for name in ("silicon", "blis"))
    runs = args.data / "llmservingsim" / "runs"
    if args.refit is not None:
        console.print(refitted(closed, stages, args.refit))
    if args.stand_ins:
        console.print(stand_ins(closed, stages))
    if args.calibrate or args.only:
        console.print(three_rows(closed, args.only))
    if args.halves:
        console.print(halves(runs))
    if args.runs:
        console.print(recorded_runs(runs))
    chosen = (args.stand_ins, args.calibrate, args.only, args.halves, args.runs)
    if args.refit is None and not any(chosen):
        console.print(on_the_fit_set(closed, stages))
        console.print(recorded_runs(runs))
    print(f"{time.process_time() - began:,.0f} s of CPU")


if __name__ == "__main__":
    main()
