"""Write the JSON schemas of understudy's JSON outputs to docs/schema, from the types that are written."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from understudy.cache.study import CacheStudy
from understudy.engines.recorder import TOTALS
from understudy.events.capture import CapturedMessage
from understudy.events.wire import WireEvent
from understudy.explain import describe as explain_module
from understudy.explain import diff as diff_module
from understudy.explain.waterfall import PARTS
from understudy.groups.plan import GroupPlan
from understudy.report import report as report_module
from understudy.report.advice import Trial
from understudy.report.latency import Latencies
from understudy.report.metrics import METRICS
from understudy.report.report import SCHEMA, Report
from understudy.report.requests import key_of
from understudy.report.verdict import Verdict
from understudy.run.schema import list_columns
from understudy.run.tier_columns import TierColumns
from understudy.run.timeline import FinishReason, Status, Timeline
from understudy.server.proxy.follower import Health
from understudy.sweep.candidate import Summary, Tail
from understudy.sweep.result import SCHEMA as SWEEP_SCHEMA
from understudy.timing.recorded.load import LinkTimes
from understudy.timing.recorded.record import KIND

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "schema"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]

COUNT: Schema = {"type": "integer", "minimum": 0}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
MAYBE_COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
MAYBE: Schema = {"type": ["number", "null"]}
TEXT: Schema = {"type": "string"}


def describe_object(title: str, properties: Schema, optional: Schema | None = None) -> Schema:
    """Describe an object with these keys and no others."""
    return {
        "title": title,
        "type": "object",
        "properties": {**properties, **(optional or {})},
        "required": list(properties),
        "additionalProperties": False,
    }


def list_of(item: Schema) -> Schema:
    """Describe a list of equal items."""
    return {"type": "array", "items": item}


def describe_type(kind: Any, defs: Schema) -> Schema:
    """Describe what is written of a type: all fields, NaN as null. The types that it contains go to `defs`."""

    def adapt(node: Any) -> Any:
        if isinstance(node, list):
            return [adapt(one) for one in node]
        if not isinstance(node, dict):
            return node
        node = {key: adapt(value) for key, value in node.items() if key not in ("default", "description")}
        if node.get("type") == "number":
            node["type"] = ["number", "null"]
        if "properties" in node:
            node |= {"required": list(node["properties"]), "additionalProperties": False}
        return node

    (described,), components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    defs.update({name: adapt(component) for name, component in components.items()})
    result: Schema = adapt(described)
    return result


def describe_report() -> Schema:
    """Describe the file that `replay --json` writes."""
    defs: Schema = {}
    unknown = dict.fromkeys(("Timeline", "Choices", "Decisions", "Workload", "Advice", "SavedRun"), Any)
    hints = get_type_hints(Report, {**vars(report_module), **unknown})
    roots = dict.fromkeys(metric.key.partition(".")[0] for metric in METRICS)
    about = describe_object("definition", {"name": TEXT, "unit": TEXT, "definition": TEXT})
    known = {
        "schema": {"const": SCHEMA},
        "run": {
            "type": "object",
            "description": "facts about the run: workload, settings, digest, wall time",
        },
        "percentile_method": TEXT,
        **{root: describe_type(hints[root], defs) for root in roots},
        "verdicts": list_of(describe_type(Verdict, defs)),
    }
    tiers = {name: describe_type(hints[name], defs) for name in ("tiers", "handoff")}
    definitions = {"definitions": {"type": "object", "additionalProperties": about}}
    without = describe_object("report without tiers", known, tiers)
    advice = describe_object(
        "advice",
        {
            "trials": list_of(describe_type(Trial, defs)),
            "seconds": NUMBER,
            "limit_s": NUMBER,
            "untried": COUNT,
        },
    )
    optional = {**tiers, "without_tiers": without, "advice": advice}
    whole = describe_object("report", {**known, **definitions}, optional)
    return {**whole, "$defs": defs}


def describe_request() -> Schema:
    """Describe a line of `replay --requests-jsonl`."""

    def list_keys(record: type) -> Schema:
        columns = [column for column in list_columns(record) if column.about.per == "request"]
        return {key_of(column, part): MAYBE for column in columns for part in range(column.parts)}

    names = {
        "status": {"enum": [status.name.lower() for status in Status]},
        "finish_reason": {"enum": [reason.name.lower() if reason else None for reason in FinishReason]},
    }
    maybe_text = {"type": ["string", "integer", "null"]}
    latencies = {field.name: MAYBE for field in fields(Latencies)}
    always = {"request": COUNT, "request_id": maybe_text, "reason": maybe_text}
    sources = {
        f"prompt_{source}": COUNT for source in ("from_g1", "from_g2", "from_g3", "from_g4", "computed")
    }
    return describe_object(
        "request",
        {**always, **list_keys(Timeline), **names, **latencies},
        {**list_keys(TierColumns), **sources},
    )


def describe_event() -> Schema:
    """Describe a line of `replay --events` or `--raw-events`."""
    tier = {"tier": {"enum": ["G1", "G2", "G3", "G4"]}}
    maybe_hash = {"type": ["integer", "null"], "minimum": 0}
    removed_block = {"sequence_hash": COUNT, "position": INTEGER, "generation": COUNT}
    stored_block = {**removed_block, "local_hash": maybe_hash}
    stored = list_of(describe_object("stored block", stored_block, {"token_ids": list_of(COUNT)}))
    removed = list_of(describe_object("removed block", removed_block))
    shapes: dict[str, Schema] = {
        "stored": {**tier, "parent_hash": maybe_hash, "blocks": stored},
        "removed": {**tier, "blocks": removed},
    }
    publishers = {"worker": COUNT}, {"publisher": TEXT}  # a tier that workers share publishes for itself
    return {
        "title": "KV event",
        "oneOf": [
            describe_object(
                name, {"time_ns": INTEGER, **publisher, "event_id": COUNT, "type": {"const": name}, **keys}
            )
            for name, keys in shapes.items()
            for publisher in publishers
        ],
    }


def describe_kv_trace() -> Schema:
    """Describe a line of `replay --kv-trace`."""
    counts = ("blocks", "block_size", "free_blocks", "active_blocks", "inactive_blocks", "total_blocks")
    event = {"event": {"enum": ["allocation", "eviction"]}}
    where = {"time_ns": INTEGER, "worker": COUNT}
    return describe_object(
        "KV trace line", {**where, **event, **dict.fromkeys(counts, COUNT), "utilization": NUMBER}
    )


def describe_decision() -> Schema:
    """Describe a line of `replay --decisions`."""
    known, truth = ("overlap", "lower_overlap", "best_overlap"), ("true_overlap", "best_true_overlap")
    maybe = {"type": ["integer", "null"], "minimum": 0}
    names = ("worker", "outstanding_requests", "outstanding_tokens", "cached_tokens")
    candidates = list_of(describe_object("worker that could be chosen", dict.fromkeys(names, COUNT)))
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
        ("overlap", "lower", "best", "cost"), MAYBE
    )
    decision = {**dict.fromkeys(counts, COUNT), **numbers, "path": TEXT, "why": TEXT, "stage": TEXT}
    state = {"enum": ["ready", "paused", "slow", "dead", "starting", "draining"]}
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


def describe_trace_row() -> Schema:
    """Describe a line of a trace that `convert` and `workload` write, in Mooncake's format."""
    integers = ("max_tokens", "strict_priority")
    texts = ("session_id", "request_id", "policy_class", "lora")
    lists = ("output_token_ids", "accepted_drafts")
    return describe_object(
        "trace row",
        {"input_length": COUNT, "output_length": COUNT, "hash_ids": list_of(COUNT)},
        {
            **dict.fromkeys(("timestamp", "delay"), NUMBER),
            **dict.fromkeys(integers, COUNT),
            "priority": INTEGER,
            **dict.fromkeys(texts, TEXT),
            **dict.fromkeys(lists, list_of(COUNT)),
            "output_in_next_turn": {"const": True},
            "notes": list_of(TEXT),
        },
    )


