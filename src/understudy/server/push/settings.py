"""Settings of a live server that is one side of SGLang's prefill/decode disaggregation."""

from __future__ import annotations

import os
from typing import Any, Literal

import msgspec

from understudy.checks import port_number
from understudy.errors import ConfigError
from understudy.server.handoff.links import LINK_FLAGS, PeerLinks, read_links

BOOTSTRAP_PORT = 8998
FAKE_HOST = "2.2.2.2"
"""SGLang's name of a prefill server for requests whose KV moves nowhere."""
FLAGS = (
    *("disaggregation-mode", "disaggregation-bootstrap-port", "disaggregation-transfer-backend"),
    "disaggregation-decode-allocation-policy",
)
"""Flags of SGLang that these settings are read from."""
_BACKENDS = ("mooncake", "mooncake_tcp", "nixl", "mori", "ascend", "fake")
_REFUSED = {
    "disaggregation-decode-enable-offload-kvcache": "a decode server's offload is not simulated",
    "disaggregation-decode-host-receive-threshold": "KV that arrives in host memory is not simulated",
}


class PushSettings(PeerLinks, frozen=True, kw_only=True):
    """How a server takes part: its side, its link, and how long it waits for the other side."""

    role: Literal["prefill", "decode"]
    backend: str = "mooncake"
    """Name of the transfer engine; `fake` moves nothing."""
    bootstrap_port: int = BOOTSTRAP_PORT
    """Where decode servers find a prefill server; of a decode server, the port of prefill servers without one."""
    kv_dtype: str = "auto"
    """Type of the KV cache, which must be equal on both sides."""
    boot_timeout_s: float = 300.0
    """How long a prefill server waits for a decode server's memory."""
    wait_timeout_s: float = 300.0
    """How long a decode server waits for KV once it has memory."""
    drain_timeout_s: float = 30.0
    """How long a decode server keeps memory of a failed transfer that its prefill server may still write."""
    heartbeat_s: float = 5.0
    """Interval of a decode server's looks at its prefill servers."""
    heartbeat_failures: int = 2
    """Failed looks after which a prefill server is lost."""

    @property
    def prefills(self) -> bool:
        """True on the prefill side."""
        return self.role == "prefill"


def read_push(given: dict[str, Any], values: dict[str, Any], model: str) -> PushSettings | None:
    """Read the flags of one side; None without `--disaggregation-mode`. Takes the flags of links out of `values`.

    Errors: ConfigError names an invalid flag.
    """
    role = given.get("disaggregation-mode")
    if role in (None, "null", False):
        return None
    if role not in ("prefill", "decode"):
        raise ConfigError(f"--disaggregation-mode must be null, prefill or decode, got {role!r}")
    for name, why in _REFUSED.items():
        if given.get(name):
            raise ConfigError(f"--{name}: {why}; leave it out")
    if given.get("disaggregation-decode-allocation-policy") not in (None, "early"):
        raise ConfigError(
            "--disaggregation-decode-allocation-policy must be early; memory after the prefill is not simulated"
        )
    backend = given.get("disaggregation-transfer-backend") or "mooncake"
    if backend not in _BACKENDS:
        raise ConfigError(
            f"--disaggregation-transfer-backend must be one of {', '.join(_BACKENDS)}, got {backend!r}"
        )
    port = given.get("disaggregation-bootstrap-port")
    links = read_links(values, model)
    for name in LINK_FLAGS:
        values.pop(name, None)
    return PushSettings(
        role=role,
        backend=backend,
        bootstrap_port=port_number(
            "--disaggregation-bootstrap-port", BOOTSTRAP_PORT if port is None else port
        ),
        kv_dtype=str(given.get("kv-cache-dtype") or "auto"),
        boot_timeout_s=_read_variable("BOOTSTRAP_TIMEOUT", 300.0),
        wait_timeout_s=_read_variable("WAITING_TIMEOUT", 300.0),
        drain_timeout_s=_read_variable("DEFERRED_DECODE_KV_RELEASE_TIMEOUT", 30.0),
        heartbeat_s=_read_variable("HEARTBEAT_INTERVAL", 5.0),
        heartbeat_failures=max(int(_read_variable("HEARTBEAT_MAX_FAILURE", 2.0)), 1),
        **links,
    )


def check_push(*, has_tiers: bool, data_parallel_size: int) -> None:
    """Raise ConfigError for a server that cannot be one side."""
    wrong = {"a host tier (HiCache)": has_tiers, "--dp-size": data_parallel_size > 1}
    for name, given in wrong.items():
        if given:
            raise ConfigError(
                f"--disaggregation-mode: {name} is not simulated with it; leave one of them out"
            )


def _read_variable(name: str, default: float) -> float:
    """Read one of SGLang's environment variables. ConfigError unless it is a number above 0."""
    whole = f"SGLANG_DISAGGREGATION_{name}"
    text = os.environ.get(whole)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1e6:
        raise ConfigError(f"{whole} must be a number above 0 and at most 1,000,000, got {text!r}")
    return value


class Bootstrap(msgspec.Struct, frozen=True):
    """Where the two sides of a request meet."""

    room: int
    host: str = ""
    port: int = 0

    @property
    def alone(self) -> bool:
        """True when its KV moves nowhere."""
        return self.host == FAKE_HOST
