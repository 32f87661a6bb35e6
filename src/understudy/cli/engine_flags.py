"""The flags of `understudy replay` that describe an engine: one for every setting, and the mocker's names."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not JSON: {error}") from None


class Flag(NamedTuple):
    """A setting of the engine as a flag; `kind` bool means --name and --no-name."""

    name: str
    kind: Callable[[str], Any]
    help: str
    metavar: str = "N"


SETTINGS = (
    Flag("block_size", int, "tokens of a KV block (default: 64)"),
    Flag("num_gpu_blocks", int, "usable KV blocks a worker (default: 16384)"),
    Flag("max_num_seqs", int, "requests in a batch (default: 256, or the tokens of a step if less)"),
    Flag("max_num_batched_tokens", int, "tokens in a step (default: 8192)"),
    Flag("max_num_active_seqs", int, "requests beyond which nobody is admitted (default: none)"),
    Flag("max_model_len", int, "context window (default: none)"),
    Flag("long_prefill_token_threshold", int, "most tokens of one prefill in a step (default: 0, none)"),
    Flag(
        "long_prefill_token_threshold_adaptive", bool, "no lower than a fair share of the step (default: no)"
    ),
    Flag("enable_prefix_caching", bool, "find prefixes in the cache (default: yes)"),
    Flag("enable_chunked_prefill", bool, "split prompts over steps (default: yes)"),
    Flag("scheduling_policy", str, "fcfs (default) or priority", "NAME"),
    Flag("preemption_mode", str, "who is preempted first: lifo (default) or fifo", "NAME"),
    Flag("scheduler_reserve_full_isl", bool, "admit only whole prompts (default: as the version does)"),
    Flag("watermark", float, "share of blocks that admissions leave free (default: 0)", "X"),
    Flag(
        "async_scheduling",
        bool,
        "schedule one batch ahead (default: as the version does; 0.14 and later: yes)",
    ),
    Flag("enable_lora", bool, "requests may name adapters (default: no)"),
    Flag("max_loras", int, "adapters in one batch (default: 1)"),
    Flag("kv_manager", str, "native (vLLM's, the default) or kvbm (one block a hash)", "NAME"),
    Flag(
        "eviction_policy",
        str,
        "order in which blocks go, if not the engine's own: not step-exact then",
        "NAME",
    ),
    Flag(
        "speculative_config",
        _json,
        'vLLM\'s, as {"method": "mtp", "num_speculative_tokens": 3} (default: none)',
        "JSON",
    ),
    Flag("vllm_version", str, "a release of vLLM, as 0.26.0 (default: the newest known)", "VERSION"),
    Flag("speedup_ratio", float, "divide the times of all steps (default: 1)", "X"),
    Flag("decode_speedup_ratio", float, "divide the times of decode steps (default: 1)", "X"),
    Flag(
        "charge_first_token",
        bool,
        "decode time in the step that ends a prompt (default: yes; Dynamo 1.6.1: no)",
    ),
    Flag("aic_nextn", int, "draft tokens of speculation, 1 to 5 (default: none)"),
    Flag("aic_nextn_accept_rates", str, "of each draft token (default: 0.85,0.3)", "X,X"),
    Flag("aic_mtp_seed", int, "of accepted drafts (default: 42)"),
)

MOCKER_NAMES = (
    Flag("g1_backend", str, "kv_manager", "NAME"),
    Flag("planner_profile_data", str, "measured step times, a profiler's .npz", "PATH"),
    Flag("num_g2_blocks", int, "blocks of host memory, of each worker; 0: none"),
    Flag("num_g3_blocks", int, "blocks of disk, of the run; 0: none"),
    Flag("enable_g4_storage", bool, "an object store without a limit"),
    Flag("kv_cache_bytes_per_token", int, "what a token weighs in the KV cache"),
    *(
        Flag(f"bandwidth_{way}_gbps", float, "10^9 bytes a second", "X")
        for way in ("g1_to_g2", "g2_to_g1", "g2_to_g3", "g3_to_g2", "g2_to_g4", "g4_to_g2")
    ),
)


def add_engine_flags(verb: argparse.ArgumentParser) -> None:
    """Describe them, in groups of their own."""
    _add(verb, "engine (any setting: --set engine.NAME=VALUE)", SETTINGS)
    _add(verb, "the engine and its tiers under the names of Dynamo's mocker, with its meaning", MOCKER_NAMES)


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as flags."""
    values = {flag.name: getattr(args, flag.name) for flag in SETTINGS + MOCKER_NAMES}
    return {name: value for name, value in values.items() if value is not None}


def _add(verb: argparse.ArgumentParser, title: str, flags: tuple[Flag, ...]) -> None:
    group = verb.add_argument_group(title)
    for flag in flags:
        name = f"--{flag.name.replace('_', '-')}"
        if flag.kind is bool:
            group.add_argument(name, action=argparse.BooleanOptionalAction, default=None, help=flag.help)
        else:
            group.add_argument(name, type=flag.kind, metavar=flag.metavar, help=flag.help)
