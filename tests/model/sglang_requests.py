"""Requests, batches and budgets of the model of SGLang's scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from understudy.conformance.sglang_recording import OUTPUT_BASE, OUTPUT_STRIDE

if TYPE_CHECKING:
    from model.sglang_tree import Lock

EOS = 2


@dataclass(eq=False)
class Request:
    """A request with the names of the specification: `kv` tokens have KV, `own` of them are the tree's."""

    name: str
    index: int
    prompt: list[int]
    max_new: int
    eos_at: int | None
    priority: int
    out: list[int] = field(default_factory=list)
    entry: int = 0
    to_abort: bool = False
    done: bool = False
    withdrawn: bool = False
    has_slot: bool = False
    seen: bool = False
    chunks: int = 0
    matched: tuple[int, int] = (0, 0)
    """Its tokens, and the cached ones, when it was last matched."""
    prefix: int = 0
    end: int = 0
    kv: int = 0
    own: int = 0
    inserted: int = 0
    lock: Lock | None = None

    # Windows and states.
    window_begin: int = 0
    branch: int | None = None
    has_state: bool = False
    tracking: int = 0
    last: int | None = None
    before: int | None = None
    untracked: int | None = None
    caches_end: bool = True

    # One side of a disaggregated server.
    has_buffer: bool = False
    ready: bool = False
    sent: int = 0
    computed: int = 0

    def tokens(self) -> list[int]:
        return self.prompt + self.out

    def forget(self) -> None:
        """Lose all KV; outputs stay."""
        self.prefix = self.end = self.kv = self.own = self.inserted = self.chunks = 0
        self.matched = (self.matched[0], 0)
        self.branch = self.untracked = None
        self.caches_end = True
        self.withdrawn = True

    def append(self) -> None:
        number = len(self.out) + 1
        own = OUTPUT_BASE + self.index * OUTPUT_STRIDE + number - 1
        self.out.append(EOS if self.eos_at == number else own)


@dataclass
class Row:
    """A request of a batch: its tokens, and its KV when it was launched."""

    request: Request
    tokens: int
    decodes: bool
    kv: int


@dataclass
class Batch:
    """What an iteration computes."""

    mode: str
    rows: list[Row]
    unfinished: Request | None = None

    def requests(self) -> list[Request]:
        return [row.request for row in self.rows]


@dataclass
class Budget:
    """What a prefill batch may still take."""

    total: float
    now: int
    input: int
    chunk: int | None
    window: int = 0
    shares: list[tuple[int, int]] | None = None
