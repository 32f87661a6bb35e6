"""Requests that wait for pages from host memory, and offloading of sealed pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.tokens import TokenBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from understudy.qwen3.host import HostTier
    from understudy.qwen3.request import Request


class Restores:
    """Owns the requests that wait for a copy.

    Loaded blocks are registered first and then matched, so that cached and loaded prefixes are admitted equally.
    """

    def __init__(self, host: HostTier) -> None:
        self.host = host
        self.loading: list[Request] = []

    def begin(self, request: Request) -> bool:
        """Begin to load pages that only the host has; return whether the request must wait for them."""
        if request.chain is None:
            request.chain = TokenBlocks(
                request.tokens, self.host.manager.layout.page_size, salt=request.salt, lora=request.lora
            )
        if request.holds:  # its pages were loaded before
            return False
        most = (
            len(request.prompt) - 1
        ) // self.host.manager.layout.page_size  # at least one token must be computed
        names = request.chain.identities[:most]
        here = self.host.manager.blocks.prefix_length(names)
        if here == most or self.host.blocks.prefix_length(names[here : here + 1]) == 0:
            return False
        held = self.host.manager.blocks.match_prefix(names[:here])  # must not be evicted by the load
        request.load = self.host.onboard(names[here:])
        if request.load is None:
            held.release()
            return False
        request.holds = [held]
        self.loading.append(request)
        return True

    def collect_loaded(self) -> list[Request]:
        """Return the requests whose pages have been loaded, and remove them from `loading`."""
        self.host.collect_ended()
        ready = [request for request in self.loading if request.load is not None and request.load.done()]
        for request in ready:
            self.loading.remove(request)
            assert request.load is not None
            request.holds.append(self.host.commit(request.load))
            request.load = None
        return ready

    def release_one(self, waiting: Iterable[Request]) -> bool:
        """Release the loaded pages of the last waiting request that has some; used when the first has no room."""
        for request in reversed(list(waiting)):
            if request.holds:
                request.release_holds()
                return True
        return False

    def offload(self, request: Request) -> None:
        """Offload the blocks that a step has sealed."""
        kv, chain = request.kv, request.chain
        if kv is None or chain is None or kv.registered_blocks <= request.offered:
            return
        names = chain.identities[request.offered : kv.registered_blocks]
        request.offered = kv.registered_blocks
        self.host.offload(names)

    def drop(self, request: Request) -> None:
        """Remove a request that ends; a copy in progress is abandoned."""
        if request in self.loading:
            self.loading.remove(request)
        if request.load is not None:
            self.host.abandon(request.load)
            request.load = None
        request.release_holds()
