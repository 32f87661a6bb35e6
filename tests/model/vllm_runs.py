"""Scenario files played by the model of vLLM's scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .vllm_config import RECORDED, Profile
from .vllm_scheduler import VllmModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .vllm_format import Scenario


def run_scenario(
    scenario: Scenario, profile: Profile = RECORDED, model: VllmModel | None = None
) -> Iterator[dict[str, Any]]:
    """The lines of the scenario's golden file after the header: one a step, then the totals."""
    model = model or VllmModel(scenario["config"], profile)
    requests = scenario["requests"]
    to_come = list(enumerate(requests))
    totals = dict.fromkeys(
        ["finished", "preemptions", "scheduled_tokens", "cached_tokens", "stored_blocks", "removed_blocks"], 0
    )
    while totals["finished"] < len(requests) and model.steps < scenario["max_steps"]:
        for index, spec in to_come:
            if spec["arrival_step"] <= model.steps:
                model.add(spec, index)
        to_come = [(index, spec) for index, spec in to_come if spec["arrival_step"] > model.steps]
        aborted = abort_due(model, scenario, "before")
        record = model.step(lambda: aborted.extend(abort_due(model, scenario, "mid")))  # noqa: B023
        totals["finished"] += len(record["finished"]) + len(aborted)
        totals["preemptions"] += len(record["preempted"])
        totals["scheduled_tokens"] += sum(record["scheduled"].values())
        totals["cached_tokens"] += sum(record["cached"].values())
        for event in record["kv_events"]:
            totals[f"{event['type']}_blocks"] += event["n"]
        yield {**record, "aborted": aborted} if "aborts" in scenario else dict(record)
    reason = "done" if totals["finished"] == len(requests) else "max_steps"
    yield {"end": {"reason": reason, "steps": model.steps, **totals}}


def abort_due(model: VllmModel, scenario: Mapping[str, Any], when: str) -> list[str]:
    """Abort who is due and there; returns them."""
    step = model.steps
    due = [
        abort["id"] for abort in scenario.get("aborts", []) if (abort["step"], abort["when"]) == (step, when)
    ]
    there = [name for name in due if model.has(name)]
    for name in there:
        model.cancel(name)
    return there
