"""Record what the scheduler of an installed vLLM does with scenarios, on the CPU and without a model.

    python tests/exact/record.py --serve
    python tests/exact/record.py --again tests/golden/vllm-0.33

It runs in an environment with vLLM (`make exact` and `make release` make one). `--serve` reads a JSON object per line,
{"kind": ..., "scenario": ...}, and writes one: `recorded` (for speculation also `events`), or `error`.
{"kind": "facts"} asks for the release's flags, metrics and event fields. `--again` checks the recorder itself:
recordings of the same release are made again and must be equal.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from exact.clock import record_clock
from exact.facts import find_facts
from exact.offload import record_offload
from exact.steps import record_speculation, record_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Line = dict[str, Any]


def _record_groups(scenario: Line, model: Path) -> Line:
    from exact.groups import record_groups  # releases before 0.33 lack what it imports

    return record_groups(scenario, model)


def _record_pair(scenario: Line, model: Path) -> Line:
    from exact.pd_record import record_pair  # releases before 0.33 lack what it imports

    return record_pair(scenario, model)


RECORDERS: dict[str, Callable[[Line, Path], Line]] = {
    "steps": record_steps,
    "speculation": record_speculation,
    "clock": record_clock,
    "offload": record_offload,
    "groups": _record_groups,
    "pairs": _record_pair,
}


def serve(model: Path) -> None:
    """Answer requests until the input ends. What vLLM prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = (
                find_facts()
                if asked["kind"] == "facts"
                else RECORDERS[asked["kind"]](asked["scenario"], model)
            )
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno} in {place.name}"
            answer = {"error": f"{type(error).__name__} at {where}: {error}"}
        print(json.dumps({"vllm": vllm.__version__, **answer}), file=answers, flush=True)


def recordings(folder: Path) -> Iterator[tuple[str, str, Line, list[Any]]]:
    """Yield the recordings under a folder: kind, name, scenario, and the values to compare."""
    for path in sorted(folder.rglob("scenarios/*.json")):
        golden = path.parents[1] / "golden" / f"{path.stem}.jsonl.gz"
        with gzip.open(golden, "rt", encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        scenario = json.loads(path.read_text(encoding="utf-8"))
        kind = "groups" if "groups" in scenario["config"] else "steps"
        if kind == "groups":  # the recorder does not count lookups
            lines[-1]["end"].pop("prefix_stats", None)
        yield kind, path.stem, scenario, lines[1:]
    for path in sorted(folder.rglob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            first = json.loads(file.readline())
            if "scenario" in first:  # of two instances; others have it in a file of its own
                name = path.name.removesuffix(".jsonl.gz")
                lines = _comparable("pairs", {"recorded": [*map(json.loads, file)]})
                yield "pairs", name, first["scenario"], lines
    for path in sorted(folder.rglob("*.json.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            pair = json.load(file)
        name = path.name.removesuffix(".json.gz")
        if isinstance(pair["recorded"], dict):
            yield "clock", name, pair["scenario"], _comparable("clock", pair)
        elif "offload" in pair["scenario"]:
            yield "offload", name, pair["scenario"], pair["recorded"][1:]
        else:
            events = path.parents[1] / "spec-events" / f"{name}.jsonl.gz"
            if events.exists():
                with gzip.open(events, "rt", encoding="utf-8") as file:
                    pair["events"] = [json.loads(line) for line in file]
            yield "speculation", name, pair["scenario"], _comparable("speculation", pair)


def _comparable(kind: str, answer: Line) -> list[Any]:
    """Return what two recordings of a scenario have in common: without the header, and batches with tokens only."""
    recorded = answer["recorded"]
    if kind == "clock":
        batches = [batch for batch in recorded["trace"] if batch[2]]
        return [batches, *(sorted(recorded[key].items()) for key in ("first", "last", "n"))]
    if kind == "pairs" and any("host" in recorded[0]["header"][side]["side"] for side in "pd"):
        return [dict(sorted(line.items())) for line in recorded[1:]]  # their keys are in no order
    return recorded if kind in ("speculation", "pairs") else list(recorded[1:])


def again(folder: Path, model: Path) -> int:
    """Record a folder's scenarios again; return the number that differ and name each of them."""
    differ = count = 0
    for kind, name, scenario, expected in recordings(folder):
        if kind not in RECORDERS:
            print(f"{name}: {kind} is not supported", file=sys.stderr)
            continue
        count += 1
        ours = _comparable(kind, RECORDERS[kind](scenario, model))
        if json.dumps(ours) != json.dumps(expected):
            differ += 1
            place = next((i for i, (a, b) in enumerate(zip(ours, expected, strict=False)) if a != b), -1)
            keys = (
                [k for k in expected[place] if ours[place].get(k) != expected[place][k]]
                if kind != "clock"
                else []
            )
            print(f"{name} differs at {place} {keys}", file=sys.stderr)
    print(f"{folder}: {count - differ} of {count} recordings made again, line for line", file=sys.stderr)
    return differ


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
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as model:
        if not args.serve:
            return 1 if sum(again(folder, Path(model)) for folder in args.again) else 0
        serve(Path(model))
    os._exit(0)  # threads of vLLM may keep the interpreter from ending


if __name__ == "__main__":
    sys.exit(main())
