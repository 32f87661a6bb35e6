"""Engines that are compared by step times which were measured on only one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

_OF_VLLM = ("preset", "data sheet", "op tables", "aiconfigurator")
"""Sources that were measured with vLLM, or with kernels that vLLM calls."""
_OF_ONE_ENGINE = ("calibrated", "recorded steps", "a planner's profile")
"""Sources that were measured with one engine: two engines cannot share one."""
REMEDY = (
    "calibrate each engine with benchmarks of its own (understudy calibrate), or accept it with --accept-unmeasured "
    "(in Python accept_unmeasured=True)"
)


def find_unmeasured(runs: Iterable[Iterable[tuple[bool, str]]]) -> str | None:
    """Return the problem of comparing the engines of these runs; None if there is none.

    Each engine of a run is whether it is SGLang, and the source of its times. Runs of the same engines are comparable.
    """
    fleets = [list(run) for run in runs]
    if len({frozenset(is_sglang for is_sglang, _ in fleet) for fleet in fleets}) < 2:
        return None
    sources: dict[bool, set[str]] = {True: set(), False: set()}
    for is_sglang, source in (engine for fleet in fleets for engine in fleet):
        sources[is_sglang].add(source)
    borrowed = [one for one in sorted(sources[True]) if one.startswith(_OF_VLLM)]
    if borrowed:
        return f"the times of SGLang were measured with vLLM ({borrowed[0]})"
    shared = [one for one in sorted(sources[True] & sources[False]) if one.startswith(_OF_ONE_ENGINE)]
    return f"vLLM and SGLang run on times that were measured on one of them ({shared[0]})" if shared else None


def list_engines(report: dict[str, Any]) -> list[tuple[bool, str]]:
    """List the engines of a saved report, each with the source of its times."""
    run = report["run"]
    source = str((run.get("times") or {}).get("from", ""))
    pools = run.get("pools") or [run]
    return [("sglang_version" in (pool.get("engine") or {}), source) for pool in pools]
