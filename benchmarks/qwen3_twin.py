"""The real engine and its twin: fit step times on one workload, predict others (CUDA).

python benchmarks/qwen3_twin.py --model Qwen3-4B --requests 200 --out twin.json
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from understudy.kv import KvCacheManager
from understudy.qwen3 import EngineOptions, Request, build_engine
from understudy.qwen3.config import find_config
from understudy.qwen3.engine import Engine
from understudy.qwen3.scheduler import Scheduler
from understudy.qwen3.steptime import FittedStepTime
from understudy.qwen3.twin import (
    Played,
    RecordedTime,
    SimulatedExecutor,
    StepTime,
    VirtualClock,
    play,
)


class WallClock:
    """Milliseconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def now_ms(self) -> float:
        return (time.perf_counter() - self._start) * 1e3

    def wait_until(self, ms: float) -> None:
        while (left := ms - self.now_ms) > 0:
            if left > 2:
                time.sleep((left - 1) / 1e3)


def workload(name: str, count: int, vocab: int) -> list[tuple[float, Request]]:
    rng = np.random.default_rng(sum(map(ord, name)))
    rate, prompt, output, shared = {
        "fit": (12.0, 700, 140, 0),
        "other rate": (24.0, 700, 140, 0),
        "other lengths": (8.0, 2400, 220, 0),
        "shared prefixes": (16.0, 300, 120, 1536),
    }[name]
    stems = [rng.integers(0, vocab, shared) for _ in range(6)]
    at_ms, rows = 0.0, []
    for number in range(count):
        at_ms += rng.exponential(1e3 / rate)
        own = rng.integers(0, vocab, max(8, int(rng.gamma(2.0, prompt / 2))))
        tokens = np.concatenate((stems[number % 6], own)).tolist()
        rows.append((at_ms, Request(f"{number}", tokens, max(2, int(rng.gamma(2.0, output / 2))))))
    return rows


def fresh(rows: list[tuple[float, Request]]) -> list[tuple[float, Request]]:
    return [(at, Request(r.id, r.prompt, r.max_tokens)) for at, r in rows]


def _show_residuals(name: str, played: Played, model: FittedStepTime) -> None:
    for kind, wanted in (("decode", False), ("mixed", True)):
        rows = [(model.ms(c) / ms - 1, ms, c) for c, ms in played.compositions() if bool(c.chunks) is wanted]
        errors = np.array([abs(error) for error, _, _ in rows])
        lost = sum(ms - model.ms(c) for error, ms, c in rows if error < -0.5)
        print(
            f"  {name}: {len(rows)} {kind} steps, median error {np.median(errors):.1%}, 95th percentile "
            f"{np.quantile(errors, 0.95):.1%}, {lost:.0f} ms in steps that took more than twice their time"
        )
        for error, ms, step in sorted(rows, key=lambda row: row[0])[:3]:
            print(f"    {ms:.1f} ms ({error:+.0%}): chunks {step.chunks}, {len(step.decodes)} decodes")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen3-4B")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("out/twin.json"))
    args = parser.parse_args()
    config = replace(find_config(args.model), max_positions=16384)
    options = EngineOptions(random_weights=1, max_model_len=16384, num_blocks=20_000)
    real = build_engine(args.model, options)
    vocab = config.vocab_size
    play(real, fresh(workload("fit", args.requests // 2, vocab)), WallClock())  # warm

    def twin(rows: list[tuple[float, Request]], time_of: StepTime, clock: VirtualClock) -> Played:
        manager = KvCacheManager(real.scheduler.manager.total_blocks, real.scheduler.manager.layout)
        engine = Engine(Scheduler(manager, real.scheduler.config), SimulatedExecutor(time_of, clock))
        try:
            return play(engine, fresh(rows), clock)
        finally:
            engine.close()

    model: FittedStepTime | None = None
    table = []
    for name in ("fit", "other rate", "other lengths", "shared prefixes"):
        rows = workload(name, args.requests, vocab)
        real.scheduler.manager.blocks.clear_inactive()
        measured = play(real, fresh(rows), WallClock())
        if model is None:
            model = FittedStepTime.fit(measured.compositions())
        _show_residuals(name, measured, model)
        predicted = twin(rows, model, VirtualClock())
        recorded = RecordedTime(measured.steps)
        imposed = twin(rows, recorded, recorded)
        row = {
            "workload": name,
            "steps": len(measured.steps),
            "ttft_ms": [measured.mean_ttft_ms, predicted.mean_ttft_ms],
            "tpot_ms": [measured.mean_tpot_ms, predicted.mean_tpot_ms],
            "cached_equal": measured.cached == predicted.cached,
            "decisions_equal_given_durations": measured.decisions == imposed.decisions,
            "ttft_all": [
                sorted(p.first_ms[k] - p.arrival_ms[k] for k in p.first_ms) for p in (measured, predicted)
            ],
        }
        table.append(row)
        ttft = predicted.mean_ttft_ms / measured.mean_ttft_ms - 1
        tpot = predicted.mean_tpot_ms / measured.mean_tpot_ms - 1
        print(
            f"{name:16s} {row['steps']:5d} steps  TTFT {measured.mean_ttft_ms:8.2f} ms, twin {ttft:+.1%}  "
            f"TPOT {measured.mean_tpot_ms:6.2f} ms, twin {tpot:+.1%}  cached equal: {row['cached_equal']}  "
            f"decisions equal given durations: {row['decisions_equal_given_durations']}",
            flush=True,
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(table))
    real.close()


if __name__ == "__main__":
    main()
