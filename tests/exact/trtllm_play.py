"""Play a scenario on TensorRT-LLM's executor and describe each pass, in the lines of the recordings.

The clock counts passes. A request is received in the first pass whose clock has reached its arrival; when the loop
would block because nothing is left to do, the clock jumps to the next arrival.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from exact import trtllm_bindings as bindings
from exact.trtllm_cuda import COPIES
from exact.trtllm_real import (
    RELEASE,
    Request,
    build_executor,
    build_manager,
    build_scheduler,
    chunk_unit,
    storage_statistics,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Line = dict[str, Any]
DEFAULTS: dict[str, Any] = {
    "max_batch_size": 8,
    "max_num_tokens": 512,
    "max_seq_len": 2048,
    "tokens_per_block": 32,
    "chunked": True,
    "chunk_unit": None,
    "overlap": True,
    "policy": "MAX_UTILIZATION",
    "prefix_aware": True,
    "enable_block_reuse": True,
    "enable_partial_reuse": True,
    "max_tokens": 4096,
    "max_gpu_bytes": 0,
    "max_util_for_resume": 0.95,
    "host_cache_size": 0,
    "disk_cache_size": 0,
    "layers": 2,
    "kv_heads": 8,
    "head_dim": 128,
    "windows": None,
    "reuse_policy": "all_reusable",
    "avg_seq_len": None,
    "pool_ratio": None,
    "swa_scratch": False,
    "batch_wait_timeout_iters": 0,
    "batch_wait_max_tokens_ratio": 0.0,
    "waiting_policy": "fcfs",
    "events": True,
    "recompute_pause": True,
}
OUTPUT_BASE = 1_000_000
OUTPUT_STRIDE = 100_000
MOST_ERROR_CHARS = 60
_KEPT: list[Play] = []
"""Executors are never torn down: their destructors expect an orderly end."""


def expand(prompt: list[Any]) -> list[int]:
    """Return the tokens of a prompt: an item is a token, or the run [start, length]."""
    return [
        token
        for item in prompt
        for token in ((item,) if isinstance(item, int) else range(item[0], item[0] + item[1]))
    ]


class Sampler:
    """Gives each request its next output, and ends it by EOS or length."""

    def __init__(self, play: Play) -> None:
        self._play = play

    def beam_width(self, _: object) -> int:
        """Return 1."""
        return 1

    def is_generation_model(self) -> bool:
        """Return True."""
        return True

    def get_cache_indirection(self, *_: object) -> None:
        """Return nothing: there are no beams."""

    def validate_request(self, _: object) -> None:
        """Accept every request."""

    def sample_async(self, batch: Any, *_: object) -> Any:
        """Return the requests that get a token."""
        requests = batch.context_requests_last_chunk + batch.generation_requests
        return SimpleNamespace(requests=requests, device=None)

    def update_requests(self, state: Any, *_: object) -> None:
        """Append a token to each request that has not ended meanwhile."""
        for request in state.requests:
            if request.state != bindings.State.GENERATION_COMPLETE:
                self._play.sample(request)


class Play:
    """One scenario on a new executor."""

    def __init__(self, scenario: Line) -> None:
        self.config = {**DEFAULTS, **scenario["config"]}
        self._requests: list[Line] = scenario["requests"]
        self._most_passes = scenario.get("max_steps", 5000)
        order = sorted(range(len(self._requests)), key=lambda i: (self._requests[i]["arrival"], i))
        self._to_come = order
        self._cancels = sorted(
            (one["cancel"], i) for i, one in enumerate(self._requests) if one.get("cancel") is not None
        )
        self._live: dict[int, Any] = {}
        self._ended: set[int] = set()
        self.outputs = [0] * len(self._requests)
        self.lines: list[Line] = []
        self._line: Line | None = None
        self._clock = self._pass = -1
        COPIES.clear()
        self._manager = build_manager(self.config)
        self._scheduler = build_scheduler(self.config, self._manager)
        self._note_calls("_suspend_request", "suspended")
        self._note_calls("_recompute_pause_request", "recompute")
        self._executor = build_executor(
            self.config,
            self._manager,
            self._scheduler,
            sampler=Sampler(self),
            fetch=self._fetch,
            forward=self._forward,
            begin_pass=self._begin_pass,
            on_answers=self._note_answers,
        )
        _KEPT.append(self)

    def header(self) -> Line:
        """Return the header: settings, and sizes of pools."""
        return {
            "format": 1,
            "trtllm": RELEASE,
            "config": self.config,
            "chunk_unit": chunk_unit(self.config),
            "pools": [
                [[one.total, getattr(one, "slot_size", None)] for one in self._statistics(level)]
                for level in range(self._num_levels())
            ],
            "max_seq_len": self._manager.max_seq_len,
        }

    def run(self) -> str:
        """Run the loop to its end; return how it ended."""
        loop = "_executor_loop_overlap" if self.config["overlap"] else "_executor_loop"
        try:
            getattr(self._executor, loop)()
            end = "done"
        except RuntimeError as error:
            end = f"error: {str(error)[:MOST_ERROR_CHARS]}"
        except SystemExit as error:
            end = str(error)
        line = self._line
        if line is not None and (
            end != "done" or any(line[key] for key in ("fetched", "ctx", "gen", "sampled"))
        ):
            self._end_pass(line)
        return end

    # -- what the loop calls

    def sample(self, request: Any) -> None:
        """Append the next output of a request."""
        assert self._line is not None
        index = request.index
        place = self.outputs[index]
        self.outputs[index] += 1
        request.add_new_token(OUTPUT_BASE + index * OUTPUT_STRIDE + place, 0)
        last = self._requests[index].get("eos_at")
        length = request.max_beam_num_tokens
        if last is not None and place + 1 >= last:
            request.finish_by(bindings.Finish.END_ID, 0)
        elif (
            length - request.py_orig_prompt_len >= request.py_max_new_tokens
            or length >= self._manager.max_seq_len
        ):
            request.finish_by(bindings.Finish.LENGTH, 0)
        request.py_num_accepted_draft_tokens = request.py_rewind_len = 0
        request.py_decoding_iter += 1
        self._line["sampled"].append([index, place])

    def _note_calls(self, name: str, key: str) -> None:
        function: Callable[[Any], Any] = getattr(self._scheduler, name)

        def noted(request: Any) -> Any:
            assert self._line is not None
            self._line[key].append(request.index)
            return function(request)

        setattr(self._scheduler, name, noted)

    def _note_answers(self, answers: list[Any]) -> None:
        if self._line is not None:
            self._line["answered"] += [self._live[answer[0]].index for answer in answers]

    def _fetch(self, timeout: Any) -> list[Any]:
        """Return what has arrived. Without a timeout the loop would block until something does."""
        assert self._line is not None
        if timeout is None and (self._to_come or self._cancels):
            due = [self._requests[i]["arrival"] for i in self._to_come[:1]]
            due += [time for time, _ in self._cancels[:1]]
            self._clock = self._line["clock"] = max(self._clock, min(due))
        items = []
        while self._to_come and self._requests[self._to_come[0]]["arrival"] <= self._clock:
            items.append(self._receive(self._to_come.pop(0)))
        self._line["fetched"] = [item.request.index for item in items]
        while self._cancels and self._cancels[0][0] <= self._clock:
            items.append(_item(self._cancels.pop(0)[1] + 1, is_canceled_request=True))
        executor = self._executor
        waits = self._to_come or self._cancels or executor.active_requests or executor.waiting_queue
        return items if items or waits else [_item(0, is_shutdown_request=True)]

    def _receive(self, index: int) -> Any:
        spec = self._requests[index]
        request = _Request(
            request_id=index + 1,
            max_new_tokens=spec["max_new"],
            input_tokens=expand(spec["prompt"]),
            cache_salt=spec.get("salt"),
            lora_task_id=spec.get("lora"),
        )
        request.index, request.priority = index, spec.get("priority", 0.5)
        self._live[index + 1] = request
        return _item(index + 1, request=request, priority=request.priority)

    def _forward(self, batch: Any, *_: object, **__: object) -> Line:
        assert self._line is not None
        self._line["ctx"] = [
            [one.index, one.context_current_position, one.context_chunk_size]
            for one in batch.context_requests
        ]
        self._line["gen"] = [one.index for one in batch.generation_requests]
        self._line["pages"] = {str(one.index): self._pages(one.py_request_id) for one in batch.all_requests()}
        return {"logits": None}

    def _pages(self, request: int) -> list[list[int]] | None:
        cache = self._manager.kv_cache_map.get(request)
        if cache is None:
            return None
        groups = range(self._manager.num_pools)
        return [
            [int(page) for page in cache.get_base_page_indices(group)][: cache.num_blocks] for group in groups
        ]

    # -- lines

    def _begin_pass(self) -> None:
        if self._line is not None:
            self._end_pass(self._line)
        self._pass += 1
        self._clock += 1
        if self._pass >= self._most_passes:
            raise SystemExit("max_steps")
        lists = ("fetched", "ctx", "gen", "suspended", "recompute", "sampled", "answered", "copies")
        self._line = {"step": self._pass, "clock": self._clock, **{key: [] for key in lists}, "pages": {}}

    def _end_pass(self, line: Line) -> None:
        executor = self._executor
        line["active"] = [
            [one.index, int(one.state), one.context_current_position, one.prompt_len]
            for one in executor.active_requests
        ]
        line["waiting"] = len(executor.waiting_queue)
        line["caches"] = [
            [key - 1, one.status.name, one.capacity, one.history_length, one.num_committed_tokens]
            for key, one in self._manager.kv_cache_map.items()
        ]
        line["pool"] = [
            [[one.total, one.available, one.evictable] for one in self._statistics(level)]
            for level in range(self._num_levels())
        ]
        line["copies"] = [list(copy) for copy in COPIES]
        COPIES.clear()
        if self.config["events"]:
            line["events"] = [describe_event(event) for event in self._manager.get_latest_events(0)]
        active = {one.py_request_id for one in executor.active_requests}
        ended = [
            key
            for key, one in self._live.items()
            if one.is_finished and key not in self._ended and key not in active
        ]
        self._ended |= set(ended)
        line["finished"] = [key - 1 for key in ended]
        self.lines.append(line)
        self._line = None

    def _num_levels(self) -> int:
        below: list[int] = [self.config[name] for name in ("host_cache_size", "disk_cache_size")]
        return 1 + sum(size > 0 for size in below)

    def _statistics(self, level: int) -> Any:
        return storage_statistics(self._manager, level)


class _Request(Request):  # type: ignore[misc]
    """A request whose answer is a plain object; the C++ half would serialise one."""

    def create_response(self, *_: object) -> Any:
        """Return an answer without content."""
        return SimpleNamespace(result=SimpleNamespace())


def _item(identifier: int, **given: Any) -> Any:
    flags = dict.fromkeys(("is_shutdown_request", "is_canceled_request", "is_control_request"), False)
    fields: Line = {"id": identifier, "request": None, "child_req_ids": None, "priority": 0.5, **flags}
    return SimpleNamespace(**fields | given)


def describe_event(event: Any) -> Line:
    """Describe a KV cache event."""
    data, kind = event.data, type(event.data).__name__
    line = {"id": event.event_id, "group": event.layer_group_id, "window": event.window_size}
    if kind == "KVCacheStoredData":
        blocks = [
            [one.block_hash, _runs(one.tokens), one.cache_level, one.priority, one.cache_salt]
            for one in data.blocks
        ]
        return line | {"kind": "stored", "parent": data.parent_hash, "blocks": blocks}
    if kind == "KVCacheRemovedData":
        return line | {"kind": "removed", "blocks": list(data.block_hashes)}
    if kind == "KVCacheCreatedData":
        return line | {"kind": "created", "blocks": list(data.num_blocks_per_cache_level)}
    if kind != "KVCacheUpdatedData":
        raise TypeError(kind)
    level, priority = (
        None if one is None else [one.old_value, one.new_value] for one in (data.cache_level, data.priority)
    )
    return line | {"kind": "updated", "block": data.block_hash, "level": level, "priority": priority}


def _runs(tokens: Any) -> list[list[int]]:
    runs: list[list[int]] = []
    for token in tokens:
        if runs and token.token_id == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([token.token_id, 1])
    return runs


def record_passes(scenario: Line) -> list[Line]:
    """Return the header, a line for each pass, and how the run ended."""
    play = Play(scenario)
    header = play.header()
    end = play.run()
    return [header, *play.lines, {"end": end, "outputs": play.outputs}]