def describe_step() -> Schema:
    """Describe a line of `replay --record-steps`: the header, a step, or the totals."""
    by_request = {"type": "object", "additionalProperties": COUNT}
    removed = {"type": {"const": "removed"}, "n": COUNT, "h": list_of(COUNT)}
    maybe = {"type": ["integer", "null"]}
    stored = {
        **removed,
        "type": {"const": "stored"},
        "parent": maybe,
        "pos": COUNT,
        "first_tokens": list_of(maybe),
    }
    lookahead = {"lookahead": list_of(list_of(COUNT))}
    events = [describe_object("removed", removed), describe_object("stored", stored, lookahead)]
    names = ("new", "resumed", "preempted", "finished", "running", "waiting_head")
    step = {
        "step": COUNT,
        **dict.fromkeys(("scheduled", "cached"), by_request),
        **dict.fromkeys(names, list_of(TEXT)),
        **dict.fromkeys(("waiting", "free_blocks", "free_after_schedule"), COUNT),
        "free_head": list_of(COUNT),
        "kv_events": list_of({"oneOf": events}),
    }
    header = {"format": {"const": 1}, "understudy": TEXT, "workers": COUNT, "requests": COUNT}
    end = {"reason": TEXT, "steps": COUNT, **dict.fromkeys(TOTALS, COUNT)}
    return {
        "title": "line of recorded steps",
        "oneOf": [
            describe_object("header", {"header": describe_object("facts", header)}),
            describe_object("step", step, {"worker": COUNT, "end_ns": INTEGER}),
            describe_object("totals", {"end": describe_object("totals", end)}),
        ],
    }


