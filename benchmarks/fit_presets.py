"""Fit the factors of presets to public measurements, and write them where presets read them.

    python benchmarks/fit_presets.py TABLE... [--relabel FILE] [-o FILE]

Tables are those of benchmarks/leave_one_out.py. The file has one line per group of deployments, and the deployments
that were measured; without -o it is src/understudy/timing/fitted_factors.json.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import msgspec

from measured.deployments import list_rows, read_tables
from measured.shared_fit import SharedFit
from understudy.timing.fitted_factors import FILE, FittedFile


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE")
    parser.add_argument("--relabel", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=FILE)
    args = parser.parse_args()
    began = time.process_time()
    fit = SharedFit(list_rows(read_tables(args.tables, args.relabel)))
    fit.run(lambda error: print(f"TPOT {error:.1%}", flush=True))
    write(args.output, fit.fitted())
    print(f"{time.process_time() - began:,.0f} s of CPU")


def write(path: Path, content: FittedFile) -> None:
    """Write the file, a line per entry."""
    plain = msgspec.to_builtins(content)
    parts = []
    for name, entries in plain.items():
        lines = ",\n".join("  " + msgspec.json.encode(entry).decode() for entry in entries)
        parts.append(f' "{name}": [\n{lines}\n ]')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
