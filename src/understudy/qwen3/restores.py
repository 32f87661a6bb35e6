"""Requests whose pages are being brought back from host memory, and what goes there: the scheduler's fifth beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.tokens import TokenBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from understudy.qwen3.host import HostTier
    from understudy.qwen3.request import Request


class Restores:
    """Owns the requests that wait for a copy. One that is brought back is registered first and matched afterwards, so
    that a prefix on the device and one that was restored take the same way in."""

    def __init__(self, host: HostTier) -> None:
        self.host = host
        self.loading: list[Request] = []

    def begin(self, request: Request) -> bool:
        """Whether the request has to wait for pages that the host has and the device lacks."""
        if request.chain is None:
            request.chain = TokenBlocks(
                request.tokens, self.host.manager.layout.page_size, salt=request.salt, lora=request.lora
            )
        if request.holds:  # it has been here
            return False
        most = (len(request.prompt) - 1) // self.host.manager.layout.page_size  # a token is left to compute
        names = request.chain.identities[:most]
        here = self.host.manager.blocks.prefix_length(names)
        if here == most or self.host.blocks.prefix_length(names[here : here + 1]) == 0:
            return False
        held = self.host.manager.blocks.match_prefix(names[:here])  # must not be evicted for what comes
        request.load = self.host.onboard(names[here:])
        if request.load is None:
            held.release()
            return False
        request.holds = [held]
        self.loading.append(request)
        return True

    def arrived(self) -> list[Request]:
        """Requests whose pages have come."""
        self.host.note_ended()
        ready = [request for request in self.loading if request.load is not None and request.load.done()]
        for request in ready:
            self.loading.remove(request)
            assert request.load is not None
            request.holds.append(self.host.commit(request.load))
            request.load = None
        return ready

    def release_one(self, waiting: Iterable[Request]) -> bool:
        """Nobody runs and the first in line lacks room: the last that holds restored pages gives them up."""
        for request in reversed(list(waiting)):
            if request.holds:
                request.release_holds()
                return True
        return False

    def offer(self, request: Request) -> None:
        """Have the blocks copied down that a step has sealed."""
        kv, chain = request.kv, request.chain
        if kv is None or chain is None or kv.registered_blocks <= request.offered:
            return
        names = chain.identities[request.offered : kv.registered_blocks]
        request.offered = kv.registered_blocks
        self.host.offer(names)

    def drop(self, request: Request) -> None:
        """The request ends, wherever it is; a copy under way ends by itself."""
        if request in self.loading:
            self.loading.remove(request)
        if request.load is not None:
            self.host.abandon(request.load)
            request.load = None
        request.release_holds()
