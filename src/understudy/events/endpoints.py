"""Addresses of publishers: the endpoint of each rank, and which side binds it."""

from __future__ import annotations

import re

from understudy.errors import ConfigError


def rank_endpoint(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank: the port plus `rank`; `inproc` and `ipc` get a suffix.

    A port of 0 (any) stays. ConfigError when the address has no port, or the port would exceed 65535.
    """
    if rank < 0:
        raise ConfigError(f"rank must be at least 0, got {rank}")
    if endpoint.startswith("inproc://"):
        return endpoint if rank == 0 else f"{endpoint}_dp{rank}"
    if endpoint.startswith("ipc://"):
        return endpoint if rank == 0 else f"{endpoint}.{rank}"
    found = re.fullmatch(r"(tcp://.+):(\d+|\*)", endpoint)
    if found is None:
        raise ConfigError(
            f"endpoint: {endpoint!r} is not known; write tcp://HOST:PORT, ipc://PATH or inproc://NAME"
        )
    port = 0 if found[2] == "*" else int(found[2])
    if port == 0:
        return endpoint
    if port + rank > 65535:
        of_rank = f" + rank {rank}" if rank else ""
        raise ConfigError(f"endpoint: port {port}{of_rank} of {endpoint} exceeds 65535; choose a lower port")
    return f"{found[1]}:{port + rank}"


def should_bind(endpoint: str) -> bool:
    """Return whether a publisher binds that address, by vLLM's rule; else it connects."""
    return any(mark in endpoint for mark in ("*", "::", "0.0.0.0")) or endpoint.startswith(
        ("ipc:", "inproc:")
    )
