"""Addresses of publishers: a rank's own, and who binds."""

from __future__ import annotations

import re

from understudy.errors import ConfigError


def rank_endpoint(endpoint: str, rank: int) -> str:
    """The address of a data-parallel rank: its port is `rank` above the first; `inproc` gets a suffix.

    A port of 0 (any) stays. ConfigError when the address has no port to count from, or the port would pass 65535.
    """
    if rank < 0:
        raise ConfigError(f"rank must be at least 0, got {rank}")
    if endpoint.startswith("inproc://"):
        return endpoint if rank == 0 else f"{endpoint}_dp{rank}"
    if endpoint.startswith("ipc://"):
        return endpoint if rank == 0 else f"{endpoint}.{rank}"
    found = re.fullmatch(r"(tcp://.+):(\d+|\*)", endpoint)
    if found is None:
        raise ConfigError(f"endpoint {endpoint!r} is not known: tcp://HOST:PORT, ipc://PATH or inproc://NAME")
    port = 0 if found[2] == "*" else int(found[2])
    if port == 0:
        return endpoint
    if port + rank > 65535:
        of_rank = f" + rank {rank}" if rank else ""
        raise ConfigError(f"endpoint {endpoint}: port {port}{of_rank} is past 65535")
    return f"{found[1]}:{port + rank}"


def binds(endpoint: str) -> bool:
    """Whether a publisher binds that address, as vLLM decides it; else it connects. (Nobody connects to 0.0.0.0.)"""
    return any(mark in endpoint for mark in ("*", "::", "0.0.0.0")) or endpoint.startswith(
        ("ipc:", "inproc:")
    )
