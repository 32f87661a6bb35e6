"""Recordings of TensorRT-LLM's executor: scenarios by pass, and the lines that a run gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from understudy._core import TrtPasses, TrtSettings
from understudy.engines.trtllm_salt import derive_salt

if TYPE_CHECKING:
    from collections.abc import Iterator

OUTPUT_BASE = 1_000_000
OUTPUT_STRIDE = 100_000

KEYS = (
    *(
        "step",
        "clock",
        "fetched",
        "ctx",
        "gen",
        "suspended",
        "recompute",
        "sampled",
        "answered",
        "copies",
        "pages",
    ),
    *("active", "waiting", "caches", "pool", "events", "finished"),
)
"""Keys of a pass, in the order of recordings."""

MAX_ERROR_CHARS = 60
"""Length at which recordings cut the message of an executor that died."""


class TrtScenarioConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the executor and its KV cache, with the recordings' names and defaults."""

    max_batch_size: int = 8
    max_num_tokens: int = 512
    max_seq_len: int = 2048
    tokens_per_block: int = 32
    chunked: bool = True
    chunk_unit: int | None = None
    overlap: bool = True
    policy: Literal["MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"] = "MAX_UTILIZATION"
    """The scheduler follows MAX_UTILIZATION whatever it says."""
    prefix_aware: bool = True
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    max_tokens: int | None = 4096
    max_gpu_bytes: int = 0
    max_util_for_resume: float = 0.95
    host_cache_size: int = 0
    disk_cache_size: int = 0
    layers: int = 2
    kv_heads: int = 8
    head_dim: int = 128
    windows: list[int] | None = None
    reuse_policy: str = "all_reusable"
    avg_seq_len: int | None = None
    pool_ratio: list[float] | None = None
    swa_scratch: bool = False
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0.0
    waiting_policy: str = "fcfs"
    events: bool = True
    recompute_pause: bool = True

    def settings(self) -> TrtSettings:
        """Build the core's form of the settings; keys and values have two bytes each."""
        out = TrtSettings()
        out.max_batch_size = self.max_batch_size
        out.max_num_tokens = self.max_num_tokens
        out.max_seq_len = self.max_seq_len
        out.tokens_per_block = self.tokens_per_block
        out.enable_chunked_prefill = self.chunked
        out.overlap = self.overlap
        out.enable_prefix_aware_scheduling = self.prefix_aware
        out.enable_recompute_pause = self.recompute_pause
        out.enable_block_reuse = self.enable_block_reuse
        out.enable_partial_reuse = self.enable_partial_reuse
        out.max_util_for_resume = self.max_util_for_resume
        out.enable_swa_scratch_reuse = self.swa_scratch
        out.batch_wait_timeout_iters = self.batch_wait_timeout_iters
        out.batch_wait_max_tokens_ratio = self.batch_wait_max_tokens_ratio
        out.num_layers = self.layers
        out.layer_bytes_per_token = 2 * 2 * self.kv_heads * self.head_dim
        out.max_attention_window = self.windows or []
        out.max_tokens = self.max_tokens
        out.max_gpu_total_bytes = self.max_gpu_bytes or None
        out.host_cache_size = self.host_cache_size
        out.disk_cache_size = self.disk_cache_size
        out.avg_seq_len = self.avg_seq_len
        out.pool_ratio = self.pool_ratio or []
        out.set_names(reuse_policy=self.reuse_policy, waiting_queue_policy=self.waiting_policy)
        return out


class TrtRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request. A prompt item `[start, len]` is the run start, start + 1, …; an int is one token."""

    arrival: int
    prompt: list[int | tuple[int, int]]
    max_new: int
    eos_at: int | None = None
    cancel: int | None = None
    """Pass in which it is cancelled."""
    salt: str | None = None
    lora: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Number of its adapter."""
    priority: float = 0.5

    def runs(self) -> list[tuple[int, int]]:
        """Return the prompt as runs (first token, count)."""
        return [(item, 1) if isinstance(item, int) else item for item in self.prompt]


class TrtScenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests by the pass in which they arrive."""

    config: TrtScenarioConfig
    requests: list[TrtRequest]
    name: str = ""
    max_steps: int = 5000


def run_trtllm_scenario(scenario: TrtScenario, *, check: bool = False) -> Iterator[dict[str, Any]]:
    """Run the scenario and yield its recording's lines: the header's sizes, one per pass, then the end."""
    settings = scenario.config.settings()
    levels, max_seq_len, _, _ = settings.plan_memory()
    yield {
        "chunk_unit": settings.chunk_unit,
        "max_seq_len": max_seq_len,
        "pools": levels,
    }
    run = _Run(scenario, settings)
    end = "done"
    for step in range(scenario.max_steps):
        line = run.next_pass(step)
        if line is None:
            break
        yield line
        if check:
            run.passes.check()
        if run.passes.stuck:
            end = f"error: {_deadlock(run.passes.stuck)}"
            break
    else:
        end = "max_steps"
    yield {"end": end, "outputs": run.outputs}


def _deadlock(requests: int) -> str:
    text = f"V2 scheduler deadlock: {requests} generation request(s) active but none could be scheduled"
    return text[:MAX_ERROR_CHARS]


class _Run:
    """An executor, the requests that have not arrived, and the clock that counts passes."""

    def __init__(self, scenario: TrtScenario, settings: TrtSettings) -> None:
        self._scenario = scenario
        self.passes = TrtPasses(settings, scenario.config.events)
        self.outputs = [0] * len(scenario.requests)
        self._clock = -1
        self._fetched: list[int] = []
        order = sorted(enumerate(scenario.requests), key=lambda one: (one[1].arrival, one[0]))
        self._to_come = [index for index, _ in order]
        self._cancels = sorted(
            (one.cancel, index) for index, one in enumerate(scenario.requests) if one.cancel is not None
        )

    def next_pass(self, step: int) -> dict[str, Any] | None:
        """Receive what is due and run a pass; None when nothing is left to do."""
        self._clock += 1
        was_idle = self.passes.idle
        if was_idle:  # the loop blocks until something arrives
            due = [self._scenario.requests[i].arrival for i in self._to_come[:1]]
            due += [time for time, _ in self._cancels[:1]]
            self._clock = max(self._clock, min(due, default=self._clock))
        fetched, cancelled = self._receive()
        self._fetched += fetched
        if was_idle and not fetched and not cancelled:
            return None
        done: dict[str, Any] = {**self.passes.run()}
        sampled = []
        for index in done["sampled"]:  # each at most once
            sampled.append([index, self.outputs[index]])
            self.outputs[index] += 1
        done |= {"step": step, "clock": self._clock, "fetched": fetched, "sampled": sampled}
        done["finished"].sort(key=self._fetched.index)
        done["pages"] = {str(index): pages for index, pages in done["pages"].items()}
        return {key: done[key] for key in KEYS if key != "events" or self._scenario.config.events}

    def _receive(self) -> tuple[list[int], bool]:
        fetched = []
        while self._to_come and self._scenario.requests[self._to_come[0]].arrival <= self._clock:
            fetched.append(self._to_come.pop(0))
            self._submit(fetched[-1])
        cancelled = False
        while self._cancels and self._cancels[0][0] <= self._clock:
            self.passes.cancel(self._cancels.pop(0)[1])
            cancelled = True
        return fetched, cancelled

    def _submit(self, index: int) -> None:
        request = self._scenario.requests[index]
        self.passes.submit(
            index,
            request.runs(),
            request.max_new,
            OUTPUT_BASE + index * OUTPUT_STRIDE,
            eos_at=request.eos_at or 0,
            priority=request.priority,
            salt=None if request.salt is None else derive_salt(request.salt),
            adapter=request.lora or 0,
        )
