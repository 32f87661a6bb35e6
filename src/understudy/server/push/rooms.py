"""Reads `bootstrap_host`, `bootstrap_port` and `bootstrap_room` of a request, as SGLang's routers send them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.server.api.errors import ApiError
from understudy.server.push.settings import FAKE_HOST, Bootstrap

if TYPE_CHECKING:
    from understudy.server.api.fields import Fields
    from understudy.server.push.settings import PushSettings

FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
MAX_ROOM = 2**63 - 1
_MAX_HOST = 255


def take_fields(body: Fields) -> dict[str, Any] | None:
    """Return the fields that a body has; None without any."""
    found = {name: body.raw(name) for name in FIELDS if body.raw(name) is not None}
    return found or None


def read_bootstrap(
    fields: dict[str, Any] | None, index: int, count: int, settings: PushSettings
) -> Bootstrap:
    """Return where the sides of answer `index` of `count` meet. ApiError names a missing or wrong field."""
    fields = fields or {}
    room = _at(fields, "bootstrap_room", index, count)
    if room is None:
        if settings.backend == "fake":
            return Bootstrap(0, FAKE_HOST)
        raise ApiError(
            "Invalid request: Disaggregated request received without bootstrap room id. Send the request through a "
            "router in front of prefill and decode servers."
        )
    if type(room) is not int or not 0 <= room <= MAX_ROOM:
        raise ApiError(f"bootstrap_room: must be a whole number of 0 to 2^63 - 1, got {room!r}")
    host = _at(fields, "bootstrap_host", index, count)
    if host is not None and not (isinstance(host, str) and 0 < len(host) <= _MAX_HOST):
        raise ApiError("bootstrap_host: must be the name or address of a prefill server")
    host = "" if host is None else host.removeprefix("[").removesuffix("]")
    port = _at(fields, "bootstrap_port", index, count)
    if port is not None and (type(port) is not int or not 1 <= port <= 65535):
        raise ApiError(f"bootstrap_port: must be a port, got {port!r}")
    port = port or settings.bootstrap_port
    if settings.backend == "fake":
        host = FAKE_HOST
    if settings.prefills or host == FAKE_HOST:
        return Bootstrap(room, host, port)
    if not host:
        raise ApiError("bootstrap_host: is missing; name the prefill server that computes the prompt")
    if not settings.may_contact(host):
        raise ApiError(f"bootstrap_host: {host!r} is no peer of this server; allow it with --kv-peer")
    return Bootstrap(room, host, port)


def _at(fields: dict[str, Any], name: str, index: int, count: int) -> Any:
    """Return the value of one answer: of a list its member; rooms count up from one number."""
    value = fields.get(name)
    if isinstance(value, list):
        if len(value) != count:
            raise ApiError(f"{name}: has {len(value)} values for {count} answers; give one for each")
        return value[index]
    if name == "bootstrap_room" and type(value) is int:
        return value + index
    return value