def describe_step_times() -> Schema:
    """Describe a line of `qwen3 bench --record`: the header, or a step with its times in ms."""
    link = describe_object("link times in ms", dict.fromkeys(LinkTimes._fields, NUMBER))
    sizes = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")
    chunk = {"type": "array", "prefixItems": [TEXT, COUNT, COUNT], "items": False, "minItems": 3}
    decode = {"type": "array", "prefixItems": [TEXT, COUNT], "items": False, "minItems": 2}
    step = {
        "at_ms": NUMBER,
        "ms": MAYBE,
        "launch_ms": NUMBER,
        "shared": COUNT,
        "ahead": {"type": "boolean"},
        "chunks": {**list_of(chunk), "description": "request, tokens, tokens before them"},
        "decodes": {**list_of(decode), "description": "request, tokens of context"},
    }
    header = {"kind": {"const": KIND}, "link": {"oneOf": [link, {"type": "null"}]}}
    return {
        "title": "line of recorded step times",
        "oneOf": [
            describe_object("header", header, {"model": TEXT, **dict.fromkeys(sizes, COUNT)}),
            describe_object("step", step, {"until_ms": NUMBER}),
        ],
    }


def describe_message() -> Schema:
    """Describe a line of `events emit --out` or `events tap --record`."""
    hexadecimal = {"type": "string", "pattern": "^([0-9a-f]{2})*$"}
    keys = {"topic": hexadecimal, "sequence": COUNT, "payload": hexadecimal, "publisher": TEXT}
    assert tuple(keys) == CapturedMessage.__struct_fields__
    return describe_object("captured message", keys)


def describe_wire_event() -> Schema:
    """Describe a line of `events tap --json`: an event as it was sent, without fields that have their default."""
    defs: Schema = {}
    head = {"sequence": COUNT, "ts": NUMBER, "rank": {"type": ["integer", "null"]}}
    shapes = []
    for kind in get_args(WireEvent):
        described = describe_type(kind, defs)
        properties = defs.pop(described["$ref"].rpartition("/")[2])["properties"]
        required = [name for name in ("type", "block_hashes") if name in properties]
        first = {name: properties.pop(name) for name in required}
        shapes.append(describe_object(kind.__name__, {**head, **first}, properties))
    return {"title": "KV event as it was sent", "oneOf": shapes}


def describe_capacity() -> Schema:
    """Describe what `capacity --json` prints."""
    group = {
        "layers": list_of(TEXT),
        "kind": TEXT,
        **dict.fromkeys(("block_size", "page_bytes", "blocks_per_request"), COUNT),
        "window": MAYBE_COUNT,
        "uniform_type": {"type": "boolean"},
    }
    plan = {
        **dict.fromkeys(("attention_block", "state_page_padded"), MAYBE_COUNT),
        "groups": list_of(describe_object("group", group)),
        **dict.fromkeys(GroupPlan.__struct_fields__[3:-2], COUNT),
        "max_concurrency": NUMBER,
    }
    fitted = {"max_model_len": COUNT}  # with --max-model-len auto
    assert (*plan, *fitted) == GroupPlan.__struct_fields__
    return describe_object("KV cache of one GPU", plan, fitted)


