"""Recordings of one side of a disaggregated SGLang server: the lines that a run gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.conformance.sglang_recording import SglangRun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.conformance.sglang_recording import SglangScenario


def run_sglang_side(scenario: SglangScenario, *, check: bool = False) -> Iterator[dict[str, Any]]:
    """Run one side of a scenario and yield its recording's lines after the header."""
    run = SglangRun(scenario)
    totals = dict.fromkeys(
        ("prefill_steps", "decode_steps", "mixed_steps", "idle_steps", "retractions", "scheduled_tokens"), 0
    )
    totals |= dict.fromkeys(("cached_tokens", "stored_blocks", "removed_blocks"), 0)
    ended: set[str] = set()
    to_come = list(range(len(scenario.requests)))
    aborts = list(scenario.aborts)
    steps = 0
    reason = "done"
    while len(ended) < len(scenario.requests):
        if steps == scenario.max_steps:
            reason = "max_steps"
            break
        for index in [i for i in to_come if scenario.requests[i].arrival_step <= steps]:
            run.submit(index)
            to_come.remove(index)
        for abort in [one for one in aborts if one.step <= steps]:
            run.abort(abort.id)
            aborts.remove(abort)
        line = {"step": steps, **_run_step(run, scenario)}
        if check:
            run.loop.check()
        mode = {"extend": "prefill", "decode": "decode", None: "idle"}[line["mode"]]
        totals[f"{mode}_steps"] += 1
        totals["retractions"] += len(line.get("retracted", ()))
        totals["scheduled_tokens"] += sum(line["scheduled"].values())
        totals["cached_tokens"] += sum(line.get("cached", {}).values())
        for event in line["kv_events"]:
            totals[f"{event['type']}_blocks"] += event["n"]
        ended.update(line["finished"], line["aborted"])
        steps += 1
        yield line
    yield {"end": {"reason": reason, "steps": steps, "finished": len(ended), **totals}}


def _run_step(run: SglangRun, scenario: SglangScenario) -> dict[str, Any]:
    loop, names = run.loop, run.names
    is_prefill = scenario.config.role == "prefill"
    batch = loop.schedule()
    after, chunked = loop.free_tokens, loop.chunked
    loop.process()
    side = loop.take_side()
    log = loop.take_log()
    mode, rows = (None, []) if batch is None else batch
    line: dict[str, Any] = {"mode": mode, "scheduled": {names[i]: tokens for i, tokens, _ in rows}}
    if is_prefill:
        line |= {
            "new": [names[i] for i, *_ in log["admitted"]],
            "cached": {names[i]: cached for i, _, cached, _ in log["admitted"]},
            "chunked": None if chunked is None or mode is None else names[chunked],
            "sent": [[names[i], pages, last] for i, pages, last in side["sent"]],
        }
    else:
        line |= {
            "resumed": [names[i] for i in side["resumed"]],
            "allocated": [[names[i], pages, prefix] for i, pages, prefix in side["allocated"]],
            "arrived": [names[i] for i in side["arrived"]],
            "joined": [names[i] for i in side["joined"]],
            "retracted": [names[i] for i in log["retracted"]],
        }
    state: dict[str, Any] = {**loop.state}
    ids = {
        "queue": side["bootstrap"],
        "waiting": side["waiting"],
        "moving": side["moving"],
        "held": side["held"],
        "retracted_queue": side["retracted"],
        "running": state["running"],
    }
    queues = {key: [names[i] for i in value] for key, value in ids.items()}
    line |= {
        "avail_after_schedule": after,
        "finished": [names[i] for i in log["finished"]],
        "aborted": [names[i] for i in log["aborted"]],
        **{key: queues[key] for key in ("queue", "waiting", "moving")},
    }
    if is_prefill:
        line["batch_is_full"] = state["batch_is_full"]
    else:
        line |= {key: queues[key] for key in ("held", "retracted_queue", "running")}
        line["new_token_ratio"] = state["new_token_ratio"]
    if scenario.config.host_tokens is not None:
        line["host_avail"] = side["host_tokens"]
    line |= {"slots": side["slots"], "buffers": side["buffers"]}
    line |= {key: state[key] for key in ("avail", "evictable", "protected", "nodes", "evict_head")}
    line["kv_events"] = run.take_events() if scenario.config.kv_events else []
    return line
