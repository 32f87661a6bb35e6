"""Schemas of traces, and of recorded steps and their times."""

from __future__ import annotations

from schemas.shapes import (
    COUNT,
    INTEGER,
    MAYBE,
    NUMBER,
    TEXT,
    Schema,
    describe_object,
    list_of,
)
from understudy.run.step_line import TOTALS
from understudy.timing.recorded.load import LinkTimes
from understudy.timing.recorded.record import KIND


def describe_trace_row() -> Schema:
    """Describe a line of a trace that `convert` and `workload` write, in Mooncake's format."""
    integers = ("max_tokens", "strict_priority")
    texts = ("session_id", "request_id", "policy_class", "lora")
    lists = ("output_token_ids", "accepted_drafts")
    return describe_object(
        "trace row",
        {"input_length": COUNT, "output_length": COUNT},
        {
            "hash_ids": list_of(COUNT),  # not in rows of lengths alone
            **dict.fromkeys(("timestamp", "delay", "elapsed_ms", "abort_after_ms"), NUMBER),
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
