"""Compare the lines of an engine with the model of its grouped host offload (group_offload.py)."""

from __future__ import annotations

import math
from typing import Any

from .group_offload import GroupOffloadModel, Key, Line, Request
from .vllm_format import expand_prompt


class ModelRun:
    """Compare the host's part of an engine's lines with the model, step by step."""

    def __init__(self, scenario: Line, requests: dict[str, Request]) -> None:
        self.model = GroupOffloadModel(scenario["config"], scenario["offload"])
        self.requests = requests
        self._numbers: dict[tuple[int, ...], int] = {}

    def compare(self, line: Line) -> bool:
        """Assert that a step's line is the model's; False: a store found no room, after which blocks may be lost."""
        expected: dict[str, list[Any]] = {"lookups": [], "loads": []}
        loads = {job["req"]: job for job in line["loads"]}
        for name, local, _ in line["lookups"]:
            request = self.requests[name]
            hit = self.model.look_up(request, local)
            expected["lookups"].append([name, local, hit])
            if name in loads:
                assert hit is not None
                expected["loads"].append(self.model.load(request, local, local + hit))
        self._schedule(line)
        stores = self._store(line)
        expected["stores"] = [job for job in stores if isinstance(job, dict)]
        expected["store_failed"] = [name for name in stores if isinstance(name, str)]
        assert {key: _without_device(line[key]) for key in expected} == expected
        self.model.finish_jobs(line["jobs_done"])
        self._finish(line)
        self._compare_host(line)
        return not expected["store_failed"]

    def _schedule(self, line: Line) -> None:
        for name in line["preempted"]:
            self.requests[name].computed = 0
        for name, cached in line["cached"].items():
            request = self.requests[name]
            request.computed = cached
            request.nulls = [group.skipped(cached) // group.block for group in self.model.groups]
        for name, tokens in line["scheduled"].items():
            self.requests[name].computed += tokens

    def _store(self, line: Line) -> list[Line | str]:
        model = self.model
        stores = [
            model.store(self.requests[name], self.requests[name].computed, finished=False)
            for name in line["scheduled"]
        ]
        ended = sorted(model.ended, key=lambda request: request.order)
        stores += [
            model.store(request, max(request.prompt, request.known - 1), finished=True) for request in ended
        ]
        for request in ended:
            model.host.policy.ended(request.access)
        model.ended = []
        return [one for one in stores if one is not None]

    def _finish(self, line: Line) -> None:
        for name in line["scheduled"]:
            request = self.requests[name]
            request.known += request.computed == request.known
        self.model.ended = [self.requests[name] for name in line["finished"]]

    def _compare_host(self, line: Line) -> None:
        host = self.model.host
        chunks = host.policy.chunks
        for job in line["loads"] + line["stores"]:
            assert job["h"] == self._number(self._keys(job))
        assert line["evicted"] == self._number(host.evicted)
        host.evicted = []
        assert (line["host_chunks"], line["host_ready"]) == (
            len(chunks),
            sum(chunk.ready for chunk in chunks.values()),
        )
        oldest = host.policy.oldest()
        assert line["host_lru"] == (None if oldest is None else self._number(oldest[:8]))
        slots = [chunk.slot for chunk in chunks.values()]
        assert len({*slots, *host.free}) == len(slots) + len(host.free) == host.used

    def _keys(self, job: Line) -> list[Key]:
        request = self.requests[job["req"]]
        return [
            self.model.key(request, g, index) for g, index in zip(job["groups"], job["chunks"], strict=True)
        ]

    def _number(self, keys: list[Any]) -> list[int]:
        return [self._numbers.setdefault(tokens, len(self._numbers)) for tokens, _ in keys]


def _without_device(rows: list[Any]) -> list[Any]:
    left_out = ("gpu", "h", "table")
    return [
        {key: value for key, value in row.items() if key not in left_out} if isinstance(row, dict) else row
        for row in rows
    ]


def model_scenario(drawn: Line, room: float) -> Line:
    """Return a drawn scenario within the model's limits, with a device for `room` of the longest requests.

    Every second request has the prompt of an earlier one.
    """
    requests = [
        {**spec, "prompt": drawn["requests"][i // 2 if i % 2 else i]["prompt"]}
        for i, spec in enumerate(drawn["requests"])
    ]
    per_chunk = drawn["offload"]["blocks_per_chunk"]
    groups = [dict(group) for group in drawn["config"]["groups"]]
    for group in groups:
        chunk = group["block_size"] * per_chunk
        if group["kind"].startswith("sliding"):
            group["window"] = max(group["window"], chunk + 1)
        elif group["kind"] == "chunked_local":
            group["chunk"] = math.ceil(group["chunk"] / chunk) * chunk
    longest = max(len(expand_prompt(spec["prompt"])) + spec["max_tokens"] for spec in requests)
    needs = sum(math.ceil(longest / group["block_size"]) for group in groups) + len(groups)
    config = {
        **drawn["config"],
        "groups": groups,
        "num_blocks": 2 + int(needs * room),
        "max_num_seqs": 1,
        "async_scheduling": False,
        "prefix_cache_retention_interval": None,
    }
    return {
        **drawn,
        "requests": requests,
        "config": config,
        "offload": {**drawn["offload"], "offload_prompt_only": True},
    }
