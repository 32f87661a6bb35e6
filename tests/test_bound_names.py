"""Every name that the core binds is used in src/, examples/ or docs/, or is listed here with its reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[1]

ONLY_TESTS = {
    "EventTruth": "an index of events alone, which tests compare with an engine",
    "BurstSampler": "the random stream of the mocker's bursts, compared with Dynamo's",
    "TransferEstimate": "the estimate behind load or recompute, compared with links",
    "TransferEstimate.copy_ns": "one of its terms",
    "TransferEstimate.load_ns": "one of its terms",
    "TransferEstimate.lower_copy_ns": "one of its terms",
    "TransferEstimate.stage_ns": "one of its terms",
    "with_slow_loads": "the connector of docs/connectors.md, compiled for tests only",
    "GroupLayout.hit_unit": "where hits of KV cache groups end, compared with vLLM's plan",
    **dict.fromkeys(
        (
            *("TestBlockPool", "TestBlockPool.mark_phantoms", "TestBlockPool.num_free"),
            *("TestBlockPool.num_nodes", "TestBlockPool.num_runs", "TestBlockPool.withdraw"),
            *("TestBlockPool.cache_from", "TestBlockPool.hand_out_cached", "TestBlockPool.last_window"),
        ),
        "the engine's pool of blocks, compiled for tests only",
    ),
    **dict.fromkeys(
        (
            *("Links.add_duplex", "Links.add_link", "Links.deadline_ns", "Links.next_completion_ns"),
            *("Links.operations", "Links.pop_due", "Links.set_duplex_share"),
            *("Links.set_share", "Links.start_all"),
        ),
        "the model of shared bandwidth, compared with a reference; engines use it inside the core",
    ),
    **dict.fromkeys(
        (
            *("BlockManager.scan", "BlockStore.operations", "RegisteredBlocks.weak"),
            *("RegisteredBlocks.set_reset_on_release", "StepOutcome.blocks_registered"),
        ),
        "the block store, compared with a reference; engines use it inside the core",
    ),
    **dict.fromkeys(
        (
            *("VllmEngine.num_slots", "VllmEngine.operations", "VllmEngine.skip_to"),
            *("VllmEngine.resident_hashes", "VllmEngine.set_fast_forward", "VllmEngine.steps_kept"),
            *("VllmEngine.take_all_events", "VllmEngine.take_finished", "VllmEngine.take_kv_trace"),
            *("VllmEngine.tier_waits", "VllmEngine.in_step"),
            *("RequestRecord.below_total", "RequestRecord.cached_first", "RequestRecord.cached_total"),
            *("SglangIterations.cached_runs", "TrtEngineConfig.dies"),
            *("SglangTokens.part_total", "SglangTokens.part_evictable", "SglangTokens.part_available"),
        ),
        "an engine without a driver, compared with a reference",
    ),
    **dict.fromkeys(
        (
            *("KvRouter.lost_deliveries", "KvRouter.unknown_removals", "PrefixIndex.expire"),
            *("RawDistance.overflowed", "RawDistance.unknown_removals"),
        ),
        "counters and clocks of routing that no report shows",
    ),
    **dict.fromkeys(("StepLoad.rank_tokens", "StepLoad.rank_width"), "inputs of user-defined timing models"),
}
"""Names that only tests use, because nothing else shows what they show."""

NOT_BY_NAME = {
    "LastDecision",
    "TrafficWindow",
    "LengthSum",
    "OffloadSamples",
    "RequestRecord.below_first",
    "SglangTokens",
    "TrtIteration",
}
"""Classes whose objects are used without their names, and a field that completes a record."""


def bound_names() -> set[str]:
    """List the public names of the stub; those of a class are prefixed with the class."""
    names: set[str] = set()
    for node in ast.parse((ROOT / "src" / "understudy" / "_core.pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            names.add(node.name)
            members = (member for member in node.body if isinstance(member, ast.FunctionDef))
            names |= {f"{node.name}.{m.name}" for m in members if not m.name.startswith("__")}
    return names


def find_unused(names: Iterable[str], *folders: str) -> set[str]:
    """List the names that are no identifier of a Python file, and no word in a code span or code block of a page."""
    names = set(names)
    wanted = {name.rpartition(".")[2] for name in names}
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if wanted.isdisjoint(re.findall(r"\w+", text)):  # parsing takes ten times as long
                continue
            for node in ast.walk(ast.parse(text)):
                match node:
                    case ast.Attribute(attr=word) | ast.Name(id=word) | ast.alias(name=word):
                        wanted.discard(word)
                    case ast.Constant(value=str(word)):
                        wanted.discard(word)
        for path in (ROOT / folder).rglob("*.md"):
            if path.name == "reference.md":  # has every name, from the stub
                continue
            code = re.findall(r"```.*?```|`[^`]*`", path.read_text(encoding="utf-8"), re.DOTALL)
            wanted -= set(re.findall(r"\w+", " ".join(code)))
    return {name for name in names if name.rpartition(".")[2] in wanted}


def test_every_bound_name_is_used_or_listed_with_its_reason() -> None:
    unused = find_unused(bound_names(), "src", "examples", "docs")
    assert unused - NOT_BY_NAME == set(ONLY_TESTS)


def test_names_listed_for_tests_are_used_by_tests() -> None:
    assert find_unused(ONLY_TESTS, "tests") == set()
