"""Engine flags of `understudy replay`: one for every setting, and the names of Dynamo's mocker."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from understudy.plain_numbers import parse_whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.engines.speculation import SpeculativeConfig


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"is not JSON: {error}") from None


_NONE = "none"


def _parse_interval(text: str) -> int | str:
    """Return a number of tokens, or "none", which is a value: argparse's None means that the flag was not given."""
    if text == _NONE:
        return _NONE
    try:
        return parse_whole_number(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of tokens or none, got {text!r}") from None


def _parse_length(text: str) -> int | str:
    """Return a number of tokens, or "auto" (vLLM's -1)."""
    try:
        return "auto" if text in ("auto", "-1") else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of tokens or auto, got {text!r}") from None


class Flag(NamedTuple):
    """Engine setting as a flag; `kind` bool adds --name and --no-name."""

    name: str
    kind: Callable[[str], Any]
    help: str
    metavar: str = "N"


SPECULATION = Flag(
    "speculative_config",
    _parse_json,
    'vLLM\'s speculative decoding, such as {"method": "mtp", "num_speculative_tokens": 3} (default: none)',
    "JSON",
)

SETTINGS = (
    Flag("block_size", int, "tokens per KV block (default: 16; MLA: 64; as vLLM)"),
    Flag("num_gpu_blocks", int, "usable KV blocks per worker (default: 16384, or as many as fit on the GPU)"),
    Flag(
        "max_num_seqs",
        int,
        "most requests in a batch (default: 256; with --gpu vLLM's for it: 1024 from 70 GiB on, except A100)",
    ),
    Flag(
        "max_num_batched_tokens",
        int,
        "tokens per step (default: 2048, or vLLM's for the GPU: 8192 from 70 GiB on, but for A100, and 16384 from 160)",
    ),
    Flag("max_num_active_seqs", int, "admit no request while so many are active (default: no limit)"),
    Flag(
        "max_model_len",
        _parse_length,
        "context window (default: none); auto: as much of the model's as fits",
        "N|auto",
    ),
    Flag(
        "long_prefill_token_threshold",
        int,
        "most prefill tokens of one request per step (default: 0, no limit)",
    ),
    Flag(
        "long_prefill_token_threshold_adaptive",
        bool,
        "raise that threshold to an equal share of the step's tokens (default: no)",
    ),
    Flag("enable_prefix_caching", bool, "reuse cached prefixes (default: yes)"),
    Flag("enable_chunked_prefill", bool, "split prompts over steps (default: yes)"),
    Flag("scheduling_policy", str, "fcfs (default) or priority", "NAME"),
    Flag("preemption_mode", str, "request to preempt first: lifo (default) or fifo", "NAME"),
    Flag(
        "scheduler_reserve_full_isl", bool, "admit only prompts that fit whole (default: as the version does)"
    ),
    Flag(
        "prefill_schedule_interval",
        int,
        "compute prompts only in every Nth step while requests decode (default: 1; since 0.33)",
    ),
    Flag("watermark", float, "share of blocks that admissions keep free (default: 0)", "X"),
    Flag(
        "async_scheduling",
        bool,
        "schedule one batch ahead (default: as the version does; 0.14 and later: yes)",
    ),
    Flag("enable_lora", bool, "accept requests that name LoRA adapters (default: no)"),
    Flag("max_loras", int, "adapters in one batch (default: 1)"),
    Flag("kv_manager", str, "native (vLLM's, the default) or kvbm (one block per hash)", "NAME"),
    Flag(
        "eviction_policy",
        str,
        "eviction order of blocks: a name, or FILE.py:CLASS (default: vLLM's; any other is not step-exact)",
        "NAME",
    ),
    SPECULATION,
    Flag(
        "kv_cache_groups",
        _parse_json,
        'groups of layers that keep different KV, such as [{"kind": "full", "block_size": 16}]; kinds also have the '
        "names that `understudy capacity` prints, such as full_attention (default: one group, or the model's "
        "on its --gpu)",
        "JSON",
    ),
    Flag(
        "prefix_cache_retention_interval",
        _parse_interval,
        "tokens between cached blocks of windows and states; 0: only ends of prompts (default); none: every block",
        "N|none",
    ),
    Flag("prefix_match_unit", int, "tokens per hash of KV cache groups (default: as the groups allow)"),
    Flag(
        "vllm_version", str, "vLLM release to simulate, such as 0.26.0 (default: the newest known)", "VERSION"
    ),
)

MOCKER_SETTINGS = (
    Flag("speedup_ratio", float, "divide the times of all steps by X (default: 1)", "X"),
    Flag("decode_speedup_ratio", float, "divide the times of decode steps by X (default: 1)", "X"),
    Flag(
        "charge_first_token",
        bool,
        "charge decode time in the step that ends a prompt (default: yes; Dynamo 1.6.1: no)",
    ),
    Flag("aic_nextn", int, "draft tokens per step of Dynamo's speculation, 1 to 5 (default: none)"),
    Flag("aic_nextn_accept_rates", str, "acceptance rate of each draft token (default: 0.85,0.3)", "X,X"),
    Flag("aic_mtp_seed", int, "seed for accepting draft tokens (default: 42)"),
)

MOCKER_NAMES = (
    Flag("g1_backend", str, "KV manager: same as --kv-manager", "NAME"),
    Flag("planner_profile_data", str, "measured step times: a profiler's .npz file", "PATH"),
    Flag("num_g2_blocks", int, "blocks of host memory per worker; 0: none"),
    Flag("num_g3_blocks", int, "blocks of disk, shared by all workers; 0: none"),
    Flag("enable_g4_storage", bool, "add an unlimited object store"),
    Flag("kv_cache_bytes_per_token", int, "KV bytes per token"),
    *(
        Flag(f"bandwidth_{way}_gbps", float, f"bandwidth {way.replace('_', ' ')}, GB/s", "X")
        for way in ("g1_to_g2", "g2_to_g1", "g2_to_g3", "g3_to_g2", "g2_to_g4", "g4_to_g2")
    ),
)


def add_engine_flags(verb: argparse.ArgumentParser) -> None:
    """Add the engine flags to a verb, in three groups."""
    _add_group(verb, "engine (any setting: --set engine.NAME=VALUE)", SETTINGS)
    group = _add_group(verb, "imitating Dynamo's mocker and its replay", MOCKER_SETTINGS)
    group.add_argument(
        "--route-rejected",
        action="store_const",
        const=True,
        help="also route requests that can never fit, as Dynamo's replay does",
    )
    _add_group(verb, "engine and tiers, with the names and meanings of Dynamo's mocker", MOCKER_NAMES)


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings that were given as flags, by name."""
    values = {flag.name: getattr(args, flag.name) for flag in SETTINGS + MOCKER_SETTINGS + MOCKER_NAMES}
    return {
        name: None if name == "prefix_cache_retention_interval" and value == _NONE else value
        for name, value in values.items()
        if value is not None
    }


def add_speculation_flag(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Add --speculative-config to a verb without the other engine flags."""
    group.add_argument(
        "--speculative-config", type=SPECULATION.kind, metavar=SPECULATION.metavar, help=SPECULATION.help
    )


def read_speculation(args: argparse.Namespace) -> SpeculativeConfig | None:
    """Return the speculation that the flag gives. ConfigError names the invalid setting."""
    from understudy.checks import read_as
    from understudy.engines.speculation import SpeculativeConfig

    given = getattr(args, "speculative_config", None)
    return None if given is None else read_as(SpeculativeConfig, given, "speculative_config")


def _add_group(verb: argparse.ArgumentParser, title: str, flags: tuple[Flag, ...]) -> argparse._ArgumentGroup:
    group = verb.add_argument_group(title)
    for flag in flags:
        name = f"--{flag.name.replace('_', '-')}"
        if flag.kind is bool:
            group.add_argument(name, action=argparse.BooleanOptionalAction, default=None, help=flag.help)
        else:
            group.add_argument(name, type=flag.kind, metavar=flag.metavar, help=flag.help)
    return group
