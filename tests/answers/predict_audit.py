"""Audit `understudy predict`: its times are those of a closed-loop replay of the same requests on the same GPUs."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace as change
from random import Random
from typing import TYPE_CHECKING, Any

from answers.evidence import replay, run, write_trace
from answers.random_traces import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from answers.definitions import Difference
    from answers.evidence import Evidence
    from answers.random_cases import Case

PRINTED_MS = 1e-4
"""A prediction has four digits after the point."""
OF_THE_DEPLOYMENT = ("model", "gpu", "tensor-parallel-size", "data-parallel-size", "enable-expert-parallel")
MEASURES = ("ttft_ms", "tpot_ms", "e2e_ms")
WINDOWED = ("gpt-oss-20b", "Gemma-3-27B")
METHODS = ("ngram", "mtp", "eagle3")


def deployment_of(case: Case, *, speculation: str | None = None) -> dict[str, str]:
    """Return the flags of a case that `predict` has too: model, GPUs and speculation."""
    flags = {name: case.flags[name] for name in OF_THE_DEPLOYMENT if name in case.flags}
    return flags if speculation is None else {**one_group(flags), "speculative-config": speculation}


def one_group(flags: dict[str, str]) -> dict[str, str]:
    """Return the flags of a deployment with one KV cache group, which drafts need."""
    return {**flags, "disable-hybrid-kv-cache-manager": ""} if flags["model"] in WINDOWED else flags


def spell(flags: dict[str, str]) -> list[str]:
    """Write flags as arguments; an empty value is a switch."""
    return [word for name, value in flags.items() for word in (f"--{name}", value) if word]


def predict(*arguments: str) -> list[dict[str, str]]:
    """Run `understudy predict` and read its table."""
    return list(csv.DictReader(io.StringIO(run("predict", *arguments))))


def predict_closed_loop(
    flags: dict[str, str], isl: int, osl: int, concurrency: int, *, least: float, prompts: int | None = None
) -> list[float]:
    """Predict TTFT, TPOT and E2E (ms) of random lengths from `least` of each on."""
    load = ["--isl", str(isl), "--osl", str(osl), "--concurrency", str(concurrency)]
    count = [] if prompts is None else ["--num-prompts", str(prompts)]
    (row,) = predict(*load, *count, "--least-length", str(least), *spell(flags))
    return [float(row[name]) if row[name] else math.nan for name in MEASURES]


def draw_speculation(rng: Random) -> str | None:
    """Draw drafts with the acceptance of a workload; half of the time none."""
    if rng.random() < 0.5:
        return None
    drafts = rng.randint(1, 3)
    rates = [0.8, 0.6, 0.3][:drafts]
    return json.dumps(
        {"method": rng.choice(METHODS), "num_speculative_tokens": drafts, "accept_rates": rates}
    )


def equal_requests(isl: int, osl: int, count: int) -> list[dict[str, Any]]:
    """Rows of equal lengths that share no prefix."""
    blocks = -(-isl // BLOCK)
    return [
        {
            "timestamp": 0,
            "input_length": isl,
            "output_length": osl,
            "hash_ids": list(range(number * blocks, (number + 1) * blocks)),
        }
        for number in range(count)
    ]


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return math.fsum(values) / len(values)


def a_prediction_of_equal_lengths_is_a_closed_loop(evidence: Evidence) -> Iterator[Difference]:
    """Requests of one length, some at a time: a replay of them has the predicted times."""
    case, rng = evidence.case, Random(f"predict {evidence.case.seed}")
    if case.kind != "models":
        return
    isl, osl = rng.choice([16, 200, 1500]), rng.choice([1, 2, 20, 60])
    concurrency = rng.choice([1, 2, 7, 24])
    prompts = rng.choice([concurrency, 3 * concurrency + 1])
    flags = deployment_of(case, speculation=draw_speculation(rng))
    predicted = predict_closed_loop(flags, isl, osl, concurrency, least=1, prompts=prompts)
    replayed = change(
        case,
        rows=tuple(equal_requests(isl, osl, prompts)),
        flags={"trace-block-size": str(BLOCK), **flags, "concurrency": str(concurrency)},
    )
    if "data-parallel-size" in flags:
        replayed = replayed.with_flags(routing="least_loaded")
    report = replay(replayed, evidence.folder).report
    what = f"isl {isl}, osl {osl}, {concurrency} at a time, {prompts} requests, {spell(flags)}"
    for name, said in zip(MEASURES, predicted, strict=True):
        expected = report[name]["mean"]
        if expected is None:
            yield f"{name} of {what}", math.isnan(said), True
        else:
            yield f"{name} of {what}", abs(said - expected) <= PRINTED_MS or said, True
    ttft, tpot, e2e = predicted
    if osl > 1:
        yield f"sum of {what}", abs(ttft + (osl - 1) * tpot - e2e) <= osl * PRINTED_MS or e2e, True


def a_prediction_of_a_trace_is_its_replay(evidence: Evidence) -> Iterator[Difference]:
    """Each request of a trace has the times of the replay."""
    case = evidence.case
    if case.kind != "models" or any("abort_after_ms" in row for row in case.rows):
        return
    flags = deployment_of(case, speculation=draw_speculation(Random(f"predict {case.seed}")))
    if "concurrency" in case.flags:
        flags |= {"concurrency": case.flags["concurrency"]}
    rows = list(case.rows)
    trace = write_trace(rows, evidence.folder / "predict.jsonl")
    said = predict(str(trace), "--format", "mooncake", "--trace-block-size", str(BLOCK), *spell(flags))
    replayed = change(case, flags={"trace-block-size": str(BLOCK), **flags})
    if "data-parallel-size" in flags:
        replayed = replayed.with_flags(routing="least_loaded")
    lines = replay(replayed, evidence.folder).lines
    yield "requests", len(said), len(rows)
    for number, (row, line) in enumerate(zip(said, lines, strict=True)):
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            value = line[name]
            if value is None:
                yield f"{number}: {name}", row[name], ""
            else:
                close = row[name] and abs(float(row[name]) - value) <= PRINTED_MS
                yield f"{number}: {name} (replay: {value})", close or row[name], True


def predictions_change_as_their_questions_do(case: Case, folder: Path) -> Iterator[Difference]:
    """Longer prompts, longer answers, better drafts: one request at a time, each changes the times in one way."""
    del folder  # nothing is written
    if case.kind != "models":
        return
    rng = Random(f"predict {case.seed}")
    flags = deployment_of(case)
    isl, osl = rng.choice([64, 500, 2000]), rng.choice([8, 40])
    ttft, tpot, e2e = predict_closed_loop(flags, isl, osl, 1, least=1, prompts=3)
    longer = predict_closed_loop(flags, 3 * isl, osl, 1, least=1, prompts=3)
    yield "TTFT of a longer prompt", longer[0] >= ttft, True
    yield "TPOT of a longer prompt", longer[1] >= tpot - PRINTED_MS, True
    more = predict_closed_loop(flags, isl, 2 * osl, 1, least=1, prompts=3)
    yield "TTFT of a longer answer", more[0], ttft
    yield "E2E of a longer answer", more[2] > e2e, True
    crowd = predict_closed_loop(flags, isl, osl, 16, least=1, prompts=32)
    yield "E2E of one among 16", crowd[2] >= e2e - PRINTED_MS, True
    varied = predict_closed_loop(flags, isl, osl, 1, least=0.8, prompts=40)
    short = predict_closed_loop(flags, max(int(isl * 0.8), 1), max(int(osl * 0.8), 1), 1, least=1, prompts=3)
    for name, least, found, most in zip(MEASURES, short, varied, (ttft, tpot, e2e), strict=True):
        yield f"{name} of varied lengths", least - PRINTED_MS <= found <= most + PRINTED_MS, True
    ttft, tpot, e2e = predict_closed_loop(one_group(flags), isl, osl, 1, least=1, prompts=3)
    before = tpot
    for rate in (0.0, 0.5, 1.0):  # ngram: a rejected draft costs its verification, and no drafter's pass
        config = {"method": "ngram", "num_speculative_tokens": 1, "accept_rates": [rate]}
        drafting = {**one_group(flags), "speculative-config": json.dumps(config)}
        _, found, _ = predict_closed_loop(drafting, isl, osl, 1, least=1, prompts=3)
        if rate == 0.0:
            yield "TPOT with drafts that are always wrong", found >= tpot - PRINTED_MS, True
        else:
            yield f"TPOT with {rate:.0%} of drafts accepted", found < before, True
        before = found
