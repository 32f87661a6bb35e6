"""Audit `understudy cache`: plain caches that serve the requests of a trace, in the order of time or of a replay."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any

from answers.definitions import ratio
from answers.evidence import ns, replay, run, write_trace
from answers.plain_caches import POLICIES, lru_hits, open_blocks, times_sent, visits_of
from answers.random_traces import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from answers.definitions import Difference
    from answers.evidence import Evidence
    from answers.plain_caches import Visit
    from answers.random_cases import Case
    from answers.random_traces import Row

UNLIMITED = 10**9
OF_THE_ROUTER = {"event-delay-ms": "event_delay_ms", "router-queue-threshold": "queue_threshold"}
OF_THE_ENGINE = (
    *("block-size", "num-gpu-blocks", "max-num-seqs", "max-num-batched-tokens", "max-model-len"),
    *("long-prefill-token-threshold", "scheduling-policy", "max-loras"),
)
SWITCHES = {"enable-lora": ("enable_lora", True), "no-async-scheduling": ("async_scheduling", False)}


def served_rows(case: Case) -> list[Row]:
    """Rows with the limit of the case; a curve takes every request to its end, so none is cut off by its client."""
    limit = case.flags.get("max-tokens")
    rows = [{name: row[name] for name in row if name != "abort_after_ms"} for row in case.rows]
    for row in rows:
        if limit is not None:
            row["max_tokens"] = min(int(limit), row.get("max_tokens", int(limit)))
    return rows


def study(rows: list[Row], folder: Path, *flags: str) -> dict[str, Any]:
    """Run `understudy cache` on rows."""
    trace = write_trace(rows, folder / "cache.jsonl")
    how = ("--trace-block-size", str(BLOCK), "--json", "-", "--quiet", *flags)
    found: dict[str, Any] = json.loads(run("cache", str(trace), *how))
    return found


def curves_are_plain_caches(evidence: Evidence) -> Iterator[Difference]:
    """Without a fleet, one cache serves the requests one at a time, in the order in which they are sent."""
    case, rng = evidence.case, Random(f"cache {evidence.case.seed}")
    rows = served_rows(case)
    size = int(case.flags.get("block-size", BLOCK))
    warm_up = rng.choice([0.0, 0.0, 0.3])
    visits = visits_of(rows, size)
    sent = times_sent(rows)
    order = sorted(range(len(rows)), key=sent.__getitem__)
    served = [visits[number] for number in order]
    distinct = len({block for visit in visits for block in visit.blocks})
    sizes = sorted({1, 2, 5, rng.randint(1, 60), max(distinct // 2, 1), max(distinct, 1)})
    found = study(
        rows,
        evidence.folder,
        *("--block-size", str(size), "--policies", "lru,insertion,lineage,optimal"),
        *("--sizes", ",".join(f"{blocks}blocks" for blocks in sizes), "--warm-up", str(warm_up)),
    )
    skipped = int(warm_up * len(rows))
    tokens = sum(visit.prompt_tokens for visit in served[skipped:])
    yield "prompt tokens", found["prompt_tokens"], tokens
    yield "requests", found["requests"], len(rows)
    yield "distinct blocks", found["distinct_blocks"], distinct
    yield "visits", found["block_visits"], sum(len(visit.blocks) for visit in visits)
    best = ratio(sum(lru_hits(served, UNLIMITED)[skipped:]) * size, tokens) or 0.0
    yield "unlimited cache", found["unlimited_hit_ratio"], best
    yield "caches of a fleet", found["routed_hit_ratio"], None
    yield "sizes", [point["blocks"] for point in found["sizes"]], sizes
    for point in found["sizes"]:
        for name, hits in POLICIES.items():
            expected = ratio(sum(hits(served, point["blocks"])[skipped:]) * size, tokens) or 0.0
            yield f"{name} with {point['blocks']} blocks", point["hit_ratio"][name], expected
        yield (
            f"lineage with {point['blocks']} blocks",
            point["hit_ratio"]["lineage"],
            point["hit_ratio"]["lru"],
        )
    yield "open blocks", found["sessions"]["open_blocks_max"], open_blocks(rows, visits, order)
    yield from bounds(found, best)


def curves_of_a_fleet_are_plain_caches(evidence: Evidence) -> Iterator[Difference]:
    """With a fleet, each worker's cache serves its requests in the order in which the replay admitted them."""
    case = evidence.case
    if case.kind != "plain" or "no-enable-prefix-caching" in case.flags:
        return
    rows = served_rows(case)
    same = case.with_flags(max_tokens=None)
    lines = replay(type(same)(same.seed, same.kind, tuple(rows), same.flags), evidence.folder).lines
    config = evidence.folder / "fleet.yaml"
    config.write_text(json.dumps(settings_of(case.flags)))
    size, blocks = int(case.flags["block-size"]), int(case.flags["num-gpu-blocks"])
    sizes = sorted({3, blocks, 4 * blocks})
    found = study(
        rows,
        evidence.folder,
        *("--config", str(config), "--policies", "lru,insertion,optimal"),
        *("--sizes", ",".join(f"{blocks}blocks" for blocks in sizes)),
    )
    visits = visits_of(rows, size)
    admitted = [line for line in lines if line["first_admit_ms"] is not None]
    admitted.sort(key=lambda line: (ns(line["first_admit_ms"]), line["prompt_tokens"], line["request"]))
    parts: dict[int, list[Visit]] = {}
    for line in admitted:
        parts.setdefault(line["worker"], []).append(visits[line["request"]])
    tokens = sum(line["prompt_tokens"] for line in admitted)
    yield "prompt tokens", found["prompt_tokens"], tokens

    def hit_ratio(caches: Sequence[Sequence[Visit]], blocks: int) -> float:
        return (ratio(sum(sum(lru_hits(visits, blocks)) for visits in caches) * size, tokens)) or 0.0

    everything = [visits[line["request"]] for line in admitted]
    best = hit_ratio([everything], UNLIMITED)
    yield "unlimited cache", found["unlimited_hit_ratio"], best
    routed = hit_ratio(list(parts.values()), UNLIMITED)
    yield "unlimited caches of workers", found["routed_hit_ratio"], routed if len(parts) > 1 else None
    for point in found["sizes"]:
        expected = hit_ratio(list(parts.values()), point["blocks"])
        yield f"lru with {point['blocks']} blocks", point["hit_ratio"]["lru"], expected
        for name in ("insertion", "optimal", "optimal_pinned"):
            within = point["hit_ratio"][name] <= routed + 1e-12
            yield f"{name} with {point['blocks']} blocks is within the bound", within, True
    hits = sum(line["cached_tokens_first"] for line in admitted)
    # null where every prompt was refused: the fleet looked nothing up
    yield "fleet", found["fleet"]["replayed_hit_ratio"], ratio(hits, tokens)
    yield "fleet's curve", found["fleet"]["lru_hit_ratio"], hit_ratio(list(parts.values()), blocks)
    for one in (found["fleet"], *found["replays"]):
        if (gap := one["gap"]) is not None:
            said = one.get("hit_ratio", one.get("replayed_hit_ratio"))
            whole = gap["curve_hit_ratio"] + gap["order"] + gap["running"] + gap["steps"]
            yield f"parts of the gap with {one['blocks']} blocks", whole, float(said)
    for one in found["replays"]:
        if (one["policy"], one["blocks"]) == ("lru", blocks):
            yield "replay of the fleet's size", one["hit_ratio"], ratio(hits, tokens)
    yield from bounds(found, best)


