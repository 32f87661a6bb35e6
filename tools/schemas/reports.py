"""Schemas of reports: runs, requests, sweeps, caches, and capacity."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from schemas.shapes import (
    COUNT,
    MAYBE,
    MAYBE_COUNT,
    NUMBER,
    TEXT,
    Schema,
    describe_object,
    describe_type,
    list_of,
)
from understudy.cache.study import CacheStudy
from understudy.groups.plan import GroupPlan
from understudy.report import data as data_module
from understudy.report.groups import Groups
from understudy.report.latency import Latencies
from understudy.report.metrics import METRICS
from understudy.report.report import SCHEMA
from understudy.report.requests import key_of
from understudy.report.trial import Trial
from understudy.report.verdict import Verdict
from understudy.report.worst_hour import WorstHour
from understudy.run.group_facts import GroupFacts, GroupUse
from understudy.run.handoff_columns import HandOffColumns
from understudy.run.schema import list_columns
from understudy.run.tier_columns import TierColumns
from understudy.run.timeline import FinishReason, Status, Timeline
from understudy.sweep.candidate import Summary, Tail
from understudy.sweep.result import SCHEMA as SWEEP_SCHEMA


def describe_report() -> Schema:
    """Describe the file that `replay --json` writes."""
    defs: Schema = {}
    unknown = dict.fromkeys(("Timeline", "Choices", "Decisions", "Workload", "SavedRun", "Self"), Any)
    hints = get_type_hints(data_module.ReportData, {**vars(data_module), **unknown})
    roots = dict.fromkeys(metric.key.partition(".")[0] for metric in METRICS)
    about = describe_object("definition", {"name": TEXT, "unit": TEXT, "definition": TEXT})
    known = {
        "schema": {"const": SCHEMA},
        "run": {
            "type": "object",
            "description": "facts about the run: workload, settings, digest, wall time",
            "properties": {"kv_groups": _describe_kv_groups()},
        },
        "percentile_method": TEXT,
        **{root: describe_type(hints[root], defs) for root in roots},
        "groups": describe_object(
            "sums over groups of sessions, for the noise of differences",
            {
                name: {**list_of(NUMBER), "type": ["array", "null"]} if name == "good" else list_of(NUMBER)
                for name in Groups.__struct_fields__
            },
        ),
        "verdicts": list_of(describe_type(Verdict, defs)),
    }
    tiers = {name: describe_type(hints[name], defs) for name in ("tiers", "handoff")}
    definitions = {"definitions": {"type": "object", "additionalProperties": about}}
    without = describe_object("report without tiers", known, {**tiers, "worst_hour": {"type": "object"}})
    advice = describe_object(
        "advice",
        {
            "trials": list_of(describe_type(Trial, defs)),
            "seconds": NUMBER,
            "replay_s": NUMBER,
            "limit_s": NUMBER,
            "untried": COUNT,
            "smaller_untried": list_of(TEXT),
        },
    )
    worst = {"worst_hour": describe_type(hints["worst_hour"], defs)}
    optional = {**tiers, **worst, "without_tiers": without, "advice": advice}
    whole = describe_object("report", {**known, **definitions}, optional)
    return {**whole, "$defs": defs}


def _describe_kv_groups() -> Schema:
    """Describe hits and held blocks of several KV cache groups."""
    group = {
        "kind": TEXT,
        "window": MAYBE_COUNT,
        **dict.fromkeys(("block_size", "held_blocks_peak"), COUNT),
        "held_blocks_mean": NUMBER,
        "held_blocks": list_of(COUNT),
    }
    facts = {
        **dict.fromkeys(("hit_ratio", "shortened_ratio"), NUMBER),
        "full_attention_hit_ratio": MAYBE,
        "time_s": list_of(NUMBER),
        "groups": list_of(describe_object("KV cache group", group)),
    }
    assert set(group) == set(GroupUse.__struct_fields__)
    assert set(facts) == set(GroupFacts.__struct_fields__)
    return describe_object("KV cache groups", facts)


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
        {**list_keys(TierColumns), **sources, **list_keys(HandOffColumns)},
    )


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
    worst = describe_object(
        "worst hour, or window of the goal",
        {**dict.fromkeys((field.name for field in fields(WorstHour)), MAYBE), "requests": COUNT},
    )
    summary = {
        **dict.fromkeys(("requests", "rejected", "preemptions"), COUNT),
        **dict.fromkeys(("good", "duration_s"), NUMBER),
        **dict.fromkeys(
            ("goodput_per_s", "input_tokens_per_s", "output_tokens_per_s", "prefix_hit_ratio"), MAYBE
        ),
        **{key: {"$ref": "#/$defs/Tail"} for key in ("ttft_ms", "itl_ms", "e2e_ms")},
        "within": {"type": "object", "additionalProperties": NUMBER},
        "digest": TEXT,
        "worst_hour": {"oneOf": [worst, {"type": "null"}]},
        "goal_window_s": MAYBE,
        "good_range": {"oneOf": [list_of(NUMBER), {"type": "null"}]},
    }
    assert set(summary) == set(Summary.__struct_fields__)
    engines = {
        **dict.fromkeys(("name", "command"), TEXT),
        **dict.fromkeys(("engines", "ranks", "gpus"), COUNT),
    }
    candidate = {
        "flags": values,
        "gpus": COUNT,
        **dict.fromkeys(("cost_per_hour", "cost_per_month"), MAYBE),
        **dict.fromkeys(("cost_per_million_tokens", "cost_per_million_output_tokens"), MAYBE),
        "cpu_s": NUMBER,
        "engines": list_of(describe_object("equal engines", engines)),
        **dict.fromkeys(("commands", "not_in_commands"), list_of(TEXT)),
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
        "goal_window_s": MAYBE,
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


def describe_cache() -> Schema:
    """Describe what `cache --json` writes."""
    defs: Schema = {}
    described = describe_type(CacheStudy, defs)
    return {"title": "cache study", **described, "$defs": defs}
