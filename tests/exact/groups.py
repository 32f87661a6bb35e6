"""Record scenarios with several KV cache groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    maybe_convert_block_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from exact.play import Play
from exact.steps import StepLines, header_of, steps_of

if TYPE_CHECKING:
    from pathlib import Path

Line = dict[str, Any]
SIZES = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
EVENT_WINDOWS = ("sliding_window", "sliding_window_mla")


def spec_of(group: Line) -> Any:
    """Build vLLM's spec of a group."""
    size = {"block_size": group["block_size"]}
    window = {"sliding_window": group.get("window")}
    match group["kind"]:
        case "full":
            return FullAttentionSpec(**size, **SIZES)
        case "mla":
            return MLAAttentionSpec(**size, **SIZES)
        case "sliding_window":
            return SlidingWindowSpec(**size, **SIZES, **window)
        case "sliding_window_mla":
            return SlidingWindowMLASpec(
                **size, **SIZES, **window, bounded_replay=group.get("bounded_replay", False)
            )
        case "chunked_local":
            return ChunkedLocalAttentionSpec(**size, **SIZES, attention_chunk_size=group["chunk"])
        case "rswa":
            return RSWASpec(**size, **SIZES, rswa_window=group["window"])
        case "circular":
            return CircularBufferSpec(**size, **SIZES)
    return MambaSpec(
        **size,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode=group["mode"],
        num_prefill_checkpoint_blocks=group.get("checkpoint_blocks", 0),
        prefill_checkpoint_alignment=group.get("checkpoint_alignment"),
    )


def build_groups(config: Line, settings: Any) -> tuple[KVCacheConfig, int, int]:
    """Return the KV cache of a scenario's groups, the scheduler's block size, and the unit of hashing.

    `settings` is vLLM's config, which gets what its start-up would derive.
    """
    blocks = KVCacheConfig(
        num_blocks=config["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer.{i}"], spec_of(group)) for i, group in enumerate(config["groups"])
        ],
        prefix_cache_retention_interval=config.get("prefix_cache_retention_interval", 0),
    )
    cached = [g.kv_cache_spec.block_size for g in blocks.kv_cache_groups if g.kv_cache_spec.prefix_cacheable]
    cache = settings.cache_config
    cache.block_size = min(cached)
    cache.prefix_match_unit = config.get("prefix_match_unit")
    cache.prefix_cache_retention_interval = config.get("prefix_cache_retention_interval", 0)
    modes = {group.get("mode") for group in config["groups"] if group["kind"] == "mamba"}
    cache.mamba_cache_mode = "align" if "align" in modes else "none"
    scheduler_block, hash_block = resolve_kv_cache_block_sizes(blocks, settings)
    blocks.hash_block_size = hash_block
    blocks.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
        blocks, settings, scheduler_block, hash_block
    )
    return blocks, scheduler_block, hash_block


class GroupEvents:
    """Formats KV events with groups; the position of a hash is that in the requests that have it."""

    def __init__(self, play: Play, groups: list[Line], hash_block: int) -> None:
        self._play = play
        self._groups = groups
        self._unit = hash_block
        self._numbers: dict[Any, int] = {}
        self._ends: dict[Any, tuple[int, Any]] = {}
        self.counts = {"stored_blocks": 0, "removed_blocks": 0}

    def learn(self) -> None:
        """Note where the hashes of all requests end."""
        for request in self._play.requests.values():
            for place, content in enumerate(request.block_hashes):
                key = maybe_convert_block_hash(content)
                self._ends.setdefault(key, ((place + 1) * self._unit, request))

    def named(self, events: list[Any]) -> list[Line]:
        """Format the events of a step; consecutive removals of a group are merged."""
        self.learn()
        out: list[Line] = []
        for event in events:
            group = event.group_idx
            if isinstance(event, BlockRemoved):
                gone = [self._number(content) for content in event.block_hashes]
                self.counts["removed_blocks"] += len(gone)
                if not out or out[-1]["type"] != "removed" or out[-1]["g"] != group:
                    out.append({"type": "removed", "n": 0, "g": group, "h": []})
                out[-1]["n"] += len(gone)
                out[-1]["h"] += gone
            elif isinstance(event, BlockStored):
                out.append(self._stored(event, group))
        return out

    def _number(self, content: Any) -> int:
        return self._numbers.setdefault(content, len(self._numbers))

    def _stored(self, event: Any, group: int) -> Line:
        parent = event.parent_block_hash
        before = None if parent is None else self._number(parent)
        self.counts["stored_blocks"] += len(event.block_hashes)
        ends = [self._ends[content][0] for content in event.block_hashes]
        kind = event.kv_cache_spec_kind
        return {
            "type": "stored",
            "n": len(event.block_hashes),
            "g": group,
            "kind": getattr(kind, "value", kind),
            "window": self._groups[group].get("window")
            if self._groups[group]["kind"] in EVENT_WINDOWS
            else None,
            "bs": event.block_size,
            "h": [self._number(content) for content in event.block_hashes],
            "parent": before,
            "pos": 0 if parent is None else self._ends[parent][0],
            "len": len(event.token_ids),
            "ends": ends,
            "first_tokens": [
                self._ends[content][1].all_token_ids[end - event.block_size]
                for content, end in zip(event.block_hashes, ends, strict=True)
            ],
        }


def record_groups(scenario: Line, model: Path) -> Line:
    """Record a scenario; `recorded` has the header, a line per step, and the totals."""
    play = Play(scenario, model)
    scheduler = play.scheduler
    play.hash_with(get_request_block_hasher, scheduler.hash_block_size)
    manager = scheduler.kv_cache_manager
    events = GroupEvents(play, play.config["groups"], scheduler.hash_block_size)
    steps = StepLines(play)
    copies = 0
    for number, batch, aborted, answers in steps_of(play):
        taken = play.take_raw_events()
        line = steps.add(number, batch, aborted, answers)
        del line["kv_events"]
        line["held"] = held_by_group(manager, scheduler.running, len(play.config["groups"]))
        line["kv_events"] = events.named(taken)
        moved = [[copy.src_block_id, copy.dst_block_id] for copy in batch.output.kv_cache_block_copies or ()]
        copies += len(moved)
        if moved:
            line["copies"] = moved
    end = {**steps.end(), **events.counts, "copies": copies}
    header = {**header_of(play), "derived": None}
    return {"recorded": [{"header": header}, *steps.lines, {"end": end}]}


def held_by_group(manager: Any, running: list[Any], groups: int) -> list[int]:
    """Return how many blocks the running requests hold, by group."""
    tables = [manager.get_blocks(request.request_id).blocks for request in running]
    return [sum(not block.is_null for table in tables for block in table[g]) for g in range(groups)]
