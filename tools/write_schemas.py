"""Write the JSON schemas of understudy's JSON outputs to docs/schema, from the types that are written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from schemas.events import describe_event, describe_kv_trace, describe_message, describe_wire_event
from schemas.explanations import describe_diff, describe_explain
from schemas.plans import describe_load, describe_plan
from schemas.reports import (
    describe_cache,
    describe_capacity,
    describe_report,
    describe_request,
    describe_sweep,
)
from schemas.routing import (
    describe_decision,
    describe_fleet_state,
    describe_fleet_worker,
    describe_router_dump,
    describe_router_query,
)
from schemas.steps import describe_step, describe_step_times, describe_trace_row

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "schema"
DRAFT = "https://json-schema.org/draft/2020-12/schema"

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
    "load": describe_load,
    "plan": describe_plan,
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
