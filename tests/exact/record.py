"""Record what the scheduler of an installed vLLM does with random scenarios, on the CPU and without a model.

    python tests/exact/record.py OUT [--first SEED] [--count 200]
    python tests/exact/record.py --again tests/golden/vllm-versions/v0.32.0

It runs in vLLM's environment (`make exact` makes one). OUT/scenarios and OUT/golden are then what
`understudy conformance vllm OUT` compares with ours; tests/golden/vllm/README.md describes both. `--again` checks the
recorder itself: what somebody recorded of the same release is recorded anew, and must be the same.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from exact.real import DEFAULTS, real_scheduler
from exact.wire import EventNames
from model.scenario_gen import random_scenario, with_caps, with_ends
from model.vllm_config import V0_31
from model.vllm_format import expand_prompt, output_token

if TYPE_CHECKING:
    from model.vllm_format import RequestSpec, Scenario, StepRecord

EOS = 2


class Recorder:
    """Plays a scenario step by step: arrivals, aborts, schedule, aborts again, and the update of this step, or of the
    one before where vLLM schedules ahead.
    """

    def __init__(self, played: Scenario, model: Path) -> None:
        self._scenario = played
        self._scheduler = real_scheduler(played["config"], model)
        self._events: list[Any] = []
        self._scheduler.kv_event_publisher = self
        self._names = EventNames(played["config"]["block_size"])
        self._preempted: list[str] = []
        self._watch_preemptions()
        self._ahead = bool(played["config"]["async_scheduling"])
        self._in_flight: tuple[Any, dict[str, bool]] | None = None
        self._index = {request["id"]: i for i, request in enumerate(played["requests"])}
        self._coming = sorted(played["requests"], key=lambda request: request["arrival_step"])
        self._requests: dict[str, Any] = {}
        self._totals = dict.fromkeys(("finished", "preemptions", "scheduled_tokens", "cached_tokens"), 0)

    def lines(self) -> list[dict[str, Any]]:
        """Of the recording."""
        header = {
            "format": 1,
            "scenario": self._scenario["name"],
            "vllm": f"v{vllm.__version__}",
            "config": self._scenario["config"],
            "requests": len(self._scenario["requests"]),
            "max_steps": self._scenario["max_steps"],
        }
        steps: list[StepRecord] = []
        reason = "max_steps"
        for number in range(self._scenario["max_steps"]):
            steps.append(self._step(number))
            if not self._coming and not self._scheduler.has_unfinished_requests():
                reason = "done"
                break
        moved = {"stored_blocks": self._names.stored, "removed_blocks": self._names.removed}
        end = {"reason": reason, "steps": len(steps), **self._totals, **moved}
        return [{"header": header}, *map(dict, steps), {"end": end}]

    def publish(self, batch: Any) -> None:
        """Hear the events of an update, in place of vLLM's publisher."""
        self._events.extend(batch.events)

    def _watch_preemptions(self) -> None:
        preempt = self._scheduler._preempt_request  # its set of victims has no order

        def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._preempted.append(request.request_id)
            return preempt(request, *args, **kwargs)

        self._scheduler._preempt_request = noted

    def _step(self, number: int) -> StepRecord:
        while self._coming and self._coming[0]["arrival_step"] <= number:
            self._add(self._coming.pop(0))
        aborted = self._abort(number, "before")
        before = {name: request.status for name, request in self._requests.items()}
        self._preempted.clear()
        self._events.clear()
        output = self._scheduler.schedule()
        scheduled = dict(output.num_scheduled_tokens)
        pool = self._scheduler.kv_cache_manager.block_pool
        free_after_schedule = pool.get_num_free_blocks()
        new = [name for name in scheduled if before[name] == RequestStatus.WAITING]
        resumed = [name for name in scheduled if before[name] == RequestStatus.PREEMPTED]
        cached = {name: self._requests[name].num_computed_tokens - scheduled[name] for name in new + resumed}
        batch = (output, {name: not self._requests[name].is_prefill_chunk for name in scheduled})
        aborted += self._abort(number, "mid")
        if self._ahead:
            self._in_flight, due = batch, self._in_flight
        else:
            due = batch
        finished = self._update(*due) if due is not None else []
        waiting = [request.request_id for request in self._scheduler.waiting]
        record: StepRecord = {
            "step": number,
            "scheduled": scheduled,
            "new": new,
            "cached": cached,
            "resumed": resumed,
            "preempted": [*self._preempted],
            "finished": finished,
            "running": [request.request_id for request in self._scheduler.running],
            "waiting": len(waiting),
            "waiting_head": waiting[:4],
            "free_blocks": pool.get_num_free_blocks(),
            "free_after_schedule": free_after_schedule,
            "free_head": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()[:4]],
            "kv_events": self._names.named(self._events),
        }
        self._totals["finished"] += len(finished) + len(aborted)
        self._totals["preemptions"] += len(self._preempted)
        self._totals["scheduled_tokens"] += sum(scheduled.values())
        self._totals["cached_tokens"] += sum(cached.values())
        if "aborts" in self._scenario:
            record["aborted"] = aborted
        return record

    def _add(self, spec: RequestSpec) -> None:
        sampling = SamplingParams(
            max_tokens=spec["max_tokens"], ignore_eos="eos_at" not in spec, temperature=0
        )
        if "eos_at" in spec:
            sampling._eos_token_id = EOS
        config = self._scenario["config"]
        hasher = (
            get_request_block_hasher(config["block_size"], sha256)
            if config["enable_prefix_caching"]
            else None
        )
        request = Request(
            request_id=spec["id"],
            prompt_token_ids=expand_prompt(spec["prompt"]),
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=spec.get("arrival_time", float(self._index[spec["id"]])),
            priority=spec.get("priority", 0),
            block_hasher=hasher,
        )
        self._requests[spec["id"]] = request
        self._scheduler.add_request(request)

    def _abort(self, number: int, when: str) -> list[str]:
        ids = [
            abort["id"]
            for abort in self._scenario.get("aborts", ())
            if (abort["step"], abort["when"]) == (number, when)
            and abort["id"] in self._requests
            and not self._requests[abort["id"]].is_finished()
        ]
        for name in ids:
            self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        return ids

    def _update(self, output: Any, samples: dict[str, bool]) -> list[str]:
        """What the model said; who finished, in order."""
        names = list(output.num_scheduled_tokens)
        said = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[[self._token(name)] if samples[name] else [] for name in names],
        )
        answers = self._scheduler.update_from_output(output, said)
        return [
            answer.request_id
            for part in answers.values()
            for answer in part.outputs
            if answer.finish_reason is not None
        ]

    def _token(self, name: str) -> int:
        index, position = self._index[name], self._requests[name].num_output_tokens
        if self._scenario["requests"][index].get("eos_at") == position + 1:
            return EOS
        return output_token(index, position)


