"""Recordings of SGLang's scheduler: scenarios by iteration, and the lines that a run gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from understudy._core import SglangIterations, SglangSettings
from understudy.conformance.sglang_published import NumberedEvents, PublishedEvents
from understudy.errors import CapacityExhausted, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

OUTPUT_BASE = 1_000_000
OUTPUT_STRIDE = 100_000

_HOST = ("hicache_write_policy", "hicache_ratio", "load_back_threshold")
_TRANSFERS = ("write_steps", "write_tokens_per_step", "load_steps")
_NAMES = ("schedule_policy", "radix_eviction_policy", "retraction_policy", "tree")
_SIDE = (
    "metadata_slots",
    "early_send",
    "num_reserved_decode_tokens",
    "extra_slots",
    "polling_interval",
    "host_tokens",
)
_LINK = ("role", "decode_radix", "retraction_backup", "handshake_steps", "transfer_steps", "ack_steps")
_OTHER = ("kv_events", "publish_events", *_HOST, *_TRANSFERS, *_SIDE, *_LINK)
_POOLS = ("avail", "evictable", "protected", "nodes", "evict_head")


class SglangScenarioConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of SGLang's scheduler, with SGLang's names and the recordings' defaults."""

    page_size: int = 1
    max_total_num_tokens: int = 16384
    max_running_requests: int = 128
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int = 8192
    prefill_max_requests: int | None = None
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "lof"] = "fcfs"
    schedule_conservativeness: float = 1.0
    init_new_token_ratio: float = 0.7
    min_new_token_ratio_factor: float = 0.14
    new_token_ratio_decay_steps: int = 600
    retract_decode_steps: int = 20
    clip_max_new_tokens: int = 4096
    in_batch_check_threshold: int = 32
    in_batch_deprioritize_threshold: int = 32
    enable_mixed_chunk: bool = False
    disable_radix_cache: bool = False
    ignore_eos: bool = False
    overlap: bool = False
    radix_eviction_policy: Literal["lru", "lfu", "slru", "fifo", "filo", "mru"] = "lru"
    tree: Literal["unified", "radix"] = "unified"
    context_len: int = 131072
    kv_events: bool = True
    enable_priority_scheduling: bool = False
    priority_scheduling_preemption_threshold: int = 10
    schedule_low_priority_values_first: bool = False
    disable_priority_preemption: bool = False
    retraction_policy: Literal["length", "priority"] = "length"
    max_queued_requests: int | None = None
    prefill_decode_interval: int = 0
    prefill_decode_interval_min_bs: int = 0
    hicache_write_policy: Literal["write_through", "write_through_selective", "write_back"] | None = None
    hicache_ratio: float = 2.0
    load_back_threshold: int = 10
    write_steps: int = 1
    write_tokens_per_step: int | None = None
    load_steps: int = 1
    publish_events: bool = False
    decode_log_interval: int = 40
    swa_window: int | None = None
    swa_tokens: int | None = None
    swa_eviction_interval: int = 128
    release_prefill_swa: bool = False
    mamba_slots: int | None = None
    mamba_extra_buffer: bool = False
    mamba_lazy: bool = False
    mamba_track_interval: int = 256
    mamba_max_states_per_path: int = -1
    role: Literal["prefill", "decode"] | None = None
    handshake_steps: int = 0
    transfer_steps: int = 1
    metadata_slots: int | None = None
    early_send: bool = True
    decode_radix: bool = False
    num_reserved_decode_tokens: int = 512
    extra_slots: int | None = None
    polling_interval: int = 1
    retraction_backup: Literal["cpu_tensor", "none", "host_pool"] = "cpu_tensor"
    host_tokens: int | None = None
    ack_steps: int | None = 1

    def settings(self) -> SglangSettings:
        """Build the core's form of the settings. ConfigError for a value that no SGLang accepts."""
        out = SglangSettings()
        for name, value in msgspec.structs.asdict(self).items():
            if name in _NAMES or name in _OTHER or (name == "swa_tokens" and value is None):
                continue
            try:
                setattr(out, name, value)
            except TypeError:  # msgspec has checked the type: the core's is narrower
                raise ConfigError(
                    f"{name}: {value} is out of range; choose one that SGLang accepts"
                ) from None
        out.set_names(**{name: getattr(self, name) for name in _NAMES})
        if self.hicache_write_policy is not None:
            out.set_host(
                hicache_write_policy=self.hicache_write_policy,
                hicache_ratio=self.hicache_ratio,
                load_back_threshold=self.load_back_threshold,
            )
        if self.role is not None:
            out.set_side(
                role=self.role,
                backs_up_retracted=self.retraction_backup != "none",
                **{name: getattr(self, name) for name in _SIDE},
            )
        return out


class SglangRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request. A prompt item `[start, len]` is the run start, start + 1, …; an int is one token."""

    id: str
    prompt: list[int | tuple[int, int]]
    max_tokens: int
    arrival_step: int = 0
    t: int = 0
    """Arrival in ns, in recordings on a clock."""
    eos_at: int | None = None
    priority: int | None = None
    handshake_steps: int | None = None
    transfer_steps: int | None = None
    fail_after: int | None = None
    decode_prefix: int = 0

    def runs(self) -> list[tuple[int, int]]:
        """Return the prompt as runs (first token, count)."""
        return [(item, 1) if isinstance(item, int) else item for item in self.prompt]


class SglangAbort(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All requests whose id begins with `id` are aborted; `*` aborts all."""

    id: str
    step: int = 0
    t: int = 0


class SglangScenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests and aborts by step, or by time."""

    config: SglangScenarioConfig
    requests: list[SglangRequest]
    name: str = ""
    max_steps: int = 0
    aborts: list[SglangAbort] = []
    clock: dict[str, int] = {}


class SglangRun:
    """The event loop of one scenario, with names in place of numbers."""

    def __init__(self, scenario: SglangScenario) -> None:
        self._requests = scenario.requests
        self.names = [request.id for request in scenario.requests]
        config = scenario.config
        self.loop = SglangIterations(
            config.settings(),
            ack_steps=config.ack_steps,
            **{name: getattr(config, name) for name in _TRANSFERS},
        )
        self._config = config
        self._numbered = NumberedEvents(has_host=config.hicache_write_policy is not None)

    def submit(self, index: int) -> None:
        """Receive the request at a place of the list."""
        request = self._requests[index]
        first = OUTPUT_BASE + index * OUTPUT_STRIDE
        if self._config.role is not None:
            self._set_transfer(index, request)
        self.loop.submit(
            index, request.runs(), request.max_tokens, first, request.eos_at or 0, priority=request.priority
        )

    def _set_transfer(self, index: int, request: SglangRequest) -> None:
        handshake, steps = request.handshake_steps, request.transfer_steps
        self.loop.set_transfer(
            index,
            handshake_steps=self._config.handshake_steps if handshake is None else handshake,
            transfer_steps=self._config.transfer_steps if steps is None else steps,
            fail_after=request.fail_after,
            decode_prefix=request.decode_prefix,
        )

    def abort(self, prefix: str) -> None:
        """Abort all requests whose id begins with `prefix`."""
        self.loop.abort([i for i, name in enumerate(self.names) if prefix == "*" or name.startswith(prefix)])

    def take_events(self) -> list[dict[str, Any]]:
        """Describe the KV events since the last call."""
        return self._numbered.describe(self.loop.take_events())


def _describe_state(loop: SglangIterations, names: list[str], *, has_states: bool) -> dict[str, Any]:
    """Describe queues and pools between two iterations, in the order of a recording's line."""
    state: dict[str, Any] = {**loop.state}
    state["running"] = [names[i] for i in state["running"]]
    state["waiting_head"] = [names[i] for i in state["waiting_head"]]
    component = loop.component
    if component is None:
        return state
    full = {key: state.pop(key) for key in _POOLS}
    pools = {"full_evictable": full["evictable"], "full_protected": full["protected"]}
    heads = {"nodes": full["nodes"], "evict_head": full["evict_head"]}
    if has_states:
        return {
            **state,
            "avail": full["avail"],
            "mamba_free": component["free"],
            "mamba_evictable": component["evictable"],
            "mamba_protected": component["protected"],
            **pools,
            **heads,
            "mamba_evict_head": component["evict_head"],
        }
    return {
        **state,
        "avail": loop.free_tokens,
        "avail_full": full["avail"],
        "avail_swa": component["free"],
        "full_evictable": full["evictable"],
        "swa_evictable": component["evictable"],
        "full_protected": full["protected"],
        "swa_protected": component["protected"],
        "swa_evicted": {names[i]: begin for i, begin in component["window_begins"]},
        **heads,
        "swa_evict_head": component["evict_head"],
    }


