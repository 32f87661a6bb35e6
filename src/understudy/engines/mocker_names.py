"""Convert engine settings with the names of Dynamo's mocker; ignore neutral values and refuse unsupported ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_LATER = {
    **dict.fromkeys(("sglang", "trtllm"), "other engines than vLLM"),
    **dict.fromkeys(("router_queue_policy", "enable_local_indexer"), "KV-aware routing"),
    **dict.fromkeys(("zmq_kv_events_port", "zmq_replay_port"), "KV events on the wire"),
    **dict.fromkeys(
        (
            "worker_type",
            "is_prefill",
            "is_decode",
            "bootstrap_port",
            "handoff_session_timeout_ms",
            "kv_transfer_bandwidth",
            "kv_transfer_timing_mode",
        ),
        "disaggregation",
    ),
    **dict.fromkeys(("dp_size", "startup_time"), "data parallelism under the mocker's name, and scaling"),
    **dict.fromkeys(("reasoning",), "live serving"),
}
"""Names of features that Understudy does not have yet, and the feature."""

_INSTEAD = {
    **dict.fromkeys(
        (
            "aic_backend",
            "aic_system",
            "aic_backend_version",
            "aic_tp_size",
            "aic_model_path",
            "aic_moe_tp_size",
            "aic_moe_ep_size",
            "aic_attention_dp_size",
            "aic_gemm_dtype",
            "aic_moe_dtype",
            "aic_fmha_dtype",
            "aic_kv_cache_dtype",
            "aic_comm_dtype",
        ),
        "describes a system to AIConfigurator; give measurements (planner_profile_data) or a user-defined timing model",
    ),
    **dict.fromkeys(
        ("gpu_memory_utilization", "mem_fraction_static", "free_gpu_memory_fraction"),
        "only estimates how many blocks fit; give num_gpu_blocks",
    ),
    "perf_model": "is an object of the mocker; give timing, planner_profile_data or a user-defined timing model",
    "has_perf_model": "says that a timing model was set, but not which; give timing or planner_profile_data",
    "response_replay_trace_path": "names a separate file of outputs; put them into the trace",
}
"""Names of the mocker without a meaning here, why, and what to give instead."""

_OFF: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(_LATER, (None,)),
    **dict.fromkeys(_INSTEAD, (None,)),
    **dict.fromkeys(("is_prefill", "is_decode", "enable_local_indexer", "has_perf_model"), (None, False)),
    "enable_g4_storage": (False,),
    "num_g2_blocks": (None, 0),
    "num_g3_blocks": (None, 0),
    "offload_batch_size": (None, 0),
    "kv_transfer_timing_mode": ("full_prompt",),
    "handoff_session_timeout_ms": (300_000,),
    "worker_type": ("aggregated",),
    "dp_size": (1,),
}
"""Neutral values of the names above, as the mocker writes them: accepted and ignored."""


def take_mocker_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Rename the mocker's settings and drop neutral ones. ConfigError where two settings mean the same."""
    taken = {
        name: value
        for name, value in settings.items()
        if not (name in _OFF and any(type(value) is type(off) and value == off for off in _OFF[name]))
    }
    if "planner_profile_data" in taken:
        path = taken.pop("planner_profile_data")
        if "timing" in taken:
            raise ConfigError("planner_profile_data and timing both name a timing model; give one")
        taken["timing"] = {"kind": "interpolated", "path": path}
    if "g1_backend" in taken:
        backend = taken.pop("g1_backend")
        if "kv_manager" in taken:
            raise ConfigError("g1_backend and kv_manager both name a KV manager; give one")
        if backend not in ("native", "kvbm"):
            raise ConfigError(f"g1_backend must be native or kvbm, got {backend!r}")
        taken["kv_manager"] = backend
    _check_engine_type(taken.pop("engine_type", "vllm"))
    if taken.get("num_gpu_blocks", 0) is None:
        del taken["num_gpu_blocks"]  # None means the default, as in the mocker
    if isinstance(taken.get("preemption_mode"), str):
        taken["preemption_mode"] = taken["preemption_mode"].lower()
    return taken


def refuse_unknown(settings: dict[str, Any], known: Sequence[str]) -> None:
    """Raise ConfigError for the first name that is not in `known`, with the remedy where there is one."""
    for name in settings:
        if name in known:
            continue
        if name in _INSTEAD:
            raise ConfigError(f"{name} {_INSTEAD[name]}")
        if name in _LATER:
            raise ConfigError(f"{name} belongs to {_LATER[name]}, which this version does not have yet")
        if name == "mocker":
            raise ConfigError("mocker: not a setting of engine; give its fields by name next to the engine's")
        if name == "tiers":
            raise ConfigError(
                "tiers: not a setting of engine; put it next to engine (Dynamo's names may be inside)"
            )
        raise ConfigError(f"{name} is not a setting of the engine; known are {', '.join(known)}")


def _check_engine_type(name: object) -> None:
    known = name.lower() if isinstance(name, str) else name
    if known in ("sglang", "trtllm"):
        raise ConfigError(
            f"engine_type {known} belongs to other engines than vLLM, which this version does not have yet"
        )
    if known != "vllm":
        raise ConfigError(f"engine_type must be vllm, sglang or trtllm, got {name!r}")
