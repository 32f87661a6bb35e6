"""Schemas of routing decisions, fleets and standalone routers."""

from __future__ import annotations

from typing import get_args

from schemas.shapes import (
    COUNT,
    INTEGER,
    MAYBE,
    MAYBE_COUNT,
    MAYBE_TEXT,
    NUMBER,
    TEXT,
    Schema,
    describe_object,
    list_of,
)
from understudy.proxy.follower import Health
from understudy.router.kv_candidates import TERMS


def describe_decision() -> Schema:
    """Describe a line of `replay --decisions`."""
    known, truth = ("overlap", "lower_overlap", "best_overlap"), ("true_overlap", "best_true_overlap")
    maybe = {"type": ["integer", "null"], "minimum": 0}
    names = ("worker", "outstanding_requests", "outstanding_tokens", "cached_tokens")
    loaded = describe_object("worker that could be chosen", dict.fromkeys(names, COUNT))
    terms = dict.fromkeys(("cost", *TERMS, "credit"), NUMBER)
    overlaps = dict.fromkeys(("overlap_blocks", "lower_overlap_blocks"), COUNT)
    priced = describe_object(
        "worker that could be chosen, with its cost", {"worker": COUNT, **terms, **overlaps}
    )
    candidates = list_of({"anyOf": [loaded, priced]})
    return describe_object(
        "routing decision",
        {
            "row": COUNT,
            "time_ns": INTEGER,
            "worker": COUNT,
            "cost": MAYBE,
            **{f"{name}_blocks": maybe for name in known},
            **{f"{name}_blocks": COUNT for name in truth},
            "cost_regret": MAYBE,
            "ties": maybe,
            "waited_ns": COUNT,
            "cached_tokens": COUNT,
            "cache_regret_tokens": COUNT,
            "candidates": {"oneOf": [candidates, {"type": "null"}]},
            "score": MAYBE,
            "reason": MAYBE_TEXT,
        },
    )


def describe_fleet_state() -> Schema:
    """Describe the answer to GET /fleet/state."""
    columns = (
        "running",
        "waiting",
        "usage",
        "host",
        "hit",
        "rate",
        "late_ms",
        "tokens",
        "dead",
        "restarts",
        "transfers",
        "restarted",
    )
    late = ("token_p50", "token_p99", "step_p99")
    counts = ("n", "worker", "tokens", "ties", "blocks", "load")
    numbers = dict.fromkeys(("at", "waited_ms"), NUMBER) | dict.fromkeys(
        ("overlap", "lower", "best", "cost", "score"), MAYBE
    )
    texts = {"path": TEXT, "why": TEXT, "stage": TEXT, "reason": MAYBE_TEXT}
    decision = {**dict.fromkeys(counts, COUNT), **numbers, **texts}
    state = {"enum": ["ready", "paused", "slow", "dead", "starting", "draining", "stopped"]}
    workers = {
        **dict.fromkeys(columns, list_of(NUMBER)),
        "state": list_of(state),
        "faults": list_of(list_of(TEXT)),
    }
    pool = {
        **dict.fromkeys(("workers", "blocks", "block_size"), COUNT),
        "model": TEXT,
        "max_num_seqs": MAYBE,
        "role": TEXT,
    }
    mark = {"t": NUMBER, "kind": TEXT, "ended": {"type": "boolean"}, "workers": list_of(COUNT)}
    summary = {**dict.fromkeys(("ttft", "itl", "rates"), list_of(MAYBE)), "cached": MAYBE, "seconds": COUNT}
    return describe_object(
        "fleet state",
        {
            "time": NUMBER,
            "workers": describe_object("one value per worker", workers),
            "ports": list_of(COUNT),
            "pools": list_of(describe_object("pool", pool)),
            "routing": TEXT,
            "queued": COUNT,
            "late_ms": describe_object("lateness in ms", dict.fromkeys(late, NUMBER)),
            "summary": describe_object(
                "the last minute: p50, p90 and p99 in ms, rates, cached share", summary
            ),
            "history": describe_object(
                "a row per second", {"columns": list_of(TEXT), "rows": list_of(list_of(MAYBE))}
            ),
            "marks": list_of(describe_object("a fault that began or ended", mark)),
            "faults": list_of({"type": "object"}),
            "decisions": list_of(describe_object("routing decision", decision)),
        },
    )


def describe_fleet_worker() -> Schema:
    """Describe the answer to GET /fleet/workers/N."""
    counts = dict.fromkeys(("prompt", "cached", "done", "of"), COUNT)
    state = {"age_ms": INTEGER, "state": {"enum": ["running", "waiting"]}}
    requests = list_of(describe_object("live request", {"id": TEXT, **counts, **state}))
    cache = describe_object("blocks", {"tier": TEXT, **dict.fromkeys(("held", "cached", "free"), COUNT)})
    known = {"worker": COUNT, "port": COUNT, "model": TEXT, "requests": requests, "cache": list_of(cache)}
    counted = dict.fromkeys(("preemptions", "restarts"), COUNT)
    return describe_object("worker", {**known, **counted, "faults": list_of({"type": "object"})})


def describe_router_worker(extra: Schema, optional: Schema | None = None) -> Schema:
    """Describe an engine in an answer of the router."""
    view = {
        **describe_object(
            "view of the engine's cache", {"state": {"enum": list(get_args(Health))}, "meaning": TEXT}
        ),
        "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
    }
    known = {
        "worker": COUNT,
        "url": TEXT,
        "rank": COUNT,
        "up": {"type": "boolean"},
        "outstanding_requests": COUNT,
        "outstanding_tokens": COUNT,
        "missed_batches": COUNT,
    }
    return describe_object("engine", {**known, "view": view, **extra}, {"why_down": TEXT, **(optional or {})})


TIER_BLOCKS = describe_object("blocks by tier", dict.fromkeys(("device", "host", "disk", "external"), COUNT))


def describe_router_dump() -> Schema:
    """Describe the router's answer to GET /dump."""
    hashes = {f"{tier}_hashes": list_of(COUNT) for tier in TIER_BLOCKS["properties"]}
    engines = list_of(describe_router_worker({"routed": COUNT}, {"blocks": TIER_BLOCKS, **hashes}))
    awaited = list_of(describe_object("awaited engine", {"url": TEXT, "why": TEXT}))
    sizes = {"routing": TEXT, "block_size": MAYBE_COUNT, "waiting": COUNT, "degraded": list_of(COUNT)}
    return describe_object("router", {**sizes, "failure": MAYBE_TEXT, "workers": engines, "awaited": awaited})


def describe_router_query() -> Schema:
    """Describe the router's answer to POST /query."""
    held = {"oneOf": [TIER_BLOCKS, {"type": "null"}]}
    extra = {"held": held, "prefill_tokens": MAYBE_COUNT, "active_blocks": MAYBE_COUNT}
    sizes = {"tokens": COUNT, "blocks": COUNT, "block_size": MAYBE_COUNT}
    return describe_object("expected hits", {**sizes, "workers": list_of(describe_router_worker(extra))})
