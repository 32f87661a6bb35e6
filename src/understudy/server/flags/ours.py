"""Flags that vLLM does not have, and the choice of the release whose flags a command line has."""

from __future__ import annotations

import msgspec

from understudy.kind_names import KIND_MODULES
from understudy.server.flags.grammar import Flag, read_command_line, vllm_flags
from understudy.server.release import NEWEST, RELEASES, find_release
from understudy.timing.gpu_flags import GPU_FLAGS

OURS = (
    Flag(["--clock-speed"], "float"),
    Flag(["--response-mode"], "str", choices=["filler", "echo", "recorded"]),
    Flag(["--response-file"], "str"),
    Flag(["--num-gpu-blocks"], "int"),
    Flag(["--vllm-version"], "str"),
    Flag(["--set"], "str", many=True),
    Flag(["--tiers"], "json"),
    Flag(["--session-kv"], "str"),
    Flag(["--kv-cache-groups"], "json"),
    Flag(["--kv-peer"], "str", many=True),
    Flag(["--kv-link-gbps"], "float"),
    Flag(["--kv-link-backend-gbps"], "float"),
    Flag(["--kv-link-latency-ms"], "float"),
    Flag(["--kv-bytes-per-token"], "int"),
    Flag(["--kv-side-channel-host"], "str"),
    Flag(["--kv-side-channel-port"], "int"),
    Flag(["--metrics"], "str", choices=["vllm", "sglang"]),
    Flag(["--old-metric-names", "--no-old-metric-names"], "bool"),
    Flag(["--startup-duration"], "float"),
    Flag(["--max-request-body-size-mb"], "float"),
    Flag(["--max-request-body-depth"], "int"),
    Flag(["--dev-mode", "--no-dev-mode"], "bool"),
    Flag(["--admin-host"], "str", many=True),
    Flag(["--time-to-first-token"], "float"),
    Flag(["--inter-token-latency"], "float"),
    Flag(["--time-to-first-token-std-dev"], "float"),
    Flag(["--inter-token-latency-std-dev"], "float"),
    Flag(["--global-cache-hit-threshold"], "float"),
    Flag(["--failure-injection-rate"], "float"),
    Flag(["--failure-types"], "str", many=True),
    Flag(["--fake-metrics"], "json"),
    Flag(["--model"], "str"),
    Flag(["--engine"], "str"),
    Flag(["--random-weights"], "int"),
    Flag(["--device"], "str"),
    Flag(["--backend"], "str", choices=["reference", "triton"]),
    Flag(["--timing"], "str"),
    *(
        Flag([f"--{name}", f"--no-{name}"] if about.kind == "bool" else [f"--{name}"], about.kind)
        for name, about in GPU_FLAGS.items()
        if f"--{name}" not in vllm_flags()
    ),
)
"""Flags that vLLM does not have (it takes `--model` as a positional argument)."""


def all_flags(version: str = NEWEST.version) -> dict[str, Flag]:
    """Return the flags of a vLLM release and ours, by every name; --engine takes every kind that has a name now."""
    ours = {name: flag for flag in OURS for name in flag.names}
    ours["--engine"] = msgspec.structs.replace(ours["--engine"], choices=[*KIND_MODULES, "qwen3"])
    return {**vllm_flags(version), **ours}


def find_flags_version(arguments: list[str], more: dict[str, Flag]) -> str:
    """Return the release whose flags a command line has. ConfigError for an invalid line."""
    every = {
        name: flag for release in reversed(RELEASES) for name, flag in all_flags(release.version).items()
    }
    every = {name: msgspec.structs.replace(flag, choices=None) for name, flag in every.items()}
    values = read_command_line(arguments, {**every, **more}).values
    given = values.get("vllm-version")
    for assignment in values.get("set") or ():
        name, _, value = assignment.partition("=")
        given = value if name == "vllm_version" else given
    return find_release(given).version
