"""Links of a live server to its peers, and the peers that it may contact."""

from __future__ import annotations

import ipaddress
import math
import re
from typing import TYPE_CHECKING, Any

import msgspec

from understudy._core import HandOffLinks
from understudy.checks import whole_number
from understudy.errors import ConfigError
from understudy.tiers.model_shape import ModelShape

if TYPE_CHECKING:
    from collections.abc import Sequence

LINK_FLAGS = ("kv-peer", "kv-link-gbps", "kv-link-backend-gbps", "kv-link-latency-ms", "kv-bytes-per-token")
"""Our flags of links and peers."""


class PeerLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Links over which a server moves KV blocks, and the servers that it may contact."""

    link_gbps: float = math.inf
    """Bandwidth of the server's link, 10^9 bytes per second."""
    backend_gbps: float = math.inf
    """Bandwidth that all hand-offs of the process share."""
    latency_ms: float = 0.0
    """Fixed time of a transfer."""
    bytes_per_token: int = 0
    peers: tuple[str, ...] = ()
    """Addresses, networks or names of prefill servers that may be contacted, besides loopback."""

    def links(self, block_size: int) -> HandOffLinks:
        """Return the links of a process with this server."""
        return HandOffLinks(
            out_gbps=self.link_gbps,
            in_gbps=self.link_gbps,
            backend_gbps=self.backend_gbps,
            fixed_ns=round(self.latency_ms * 1e6),
            bytes_per_block=self.bytes_per_token * block_size,
        )

    def may_contact(self, host: str) -> bool:
        """Return True if a host is a loopback address or one of `peers`. Names are not resolved."""
        if host in ("localhost", *self.peers):
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return address.is_loopback or any(address in network for network in _networks(self.peers))


def _networks(peers: Sequence[str]) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    networks = []
    for peer in peers:
        try:
            networks.append(ipaddress.ip_network(peer, strict=False))
        except ValueError:
            continue  # a host name
    return networks


def read_links(values: dict[str, Any], model: str) -> dict[str, Any]:
    """Read the flags of links and peers as fields of `PeerLinks`. ConfigError names an invalid one."""
    gbps = {name: _positive(values, name, math.inf) for name in ("kv-link-gbps", "kv-link-backend-gbps")}
    size = values.get("kv-bytes-per-token")
    if size is not None:
        size = whole_number("--kv-bytes-per-token", size, 1, 1 << 30)
    elif math.isfinite(min(gbps.values())):
        size = _model_bytes(model, values.get("kv-cache-dtype"))
    latency_ms = values.get("kv-link-latency-ms")
    if latency_ms is not None and not 0 <= latency_ms <= 3_600_000:
        raise ConfigError(f"--kv-link-latency-ms must be 0 to 3,600,000, got {latency_ms:g}")
    return {
        "link_gbps": gbps["kv-link-gbps"],
        "backend_gbps": gbps["kv-link-backend-gbps"],
        "latency_ms": float(latency_ms or 0.0),
        "bytes_per_token": size or 0,
        "peers": tuple(map(_read_peer, values.get("kv-peer") or ())),
    }


def _model_bytes(model: str, kv_dtype: object) -> int:
    """Return the KV bytes of a token. ConfigError if the model is not known."""
    try:
        return ModelShape.find(model).bytes_per_token(
            kv_dtype=None if kv_dtype in (None, "auto") else str(kv_dtype)
        )
    except ConfigError as error:
        raise ConfigError(
            f"--kv-link-gbps needs the KV bytes of a token; give --kv-bytes-per-token, or a known model ({error})"
        ) from None


def _read_peer(value: object) -> str:
    """Return a peer of --kv-peer. ConfigError unless it is an address, a network or a host name."""
    peer = str(value)
    try:
        ipaddress.ip_network(peer, strict=False)
    except ValueError:
        if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", peer) is None:
            raise ConfigError(
                f"--kv-peer must be an address, a network or a host name without a port, got {peer!r}"
            ) from None
    return peer


def _positive(values: dict[str, Any], name: str, default: float) -> float:
    value = values.get(name)
    if value is None:
        return default
    if not value > 0:
        raise ConfigError(f"--{name} must be above 0, got {value:g}")
    return float(value)
