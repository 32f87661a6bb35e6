"""Schemas of plans and of loads."""

from __future__ import annotations

from schemas.shapes import COUNT, MAYBE, MAYBE_TEXT, NUMBER, TEXT, Schema, describe_object, list_of
from understudy.online.load_result import NAMES as STATISTICS
from understudy.online.load_result import SCHEMA as LOAD_SCHEMA
from understudy.planning.result import SCHEMA as PLAN_SCHEMA


def describe_plan() -> Schema:
    """Describe what `plan --json` writes."""
    numbers: Schema = {"type": "object", "additionalProperties": NUMBER}
    fleet = {
        **dict.fromkeys(("fleet", "times"), TEXT),
        "flags": {"type": "object"},
        **dict.fromkeys(("gpus", "engines"), COUNT),
        **dict.fromkeys(("cost_per_hour", "cost_per_month", "in_time", "judged"), NUMBER),
        **dict.fromkeys(("cost_per_million_tokens", "cost_per_million_output_tokens"), MAYBE),
        "summary": {"type": "object"},
        **dict.fromkeys(("commands", "not_expressed"), list_of(TEXT)),
    }
    maybe_fleet = {"oneOf": [{"$ref": "#/$defs/Fleet"}, {"type": "null"}]}
    times = {
        "percent": NUMBER,
        "origin": TEXT,
        **dict.fromkeys(
            (
                "in_time_at_shortest",
                "in_time_at_longest",
                "cost_per_hour_at_shortest",
                "cost_per_hour_at_longest",
            ),
            MAYBE,
        ),
    }
    lever = {"change": TEXT, "cost_per_hour": MAYBE, "gpus": COUNT, "fleet": TEXT}
    plan = {
        "schema": {"const": PLAN_SCHEMA},
        **dict.fromkeys(("understudy", "workload", "workload_digest", "model"), TEXT),
        **dict.fromkeys(("requests", "ran", "found", "fleets"), COUNT),
        **dict.fromkeys(("users", "goal", "cpu_s", "wall_s"), NUMBER),
        **dict.fromkeys(("goal_window_s", "stopped_at_cpu_s"), MAYBE),
        **dict.fromkeys(("gpus", "assumed_prices", "notes"), list_of(TEXT)),
        **dict.fromkeys(("prices", "objectives", "too_slow_alone"), numbers),
        **dict.fromkeys(("answer", "nearest", "runner_up"), maybe_fleet),
        "range": {"oneOf": [describe_object("range of the step times", times), {"type": "null"}]},
        "levers": list_of(describe_object("lever", lever)),
        "rejected": {"type": "object", "additionalProperties": TEXT},
    }
    return {**describe_object("plan", plan), "$defs": {"Fleet": describe_object("fleet", fleet)}}


def describe_load() -> Schema:
    """Describe what `load --json` writes."""
    tail = describe_object("statistics, ms", {**dict.fromkeys(STATISTICS, MAYBE), "count": COUNT})
    one = {
        "load": TEXT,
        "level": MAYBE,
        **dict.fromkeys(
            ("requests", "failed", "prompt_tokens", "output_tokens", "counted_by_endpoint"), COUNT
        ),
        "first_error": MAYBE_TEXT,
        **dict.fromkeys(("duration_s", "requests_per_s", "output_tokens_per_s"), NUMBER),
        **{key: {"$ref": "#/$defs/Tail"} for key in ("ttft_ms", "tpot_ms", "e2e_ms", "late_ms")},
        **dict.fromkeys(("cached_tokens", "in_time"), MAYBE),
    }
    loads = {
        "schema": {"const": LOAD_SCHEMA},
        **dict.fromkeys(("url", "model"), TEXT),
        "kind": {"enum": ["rate", "users", "trace"]},
        "knee": MAYBE,
        "loads": list_of(describe_object("load", one)),
    }
    return {**describe_object("loads", loads), "$defs": {"Tail": tail}}
