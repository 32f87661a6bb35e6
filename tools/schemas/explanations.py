"""Schemas of explained requests and of compared runs."""

from __future__ import annotations

from schemas.shapes import (
    COUNT,
    INTEGER,
    MAYBE_COUNT,
    MAYBE_TEXT,
    NUMBER,
    TEXT,
    Schema,
    describe_object,
    list_of,
)
from understudy.explain import describe as explain_module
from understudy.explain import diff as diff_module
from understudy.explain.misses import CAUSES
from understudy.explain.waterfall import PARTS


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
    missed = describe_object(
        "missed tokens with one cause",
        {"first_token": COUNT, "tokens": COUNT, "cause": {"enum": list(CAUSES)}},
        {"evicted_ns": COUNT, "evicted_for": MAYBE_TEXT},
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
            "router": {
                "type": ["object", "null"],
                "additionalProperties": {"type": ["number", "string", "null"]},
            },
            "parts": parts,
            "ttft_parts": parts,
        },
        {"spans": list_of(span), "misses": list_of(missed)},
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
        {"misses": describe_misses()},
    )


def describe_misses() -> Schema:
    """Describe the missed prompt tokens of a run."""
    causes = {"type": "object", "properties": dict.fromkeys(CAUSES, COUNT), "additionalProperties": False}
    request = describe_object("request that needed the room", {"request": TEXT, "tokens": COUNT})
    return describe_object(
        "misses",
        {
            **dict.fromkeys(("prompt_tokens", "cached_tokens", "missed_tokens"), COUNT),
            "causes": causes,
            "cause_names": {"type": "object", "additionalProperties": TEXT},
            "evicted_for": list_of(request),
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
            "mean_change": {
                "oneOf": [
                    describe_object(
                        "mean change of latencies",
                        {
                            **dict.fromkeys(("mean_ms", "low_ms", "high_ms", "confidence"), NUMBER),
                            "above_noise": {"type": "boolean"},
                        },
                    ),
                    {"type": "null"},
                ]
            },
            "changed": COUNT,
            "causes": describe_object("causes", {"requests": COUNT, "change_ns": INTEGER, "parts": parts}),
            "requests": list_of(request),
            "part_names": {"type": "object", "additionalProperties": TEXT},
        },
    )
