"""The real engine and its twin: fit step times on one workload, predict others.

    python benchmarks/qwen3_twin.py --save measured.json.gz --out twin.json         measure (CUDA), then compare
    python benchmarks/qwen3_twin.py --load measured.json.gz --out twin.json         compare once more, on any machine

Every workload is played twice, there and back (the fit first and last), because the same engine takes a few percent
longer at one time than at another: the fit is made on both of its rounds, and the twin stands beside the mean of two.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.publish import add_json_flag, publish
from understudy.clock import ScriptedClock
from understudy.kv import KvCacheManager
from understudy.qwen3 import EngineOptions, build_engine
from understudy.qwen3.config import find_config
from understudy.qwen3.engine import Engine
from understudy.qwen3.host import HostTier
from understudy.qwen3.limits import SchedulerConfig
from understudy.qwen3.link import measure_link
from understudy.qwen3.pages import PinnedPages
from understudy.qwen3.runner import RunRecord, measure, run_workload
from understudy.qwen3.scheduler import Scheduler
from understudy.qwen3.twin import build_recorded_twin, build_twin
from understudy.qwen3.workloads import RAMP, Traffic, copy_requests, generate_workload
from understudy.timing.recorded.fit import FittedStepTime, kind_of
from understudy.timing.recorded.load import LinkTimes
from understudy.timing.recorded.record import Record

if TYPE_CHECKING:
    from understudy.qwen3.request import Request

    Measured = dict[str, list[RunRecord]]
    """Of every workload, its rounds."""

WORKLOADS: dict[str, tuple[Traffic | tuple[Traffic, ...], bool]] = {
    "fit": (RAMP, False),
    "another rate": (Traffic(16.0, 700, 140), False),
    "other lengths": (Traffic(7.0, 2400, 220), False),
    "shared prefixes": (Traffic(16.0, 300, 120, 6, 1536), False),
    "host memory": (Traffic(8.0, 200, 120, 24, 3072), True),
}
"""By name: the traffic, and whether it is played on few device pages with host memory below."""
BLOCKS, HOST_DEVICE_BLOCKS, HOST_BLOCKS = 20_000, 2600, 10_000
"""The host has room for all: if it had to evict, what is found there would hang on milliseconds, in the engine too."""
LIMITS = SchedulerConfig(max_positions=16384)
KEPT = ("steps", "polls", "copies", "arrival_ms", "first_ms", "last_ms", "tokens", "cached")
"""Of what was played, what a comparison needs."""


def requests_of(name: str, requests: int, vocab: int) -> list[tuple[int, Request]]:
    """The same ones in every round, and in the twin."""
    count = requests * (2 if name == "fit" else 1)
    return generate_workload(WORKLOADS[name][0], count, vocab, seed=list(WORKLOADS).index(name))


def measure_all(model: str, requests: int, rounds: int) -> tuple[Measured, LinkTimes]:
    """Play every workload on the engine, in one order and then in the other."""
    vocab = find_config(model).vocab_size
    options = EngineOptions(random_weights=1, max_model_len=LIMITS.max_positions, num_blocks=BLOCKS)
    plain = build_engine(model, options)
    assert plain.scheduler.config == LIMITS
    buffer = plain.executor.buffer  # type: ignore[attr-defined]
    small = KvCacheManager(HOST_DEVICE_BLOCKS, plain.scheduler.manager.layout)
    assert small.padding_block == plain.scheduler.manager.padding_block
    tier = HostTier(small, PinnedPages(HOST_BLOCKS, buffer))
    link = measure_link(tier)
    print(
        f"a copy takes the host {link.copy_ms:.3f} ms and {link.page_ms:.4f} ms a page, the link {link.down_ms:.4f} ms "
        f"a page down and {link.up_ms:.4f} ms up"
    )
    hosted = Engine(Scheduler(small, LIMITS, host=tier), plain.executor)
    measure(plain, generate_workload(RAMP, requests // 4, vocab, seed=9))  # warm
    gc.freeze()
    played: Measured = {name: [] for name in WORKLOADS}
    for number in range(rounds):
        for name in list(WORKLOADS)[:: -1 if number % 2 else 1]:
            real = hosted if WORKLOADS[name][1] else plain
            real.scheduler.manager.blocks.clear_inactive()
            tier.blocks.clear_inactive()
            played[name].append(measure(real, requests_of(name, requests, vocab)))
            last = played[name][-1]
            print(
                f"{name}, round {number + 1}: {len(last.steps)} steps, TTFT {last.mean_ttft_ms:.2f} ms, "
                f"TPOT {last.mean_tpot_ms:.3f} ms",
                flush=True,
            )
    hosted.close()
    plain.close()
    gc.unfreeze()  # or the interpreter ends without collecting what was frozen, and its blocks count as leaked
    return played, link


def save(path: Path, played: Measured, link: LinkTimes, model: str, requests: int) -> None:
    """All that a comparison needs."""
    rounds = {name: [{key: getattr(p, key) for key in KEPT} for p in of] for name, of in played.items()}
    whole = {"model": model, "requests": requests, "link": link._asdict(), "played": rounds}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(whole).encode()))


def load(path: Path) -> tuple[Measured, LinkTimes, str, int]:
    """What `save` wrote."""
    whole = json.loads(gzip.decompress(path.read_bytes()))
    played = {name: [RunRecord(**p) for p in rounds] for name, rounds in whole["played"].items()}
    return played, LinkTimes(**whole["link"]), whole["model"], whole["requests"]


def residuals(name: str, rounds: list[RunRecord], model: FittedStepTime) -> None:
    """How far the model is from each kind of step."""
    for kind in ("decode", "mixed", "eager"):
        steps = [step for played in rounds for step in played.steps]
        rows = [(step, ms) for step, ms in Record.of(steps).loads() if kind_of(step) == kind]
        if not rows:
            continue
        guesses = np.array([model.step_ms(step) for step, _ in rows])
        times = np.array([ms for _, ms in rows])
        errors = np.abs(guesses / times - 1)
        print(
            f"  {name}: {len(rows)} {kind} steps of {times.mean():.2f} ms, error {np.median(errors):.1%} (median), "
            f"{np.quantile(errors, 0.95):.1%} (95th), {guesses.sum() / times.sum() - 1:+.2%} in all"
        )


def compare(
    name: str, model: str, requests: int, rounds: list[RunRecord], time: FittedStepTime, link: LinkTimes
) -> dict[str, Any]:
    """The twin's run beside the measured ones, and the twin with each round's own durations."""
    config, host = find_config(model), WORKLOADS[name][1]
    rows = requests_of(name, requests, config.vocab_size)
    clock = ScriptedClock()
    twin = build_twin(
        LIMITS,
        HOST_DEVICE_BLOCKS if host else BLOCKS,
        config.layout(16),
        time,
        clock,
        host=(HOST_BLOCKS, link) if host else None,
    )
    predicted = run_workload(twin, copy_requests(rows), clock)
    equal = True
    for measured in rounds:
        imposing, recorded = build_recorded_twin(measured, twin)
        imposed = run_workload(imposing, copy_requests(rows), recorded)
        imposing.close()
        equal &= measured.decisions == imposed.decisions and measured.cached == imposed.cached
    twin.close()
    ttft = [played.mean_ttft_ms for played in rounds]
    tpot = [played.mean_tpot_ms for played in rounds]
    off = [predicted.mean_ttft_ms / np.mean(ttft) - 1, predicted.mean_tpot_ms / np.mean(tpot) - 1]
    cached = [sum(played.cached.values()) for played in (*rounds, predicted)]
    print(
        f"{name:16s} TTFT {_each(ttft)} ms, twin {off[0]:+.1%}  TPOT {_each(tpot)} ms, twin {off[1]:+.1%}  "
        f"cached tokens {_each(cached[:-1], '.0f')}, twin {cached[-1]}  given the durations, decisions and cached "
        f"tokens equal: {equal}",
        flush=True,
    )
    return {
        "workload": name,
        "steps": [len(played.steps) for played in rounds],
        "ttft_ms": [*ttft, predicted.mean_ttft_ms],
        "tpot_ms": [*tpot, predicted.mean_tpot_ms],
        "cached_tokens": cached,
        "equal_given_durations": equal,
        "ttft_all": [sorted(t for p in rounds for t in p.ttft_ms), sorted(predicted.ttft_ms)],
        "tpot_all": [sorted(t for p in rounds for t in p.tpot_ms), sorted(predicted.tpot_ms)],
    }


def _each(values: list[float] | list[int], how: str = ".2f") -> str:
    return " and ".join(format(value, how) for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen3-4B")
    parser.add_argument(
        "--requests", type=int, default=240, help="of each workload; the fit has twice as many"
    )
    parser.add_argument("--rounds", type=int, default=2, help="of every workload (2)")
    parser.add_argument("--save", type=Path, help="write what was measured")
    parser.add_argument("--load", type=Path, help="compare what was measured before")
    parser.add_argument("--no-compare", action="store_true", help="measure and save, no more")
    parser.add_argument("--out", type=Path, default=Path("out/twin.json"), help="the comparison")
    parser.add_argument("--record", type=Path, help="write the steps of the fit, for `replay --step-times`")
    parser.add_argument("--gpu", help="with --load: GPU of the measured runs, for --json")
    add_json_flag(parser)
    args = parser.parse_args()
    if args.load is None:
        import torch

        model, requests, args.gpu = args.model, args.requests, torch.cuda.get_device_name()
        played, link = measure_all(model, requests, args.rounds)
        if args.save is not None:
            save(args.save, played, link, model, requests)
    else:
        played, link, model, requests = load(args.load)
    record = Record.of(
        [step for round_ in played["fit"] for step in round_.steps],
        link,
        model=model,
        num_blocks=BLOCKS - 1,
        block_size=16,
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_batched_tokens,
    )
    if args.record is not None:
        record.write(args.record)
    if args.no_compare:
        return
    time = record.fit()
    table = []
    for name, rounds in played.items():
        residuals(name, rounds, time)
        table.append(compare(name, model, requests, rounds, time, link))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(table))
    publish("qwen3_twin", describe(table), args.json, gpu=args.gpu)


def describe(table: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the columns of each workload, with its first two rounds, and the largest errors of the unfitted ones."""
    rows: dict[str, dict[str, float]] = {}
    for one in table:
        row = rows[one["workload"]] = {}
        for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
            *real, twin = one[key]
            row[f"error of {name}"] = 100 * (twin / (sum(real) / len(real)) - 1)
            row |= {f"{name}, {which} run": ms for which, ms in zip(("first", "second"), real, strict=False)}
        if len(set(one["cached_tokens"])) == 1:
            row["cached tokens, all three"] = one["cached_tokens"][0]
        print(f"{one['workload']}: equal with the measured durations: {one['equal_given_durations']}")
    others = [row for name, row in rows.items() if name != "fit"]
    rows["the four that were not fitted"] = {
        f"largest error of {name}": max(abs(row[f"error of {name}"]) for row in others)
        for name in ("TTFT", "TPOT")
    }
    return rows


if __name__ == "__main__":
    main()
