"""What the model of tiers is made of: the tiers below the device, and what is on its way between them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from fractions import Fraction

    from .vllm_blocks import Block
    from .vllm_requests import Request

Told = tuple[str, int, int]  # (stored or removed, tier, key)


@dataclass(frozen=True)
class TierSettings:
    """Bandwidths in bytes per ns, None for no limit; `below` has (tier, blocks, down, up) of G3 and G4."""

    g2_blocks: int
    block_bytes: int
    down: Fraction | None = None
    up: Fraction | None = None
    fixed_ns: int = 0
    write_through: bool = False
    exclusive: bool = False
    min_reuse: int = 0
    batch: int = 32
    concurrency: int | None = None
    onboard_preempted: bool = True
    ns_per_token: int | None = None  # to compute a token of a prompt: loads that take as long are not begun
    below: tuple[tuple[int, int, Fraction | None, Fraction | None], ...] = ()


class Store:
    """A tier below the device: blocks by key, those without references in order of use."""

    def __init__(self, tier: int, capacity: int, tell: Callable[[Told], None]) -> None:
        self.tier, self.capacity, self.tell = tier, capacity, tell
        self.refs: dict[int, int] = {}  # of every block that is here
        self.idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self.leaving: set[int] = set()  # go when their last reference does
        self.reserved = 0
        self.coming: dict[int, list[tuple[Load, int]]] = {}  # key -> loads that wait for it
        self.coming_eta_ns: dict[int, int] = {}
        self.copying = 0  # batches on their way here

    def available(self) -> int:
        return self.capacity - len(self.refs) - self.reserved + len(self.idle)

    def reserve(self, count: int) -> bool:
        if count > self.available():
            return False
        while self.capacity - len(self.refs) - self.reserved < count:
            oldest, _ = self.idle.popitem(last=False)
            del self.refs[oldest]
            self.tell(("removed", self.tier, oldest))
        self.reserved += count
        return True

    def store(self, key: int) -> None:
        """Into a reserved place, referenced; or, when it is here, another reference."""
        self.reserved -= 1
        if key in self.refs:
            self.hold(key)
        else:
            self.refs[key] = 1
            self.tell(("stored", self.tier, key))

    def hold(self, key: int) -> None:
        self.refs[key] += 1
        self.idle.pop(key, None)

    def drop(self, keys: Sequence[int]) -> None:
        """One reference of each, the last first."""
        for key in reversed(keys):
            self.refs[key] -= 1
            if self.refs[key] > 0:
                continue
            if key in self.leaving:
                self.leaving.remove(key)
                del self.refs[key]
                self.tell(("removed", self.tier, key))
            else:
                self.idle[key] = None

    def touch(self, key: int) -> None:
        if key in self.idle:
            self.idle.move_to_end(key)


@dataclass(eq=False)
class Copy:
    """A batch on its way from the device to the host."""

    blocks: list[Block]
    keys: list[int]
    held: bool
    eta_ns: int = 0
    waiters: list[tuple[Request, int]] = field(default_factory=list)
    loads: list[tuple[Load, int]] = field(default_factory=list)


@dataclass(eq=False)
class Load:
    """Blocks on their way up for somebody."""

    keys: list[int] = field(default_factory=list)
    tiers: list[int] = field(default_factory=list)  # where each comes from
    to: list[Block] = field(default_factory=list)
    pins: list[Block] = field(default_factory=list)
    phase: Literal["landing", "staging", "loading"] = "landing"
    pending: int = 0
    joins: int = 0
    joined: list[int] = field(default_factory=list)  # keys that those bring
    wanted: bool = False  # though nobody waits
    eta_ns: int = 0
    waiters: list[Park] = field(default_factory=list)
    followers: list[Load] = field(default_factory=list)


@dataclass(eq=False)
class Park:
    """A request whose blocks are being loaded."""

    request: Request
    pending: int
    first_block: int
    tiers: list[int]
    since_ns: int
    pins: list[Block] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    parked_ns: int = 0


@dataclass
class Waiting:
    """For room: `left` copies, of the present try."""

    left: int = 0
    attempt: int = 0
    since_ns: int = 0
    total_ns: int = 0
