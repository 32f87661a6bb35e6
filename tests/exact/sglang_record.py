"""Record what the scheduler of an installed SGLang does with scenarios, on the CPU and without a model.

    python tests/exact/sglang_record.py --serve
    python tests/exact/sglang_record.py --again tests/golden/sglang

It runs in an environment with SGLang (`make exact-sglang` makes one). `--serve` reads a JSON object per line,
{"kind": ..., "scenario": ...}, and writes one: `recorded`, or `error`. `--again` checks the recorder itself:
recordings of the same release are made again and must be equal.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)

import sglang  # noqa: E402

from exact.sglang_clock import record_clock  # noqa: E402
from exact.sglang_steps import record_steps  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Line = dict[str, Any]
RECORDERS: dict[str, Callable[[Line], Any]] = {"steps": record_steps, "clock": record_clock}


def serve() -> None:
    """Answer requests until the input ends. What SGLang prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer: Line = (
                {} if asked["kind"] == "facts" else {"recorded": RECORDERS[asked["kind"]](asked["scenario"])}
            )
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno} in {place.name}"
            answer = {"error": f"{type(error).__name__} at {where}: {error}"}
        print(json.dumps({"sglang": sglang.__version__, **answer}), file=answers, flush=True)


def recordings(folder: Path) -> Iterator[tuple[str, str, Line, Any]]:
    """Yield the recordings under a folder: kind, name, scenario, and what was recorded."""
    for path in sorted(folder.rglob("scenarios/*.json")):
        names = [path.parents[1] / part / f"{path.stem}.jsonl.gz" for part in ("golden", sglang.__version__)]
        golden = next(name for name in names if name.exists())
        with gzip.open(golden, "rt", encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        scenario = json.loads(path.read_text(encoding="utf-8"))
        yield "steps", path.stem, scenario, lines
    for path in sorted(folder.rglob("*.json.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            pair = json.load(file)
        yield "clock", path.name.removesuffix(".json.gz"), pair["scenario"], pair["recorded"]


def again(folder: Path) -> int:
    """Record a folder's scenarios again; return the number that differ and name each of them."""
    differ = count = 0
    for kind, name, scenario, expected in recordings(folder):
        count += 1
        try:
            ours = RECORDERS[kind](scenario)
        except Exception as error:
            traceback.print_exc()
            ours = [] if kind == "steps" else {"error": repr(error)}
        place = _first_difference(kind, ours, expected)
        if place:
            differ += 1
            print(f"{name} differs {place}", file=sys.stderr)
    print(f"{folder}: {count - differ} of {count} recordings made again, line for line", file=sys.stderr)
    return differ


def _first_difference(kind: str, ours: Any, expected: Any) -> str:
    if kind == "clock":
        keys = [key for key in expected if key in ours and ours[key] != expected[key]]
        return f"in {keys}" if keys or "error" in ours else ""
    for place, (one, other) in enumerate(zip(ours[1:], expected[1:], strict=False)):
        if json.dumps(one) != json.dumps(other):
            values = [(key, one.get(key), other[key]) for key in other if one.get(key) != other[key]]
            return f"at {place}: {values or [*one]}"
    return "" if len(ours) == len(expected) else f"in length: {len(ours)} lines, not {len(expected)}"


def main() -> int:
    """Serve, or record again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--again", type=Path, nargs="+", metavar="FOLDER")
    args = parser.parse_args()
    if args.serve == (args.again is not None):
        parser.error("give --serve, or --again FOLDER")
    if not args.serve:
        return 1 if sum(again(folder) for folder in args.again) else 0
    serve()
    os._exit(0)  # threads of SGLang may keep the interpreter from ending


if __name__ == "__main__":
    sys.exit(main())
