"""Record scenarios with several KV cache groups and vLLM's native host offload."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_offload.base import get_offload_group_idx

from exact.groups import GroupEvents, held_by_group
from exact.offload import ALIGNMENT, TOKEN_BYTES, Host, sum_transfers
from exact.play import Play
from exact.steps import Line, StepLines, header_of, steps_of

if TYPE_CHECKING:
    from pathlib import Path

LEFT_OUT = ("blocks", "host_events")
"""Keys of a host's line that recordings with groups do not have, or have with their groups."""


def record_group_offload(scenario: Line, model: Path) -> Line:
    """Record a scenario; a job names the group of each chunk, and hashes are numbered in order of their naming."""
    play = Play(scenario, model, _transfer(scenario))
    scheduler = play.scheduler
    play.hash_with(get_request_block_hasher, scheduler.hash_block_size)
    host = GroupHost(play)
    groups = play.config["groups"]
    events = GroupEvents(play, groups, scheduler.hash_block_size)
    steps = StepLines(play)
    for number, batch, aborted, answers in steps_of(play, host):
        published = play.take_raw_events()
        below = [event for event in published if getattr(event, "medium", None) == "CPU"]
        taken = [event for event in published if event not in below]
        line = steps.add(number, batch, aborted, answers)
        del line["kv_events"]
        line["held"] = held_by_group(scheduler.kv_cache_manager, scheduler.running, len(groups))
        line["kv_events"] = events.named(taken)
        copies = batch.output.kv_cache_block_copies or ()
        if copies:
            line["copies"] = [[copy.src_block_id, copy.dst_block_id] for copy in copies]
        line["aborted"] = aborted
        line |= {key: value for key, value in host.line().items() if key not in LEFT_OUT}
        line["host_events"] = [
            {
                "type": "stored" if isinstance(event, BlockStored) else "removed",
                "g": event.group_idx,
                "h": list(event.block_hashes),
            }
            for event in below
        ]
    number_by_naming(steps.lines)
    end = {**steps.end(busy=host.busy), **events.counts, **sum_transfers(steps.lines)}
    end |= {"aborted": host.aborted, "aborted_loading": host.aborted_loading}
    header = {**header_of(play), "offload": scenario["offload"]}
    return {"recorded": [{"header": header}, *steps.lines, {"end": end}]}


def _transfer(scenario: Line) -> Any:
    offload = scenario["offload"]
    per_chunk = offload.get("blocks_per_chunk", 1)
    block_bytes = sum(group["block_size"] * TOKEN_BYTES for group in scenario["config"]["groups"])
    page = math.ceil(per_chunk * block_bytes / ALIGNMENT) * ALIGNMENT
    if page > ALIGNMENT:
        raise ValueError("chunks of several groups must fit into a page, whatever their kinds")
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "cpu_bytes_to_use": offload["host_chunks"] * page,
            "blocks_per_chunk": per_chunk,
            "eviction_policy": offload.get("eviction_policy", "lru"),
            "offload_prompt_only": offload.get("offload_prompt_only", True),
        },
    )


class GroupHost(Host):
    """Describe jobs by chunk and group."""

    def _table(self, name: str) -> list[int]:
        del name
        return []

    def _job(self, number: int, job: Any, keys: list[Any], *, load: bool) -> Line:
        sizes = {config.group_idx: config.tokens_per_chunk for config in self._side.config.kv_group_configs}
        context = self._side._req_status[job.req_id].req_context
        groups = [get_offload_group_idx(key) for key in keys]
        line = super()._describe(number, job, keys, load=load)
        line["groups"] = groups
        # A state may end inside a chunk.
        ends = [context.get_offload_key_position(key) for key in keys]
        line["chunks"] = [(end - 1) // sizes[group] for group, end in zip(groups, ends, strict=True)]
        return line


def number_by_naming(lines: list[Line]) -> None:
    """Replace hashes by numbers in the order in which transfers, evictions and the host's order name them."""
    numbers: dict[Any, int] = {}

    def number(hashes: list[Any]) -> list[int]:
        return [numbers.setdefault(value, len(numbers)) for value in hashes]

    for line in lines:
        for job in line["loads"] + line["stores"]:
            job["h"] = number(job["h"])
            job.pop("table", None)
        line["evicted"] = number(line["evicted"])
        for event in line["host_events"]:
            event["h"] = number(event["h"])
        if line["host_lru"] is not None:
            line["host_lru"] = number(line["host_lru"])
