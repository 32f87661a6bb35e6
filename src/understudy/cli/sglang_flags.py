"""Engine flags of `understudy replay --engine sglang`, with SGLang's own names and defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.cli.engine_flags import Flag
from understudy.cli.own_flags import OwnFlags, names_gpu
from understudy.errors import ConfigError

if TYPE_CHECKING:
    import argparse

SGLANG_SETTINGS = (
    Flag("page_size", int, "tokens per KV page (default: 1)"),
    Flag("max_total_tokens", int, "tokens of the KV pool per worker (default: 1048576)"),
    Flag("max_running_requests", int, "most requests at a time (default: 2048 to 4096, as SGLang chooses)"),
    Flag("max_queued_requests", int, "most waiting requests; more are aborted (default: no limit)"),
    Flag("context_length", int, "context window (default: 131072)"),
    Flag("chunked_prefill_size", int, "prompt tokens of a step; -1: prompts are never split (default: 8192)"),
    Flag("max_prefill_tokens", int, "prompt tokens of a batch (default: 16384)"),
    Flag("prefill_max_requests", int, "most requests of a prefill batch (default: no limit)"),
    Flag("schedule_policy", str, "fcfs (default), lpm, dfs-weight or lof", "NAME"),
    Flag("schedule_conservativeness", float, "above 1: admit fewer requests (default: 1)", "X"),
    Flag("enable_mixed_chunk", bool, "decode in steps that compute prompts"),
    Flag("disable_radix_cache", bool, "reuse no prefixes"),
    Flag("radix_eviction_policy", str, "lru (default), lfu, slru, fifo, filo or mru", "NAME"),
    Flag("disable_overlap_schedule", bool, "schedule a batch only when the one before has ended"),
    Flag("enable_priority_scheduling", bool, "order requests by priority; needs fcfs or lof"),
    Flag(
        "priority_scheduling_preemption_threshold", int, "preempt for a priority better by more (default: 10)"
    ),
    Flag("schedule_low_priority_values_first", bool, "lower values are better priorities"),
    Flag("disable_priority_preemption", bool, "preempt for no priority"),
    Flag("retraction_policy", str, "request to retract first: length (default) or priority", "NAME"),
    Flag(
        "hicache_write_policy",
        str,
        "with --g2-bytes: write_through (default), write_through_selective or write_back",
        "NAME",
    ),
    Flag(
        "swa_window", int, "tokens of the model's sliding windows, with a pool of their own (default: none)"
    ),
    Flag("swa_full_tokens_ratio", float, "window tokens per token of the full pool (default: 0.8)", "X"),
    Flag("max_mamba_cache_size", int, "slots for states of recurrent layers (default: the model has none)"),
    Flag(
        "mamba_full_memory_ratio", float, "with --gpu: memory of states per memory of KV (default: 0.9)", "X"
    ),
    Flag(
        "mamba_radix_cache_strategy",
        str,
        "how states are cached: auto (default), no_buffer, extra_buffer or extra_buffer_lazy",
        "NAME",
    ),
    Flag("mamba_track_interval", int, "tokens between states that decoding tracks (default: 256)"),
    Flag("mamba_max_states_per_path", int, "most cached states of a path; -1: no limit (default: -1)"),
    Flag(
        "num_reserved_decode_tokens",
        int,
        "decode workers: tokens that stay free for each request with memory (default: 512)",
    ),
    Flag("disaggregation_decode_enable_radix_cache", bool, "decode workers reuse prefixes"),
    Flag(
        "disaggregation_decode_extra_slots",
        int,
        "decode workers: slots for requests whose KV is on its way (default: SGLang's rule)",
    ),
    Flag(
        "disaggregation_decode_polling_interval",
        int,
        "decode workers: iterations between two looks at transfers (default: 1)",
    ),
    Flag(
        "disaggregation_decode_retraction_backup",
        str,
        "decode workers: where retracted requests are copied: cpu_tensor, host_pool or none (default: SGLang's rule)",
        "NAME",
    ),
    Flag("sglang_version", str, "SGLang release to simulate (default and only one: 0.5.23)", "VERSION"),
)

_INSTEAD = {
    "block_size": "--page-size",
    "num_gpu_blocks": "--max-total-tokens",
    "max_num_seqs": "--max-running-requests",
    "max_num_batched_tokens": "--chunked-prefill-size",
    "max_model_len": "--context-length",
    "enable_prefix_caching": "--disable-radix-cache",
    "enable_chunked_prefill": "--chunked-prefill-size",
    "scheduling_policy": "--schedule-policy",
    "async_scheduling": "--disable-overlap-schedule",
    "eviction_policy": "--radix-eviction-policy",
    "vllm_version": "--sglang-version",
    "num_g2_blocks": "--g2-bytes",
}
"""vLLM's and the mocker's settings with a counterpart in SGLang."""


SGLANG_FLAGS = OwnFlags(
    engine="sglang",
    title="SGLang",
    settings=SGLANG_SETTINGS,
    others=(
        Flag(
            "mem_fraction_static",
            float,
            "with --gpu: share of its memory for weights and KV pool, for the estimate of the pool (default: 0.9)",
            "X",
        ),
    ),
    instead=_INSTEAD,
)


def read_sglang_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that SGLang's flags give, nested as in a file. ConfigError for flags of another engine."""
    given = SGLANG_FLAGS.read_settings(args)
    if args.engine != "sglang":
        return {}
    settings: dict[str, Any] = {"engine": given}
    fraction = args.mem_fraction_static
    if fraction is not None:
        if not names_gpu(args):
            raise ConfigError("--mem-fraction-static: needs a GPU; give --gpu and --model")
        if args.gpu_memory_utilization is not None:
            raise ConfigError("--mem-fraction-static contradicts --gpu-memory-utilization; give one")
        settings["gpu"] = {"gpu_memory_utilization": fraction}
    return settings
