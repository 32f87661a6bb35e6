"""The real engine and its twin: fit step times on one workload, predict others (CUDA).

python benchmarks/qwen3_twin.py --model Qwen3-4B --requests 240 --out twin.json --record steps.jsonl
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.kv import KvCacheManager
from understudy.qwen3 import EngineOptions, build_engine
from understudy.qwen3.config import find_config
from understudy.qwen3.engine import Engine
from understudy.qwen3.host import HostTier
from understudy.qwen3.link import measure_link
from understudy.qwen3.pages import PinnedPages
from understudy.qwen3.play import Played, VirtualClock, measure, play
from understudy.qwen3.scheduler import Scheduler
from understudy.qwen3.twin import again, twin_of
from understudy.qwen3.workloads import RAMP, Traffic, fresh, workload
from understudy.timing.recorded.fit import FittedStepTime, kind_of
from understudy.timing.recorded.record import Record

if TYPE_CHECKING:
    from understudy.timing.recorded.load import LinkTimes

WORKLOADS: dict[str, tuple[Traffic | tuple[Traffic, ...], bool]] = {
    "fit": (RAMP, False),
    "another rate": (Traffic(16.0, 700, 140), False),
    "other lengths": (Traffic(7.0, 2400, 220), False),
    "shared prefixes": (Traffic(16.0, 300, 120, 6, 1536), False),
    "host memory": (Traffic(8.0, 200, 120, 24, 3072), True),
}
"""By name: the traffic, and whether it is played on few device pages with host memory below."""
HOST_DEVICE_BLOCKS, HOST_BLOCKS = 2600, 6000


def residuals(name: str, played: Played, model: FittedStepTime) -> None:
    """How far the model is from each kind of step."""
    for kind in ("decode", "mixed", "eager"):
        rows = [(step, ms) for step, ms in Record.of(played.steps).loads() if kind_of(step) == kind]
        if not rows:
            continue
        guesses = np.array([model.step_ms(step) for step, _ in rows])
        times = np.array([ms for _, ms in rows])
        errors = np.abs(guesses / times - 1)
        print(
            f"  {name}: {len(rows)} {kind} steps of {times.mean():.2f} ms, error {np.median(errors):.1%} (median), "
            f"{np.quantile(errors, 0.95):.1%} (95th), {guesses.sum() / times.sum() - 1:+.2%} in all"
        )
        for place in np.argsort(guesses / times)[:2]:
            step = rows[place][0]
            print(
                f"    {times[place]:.1f} ms, not {guesses[place]:.1f}: {list(step.chunks)}, {step.decodes} decodes"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen3-4B")
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--out", type=Path, default=Path("out/twin.json"))
    parser.add_argument("--record", type=Path, help="write the steps of the fit")
    args = parser.parse_args()
    vocab = find_config(args.model).vocab_size
    options = EngineOptions(random_weights=1, max_model_len=16384, num_blocks=20_000)
    plain = build_engine(args.model, options)
    buffer = plain.executor.buffer  # type: ignore[attr-defined]
    small = KvCacheManager(HOST_DEVICE_BLOCKS, plain.scheduler.manager.layout)
    assert small.padding_block == plain.scheduler.manager.padding_block
    carrier = PinnedPages(HOST_BLOCKS, buffer)
    tier = HostTier(small, carrier)
    link = measure_link(tier)
    print(
        f"a copy takes the host {link.copy_ms:.3f} ms and {link.page_ms:.4f} ms a page, the link {link.down_ms:.4f} ms "
        f"a page down and {link.up_ms:.4f} ms up"
    )
    hosted = Engine(Scheduler(small, plain.scheduler.config, host=tier), plain.executor)
    measure(plain, workload(RAMP, args.requests // 4, vocab, seed=9))  # warm
    gc.freeze()

    model: FittedStepTime | None = None
    table: list[dict[str, Any]] = []
    for seed, (name, (traffic, host)) in enumerate(WORKLOADS.items()):
        real = hosted if host else plain
        rows = workload(traffic, args.requests * (2 if name == "fit" else 1), vocab, seed=seed)
        real.scheduler.manager.blocks.clear_inactive()
        measured = measure(real, fresh(rows))
        if model is None:
            record = Record.of(measured.steps, link, model=args.model)
            model = record.fit()
            if args.record is not None:
                record.write(args.record)
        residuals(name, measured, model)
        table.append(compare(name, real, rows, measured, model, (HOST_BLOCKS, link) if host else None))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(table))
    hosted.scheduler.manager.close()
    plain.close()


def compare(
    name: str,
    real: Engine,
    rows: list[Any],
    measured: Played,
    model: FittedStepTime,
    host: tuple[int, LinkTimes] | None,
) -> dict[str, Any]:
    """The twin's run beside the measured one."""
    clock = VirtualClock()
    manager = real.scheduler.manager
    twin = twin_of(real.scheduler.config, manager.total_blocks, manager.layout, model, clock, host=host)
    predicted = play(twin, fresh(rows), clock)
    twin.close()
    imposing, recorded = again(measured, real)
    imposed = play(imposing, fresh(rows), recorded)
    imposing.close()
    ttft = predicted.mean_ttft_ms / measured.mean_ttft_ms - 1
    tpot = predicted.mean_tpot_ms / measured.mean_tpot_ms - 1
    equal = measured.decisions == imposed.decisions and measured.cached == imposed.cached
    cached = [sum(played.cached.values()) for played in (measured, predicted)]
    print(
        f"{name:16s} {len(measured.steps):5d} steps  TTFT {measured.mean_ttft_ms:8.2f} ms, twin {ttft:+.1%}  "
        f"TPOT {measured.mean_tpot_ms:6.2f} ms, twin {tpot:+.1%}  cached tokens {cached[0]}, twin {cached[1]} "
        f"(each equal: {measured.cached == predicted.cached})  decisions equal given durations: {equal}",
        flush=True,
    )
    return {
        "workload": name,
        "steps": len(measured.steps),
        "ttft_ms": [measured.mean_ttft_ms, predicted.mean_ttft_ms],
        "tpot_ms": [measured.mean_tpot_ms, predicted.mean_tpot_ms],
        "cached_tokens": cached,
        "cached_equal": measured.cached == predicted.cached,
        "decisions_equal_given_durations": equal,
        "ttft_all": [sorted(played.ttft_ms) for played in (measured, predicted)],
        "tpot_all": [sorted(played.tpot_ms) for played in (measured, predicted)],
        "rows": [{k: v for k, v in step.items() if k != "until_ms"} for step in measured.steps],
    }


if __name__ == "__main__":
    main()
