"""A prefill and a decode server of SGLang in one event loop, each with a clock and a driver of its own."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgspec

from server.client import Client
from understudy.server.flags.serving import read_serve
from understudy.server.server import Server

if TYPE_CHECKING:
    from server.client import Reply

QUICK = ["--set", "timing.kind=constant", "timing.prefill_ms=4", "timing.decode_ms=2"]
POOL = ["--page-size", "16", "--max-total-tokens", "8192"]
_ROOMS = itertools.count(1)


def make_side(role: str, *flags: str, **limits: float) -> Server:
    """Make one side, on free ports; `limits` are fields of its `PushSettings`."""
    port = ["--disaggregation-bootstrap-port", "0"] if role == "prefill" else []
    line = ["--engine", "sglang", "--port", "0", "--disaggregation-mode", role, *port, *POOL, *QUICK, *flags]
    settings = read_serve(line).settings
    assert settings.push is not None
    return Server(msgspec.structs.replace(settings, push=msgspec.structs.replace(settings.push, **limits)))


def bootstrap_port(prefill: Server) -> int:
    """Return the port on which decode servers find a prefill server."""
    assert prefill.worker.push is not None
    assert prefill.worker.push.prefill_side is not None
    return prefill.worker.push.prefill_side.bootstrap.port


def meet(prefill: Server | int, room: int | None = None) -> dict[str, Any]:
    """Return the fields with which a router sends a request to both sides."""
    port = prefill if isinstance(prefill, int) else bootstrap_port(prefill)
    room = next(_ROOMS) if room is None else room
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}


async def ask(server: Server, fields: dict[str, Any], text: str, tokens: int = 6, **more: Any) -> Reply:
    """Send a request to `/generate` of one side."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    return await Client(server.port).post(
        "/generate", {"text": text, "sampling_params": sampling, **fields, **more}
    )


def is_empty(server: Server) -> bool:
    """Return True if a side has no request, no memory in use and no room."""
    core, push = server.worker.cores[0], server.worker.push
    assert push is not None
    return core.is_empty and core.engine.snapshot().active_blocks == 0 and not push.rooms
