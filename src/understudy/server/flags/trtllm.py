"""Reads the flags of `understudy serve --engine trtllm`: trtllm-serve's, our own, and those without effect here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.engines.trtllm_config import TrtllmConfig
from understudy.engines.trtllm_options import OptionsFile, read_options, read_options_file
from understudy.errors import ConfigError
from understudy.server.flags.engine import complete_engine, has_gpu
from understudy.server.flags.grammar import CommandLine, Flag, read_command_line, vllm_flags
from understudy.server.flags.ours import OURS
from understudy.server.flags.plan import ServePlan, settings_of

if TYPE_CHECKING:
    from understudy.server.flags.engine import BuiltEngine

TRTLLM_FLAGS = (
    *(
        Flag([f"--{name}"], "str")
        for name in (
            *(
                "tokenizer",
                "custom-tokenizer",
                "post-processor-hook",
                "host",
                "log-level",
                "custom-module-dirs",
            ),
            *("reasoning-parser", "tool-parser", "metadata-server-config-file", "server-role"),
            *("otlp-traces-endpoint", "disagg-cluster-uri", "media-io-kwargs", "chat-template", "middleware"),
            *("served-model-name", "visual-gen-args", "agent-types", "report-addr", "extra-llm-api-options"),
        )
    ),
    *(
        Flag([f"--{name}"], "int")
        for name in (
            *("port", "max-beam-width", "max-batch-size", "max-num-tokens", "max-seq-len", "gpus-per-node"),
            *("num-postprocess-workers", "num-serve-frontends", "num-input-processor-workers"),
            "num-media-load-workers",
        )
    ),
    Flag(["--tp-size", "--tensor-parallel-size"], "int"),
    Flag(["--pp-size", "--pipeline-parallel-size"], "int"),
    Flag(["--cp-size", "--context-parallel-size"], "int"),
    Flag(["--ep-size", "--moe-expert-parallel-size"], "int"),
    Flag(["--cluster-size", "--moe-cluster-parallel-size"], "int"),
    Flag(["--kv-cache-free-gpu-memory-fraction", "--free-gpu-memory-fraction"], "float"),
    Flag(["--kv-cache-dtype"], "str", choices=["auto", "fp8", "nvfp4"]),
    Flag(["--backend"], "str", choices=["pytorch", "_autodeploy"]),
    Flag(["--generation-config"], "str", choices=["auto", "trtllm"]),
    Flag(["--revision", "--hf-revision"], "str"),
    *(Flag([f"--{name}"], "float") for name in ("video-pruning-rate", "agent-percentage")),
    *(
        Flag([f"--{name}", f"--no-{name}"], "bool")
        for name in (
            *("trust-remote-code", "fail-fast-on-attention-window-too-large", "telemetry", "grpc"),
            *("enable-chunked-prefill", "enable-attention-dp", "allow-request-chat-template"),
            "enable-visual-gen",
        )
    ),
    Flag(["--trtllm-version"], "str"),
)
"""Flags of trtllm-serve 1.3.0rc25, and the release."""

_OF_VLLM = ("--api-key", "--kv-events-config", "--seed", "--enable-log-requests")
"""Flags of our own servers that vLLM has too."""
_LEFT_OUT = frozenset(
    (
        *("num-gpu-blocks", "vllm-version", "metrics", "old-metric-names", "dev-mode", "device", "backend"),
        *("random-weights", "global-cache-hit-threshold", "kv-cache-groups", "tiers", "kv-peer"),
    )
)
"""Our own flags for engines of other kinds."""
_REFUSED = {
    "server-role": "prefill and decode on different servers are not simulated",
    "disagg-cluster-uri": "prefill and decode on different servers are not simulated",
    "metadata-server-config-file": "servers are not registered",
    "enable-attention-dp": "attention with data parallelism is not simulated",
    "pp-size": "pipeline parallelism is not simulated",
    "cp-size": "context parallelism is not simulated",
    "max-beam-width": "beam search is not simulated",
    "grpc": "gRPC is not served",
    "enable-visual-gen": "images are not made",
}
_ENGINE = {
    "max-batch-size": "max_batch_size",
    "max-num-tokens": "max_num_tokens",
    "enable-chunked-prefill": "enable_chunked_prefill",
    "kv-cache-free-gpu-memory-fraction": "free_gpu_memory_fraction",
    "trtllm-version": "trtllm_version",
}
_SAME = (
    *("host", "port", "tokenizer", "kv-cache-dtype", "api-key", "kv-events-config", "seed", "model"),
    "enable-log-requests",
)
_GPU = {"tp-size": "tensor-parallel-size", "ep-size": "expert-parallel-size"}
_OWN_NAMES = frozenset(flag.name for flag in OURS) - _LEFT_OUT


def read_trtllm_serve(arguments: list[str], *, more: tuple[Flag, ...] = ()) -> ServePlan:
    """Read a command line with the flags of trtllm-serve. ConfigError names the problem and the remedy."""
    flags = {name: flag for flag in TRTLLM_FLAGS for name in flag.names}
    flags |= {name: vllm_flags()[name] for name in _OF_VLLM}
    for flag in (*OURS, *more):
        if flag.name not in _LEFT_OUT:
            flags |= {name: flag for name in flag.names if name not in flags}
    line = read_command_line(_rename_config(arguments), flags)
    given = line.values
    for name, why in _REFUSED.items():
        value = given.get(name)
        if value is True or value not in (None, False, 1):
            raise ConfigError(f"--{name.replace('-', '_')}: {why}; leave it out")
    path = given.get("extra-llm-api-options")
    file = OptionsFile() if path is None else read_options_file(Path(path))
    values = _translate(given, file)
    settings = {**file.engine, **read_options(_list_settings(given))}
    if settings.get("max_model_len") is not None:
        values["max-model-len"] = settings.pop("max_model_len")

    def build(values: dict[str, Any], max_model_len: int, model: str) -> BuiltEngine:
        built = complete_engine({**settings, "max_model_len": max_model_len}, values, model, TrtllmConfig)
        if built.gpu is None:
            _check_known_model(built.engine, model)
        return built

    server = settings_of(CommandLine(values, line.words), TrtllmConfig, build)
    assert isinstance(server.engine, TrtllmConfig)
    server = msgspec.structs.replace(
        server, max_model_len=min(server.max_model_len, server.engine.longest_sequence)
    )
    used = {*_SAME, *_ENGINE, *_OWN_NAMES, *(flag.name for flag in more)}
    used |= {"max-seq-len", "served-model-name", "tool-parser", "extra-llm-api-options", "backend", *_REFUSED}
    if has_gpu(values):
        used |= {*_GPU}
    else:
        used -= {"kv-cache-free-gpu-memory-fraction", "kv-cache-dtype"}
    return ServePlan(server, [name for name in given if name not in used and given[name] is not None], line)


def _rename_config(arguments: list[str]) -> list[str]:
    """Give TensorRT-LLM's `--config`, a file of options, its other name: ours is a file of flags."""
    option = "--extra-llm-api-options"
    renamed = [option if word == "--config" else word for word in arguments]
    return [
        f"{option}={word.partition('=')[2]}" if word.startswith("--config=") else word for word in renamed
    ]


