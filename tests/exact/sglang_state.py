"""Describe a batch and the state after an iteration, as the lines of a recording do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

if TYPE_CHECKING:
    from exact.sglang_play import Play

Line = dict[str, Any]


def batch_rows(batch: Any) -> list[tuple[Any, int, bool]]:
    """Return the rows of a batch: request, tokens, and whether it decodes."""
    if batch is None:
        return []
    if batch.forward_mode.is_decode():
        return [(req, 1, True) for req in batch.reqs]
    decoding = set(batch.decoding_reqs or ())
    return [(req, tokens, req in decoding) for req, tokens in zip(batch.reqs, batch.extend_lens, strict=True)]


def batch_line(play: Play, batch: Any) -> Line:
    """Describe a schedule."""
    mode = None
    if batch is not None:
        forward = batch.forward_mode
        mode = "decode" if forward.is_decode() else "mixed" if forward.is_mixed() else "extend"
    chunked = play.real.chunked_req if mode in ("extend", "mixed") else None
    line: Line = {
        "mode": mode,
        "scheduled": {req.rid: tokens for req, tokens, _ in batch_rows(batch)},
        "new": [req.rid for req, resumed in play.admitted if not resumed],
        "resumed": [req.rid for req, resumed in play.admitted if resumed],
        "cached": {req.rid: req.prefix_len for req, _ in play.admitted},
        "chunked": None if chunked is None else chunked.rid,
        "avail_after_schedule": play.real.token_to_kv_pool_allocator.available_size(),
    }
    if play.transfers is not None:
        line["loaded"] = {req.rid: play.loaded[req.rid] for req, _ in play.admitted if play.loaded[req.rid]}
    return line


def state_line(play: Play) -> Line:
    """Describe the ends of an iteration and the state after it."""
    real, tree = play.real, play.tree
    return {
        "retracted": list(play.retracted),
        "finished": list(play.finished),
        "aborted": list(play.aborted),
        "running": [req.rid for req in real.running_batch.reqs],
        "batch_is_full": real.running_batch.batch_is_full,
        "waiting": len(real.waiting_queue),
        "waiting_head": [req.rid for req in real.waiting_queue[:4]],
        "new_token_ratio": real.new_token_ratio_tracker.current,
        "avail": real.token_to_kv_pool_allocator.available_size(),
        "evictable": tree.evictable_size(),
        "protected": tree.protected_size(),
        "nodes": len(_nodes(tree)),
        "evict_head": _head(tree, _core(tree, "evictable_device_leaves", "evictable_leaves")),
    }


def host_line(play: Play) -> Line:
    """Describe the host tier; empty without one."""
    if play.transfers is None:
        return {}
    tree = play.tree
    controller = tree.cache_controller
    on_both = host_only = 0
    for node in _nodes(tree):
        data = node.component_data[ComponentType.FULL]
        if data.host_value is not None and data.value is not None:
            on_both += len(node.key)
        elif data.host_value is not None:
            host_only += len(node.key)
    return {
        "writes": list(play.transfers.writes),
        "loads": list(play.transfers.loads),
        "host_avail": controller.mem_pool_host.available_size(),
        "writing": len(tree.ongoing_write_through),
        "loading": len(tree.ongoing_load_back),
        "on_both": on_both,
        "host_only": host_only,
        "host_evict_head": _head(tree, tree.tree_core.evictable_host_leaves),
    }


def _core(tree: Any, unified: str, radix: str) -> Any:
    core = getattr(tree, "tree_core", None)
    return getattr(tree, radix) if core is None else getattr(core, unified)


def _nodes(tree: Any) -> list[Any]:
    if tree.disable:
        return []
    found, left = [], list(_core(tree, "root_node", "root_node").children.values())
    while left:
        node = left.pop()
        found.append(node)
        left.extend(node.children.values())
    return found


def _head(tree: Any, leaves: Any) -> list[list[int]]:
    """Return the first four leaves in eviction order: position, length, and last token."""
    strategy = _core(tree, "eviction_strategy", "eviction_strategy")
    head = sorted(leaves, key=lambda node: (strategy.get_priority(node), node))[:4]
    return [[_depth(node.parent), len(node.key), list(node.key)[-1]] for node in head]


def _depth(node: Any) -> int:
    depth = 0
    while node is not None:
        depth += len(node.key or ())
        node = node.parent
    return depth