def run_sglang_scenario(scenario: SglangScenario, *, check: bool = False) -> Iterator[dict[str, Any]]:
    """Run the scenario and yield its recording's lines after the header: one per step, then the totals."""
    run = SglangRun(scenario)
    loop = run.loop
    config = scenario.config
    published = PublishedEvents(config.page_size, config.decode_log_interval)
    totals = dict.fromkeys(
        ("prefill_steps", "decode_steps", "mixed_steps", "idle_steps", "retractions", "scheduled_tokens"), 0
    )
    cached_tokens = 0
    blocks = {"stored": 0, "removed": 0}
    ended: set[int] = set()
    to_come = list(range(len(scenario.requests)))
    aborts = list(scenario.aborts)
    steps = 0
    reason = "done"
    while len(ended) < len(scenario.requests):
        if steps == scenario.max_steps:
            reason = "max_steps"
            break
        for index in [i for i in to_come if scenario.requests[i].arrival_step <= steps]:
            run.submit(index)
            to_come.remove(index)
        for abort in [one for one in aborts if one.step <= steps]:
            run.abort(abort.id)
            aborts.remove(abort)
        try:
            batch = loop.schedule()
        except CapacityExhausted:
            reason = "out of memory"
            break
        after, chunked = loop.free_tokens, loop.chunked
        result = loop.process()
        if check:
            loop.check()
        log = loop.take_log()
        ended.update(log["finished"], log["aborted"])
        host = loop.take_host_state()
        mode, rows = (None, []) if batch is None else batch
        names = run.names
        line: dict[str, Any] = {
            "step": steps,
            "mode": mode,
            "scheduled": {names[i]: tokens for i, tokens, _ in rows},
            "new": [names[i] for i, resumed, *_ in log["admitted"] if not resumed],
            "resumed": [names[i] for i, resumed, *_ in log["admitted"] if resumed],
            "cached": {names[i]: cached for i, _, cached, _ in log["admitted"]},
            "chunked": None if chunked is None or mode in (None, "decode") else names[chunked],
            "avail_after_schedule": after,
        }
        if host is not None:
            line["loaded"] = {names[i]: loaded for i, _, _, loaded in log["admitted"] if loaded}
        line |= {
            "retracted": [names[i] for i in log["retracted"]],
            "finished": [names[i] for i in log["finished"]],
            "aborted": [names[i] for i in log["aborted"]],
        }
        line |= _describe_state(loop, names, has_states=config.mamba_slots is not None)
        if config.publish_events:
            line["kv_events"] = []
        else:
            line["kv_events"] = run.take_events() if config.kv_events else []
        if config.enable_priority_scheduling:
            line["preempted"] = [names[i] for i in log["preempted"]]
        if config.publish_events:
            line["published"] = published.after(result, loop)
        line |= host or {}
        totals[
            {"extend": "prefill", "decode": "decode", "mixed": "mixed", None: "idle"}[mode] + "_steps"
        ] += 1
        totals["retractions"] += len(log["retracted"])
        totals["scheduled_tokens"] += sum(tokens for _, tokens, _ in rows)
        cached_tokens += sum(cached for _, _, cached, _ in log["admitted"])
        for event in line["kv_events"]:
            blocks[event["type"]] += event["n"]
        steps += 1
        yield line
    end: dict[str, Any] = {"reason": reason, "steps": steps, "finished": len(ended), **totals}
    end |= {
        "cached_tokens": cached_tokens,
        "stored_blocks": blocks["stored"],
        "removed_blocks": blocks["removed"],
    }
    yield {"end": end}
