"""Write the JSON schemas of understudy's JSON outputs to docs/schema, from the types that are written."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from understudy.report import report as report_module
from understudy.report.latency import Latencies
from understudy.report.metrics import METRICS
from understudy.report.report import SCHEMA, Report
from understudy.report.requests import key_of
from understudy.report.verdicts import Verdict
from understudy.run.schema import list_columns
from understudy.run.tier_columns import TierColumns
from understudy.run.timeline import FinishReason, Status, Timeline

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "schema"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]

COUNT: Schema = {"type": "integer", "minimum": 0}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
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
    unknown = dict.fromkeys(("Timeline", "Decisions", "Workload"), Any)
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
    tiers = {"tiers": describe_type(hints["tiers"], defs)}
    definitions = {"definitions": {"type": "object", "additionalProperties": about}}
    without = describe_object("report without tiers", known, tiers)
    whole = describe_object("report", {**known, **definitions}, {**tiers, "without_tiers": without})
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
    overlaps = ("overlap", "lower_overlap", "best_overlap", "true_overlap", "best_true_overlap")
    return describe_object(
        "routing decision",
        {
            "row": COUNT,
            "time_ns": INTEGER,
            "worker": COUNT,
            "cost": MAYBE,
            **{f"{name}_blocks": COUNT for name in overlaps},
            "cost_regret": MAYBE,
            "ties": COUNT,
            "waited_ns": COUNT,
            "cached_tokens": COUNT,
        },
    )


def describe_fleet_state() -> Schema:
    """Describe the answer to GET /fleet/state."""
    columns = ("running", "waiting", "usage", "host", "hit", "rate", "late_ms", "tokens", "dead")
    late = ("token_p50", "token_p99", "step_p99")
    counts = ("worker", "tokens", "overlap", "lower", "best", "ties", "blocks", "load")
    numbers = dict.fromkeys(("at", "cost", "waited_ms"), NUMBER)
    decision = {**dict.fromkeys(counts, COUNT), **numbers, "path": TEXT, "why": TEXT}
    return describe_object(
        "fleet state",
        {
            "workers": describe_object("one value per worker", dict.fromkeys(columns, list_of(NUMBER))),
            "ports": list_of(COUNT),
            "routing": TEXT,
            "queued": COUNT,
            "late_ms": describe_object("lateness in ms", dict.fromkeys(late, NUMBER)),
            "decisions": list_of(describe_object("routing decision", decision)),
        },
    )


SCHEMAS = {
    "report": describe_report,
    "request": describe_request,
    "event": describe_event,
    "kv-trace": describe_kv_trace,
    "decision": describe_decision,
    "fleet-state": describe_fleet_state,
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
