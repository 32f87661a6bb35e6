"""Embed `KvManager` in a small serving loop: admission, decoding, a preemption, and prefixes that are shared.

Run it: `python examples/embed_kv_manager.py`.
"""

from __future__ import annotations

from collections import deque
from itertools import count

from understudy.errors import CapacityExhausted
from understudy.kv.kv_manager import KvManager
from understudy.tokens import Identities, Identity, TokenBlocks

BLOCK_SIZE = 4
_partial_ids = count()


class Request:
    """A request: its tokens, and the id of its last block while that block is not full."""

    def __init__(self, name: str, prompt: range, outputs: int) -> None:
        self.name = name
        self.tokens = TokenBlocks(prompt, BLOCK_SIZE)
        self.length = len(prompt) + outputs
        self.partial = next(_partial_ids)

    def sample(self) -> int:
        """Return the next token; a stand-in for the model."""
        return 1000 * ord(self.name) + len(self.tokens)

    @property
    def full_blocks(self) -> Identities:
        """Identities of the full blocks; equal prefixes have equal identities."""
        return self.tokens.identities

    def blocks(self) -> list[Identity | int]:
        """List all blocks in order: the full ones, then the partial one that the next token is written to."""
        return [*self.full_blocks, self.partial]


class Server:
    """Serve requests first come, first served; preempt the newest one if the blocks do not suffice."""

    def __init__(self, num_gpu_blocks: int) -> None:
        self.kv = KvManager(num_gpu_blocks, BLOCK_SIZE, events=True)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def admit(self) -> None:
        """Acquire the blocks of waiting requests, all blocks of a request or none."""
        while self.waiting:
            request = self.waiting[0]
            cached, _ = self.kv.overlap(request.full_blocks)
            try:
                self.kv.acquire(request.blocks())
            except CapacityExhausted:
                return
            self.running.append(self.waiting.popleft())
            print(f"{request.name}: admitted, {cached} of {len(request.full_blocks)} full blocks cached")

    def step(self) -> None:
        """Generate one token for every running request, the oldest first."""
        for request in list(self.running):
            if request in self.running:  # an older request may have preempted it
                self.decode(request)

    def decode(self, request: Request) -> None:
        """Append a token. A block that it completes is sealed, and the next token needs another block."""
        held = request.blocks()
        is_complete = request.tokens.append(request.sample()) is not None
        if is_complete:
            self.kv.seal(request.partial, request.full_blocks[-1])
            held = list(request.full_blocks)
            request.partial = next(_partial_ids)
        if len(request.tokens) == request.length:
            self.running.remove(request)
            self.kv.release(held[::-1])  # the tail first: prefixes stay cached longest
            print(f"{request.name}: finished with {request.length} tokens")
        elif is_complete:
            self.acquire_partial(request)

    def acquire_partial(self, request: Request) -> None:
        """Acquire the request's next block; preempt the newest requests until there is room."""
        while request in self.running:
            try:
                self.kv.acquire([request.partial])
                return
            except CapacityExhausted:
                victim = self.running.pop()
                held = list(victim.full_blocks) if victim is request else victim.blocks()
                self.kv.release(held[::-1])
                self.waiting.appendleft(victim)
                print(f"{victim.name}: preempted")


def main() -> None:
    """Serve three requests with a pool that is too small for all of them."""
    server = Server(num_gpu_blocks=8)
    system_prompt = 8
    server.waiting += [
        Request("a", range(system_prompt + 4), outputs=8),
        Request("b", range(system_prompt + 2), outputs=6),
        Request("c", range(100, 108), outputs=9),
    ]
    while server.waiting or server.running:
        server.admit()
        server.step()
        server.kv.check()
    secret = TokenBlocks(range(100, 108), BLOCK_SIZE).identities
    server.kv.acquire(secret)
    server.kv.discard(secret)  # no later request finds these blocks
    print(f"c: {server.kv.overlap(secret)[0]} blocks cached after discard")
    events = server.kv.drain_events().consolidated
    print(
        f"{len(events)} KV events; {server.kv.active_blocks} active, {server.kv.inactive_blocks} cached blocks"
    )


if __name__ == "__main__":
    main()
