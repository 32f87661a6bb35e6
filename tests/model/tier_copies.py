"""Room on the device, and copies down from it: what is evicted, held, queued and lands."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, Any, Literal

from .links import ModelLink, ModelTransfer, completions
from .tier_store import Copy, Load, Park, Store, TierSettings, Told, Waiting
from .vllm_scheduler import VllmModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from fractions import Fraction

    from .vllm_blocks import Block
    from .vllm_config import Profile
    from .vllm_requests import Request


class CopiesDown(VllmModel):
    """Half of the model: `take` makes room, `write_through` copies at once, `land` lets transfers arrive."""

    def __init__(self, config: Mapping[str, Any], profile: Profile, tiers: TierSettings) -> None:
        super().__init__(config, profile)
        self.tiers = tiers
        self.told: list[Told] = []
        self.told_below: list[Told] = []
        self.host = Store(2, tiers.g2_blocks, self.tell)
        self.below = [Store(tier, blocks, self.told_below.append) for tier, blocks, _, _ in tiers.below]
        self.links = [ModelLink(tiers.down, tiers.fixed_ns), ModelLink(tiers.up, tiers.fixed_ns)]
        for _, _, down, up in tiers.below:
            self.links += [ModelLink(down), ModelLink(up)]
        self.now_ns = 0
        self.under_way: list[tuple[ModelTransfer, Callable[[], None], bool]] = []  # and whether it has ended
        self.ends: list[tuple[int, int]] | None = None  # of those, while none joins them
        self.held = 0
        self.reuse: dict[int, int] = {}
        self.copies: list[Copy] = []
        self.queue: deque[Copy] = deque()
        self.copying = 0
        self.landing: dict[int, Copy] = {}
        self.loading: dict[int, Load] = {}
        self.waits: dict[Request, Waiting] = {}
        self.parks: dict[Request, Park] = {}
        self.ready: list[Request] = []
        self.parked: list[Request] = []
        self.was: dict[Request, Literal["new", "preempted"]] = {}
        self.tried: set[Request] = set()
        self.through: dict[Request, int] = {}
        self.from_below: dict[Request, list[int]] = {}
        self.parked_ns: dict[Request, int] = {}
        self.loading_now = 0  # loads on the link to the device
        self.offloaded = self.dropped = self.onboarded = self.slow_loads = 0

    def tell(self, told: Told) -> None:
        self.take_device_events()
        self.told.append(told)

    def take_device_events(self) -> None:
        for event in self.pool.events:
            self.told += [(event["type"], 1, key) for key in event["h"]]
        self.pool.events = []

    # --- time ---------------------------------------------------------------------------------------------

    def start(self, path: tuple[int, ...], blocks: int, then: Callable[[], None]) -> None:
        if all(ended for _, _, ended in self.under_way):
            self.under_way = []
        size = blocks * self.tiers.block_bytes
        self.ends = None
        self.under_way.append((ModelTransfer(self.now_ns, path, size), then, False))

    def flow_ns(self, bytes_per_ns: Fraction | None, blocks: int, sharers: int) -> int:
        """An estimate: at an equal share, as if nobody came or left."""
        return 0 if bytes_per_ns is None else ceil(blocks * self.tiers.block_bytes * sharers / bytes_per_ns)

    def next_end(self) -> int | None:
        ends = [time for time, i in self._ends() if not self.under_way[i][2]]
        return min(ends) if ends else None

    def _ends(self) -> list[tuple[int, int]]:
        if self.ends is None:
            fresh = [ModelTransfer(t.start_ns, t.path, t.num_bytes) for t, _, _ in self.under_way]
            self.ends = completions(self.links, [], fresh)
        return self.ends

    def land(self, now_ns: int) -> None:
        """Everything that ends by then, each at its time; what that starts may end too."""
        while (then := self.next_end()) is not None and then <= now_ns:
            self.now_ns = max(self.now_ns, then)
            due = [i for time, i in self._ends() if time == then and not self.under_way[i][2]]
            transfers = self.under_way
            for i in due:
                transfer, action, _ = transfers[i]
                transfers[i] = (transfer, action, True)
            for i in due:
                transfers[i][1]()
        self.now_ns = max(self.now_ns, now_ns)

    # --- room on the device -------------------------------------------------------------------------------

    def take(self, request: Request | None, count: int) -> list[Block] | Literal["short", "wait"]:
        """Slots for `count` blocks. What is evicted and worth it is copied, and its slot held meanwhile."""
        while True:
            free = self.pool.free_count()
            if count > free + self.held:
                return "short"
            if count > free:
                self.wait_for_held(request, count - free)
                return "wait"
            if request is None and not self.tiers.write_through:
                going = [block.key for block in islice(self.pool.free.values(), count)]
                if any(k is not None and k not in self.host.refs and k not in self.landing for k in going):
                    return "short"  # nobody would wait for the copy
            blocks, evicted = [], []
            for _ in range(count):
                key = next(iter(self.pool.free.values())).key
                (block,) = self.pool.take_free(1)
                blocks.append(block)
                if key is not None:
                    evicted.append((block if key not in self.pool.index else None, key))
            chosen = [] if self.tiers.write_through else self.choose(evicted)
            if not chosen:
                for block in blocks:
                    self.reuse[block.id] = 0
                return blocks
            self.host.reserve(len(chosen))
            leaving = {block for block, _ in chosen}
            self.give_back([block for block in blocks if block not in leaving])
            self.held += len(chosen)
            held_before = self.held
            self.copy_down(list(reversed(chosen)), True, request)
            self.land(self.now_ns)
            if request is None and self.held > held_before - len(chosen):
                return "wait"
            if request is not None and self.waits_for_room(request):
                return "wait"

    def choose(self, blocks: Sequence[tuple[Block | None, int]]) -> list[tuple[Block, int]]:
        chosen, used = [], []
        for block, key in blocks:
            if key in self.host.refs:
                used.append(key)
            elif block is None or key in self.landing:
                continue  # another copy of it stays, or is on its way
            elif self.reuse.get(block.id, 0) >= self.tiers.min_reuse:
                chosen.append((block, key))
        for key in used:
            self.host.touch(key)
        excess = max(0, len(chosen) - self.host.available())
        self.dropped += excess
        if self.tiers.write_through:
            return chosen[: len(chosen) - excess]
        return chosen[excess:]  # evicted from the ends of chains, which nobody finds without their beginnings

    def give_back(self, blocks: Sequence[Block]) -> None:
        """Empty slots, to the front: the first of them is handed out next."""
        for block in reversed(blocks):
            block.refs = 0
            self.pool.free[block.id] = block
            self.pool.free.move_to_end(block.id, last=False)

    def waits_for_room(self, request: Request) -> bool:
        return request in self.waits and self.waits[request].left > 0

    def wait_for(self, request: Request | None, copy: Copy) -> None:
        if request is None:
            return
        wait = self.waits.setdefault(request, Waiting())
        if wait.left == 0:
            wait.since_ns = self.now_ns
        wait.left += 1
        copy.waiters.append((request, wait.attempt))

    def wait_for_held(self, request: Request | None, slots: int) -> None:
        for copy in self.copies:
            if copy.held and slots > 0:
                self.wait_for(request, copy)
                slots -= len(copy.blocks)

    def stop_waiting(self, request: Request) -> None:
        if self.waits_for_room(request):
            wait = self.waits[request]
            wait.total_ns += self.now_ns - wait.since_ns
            wait.left = 0
            wait.attempt += 1

    # --- down ---------------------------------------------------------------------------------------------

    def write_through(self, table: Sequence[Block]) -> None:
        keyed = [(block, block.key) for block in table if block.key is not None]
        chosen = self.choose(keyed)
        if chosen:
            self.host.reserve(len(chosen))
            for block, _ in chosen:
                block.refs += 1
            self.copy_down(chosen, False, None)

    def copy_down(self, blocks: Sequence[tuple[Block, int]], held: bool, request: Request | None) -> None:
        self.offloaded += len(blocks)
        for i in range(0, len(blocks), self.tiers.batch):
            part = blocks[i : i + self.tiers.batch]
            copy = Copy([block for block, _ in part], [key for _, key in part], held)
            copy.eta_ns = self.now_ns + self.tiers.fixed_ns
            copy.eta_ns += self.flow_ns(self.tiers.down, len(part), 1 + self.copying + len(self.queue))
            self.landing |= dict.fromkeys(copy.keys, copy)
            self.wait_for(request, copy)
            self.copies.append(copy)
            self.queue.append(copy)
        self.start_copies()

    def start_copies(self) -> None:
        while self.queue and (self.tiers.concurrency is None or self.copying < self.tiers.concurrency):
            copy = self.queue.popleft()
            self.copying += 1
            self.start((0,), len(copy.keys), partial(self.copy_landed, copy))

    def copy_landed(self, copy: Copy) -> None:
        self.copying -= 1
        self.copies.remove(copy)
        for key in copy.keys:
            self.host.store(key)
            del self.landing[key]
        for load, key in copy.loads:
            self.host.hold(key)
            self.next_phase(load)
        for number, store in enumerate(self.below):
            self.copy_lower(number, store, copy.keys)
        self.host.drop(copy.keys)
        if copy.held:
            self.held -= len(copy.blocks)
            self.give_back(copy.blocks)
        else:
            self.pool.release(copy.blocks)
        for request, attempt in copy.waiters:
            wait = self.waits[request]
            if wait.attempt == attempt:
                wait.left -= 1
                if wait.left == 0:
                    wait.total_ns += self.now_ns - wait.since_ns
                    wait.attempt += 1
        self.start_copies()

    def copy_lower(self, number: int, store: Store, keys: Sequence[int]) -> None:
        missing = [key for key in keys if key not in store.refs and key not in store.coming]
        missing = missing[: store.available()]
        store.reserve(len(missing))
        eta_ns = self.now_ns + self.flow_ns(self.tiers.below[number][2], len(missing), 1 + store.copying)
        for key in missing:
            store.coming[key] = []
            store.coming_eta_ns[key] = eta_ns
            self.host.hold(key)
        for i in range(0, len(missing), self.tiers.batch):
            part = missing[i : i + self.tiers.batch]
            store.copying += 1
            self.start((2 + 2 * number,), len(part), partial(self.lower_landed, store, part))

    def lower_landed(self, store: Store, keys: list[int]) -> None:
        store.copying -= 1
        for key in keys:
            store.store(key)
        for key in keys:
            for load, _ in store.coming.pop(key):
                store.hold(key)
                self.next_phase(load)
        store.drop(keys)
        self.host.drop(keys)

    def next_phase(self, load: Load) -> None:
        raise NotImplementedError
