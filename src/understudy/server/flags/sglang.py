"""Reads the flags of `understudy serve --engine sglang`: SGLang's, our own, and those without effect here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.engines.sglang_config import SGLANG_NAMES, SglangConfig
from understudy.errors import ConfigError
from understudy.server.flags.engine import complete_engine
from understudy.server.flags.grammar import CommandLine, Flag, read_command_line, sglang_flags
from understudy.server.flags.ours import OURS
from understudy.server.flags.plan import ServePlan, settings_of
from understudy.server.flags.tiers import offload_below, read_tiers
from understudy.server.push.settings import FLAGS as PUSH_FLAGS
from understudy.server.push.settings import check_push, read_push
from understudy.tiers.model_shape import count_kv_parts
from understudy.timing.contexts import known_context

if TYPE_CHECKING:
    from understudy.server.flags.engine import BuiltEngine
    from understudy.server.settings import ServerSettings
    from understudy.tiers.settings import TiersConfig

DEFAULT_PORT = 30000
_NOT_OURS = frozenset(("num-gpu-blocks", "vllm-version", "metrics", "old-metric-names", "dev-mode", "device"))
_NOT_OURS_EITHER = frozenset(("backend", "random-weights", "global-cache-hit-threshold"))
_SAME = (
    *("host", "port", "api-key", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "stream-interval"),
    *("tool-call-parser", "kv-cache-dtype", "model"),
)
_RENAMED = {
    "model-path": "model",
    "served-model-name": "served-model-name",
    "tokenizer-path": "tokenizer",
    "random-seed": "seed",
    "enable-cache-report": "enable-prompt-tokens-details",
    "log-requests": "enable-log-requests",
    "tp-size": "tensor-parallel-size",
    "mem-fraction-static": "gpu-memory-utilization",
    "kv-events-config": "kv-events-config",
}
"""SGLang's flags with a counterpart among vLLM's, which the server's settings are read from."""
_ENGINE = frozenset(
    name.replace("_", "-")
    for name in (*SglangConfig.__struct_fields__, *SGLANG_NAMES, "sglang_version")
    if name not in ("timing", "mocker", "tiers") and not name.startswith(("swa_", "mamba_", "max_mamba_"))
)
_HICACHE = ("enable-hierarchical-cache", "hicache-ratio", "hicache-size")
_REFUSED = {
    "speculative-algorithm": "SGLang's speculation is not simulated",
    "hicache-storage-backend": "HiCache has no storage behind the host here",
    "skip-tokenizer-init": "answers are made with the tokenizer",
    "admin-api-key": "--api-key protects the control routes, too",
    "pp-size": "pipeline stages are not simulated",
    "dcp-size": "context parallelism is not simulated",
    "attn-cp-size": "context parallelism is not simulated",
    "smg-grpc-mode": "gRPC is not served",
    "grpc-mode": "gRPC is not served",
}
_OFF = (None, False, "null", "none")
_SIZES = ("pp-size", "dcp-size", "attn-cp-size")
"""Of these, 1 is off too."""
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?")
_SCALE = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SCALE |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def read_sglang_serve(arguments: list[str], *, more: tuple[Flag, ...] = ()) -> ServePlan:
    """Read a command line with SGLang's flags. ConfigError names the problem and the remedy."""
    flags = dict(sglang_flags())
    for flag in (*OURS, *more):
        if flag.name not in _NOT_OURS | _NOT_OURS_EITHER:
            flags |= {name: flag for name in flag.names if name not in flags}
    flags["--sglang-version"] = Flag(["--sglang-version"], "str")
    line = read_command_line(arguments, flags)
    given = line.values
    for name, why in _REFUSED.items():
        value = given.get(name)
        is_one = name in _SIZES and value in (1, "1")
        if value not in _OFF and not is_one:
            raise ConfigError(f"--{name}: {why}; leave it out")
    values = _translate(given, listens=not more)
    tiers = values.pop("tiers", None)
    model = line.words[0] if line.words else str(values.get("model") or "understudy/tok")
    push = read_push(given, values, model)
    engines: list[BuiltEngine] = []

    def build(values: dict[str, Any], max_model_len: int, model: str) -> BuiltEngine:
        settings: dict[str, Any] = {"context_length": max_model_len}
        for name in _ENGINE:
            if given.get(name) is not None and name != "context-length":
                settings[name.replace("-", "_")] = given[name]
        if "max_total_tokens" in settings:
            settings["max_total_tokens"] = _read_count("max-total-tokens", settings["max_total_tokens"])
        built = complete_engine(settings, values, model, SglangConfig)
        engines.append(built)
        return built

    context = given.get("context-length")
    if context is not None:
        values["max-model-len"] = _read_count("context-length", context)
    elif known_context(model) is None:
        values["max-model-len"] = 131072
    server = settings_of(CommandLine(values, line.words), SglangConfig, build)
    if given.get("incremental-streaming-output"):
        server = msgspec.structs.replace(server, incremental_streaming_output=True)
    server = _with_tiers(server, engines[0], given, None if tiers is None else read_tiers(tiers))
    if push is not None:
        if more:
            raise ConfigError(
                "--disaggregation-mode: a process has one side; start each server with `understudy serve`"
            )
        server = msgspec.structs.replace(server, push=push)
        check_push(has_tiers=bool(server.tiers.tiers), data_parallel_size=server.data_parallel_size)
    used = {
        *_SAME,
        *_RENAMED,
        *_ENGINE,
        *_OWN_USED,
        "dp-size",
        "context-length",
        "incremental-streaming-output",
        *(PUSH_FLAGS if push is not None else ()),
    }
    used |= {*_HICACHE} if server.tiers.tiers else set()
    used |= {flag.name for flag in more}
    return ServePlan(server, [name for name in given if name not in used and given[name] is not None], line)


