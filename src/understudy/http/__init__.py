"""HTTP/1.1 server on asyncio protocols, with one write per step and connection."""

from __future__ import annotations

from understudy.http.connection import Connection
from understudy.http.listen import address_of, listen
from understudy.http.outbox import Outbox
from understudy.http.request import Request

__all__ = ["Connection", "Outbox", "Request", "address_of", "listen"]