def scenario(seed: int) -> Scenario:
    """The one of that seed, complete; of three, one has requests that end early, one settings that came with v0.31."""
    plain = random_scenario(seed, V0_31)
    out = [plain, with_ends(plain, seed), with_caps(plain, seed)][seed % 3]
    return {**out, "config": {**DEFAULTS, **out["config"]}}


def record(out: Path, seeds: range, model: Path) -> None:
    """Scenarios of those seeds, and what vLLM does with them."""
    for folder in ("scenarios", "golden"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds, 1):
        played = scenario(seed)
        lines = Recorder(played, model).lines()
        name = played["name"]
        (out / "scenarios" / f"{name}.json").write_text(json.dumps(played), encoding="utf-8")
        with gzip.open(out / "golden" / f"{name}.jsonl.gz", "wt", encoding="utf-8") as golden:
            golden.writelines(json.dumps(line) + "\n" for line in lines)
        if sys.stderr.isatty():
            print(f"\rrecorded {number} of {len(seeds)}", end="", file=sys.stderr, flush=True)
    print(f"\rrecorded {len(seeds)} schedules of vLLM {vllm.__version__} in {out}", file=sys.stderr)


def again(folder: Path, model: Path) -> int:
    """How many recordings of a folder are not the same when they are made anew; each is named."""
    paths = sorted((folder / "scenarios").glob("*.json"))
    if not paths:
        raise SystemExit(f"{folder}/scenarios has none")
    others = 0
    for path in paths:
        known: Scenario = json.loads(path.read_text(encoding="utf-8"))
        played: Scenario = {**known, "config": {**DEFAULTS, **known["config"]}}
        lines = [json.dumps(line) for line in Recorder(played, model).lines()]
        with gzip.open(folder / "golden" / f"{path.stem}.jsonl.gz", "rt", encoding="utf-8") as golden:
            recorded = [json.dumps(json.loads(line)) for line in golden]
        if lines[1:] != recorded[1:]:  # behind the headers, whose words are their makers'
            others += 1
            print(f"{path.stem} is another", file=sys.stderr)
    print(f"{len(paths) - others} of {len(paths)} recordings made again, line for line", file=sys.stderr)
    return others


def main() -> int:
    """Record and say where."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--again", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if (args.out is None) == (args.again is None):
        parser.error("give OUT, or --again FOLDER")
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as model:
        if args.again is not None:
            return 1 if again(args.again, Path(model)) else 0
        record(args.out, range(args.first, args.first + args.count), Path(model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