_OWN_USED = frozenset(flag.name for flag in OURS)


def _translate(given: dict[str, Any], *, listens: bool) -> dict[str, Any]:
    """Return the values under the names that the server's settings are read from."""
    values = {name: given[name] for name in (*_SAME, *_OWN_USED) if given.get(name) is not None}
    values |= {ours: given[name] for name, ours in _RENAMED.items() if given.get(name) is not None}
    if "served-model-name" in values:
        values["served-model-name"] = [values["served-model-name"]]
    if "api-key" in values:
        values["api-key"] = [values["api-key"]]
    if given.get("dp-size") is not None:
        values["data-parallel-size"] = given["dp-size"]
    if "kv-events-config" in values:
        values["kv-events-config"] = _read_events(values["kv-events-config"])
    if listens:
        values.setdefault("port", DEFAULT_PORT)
    return values


def _read_events(config: Any) -> dict[str, Any]:
    """Read SGLang's --kv-events-config: events are published if the publisher is zmq."""
    if not isinstance(config, dict):
        raise ConfigError("--kv-events-config must be a JSON object")
    if config.get("format", "default") != "default":
        raise ConfigError("--kv-events-config: format must be default; the format of Dynamo is not published")
    if config.get("bind") is False:
        raise ConfigError("--kv-events-config: bind must not be false; the publisher listens here")
    known = {name: value for name, value in config.items() if name not in ("format", "bind")}
    return {**known, "enable_kv_cache_events": config.get("publisher") == "zmq"}


def _read_count(flag: str, value: Any) -> int:
    """Parse a number of tokens as SGLang does: 32k is 32000, 32Ki is 32768."""
    found = _NUMBER.fullmatch(str(value).strip())
    if found is None:
        raise ConfigError(f"--{flag} must be a number of tokens, as 32768, 32k or 32Ki; got {value!r}")
    return int(float(found[1]) * _SCALE[found[2] or ""])


def _with_tiers(
    server: ServerSettings, built: BuiltEngine, given: dict[str, Any], tiers: TiersConfig | None
) -> ServerSettings:
    """Add the host tier of HiCache's flags, or of --tiers. ConfigError when both give one.

    `--hicache-size` is the memory of each GPU's process, while tiers belong to the whole engine.
    """
    if not given.get("enable-hierarchical-cache"):
        return server if tiers is None else msgspec.structs.replace(server, tiers=tiers)
    ratio, size_gb = given.get("hicache-ratio"), given.get("hicache-size")
    tier: dict[str, Any] = {"tier": "g2"}
    if size_gb:
        gpus = int(given.get("tp-size") or 1) if built.gpu is None else built.gpu.tensor_parallel_size
        tier["bytes"] = int(float(size_gb) * 1e9) * count_kv_parts(server.model, gpus)
    else:
        ratio = 2.0 if ratio is None else ratio
        if not ratio > 0:
            raise ConfigError(f"--hicache-ratio must be positive, got {ratio}")
        tier["blocks"] = max(int(built.engine.num_gpu_blocks * ratio), 1)
    return msgspec.structs.replace(server, tiers=offload_below({"tiers": [tier]}, tiers, server.model))