def _list_settings(given: dict[str, Any]) -> dict[str, Any]:
    settings = {ours: given[name] for name, ours in _ENGINE.items() if given.get(name) is not None}
    if given.get("max-seq-len") is not None:
        settings["max_seq_len"] = given["max-seq-len"]
    return settings


def _translate(given: dict[str, Any], file: OptionsFile) -> dict[str, Any]:
    """Return the values under the names that the server's settings are read from."""
    values = {name: given[name] for name in (*_SAME, *_OWN_NAMES) if given.get(name) is not None}
    if given.get("served-model-name") is not None:
        values["served-model-name"] = [given["served-model-name"]]
    if given.get("tool-parser") is not None:
        values["tool-call-parser"] = given["tool-parser"]
    if not has_gpu(values):
        values.pop("kv-cache-dtype", None)
        return values
    for ours, size in file.gpu.items():
        values[ours.replace("_", "-")] = size
    values |= {ours: given[name] for name, ours in _GPU.items() if given.get(name) is not None}
    if file.kv_dtype is not None:
        values.setdefault("kv-cache-dtype", file.kv_dtype)
    return values


def _check_known_model(engine: Any, model: str) -> None:
    """Raise ConfigError for a known model of manager V1; most served names are of no known model."""
    from understudy.engines.trtllm_pools import check_manager
    from understudy.groups import layers_of_model

    try:
        layers_of_model(model, block_size=engine.block_size)
    except ConfigError:
        return
    check_manager(engine, model)