def settings_of(flags: dict[str, str]) -> dict[str, Any]:
    """Write the flags of `replay` as a settings file."""
    engine: dict[str, Any] = {}
    for name in OF_THE_ENGINE:
        if name in flags:
            value = flags[name]
            engine[name.replace("-", "_")] = int(value) if value.isdigit() else value
    engine |= {setting: is_on for name, (setting, is_on) in SWITCHES.items() if name in flags}
    settings: dict[str, Any] = {"engine": engine}
    for name in ("workers", "seed"):
        if name in flags:
            settings[name] = int(flags[name])
    if "routing" in flags:
        settings["routing"] = flags["routing"]
    router = {name: float(flags[flag]) for flag, name in OF_THE_ROUTER.items() if flag in flags}
    if router:
        settings["router"] = router
    if "concurrency" in flags:
        settings["load"] = {"kind": "closed_loop", "concurrency": int(flags["concurrency"])}
    elif "arrival-rate-scale" in flags:
        scale = float(flags["arrival-rate-scale"])
        settings["load"] = {"kind": "open_loop", "arrival_rate_scale": scale}
    return settings


def bounds(found: dict[str, Any], best: float) -> Iterator[Difference]:
    """No cache hits more than the unlimited one, none more than the optimal one, and a larger one never fewer."""
    slack = 1e-12
    before: dict[str, float] = {}
    for point in found["sizes"]:
        for name, hits in point["hit_ratio"].items():
            yield (
                f"{name} with {point['blocks']} blocks within the unlimited cache",
                hits <= best + slack,
                True,
            )
            if name != "optimal_pinned":
                best_of_size = point["hit_ratio"]["optimal"]
                yield f"{name} with {point['blocks']} blocks: optimum", hits <= best_of_size + slack, True
            if name in ("lru", "optimal"):
                more = hits >= before.get(name, 0.0) - slack
                yield f"{name} with {point['blocks']} blocks hits no fewer than smaller ones", more, True
        before = point["hit_ratio"]
    curve = [point["hit_ratio"]["lru"] for point in found["lru_curve"]]
    yield "the plotted curve rises", curve, sorted(curve)