def describe_sweep() -> Schema:
    """Describe what `sweep --json` writes."""
    values: Schema = {"type": "object", "additionalProperties": {"type": ["string", "number", "null"]}}
    summary = {
        **dict.fromkeys(("requests", "rejected", "preemptions"), COUNT),
        **dict.fromkeys(("good", "duration_s"), NUMBER),
        **dict.fromkeys(("goodput_per_s", "output_tokens_per_s", "prefix_hit_ratio"), MAYBE),
        **{key: {"$ref": "#/$defs/Tail"} for key in ("ttft_ms", "itl_ms", "e2e_ms")},
        "within": {"type": "object", "additionalProperties": NUMBER},
        "digest": TEXT,
    }
    assert set(summary) == set(Summary.__struct_fields__)
    candidate = {
        "flags": values,
        "gpus": COUNT,
        "cost_per_hour": MAYBE,
        "cpu_s": NUMBER,
        "commands": list_of(TEXT),
        **summary,
    }
    near = {"oneOf": [describe_object("fleet", {**candidate, "margin": NUMBER}), {"type": "null"}]}
    trial = describe_object("candidate", candidate)
    answer = {"load": values, "best": near, "smaller": near, "front": list_of(trial)}
    errors = list_of(describe_object("combination", {"flags": values, "reason": TEXT}))
    facts = {
        "schema": {"const": SWEEP_SCHEMA},
        **dict.fromkeys(("understudy", "workload", "workload_digest", "search"), TEXT),
        **dict.fromkeys(("requests", "found", "ran"), COUNT),
        **dict.fromkeys(("goal", "cpu_s", "wall_s"), NUMBER),
        **{key: {"type": "object", "additionalProperties": NUMBER} for key in ("objectives", "variance")},
        "space": {"type": "object", "additionalProperties": {"type": "array"}},
        "answers": list_of(describe_object("answer", answer)),
        **dict.fromkeys(("notes", "times"), list_of(TEXT)),
        "trials": list_of(trial),
        "invalid": errors,
        "failed": errors,
    }
    defs_of_tail = {"Tail": describe_object("percentiles, ms", dict.fromkeys(Tail.__struct_fields__, MAYBE))}
    return {**describe_object("sweep", facts), "$defs": defs_of_tail}


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
    }
    return describe_object("engine", {**known, "view": view, **extra}, {"why_down": TEXT, **(optional or {})})


TIER_BLOCKS = describe_object("blocks by tier", dict.fromkeys(("device", "host", "disk", "external"), COUNT))


def describe_router_dump() -> Schema:
    """Describe the router's answer to GET /dump."""
    hashes = {f"{tier}_hashes": list_of(COUNT) for tier in TIER_BLOCKS["properties"]}
    engines = list_of(describe_router_worker({"routed": COUNT}, {"blocks": TIER_BLOCKS, **hashes}))
    awaited = list_of(describe_object("awaited engine", {"url": TEXT, "why": TEXT}))
    sizes = {"routing": TEXT, "block_size": MAYBE_COUNT, "waiting": COUNT, "degraded": list_of(COUNT)}
    return describe_object("router", {**sizes, "workers": engines, "awaited": awaited})


def describe_router_query() -> Schema:
    """Describe the router's answer to POST /query."""
    extra = {"held": TIER_BLOCKS, "prefill_tokens": COUNT, "active_blocks": COUNT}
    sizes = {"tokens": COUNT, "blocks": COUNT, "block_size": MAYBE_COUNT}
    return describe_object("expected hits", {**sizes, "workers": list_of(describe_router_worker(extra))})


def describe_cache() -> Schema:
    """Describe what `cache --json` writes."""
    defs: Schema = {}
    described = describe_type(CacheStudy, defs)
    return {"title": "cache study", **described, "$defs": defs}


def describe_parts(kind: Schema) -> Schema:
    """Describe ns by part of a latency; parts of 0 are left out."""
    return {"type": "object", "properties": dict.fromkeys(PARTS, kind), "additionalProperties": False}


