"""Plan of a server: the settings that a command line gives, from flags that engines share."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.checks import port_number, positive_number, whole_number
from understudy.engines.group_layouts import fit_model_len
from understudy.errors import ConfigError
from understudy.run.session_kv import SessionKv
from understudy.server.access import admin_networks
from understudy.server.flags.engine import build_engine
from understudy.server.flags.tiers import check_tiers, offload_below, read_tiers
from understudy.server.handoff.settings import check_handoff, names_connector, read_handoff
from understudy.server.latency import LATENCIES, check_latency
from understudy.server.metrics.cache_info import read_cache_labels
from understudy.server.settings import LoraModule, ServerSettings
from understudy.tiers.vllm_flags import offload_settings
from understudy.timing.contexts import known_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.engines.engine_config import EngineConfig
    from understudy.server.flags.engine import BuiltEngine
    from understudy.server.flags.grammar import CommandLine

SERVER_FLAGS = {
    "max-logprobs": "max_logprobs",
    "host": "host",
    "port": "port",
    "seed": "seed",
    "data-parallel-size": "data_parallel_size",
    "enable-request-id-headers": "enable_request_id_headers",
    "enable-prompt-tokens-details": "enable_prompt_tokens_details",
    "enable-force-include-usage": "enable_force_include_usage",
    "enable-per-request-metrics": "enable_per_request_metrics",
    "enable-server-load-tracking": "enable_server_load_tracking",
    "disable-fastapi-docs": "disable_fastapi_docs",
    "global-cache-hit-threshold": "global_cache_hit_threshold",
    "uds": "uds",
    "ssl-certfile": "ssl_certfile",
    "ssl-keyfile": "ssl_keyfile",
    "ssl-ca-certs": "ssl_ca_certs",
    "ssl-cert-reqs": "ssl_cert_reqs",
    "enable-scale-out": "enable_scale_out",
    "enable-auto-tool-choice": "enable_auto_tool_choice",
    "tool-call-parser": "tool_call_parser",
    "trust-request-chat-template": "trust_request_chat_template",
    "enable-log-requests": "enable_log_requests",
    "max-num-queued-reqs": "max_num_queued_reqs",
    "max-num-queued-tokens": "max_num_queued_tokens",
    "enable-lora": "enable_lora",
    "max-loras": "max_loras",
    "max-cpu-loras": "max_cpu_loras",
    "shutdown-timeout": "shutdown_timeout_s",
    "response-mode": "response_mode",
    "response-file": "response_file",
    "clock-speed": "clock_speed",
    "metrics": "metrics",
    "old-metric-names": "old_metric_names",
    "kv-cache-metrics": "kv_cache_metrics",
    "sse-keep-alive-interval": "sse_keep_alive_interval_s",
    "stream-interval": "stream_interval",
    "kv-cache-metrics-sample": "kv_cache_metrics_sample",
    "startup-duration": "startup_duration_s",
    "dev-mode": "dev_mode",
    "max-request-body-depth": "max_body_depth",
    "tokenizer": "tokenizer",
}
"""Flags of vLLM and our own that are settings as they stand, by their names there."""


class ServePlan(msgspec.Struct, frozen=True):
    """The settings, and the accepted flags without effect."""

    settings: ServerSettings
    idle: list[str]
    line: CommandLine


def settings_of(
    line: CommandLine,
    config_class: type[EngineConfig],
    build: Callable[[dict[str, Any], int, str], BuiltEngine] | None = None,
) -> ServerSettings:
    """Build the settings from the flags. ConfigError names an invalid flag.

    `build` makes the engine from the flags, the context and the model; None: flags with vLLM's names set settings of
    `config_class`.
    """
    values = line.values
    if len(line.words) > 1:
        raise ConfigError(f"one model, please; got {', '.join(line.words)}")
    if line.words and values.get("model") not in (None, line.words[0]):
        raise ConfigError("the model is given twice, as a word and as --model")
    given: dict[str, Any] = {
        field: values[name] for name, field in SERVER_FLAGS.items() if values.get(name) is not None
    }
    for field in (
        "host",
        "uds",
        "tool_call_parser",
        "tokenizer",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_ca_certs",
    ):
        if field in given:
            given[field] = str(given[field])
    if line.words and not line.words[0].strip():
        raise ConfigError("model: the name is empty; name a model or leave it out")
    given["model"] = line.words[0] if line.words else values.get("model") or "understudy/tok"
    if (
        isinstance(given.get("tokenizer"), str | None)
        and given.get("tokenizer") is None
        and os.path.isfile(os.path.join(given["model"], "tokenizer.json"))
    ):
        given["tokenizer"] = given["model"]
    if values.get("served-model-name"):
        given["served_model_name"] = tuple(map(str, values["served-model-name"]))
    length = values.get("max-model-len")
    context = length if isinstance(length, int) else known_context(given["model"])
    given["max_model_len"] = ServerSettings().max_model_len if context is None else context
    given["api_keys"] = read_api_keys(values.get("api-key"))
    given["admin_hosts"] = tuple(map(str, values.get("admin-host") or ()))
    admin_networks(given["admin_hosts"], given["api_keys"])
    if isinstance(values.get("allowed-origins"), list):
        given["allowed_origins"] = tuple(map(str, values["allowed-origins"]))
    given["lora_modules"] = tuple(_lora(module) for module in values.get("lora-modules") or ())
    if values.get("max-request-body-size-mb") is not None:
        size_mb = positive_number("--max-request-body-size-mb", values["max-request-body-size-mb"])
        given["max_body_bytes"] = int(size_mb * 1024 * 1024)
    if "max_body_depth" in given:
        whole_number("--max-request-body-depth", given["max_body_depth"], 1)
    if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
        given["dev_mode"] = True
    if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true"):
        given["runtime_lora"] = True
    events = values.get("kv-events-config")
    if events is not None:
        if not isinstance(events, dict):
            raise ConfigError("--kv-events-config must be a JSON object")
        given["kv_events_config"] = events
    given["cache_info"] = read_cache_labels(values)
    given["profile_dir"] = _read_profile_dir(values.get("profiler-config"))
    if values.get("tiers") is not None:
        given["tiers"] = read_tiers(values["tiers"])
    if values.get("session-kv") is not None:
        given["session_kv"] = SessionKv.read(values["session-kv"])
    hands_off = names_connector(values.get("kv-transfer-config"))
    below = offload_settings(
        values.get("kv-offloading-size"),
        values.get("kv-offloading-backend"),
        None if hands_off else values.get("kv-transfer-config"),
        live=True,
    )
    if below is not None:
        given["tiers"] = offload_below(below, given.get("tiers"), given["model"])
    built = (  # a plan refuses a length that does not fit
        build_engine(
            values, None if length == "auto" else given["max_model_len"], given["model"], config_class
        )
        if build is None
        else build(values, given["max_model_len"], given["model"])
    )
    engine = built.engine
    if length == "auto":  # as much of the context as the cache has room for
        given["max_model_len"] = fit_model_len(engine, given["max_model_len"])
        engine = msgspec.structs.replace(engine, max_model_len=given["max_model_len"])
    given["engine"] = engine
    given["notes"] = (*built.notes, *engine.notes())
    if built.gpu is not None and (given_share := built.gpu.gpu_memory_utilization) is not None:
        given["cache_info"]["gpu_memory_utilization"] = str(given_share)
    if built.gpu is not None and built.gpu.data_parallel_size > 1:  # of the flag, or of the timing file
        given["data_parallel_size"] = built.gpu.data_parallel_size
    given["handoff"] = read_handoff(values, given["model"])
    if (within := given["engine"].tiers).tiers:
        given["tiers"] = offload_below(within.describe(), given.get("tiers"), given["model"])
    if "tiers" in given:
        given["tiers"] = built.size_tiers(given["tiers"])
    if values.get("tiers") is not None:
        check_tiers(given["tiers"], values["tiers"], given["engine"].block_size)
    for field in ("shutdown_timeout_s", "startup_duration_s", "clock_speed", "sse_keep_alive_interval_s"):
        if field in given:
            given[field] = float(given[field])
    if not (math.isfinite(given.get("clock_speed", 1.0)) and given.get("clock_speed", 1.0) > 0):
        raise ConfigError(f"--clock-speed must be positive, got {given['clock_speed']:g}")
    if given.get("sse_keep_alive_interval_s", 0.0) < 0:
        raise ConfigError("--sse-keep-alive-interval must not be negative; 0 sends no comments")
    if given.get("stream_interval", 1) < 1:
        raise ConfigError("--stream-interval must be 1 or more")
    if given.get("data_parallel_size", 1) < 1:
        raise ConfigError("--data-parallel-size must be 1 or more")
    if "port" in given:
        port_number("--port", given["port"])
    for name in ("time-to-first-token", "inter-token-latency", "startup-duration", "shutdown-timeout"):
        if isinstance(values.get(name), int | float):
            positive_number(f"--{name}", values[name], or_zero=True)
            if name in LATENCIES:
                check_latency(f"--{name}", values[name])
    first, each = values.get("time-to-first-token"), values.get("inter-token-latency")
    if first is not None or each is not None:
        given["latency_ms"] = (float(first or 0.0), float(each or 0.0))
    given["latency_std_dev_ms"] = _strays(values, given.get("latency_ms"))
    if given.get("response_file") is not None and given.get("response_mode") != "recorded":
        raise ConfigError("--response-file needs --response-mode recorded, which answers from it")
    sample = given.get("kv_cache_metrics_sample")
    if sample is not None and not 0 < sample <= 1:
        raise ConfigError(
            f"--kv-cache-metrics-sample is a share of blocks, above 0 and at most 1; got {sample:g}"
        )
    threshold = given.get("global_cache_hit_threshold")
    if threshold is not None and not 0 <= threshold <= 1:
        raise ConfigError(f"--global-cache-hit-threshold must be from 0 to 1, got {threshold:g}")
    live_config = ("failure-injection-rate", "failure-types", "fake-metrics")
    given["live_config"] = {name: values[name] for name in live_config if values.get(name) is not None}
    if given["handoff"] is not None:
        check_handoff(engine, given.get("tiers"), given.get("data_parallel_size", 1))
    try:
        return msgspec.convert(given, ServerSettings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None


def read_api_keys(given: list[Any] | None) -> tuple[str, ...]:
    """Return the keys of `--api-key`; without the flag, that of VLLM_API_KEY. ConfigError for an empty one."""
    keys = given or ([os.environ["VLLM_API_KEY"]] if os.environ.get("VLLM_API_KEY") else [])
    if not all(map(str, keys)):
        raise ConfigError("--api-key: is empty; give a key, or leave the flag out")
    return tuple(map(str, keys))


def _strays(values: dict[str, Any], latency_ms: tuple[float, float] | None) -> tuple[float, float]:
    """Return the standard deviations of the two latencies; at most 30 %, as in llm-d-inference-sim."""
    strays = []
    for place, name in enumerate(("time-to-first-token", "inter-token-latency")):
        stray = float(values.get(f"{name}-std-dev") or 0.0)
        if not 0 <= stray <= 0.3 * (0.0 if latency_ms is None else latency_ms[place]):
            raise ConfigError(f"--{name}-std-dev must be from 0 to 30 % of --{name}, got {stray:g}")
        strays.append(stray)
    return strays[0], strays[1]


def _read_profile_dir(config: Any) -> str | None:
    """Return the folder of `--profiler-config`; None where it names no profiler. ConfigError for an invalid one."""
    if config is None or (isinstance(config, dict) and config.get("profiler") is None):
        return None
    if not isinstance(config, dict):
        raise ConfigError("--profiler-config must be a JSON object")
    if config["profiler"] != "torch":
        raise ConfigError(f"--profiler-config: profiler {config['profiler']!r} needs a GPU; use torch")
    folder = config.get("torch_profiler_dir")
    if not isinstance(folder, str) or not folder:
        raise ConfigError("--profiler-config: torch_profiler_dir is missing; name a folder for the traces")
    return folder


def _lora(module: Any) -> LoraModule:
    if isinstance(module, str) and "=" in module:
        name, _, path = module.partition("=")
        return LoraModule(name, path)
    try:
        return msgspec.convert(module, LoraModule)
    except msgspec.ValidationError:
        raise ConfigError(
            f"--lora-modules takes NAME=PATH or JSON with name and path; got {module!r}"
        ) from None
