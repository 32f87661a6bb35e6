"""Record what TensorRT-LLM's executor does with scenarios, on the CPU and without a model.

    TRTLLM_SOURCES=DIR python tests/exact/trtllm_record.py --serve
    TRTLLM_SOURCES=DIR python tests/exact/trtllm_record.py --again tests/golden/trtllm

It runs in an environment that `make exact-trtllm` makes. `--serve` reads a JSON object per line, {"kind": ...,
"scenario": ...}, and writes one: `recorded`, or `error`. `--again` checks the recorder itself: recordings are made
again and must be equal.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)

from exact.trtllm_play import record_passes  # noqa: E402
from exact.trtllm_real import RELEASE  # noqa: E402

Line = dict[str, Any]
_HEADER = ("chunk_unit", "pools", "max_seq_len")


def serve() -> None:
    """Answer requests until the input ends. What TensorRT-LLM prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer: Line = {} if asked["kind"] == "facts" else {"recorded": record_passes(asked["scenario"])}
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno} in {place.name}"
            answer = {"error": f"{type(error).__name__} at {where}: {error}"}
        print(json.dumps({"trtllm": RELEASE, **answer}), file=answers, flush=True)


def again(folder: Path) -> int:
    """Record a folder's scenarios again; return the number that differ and name each of them."""
    differ = count = 0
    for path in sorted(folder.rglob("scenarios/*.json")):
        golden = path.parents[1] / "golden" / f"{path.stem}.jsonl.gz"
        with gzip.open(golden, "rt", encoding="utf-8") as file:
            expected = [json.loads(line) for line in file]
        count += 1
        place = _first_difference(record_passes(json.loads(path.read_text(encoding="utf-8"))), expected)
        if place:
            differ += 1
            print(f"{path.stem} differs {place}", file=sys.stderr)
    print(f"{folder}: {count - differ} of {count} recordings made again, line for line", file=sys.stderr)
    return differ


def _first_difference(ours: list[Line], expected: list[Line]) -> str:
    for place, (one, other) in enumerate(zip(ours, expected, strict=False)):
        keys = _HEADER if place == 0 else [*other]
        values = [(key, one.get(key), other[key]) for key in keys if _text(one.get(key)) != _text(other[key])]
        if values:
            return f"in {'the header' if place == 0 else f'pass {place - 1}'}: {values[0]}"
    return "" if len(ours) == len(expected) else f"in length: {len(ours)} lines, not {len(expected)}"


def _text(value: Any) -> str:
    return json.dumps(value)


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
    if args.serve:
        serve()
        code = 0
    else:
        code = 1 if sum(again(folder) for folder in args.again) else 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # destructors of executors expect an orderly end


if __name__ == "__main__":
    sys.exit(main())