def describe_explain() -> Schema:
    """Describe the file that `explain --json` writes."""
    parts = describe_parts({"type": "integer", "minimum": 1})
    other = describe_object("other request", {"request": TEXT}, {"blocks": NUMBER, "tokens": NUMBER})
    span = describe_object(
        "span",
        {
            "after_ns": COUNT,
            "duration_ns": COUNT,
            "kind": {"enum": list(PARTS)},
            "parts": parts,
            "worker": INTEGER,
            "steps": COUNT,
            "tokens": COUNT,
            "others": list_of(other),
        },
        {"at_head_ns": COUNT, "preempted_by": {"type": ["string", "null"]}},
    )
    request = describe_object(
        "explained request",
        {
            "request": TEXT,
            "row": COUNT,
            "worker": INTEGER,
            "arrival_ns": COUNT,
            "latency_ns": COUNT,
            "ttft_ns": MAYBE_COUNT,
            "prompt_tokens": COUNT,
            "cached_tokens": COUNT,
            "loaded_tokens": {"type": "object", "additionalProperties": COUNT},
            "output_tokens": COUNT,
            "preemptions": COUNT,
            "router": {"type": ["object", "null"], "additionalProperties": NUMBER},
            "parts": parts,
            "ttft_parts": parts,
        },
        {"spans": list_of(span)},
    )
    return describe_object(
        "explanation",
        {
            "schema": {"const": explain_module.SCHEMA},
            "run": {"type": "object"},
            "requests": list_of(request),
            "latency_ns": COUNT,
            "parts": parts,
            "part_names": {"type": "object", "additionalProperties": TEXT},
        },
    )


def describe_diff() -> Schema:
    """Describe the file that `diff --json` writes."""
    parts = describe_parts(INTEGER)

    def both(kind: Schema) -> Schema:
        return describe_object("both runs", {"a": kind, "b": kind})

    decision = describe_object(
        "decision",
        {
            "time_ns": COUNT,
            "worker": COUNT,
            "request": {"type": ["string", "null"]},
            "what": TEXT,
            "kind": {"enum": ["step_end", "placed", "preempted", "admitted", "step_begin"]},
        },
    )
    first = describe_object(
        "first difference",
        {
            "time_ns": COUNT,
            "after_equal_decisions": COUNT,
            **both({"anyOf": [decision, {"type": "null"}]})["properties"],
        },
    )
    request = describe_object(
        "changed request",
        {
            "request": TEXT,
            "row": COUNT,
            "worker": both(INTEGER),
            "latency_ns": both(COUNT),
            "change_ns": INTEGER,
            "cause": {"enum": list(PARTS)},
            "parts": parts,
        },
    )
    return describe_object(
        "difference",
        {
            "schema": {"const": diff_module.SCHEMA},
            "settings": list_of(describe_object("setting", {"name": TEXT, "a": {}, "b": {}})),
            "first_difference": {"anyOf": [first, {"type": "null"}]},
            "ended": describe_object("ended requests", {"a": COUNT, "b": COUNT, "both": COUNT}),
            "latency_ns": both(COUNT),
            "changed": COUNT,
            "causes": describe_object("causes", {"requests": COUNT, "change_ns": INTEGER, "parts": parts}),
            "requests": list_of(request),
            "part_names": {"type": "object", "additionalProperties": TEXT},
        },
    )


SCHEMAS = {
    "cache": describe_cache,
    "diff": describe_diff,
    "explain": describe_explain,
    "capacity": describe_capacity,
    "report": describe_report,
    "request": describe_request,
    "event": describe_event,
    "kv-trace": describe_kv_trace,
    "decision": describe_decision,
    "fleet-state": describe_fleet_state,
    "fleet-worker": describe_fleet_worker,
    "message": describe_message,
    "router-dump": describe_router_dump,
    "router-query": describe_router_query,
    "step": describe_step,
    "step-times": describe_step_times,
    "sweep": describe_sweep,
    "trace-row": describe_trace_row,
    "wire-event": describe_wire_event,
}


def render(name: str) -> str:
    """Return the text of a schema file."""
    return json.dumps({"$schema": DRAFT, **SCHEMAS[name]()}, indent=1) + "\n"


def main() -> int:
    """Write all schemas."""
    FOLDER.mkdir(exist_ok=True)
    for name in SCHEMAS:
        (FOLDER / f"{name}.json").write_text(render(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
