"""Shrink a scenario that differs: fewer requests, steps and tokens, as long as it still differs."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from release.families import Scenario

CALLS = 1500
"""Default number of recordings that shrinking one scenario may take."""


class _Spent(Exception):
    """No recordings are left."""


def shrink(scenario: Scenario, differs: Callable[[Scenario], bool], calls: int = CALLS) -> Scenario:
    """Return a smaller scenario for which `differs` is still true, after at most `calls` calls of it."""
    search = _Search(scenario, differs, calls)
    try:
        while search.shrink_once():
            pass
    except _Spent:
        pass
    return search.best


class _Search:
    def __init__(self, scenario: Scenario, differs: Callable[[Scenario], bool], calls: int) -> None:
        self.best = scenario
        self._differs = differs
        self._left = calls

    def shrink_once(self) -> bool:
        """Try every reduction once; return whether one of them helped."""
        before = self.best
        self._reduce(("max_ticks" if "max_ticks" in self.best else "max_steps",))
        many = None
        while many != (many := len(self.best["requests"])):
            self._reduce_list("requests")
        if self.best.get("aborts"):
            self._reduce_list("aborts")
        for folder in _settings(self.best):
            for setting in sorted(set(_at(self.best, folder)) - {"block_size", "num_blocks"}):
                self._try_without((*folder, setting))
        for index in range(len(self.best["requests"])):
            for key in ("eos_at", "priority", "arrival_time", "lora", "local", "drop", "proxy"):
                self._try_without(("requests", index, key))
        for path in [*_numbers(self.best)]:
            self._reduce(path)
        return self.best is not before

    def _try(self, scenario: Scenario) -> bool:
        if self._left == 0:
            raise _Spent
        self._left -= 1
        if not self._differs(scenario):
            return False
        self.best = scenario
        return True

    def _reduce_list(self, key: str) -> None:
        """Remove items in chunks, halved until single items remain (delta debugging)."""
        chunk = max(1, len(self.best[key]) // 2)
        while True:
            start = 0
            while start < len(self.best[key]):
                kept = self.best[key][:start] + self.best[key][start + chunk :]
                if (key == "requests" and not kept) or not self._try(_with_list(self.best, key, kept)):
                    start += chunk
            if chunk == 1:
                return
            chunk //= 2

    def _try_without(self, path: Sequence[str | int]) -> None:
        *folder, key = path
        if key in _at(self.best, folder):
            changed = copy.deepcopy(self.best)
            del _at(changed, folder)[key]
            self._try(changed)

    def _reduce(self, path: Sequence[str | int]) -> None:
        """Search for the smallest value by halving its distance to a value that does not differ."""
        *folder, key = path
        if key not in _at(self.best, folder) and isinstance(key, str):
            return
        lowest = 0 if key in ("arrival_step", "arrival_tick", "tick", "t", "store_steps", "load_steps") else 1
        value = _at(self.best, folder)[key]
        if value <= lowest or self._try_value(path, lowest):
            return
        while value - lowest > 1:
            middle = (value + lowest) // 2
            if self._try_value(path, middle):
                value = middle
            else:
                lowest = middle

    def _try_value(self, path: Sequence[str | int], value: int) -> bool:
        *folder, key = path
        changed = copy.deepcopy(self.best)
        _at(changed, folder)[key] = value
        return self._try(changed)


def _with_list(scenario: Scenario, key: str, items: list[Any]) -> Scenario:
    """Return the scenario with another list; aborts and failures of requests that are gone are dropped."""
    changed = {**scenario, key: items}
    names = {request["id"] for request in changed["requests"]}
    if scenario.get("aborts") and key == "requests":
        changed["aborts"] = [abort for abort in scenario["aborts"] if abort["id"] in names]
    if scenario.get("fail"):
        changed["fail"] = {
            name: way for name, way in scenario["fail"].items() if name in {*names, "handshake"}
        }
    return changed


def _settings(scenario: Scenario) -> list[tuple[str, ...]]:
    """Return the paths of the settings that may be left out."""
    if "config" in scenario:
        return [("config",)]
    parts = [("p", "config"), ("p", "side"), ("d", "config"), ("d", "side"), ("wire",)]
    return [*parts, *([("fail",)] if "fail" in scenario else [])]


def _at(scenario: Scenario, path: Sequence[str | int]) -> Any:
    value: Any = scenario
    for key in path:
        value = value[key]
    return value


def _numbers(scenario: Scenario) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of the numbers to reduce."""
    pools = [path for path in _settings(scenario) if path[-1] == "config"]
    for path in pools:
        yield *path, "num_blocks"
    if "k" in scenario:
        yield ("k",)
    if "offload" in scenario:
        for key in ("host_chunks", "blocks_per_chunk", "store_steps", "load_steps"):
            yield "offload", key
    for index, request in enumerate(scenario["requests"]):
        for key in ("max_tokens", "arrival_step", "arrival_tick", "t"):
            if key in request:
                yield "requests", index, key
        for place, item in enumerate(request["prompt"]):
            if not isinstance(item, int):
                yield "requests", index, "prompt", place, 1
    if "config" in scenario:  # two instances have one block size
        yield "config", "block_size"
