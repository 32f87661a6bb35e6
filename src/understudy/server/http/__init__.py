"""HTTP/1.1 server on asyncio protocols, with one write per step and connection."""

from __future__ import annotations

from understudy.server.http.connection import Connection
from understudy.server.http.listen import address_of, listen
from understudy.server.http.outbox import Outbox
from understudy.server.http.request import Request

__all__ = ["Connection", "Outbox", "Request", "address_of", "listen"]
