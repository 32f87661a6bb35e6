"""Every name that the core binds is used in src/, examples/ or docs/, or is listed here with its reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

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
            *(
                "BlockManager.scan",
                "BlockStore.operations",
                "RegisteredBlocks.clone",
                "RegisteredBlocks.weak",
            ),
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
            "SglangIterations.cached_runs",
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
    "TrtEngine",
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


def used_words(*folders: str) -> set[str]:
    """List the identifiers in Python files, and the words in code spans and code blocks of pages."""
    words: set[str] = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                match node:
                    case ast.Attribute(attr=word) | ast.Name(id=word) | ast.alias(name=word):
                        words.add(word)
                    case ast.Constant(value=str(word)):
                        words.add(word)
        for path in (ROOT / folder).rglob("*.md"):
            code = re.findall(r"```.*?```|`[^`]*`", path.read_text(encoding="utf-8"), re.DOTALL)
            words |= set(re.findall(r"\w+", " ".join(code)))
    return words


def test_every_bound_name_is_used_or_listed_with_its_reason() -> None:
    used = used_words("src", "examples", "docs")
    unused = {name for name in bound_names() if name.rpartition(".")[2] not in used}
    assert unused - NOT_BY_NAME == set(ONLY_TESTS)


def test_names_listed_for_tests_are_used_by_tests() -> None:
    used = used_words("tests")
    assert [name for name in ONLY_TESTS if name.rpartition(".")[2] not in used] == []
