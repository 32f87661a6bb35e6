"""The flags of `understudy replay` that describe tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError

if TYPE_CHECKING:
    import argparse

EXAMPLES = """\
  understudy replay trace.jsonl --g2 65536 --model Llama-3.1-8B --compare-without-tiers
  understudy replay trace.jsonl --g2-bytes 512GiB --g2-bandwidth-gbps 25 --kv-bytes-per-token 131072
  understudy replay trace.jsonl --kv-offloading-size 64 --model Llama-3.1-8B       vLLM's own offload, 64 GiB
  understudy replay trace.jsonl --g2-bytes 64GB --g3-bytes 4TB --g3-bandwidth-gbps 7 --model ./config.json
"""

_WHERE = {"g2": "host memory, of each worker", "g3": "disk, of the run", "g4": "object store, of the run"}
_DEFAULT_GBPS = {"g2": 14, "g3": 7, "g4": 4}
_OFFLOAD = {"--offload-mode": ("mode", str), "--offload-batch-size": ("offload_batch_size", int)}
_WEIGHT = {"--kv-bytes-per-token": int, "--model": str, "--kv-dtype": str}


def add_tier_flags(verb: argparse.ArgumentParser) -> None:
    """Describe them, in a group of their own."""
    group = verb.add_argument_group("KV tiers below the GPU (any setting: --set tiers.g2.NAME=VALUE)")
    for tier, where in _WHERE.items():
        group.add_argument(f"--{tier}", metavar="BLOCKS", help=f"{where}: blocks, or unlimited")
        group.add_argument(
            f"--{tier}-bytes", metavar="SIZE", help="the same as a size, such as 512GiB or 4TB"
        )
        shared = "" if tier == "g2" else ", shared by all workers"
        group.add_argument(
            f"--{tier}-bandwidth-gbps",
            metavar="X",
            help=f"10^9 bytes a second each way, or inf{shared} (default: {_DEFAULT_GBPS[tier]})",
        )
        if tier == "g2":
            group.add_argument("--g2-d2h-gbps", metavar="X", help="only down, from the GPU to the host")
            group.add_argument("--g2-h2d-gbps", metavar="X", help="only up, from the host to the GPU")
        group.add_argument(f"--{tier}-latency-ms", metavar="MS", help="added to each transfer (default: 0)")
        group.add_argument(f"--{tier}-eviction", metavar="NAME", help="eviction policy (default: lru)")
    group.add_argument(
        "--offload-mode", metavar="NAME", help="write_through (default), evict, or vllm: its own rules"
    )
    group.add_argument(
        "--kv-offloading-size", metavar="GIB", help="vLLM's flag: its native offload to so much host memory"
    )
    group.add_argument("--kv-offloading-backend", metavar="NAME", help="vLLM's flag: native (default)")
    group.add_argument(
        "--kv-transfer-config", metavar="JSON", help="vLLM's flag, with its OffloadingConnector"
    )
    group.add_argument("--offload-batch-size", metavar="N", help="blocks of one copy down (default: 32)")
    group.add_argument("--kv-bytes-per-token", metavar="N", help="what a token weighs in the KV cache")
    group.add_argument(
        "--compare-without-tiers",
        action="store_true",
        help="play it once more without, and show the difference",
    )


def tier_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as flags. ConfigError names flags that contradict each other or have no value."""
    _refuse_both(args, "--kv-bytes-per-token", "--model", "both say what a token weighs")
    _refuse_both(args, "--kv-bytes-per-token", "--kv-dtype", "both say what a token weighs")
    settings: dict[str, Any] = {}
    tiers = {tier: found for tier in _WHERE if (found := _tier(args, tier))}
    below = _vllm_offload(args)
    if below is not None:
        (host,) = below["tiers"]
        tiers["g2"] = {
            **tiers.get("g2", {}),
            **{name: value for name, value in host.items() if name != "tier"},
        }
    if tiers:
        settings["tiers"] = tiers
    offload = {
        name: _number(flag, value, kind)
        for flag, (name, kind) in _OFFLOAD.items()
        if (value := _given(args, flag)) is not None
    }
    if below is not None:
        offload |= below["offload"]
    if offload:
        settings["offload"] = offload
    for flag, kind in _WEIGHT.items():
        if (value := _given(args, flag)) is not None:
            settings[_name(flag)] = _number(flag, value, kind)
    return settings


def _vllm_offload(args: argparse.Namespace) -> dict[str, Any] | None:
    """What vLLM's own flags ask for."""
    from understudy.tiers.vllm_flags import offload_settings

    for flag in ("--kv-offloading-size", "--kv-transfer-config"):
        for other in ("--g2", "--g2-bytes"):
            _refuse_both(args, flag, other, "both say how large the host is")
        _refuse_both(args, flag, "--offload-mode", "both say how blocks are offloaded")
    if args.kv_offloading_backend is not None and args.kv_offloading_size is args.kv_transfer_config is None:
        raise ConfigError("--kv-offloading-backend needs --kv-offloading-size, the host memory that it fills")
    return offload_settings(
        args.kv_offloading_size,
        args.kv_offloading_backend,
        args.kv_transfer_config,
    )


def refuse_idle_flags(args: argparse.Namespace) -> None:
    """For a run without any tier: a flag that says how to use one is a mistake (what a token weighs: see settings)."""
    for flag in (*_OFFLOAD, "--compare-without-tiers"):
        if _given(args, flag):
            raise ConfigError(f"{flag} needs a tier: give --g2 or --g2-bytes")


def _tier(args: argparse.Namespace, tier: str) -> dict[str, Any]:
    _refuse_both(args, f"--{tier}", f"--{tier}-bytes", "both say how large the tier is")
    settings: dict[str, Any] = {}
    if (blocks := _given(args, f"--{tier}")) is not None:
        settings["blocks"] = blocks if blocks == "unlimited" else _number(f"--{tier}", blocks, int)
    if (size := _given(args, f"--{tier}-bytes")) is not None:
        settings["bytes"] = size
    if (latency := _given(args, f"--{tier}-latency-ms")) is not None:
        settings["latency_ms"] = _number(f"--{tier}-latency-ms", latency, float)
    if (eviction := _given(args, f"--{tier}-eviction")) is not None:
        settings["eviction"] = eviction
    if link := _link(args, tier):
        settings["link"] = link
    return settings


def _link(args: argparse.Namespace, tier: str) -> dict[str, float]:
    both = f"--{tier}-bandwidth-gbps"
    down, up = ("down_gbps", "up_gbps") if tier == "g2" else ("backend_down_gbps", "backend_up_gbps")
    fields: dict[str, tuple[str, ...]] = {both: (down, up)}
    if tier == "g2":
        for flag, field in (("--g2-d2h-gbps", down), ("--g2-h2d-gbps", up)):
            _refuse_both(args, both, flag, "both give a bandwidth")
            fields[flag] = (field,)
    return {
        field: _gbps(flag, value)
        for flag, named in fields.items()
        if (value := _given(args, flag)) is not None
        for field in named
    }


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _given(args: argparse.Namespace, flag: str) -> Any:
    return getattr(args, _name(flag))


def _refuse_both(args: argparse.Namespace, one: str, other: str, why: str) -> None:
    if _given(args, one) is not None and _given(args, other) is not None:
        raise ConfigError(f"{one} and {other} {why}; give one")


def _number(flag: str, value: str, kind: type) -> Any:
    try:
        return kind(value)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{flag} must be {what}, got {value!r}") from None


def _gbps(flag: str, value: str) -> float:
    from understudy.tiers.settings import check_gbps

    return check_gbps(flag, _number(flag, value, float))
