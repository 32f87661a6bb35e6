"""Reads the flags of `understudy serve`: vLLM's, our own, and those without effect here."""

from __future__ import annotations

from itertools import pairwise

from understudy.context_parallel import refuse_context_parallel
from understudy.engines.kinds.registry import default_kind, find_kind
from understudy.errors import ConfigError
from understudy.kind_names import KIND_MODULES
from understudy.server.flags.engine import IDLE_WITHOUT, has_gpu, list_engine_flags
from understudy.server.flags.grammar import Flag, read_command_line, vllm_flags
from understudy.server.flags.ours import all_flags, find_flags_version
from understudy.server.flags.plan import SERVER_FLAGS, ServePlan, settings_of
from understudy.server.flags.sglang import read_sglang_serve
from understudy.server.flags.trtllm import read_trtllm_serve
from understudy.server.handoff.settings import FLAGS as HANDOFF_FLAGS
from understudy.timing.gpu_flags import GPU_FLAGS

_TIMES = ("timing", *(name for name in GPU_FLAGS if f"--{name}" not in vllm_flags()))
"""Our flags for the time of steps, which a real engine measures."""
_HANDLED = frozenset(
    (
        "timing",
        *(
            "model",
            "served-model-name",
            "max-model-len",
            "api-key",
            "admin-host",
            "allowed-origins",
            "lora-modules",
            "kv-events-config",
            "profiler-config",
        ),
        *("kv-offloading-size", "kv-offloading-backend", "kv-transfer-config", *HANDOFF_FLAGS),
        *(
            "set",
            "tiers",
            "session-kv",
            "max-request-body-size-mb",
            "time-to-first-token",
            "inter-token-latency",
        ),
        *("time-to-first-token-std-dev", "inter-token-latency-std-dev"),
        *("failure-injection-rate", "failure-types", "fake-metrics", "engine"),
    )
)

READERS = {"sglang": read_sglang_serve, "trtllm": read_trtllm_serve}
"""Readers of command lines with the flags of a kind of engine; others take vLLM's flags."""


def read_serve(arguments: list[str], *, more: tuple[Flag, ...] = ()) -> ServePlan:
    """Read a command line, with the flags of the engine that it names. ConfigError names the problem and the remedy."""
    name = find_engine_name(arguments)
    if name and name != "vllm" and any(word.partition("=")[0] == "--session-kv" for word in arguments):
        raise ConfigError(f"--session-kv: works with vLLM's scheduler; leave it out with --engine {name}")
    if name in READERS:
        return READERS[name](arguments, more=more)
    kind = find_kind(name) if name in KIND_MODULES else default_kind()  # whose flags refuse other names
    ours = {name: flag for flag in more for name in flag.names}
    line = read_command_line(arguments, {**all_flags(find_flags_version(arguments, ours)), **ours})
    extra = {flag.name for flag in more}
    if has_gpu(line.values):
        extra |= {*GPU_FLAGS, "kv-cache-dtype"} - {"front-end-ms"}  # a live server has a front end of its own
        if any(line.values.get(name) is not None for name in ("num-gpu-blocks", "num-gpu-blocks-override")):
            extra -= {"gpu-memory-utilization"}  # as with vLLM, the blocks are known
    if line.values.get("engine") == "qwen3":
        for name in _TIMES:
            if line.values.get(name) is not None:
                raise ConfigError(f"--{name} is for a simulated engine; leave it out with --engine qwen3")
    used = {*SERVER_FLAGS, *list_engine_flags(kind.config_class), *_HANDLED, *extra}
    if not line.values.get("enable-lora"):
        used -= {"max-loras", "max-cpu-loras"}  # vLLM takes them too, and does nothing
    if line.values.get("ssl-certfile") is None:
        used -= {"ssl-ca-certs", "ssl-cert-reqs"}  # nothing is encrypted
    if line.values.get("uds") is not None and line.values.get("kv-events-config") is None:
        used -= {"host", "port"}  # the topic of events may name them
    if line.values.get("kv-offloading-size") is None and line.values.get("kv-transfer-config") is None:
        used -= {"kv-offloading-backend"}
    if not line.values.get("kv-cache-metrics"):
        used -= {"kv-cache-metrics-sample"}
    refuse_context_parallel(line.values, are_flags=True)
    settings = settings_of(line, kind.config_class)
    engine = settings.engine
    for name, needed in IDLE_WITHOUT.items():
        if not getattr(engine, needed, None):
            used -= {name}
    strays = any(settings.latency_std_dev_ms) or settings.tiers.offload.onboard_failure_rate
    if settings.response_mode == "echo" and not strays and not more and line.values.get("engine") != "qwen3":
        used -= {"seed"}  # of what is said, of times that stray and loads that fail, and of a fleet's routing
    idle = [name for name in line.values if name not in used and line.values[name] is not None]
    return ServePlan(settings, idle, line)


def find_engine_name(arguments: list[str]) -> str:
    """Return the engine that a command line chooses, empty without a choice; the last choice counts."""
    chosen = ""
    for word, after in pairwise([*arguments, ""]):
        if word == "--engine":
            chosen = after
        elif word.startswith("--engine="):
            chosen = word.partition("=")[2]
    return chosen
