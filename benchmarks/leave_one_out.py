"""How far predictions are off for a deployment that nothing was fitted to: leave one deployment out, predict it.

    python benchmarks/leave_one_out.py TABLE... [--relabel FILE] [--keep] [--only WORDS] [--draws N] [--json FILE]

A TABLE has one run per row, in the columns of docs/accuracy.md (closed loops) with the measured means; a deployment is
its model, GPU, engine and type of weights. Of each deployment, the presets lose the numbers that were fitted to it
alone, the factors that deployments share are fitted again without it (benchmarks/fit_presets.py), and all its rows are
predicted by the engine that `understudy predict` runs. `--keep` leaves the presets as they are: their errors on the
rows that they were fitted to. Rows whose column `speculation` is
filled are not scored, and TTFT is scored where `ttft_usable` is not 0. `--relabel` names a file of corrected cells
(key, column, was, is); `--draws 1` replays one sample of each row's random lengths, which is faster.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rich.console import Console

from measured.deployments import format_scores, leave_out, list_rows, read_tables
from measured.shared_fit import SharedFit


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE")
    parser.add_argument("--relabel", type=Path)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="deployments that have WORDS in their name"
    )
    parser.add_argument("--draws", type=int, metavar="N")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began = time.process_time()
    tables = read_tables(args.tables, args.relabel)
    refit = None
    if not args.keep:
        fit = SharedFit(list_rows(tables))
        fit.run()
        refit = fit.without
    scores = leave_out(tables, only=args.only, draws=args.draws, refit=refit)
    Console(width=140, highlight=False).print(format_scores(scores))
    if args.json is not None:
        found = [
            {**name._asdict(), "tpot": one.tokens, "ttft": one.first, "refused": one.refused}
            for name, one in sorted(scores.items())
        ]
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{time.process_time() - began:,.0f} s of CPU")


if __name__ == "__main__":
    main()
