"""What the tests of request KV share: a tiny engine whose memory remembers every row, and the invariants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from understudy.kv import KvCacheManager, KvLayout, KvView, RequestKv

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BLOCK = 16
LAYOUT = KvLayout(page_size=BLOCK, num_layers=1, kv_heads=1, head_dim=1)
ANY = 7  # a sampled token, where it does not matter which
COUNTERS = (
    "state",
    "block_size",
    "prompt_tokens",
    "prefill_target",
    "computed_tokens",
    "cached_tokens",
    "scheduled_tokens",
    "generated_tokens",
    "max_output_tokens",
    "finished",
    "registered_blocks",
    "held_blocks",
)


def prompt(length: int, seed: int = 1) -> list[int]:
    """Tokens that no other seed shares a block with."""
    return [1_000 * seed + i for i in range(length)]


# ── A model that can be computed by hand ──


def fingerprint(before: int, token: int) -> int:
    """What a row holds: a digest of its token and of every row in front of it."""
    return hash((before, token))


def next_token(row: int) -> int:
    """Greedy sampling: the next token follows from the last row alone."""
    return row % 50_000


def greedy(tokens: Sequence[int], count: int) -> list[int]:
    """What the model says after `tokens`, computed densely, without pages."""
    row = 0
    for token in tokens:
        row = fingerprint(row, token)
    out = []
    for _ in range(count):
        out.append(next_token(row))
        row = fingerprint(row, out[-1])
    return out


@dataclass
class Memory:
    """A rank's KV buffer. A row that was written for another prefix is poison: reading it shows at once."""

    rows: dict[tuple[int, int], int] = field(default_factory=dict)

    def forward(self, kv: RequestKv, drafts: Sequence[int] = ()) -> list[int]:
        """Write the scheduled rows, attend to every row, and sample behind each of the new ones."""
        return self.run(kv.view(), kv.scheduled_tokens, [*kv.tokens.tolist(), *drafts])

    def run(self, view: KvView, chunk: int, tokens: Sequence[int]) -> list[int]:
        pages = view.page_ids.tolist()
        places = [(pages[at // view.page_size], at % view.page_size) for at in range(view.seq_len)]
        positions = view.positions(chunk).tolist()
        for at in positions:  # written before it is read, and only from what the pages hold
            before = self.rows[places[at - 1]] if at else 0
            self.rows[places[at]] = fingerprint(before, tokens[at])
        row = 0
        for at, place in enumerate(places):
            row = fingerprint(row, tokens[at])
            assert self.rows[place] == row, f"row {at} on page {place[0]} was not computed for these tokens"
        return [next_token(self.rows[places[at]]) for at in positions]


# ── Steps. Without a memory they only count ──


def prefill(kv: RequestKv, memory: Memory | None = None, chunk: int | None = None) -> None:
    """The rest of the prompt in chunks; the last one samples a token when the output budget has room."""
    while (left := kv.prefill_target - kv.computed_tokens) > 0:
        kv.schedule_prefill(min(chunk or left, left))
        sampled = memory.forward(kv)[-1] if memory else ANY
        last = kv.computed_tokens + kv.scheduled_tokens == kv.prefill_target
        kv.apply_prefill(sampled if last and kv.generated_tokens < kv.max_output_tokens else None)


def decode(kv: RequestKv, memory: Memory | None = None) -> None:
    """One token more."""
    kv.schedule_decode()
    kv.apply_decode(memory.forward(kv)[-1] if memory else ANY)


def run(kv: RequestKv, memory: Memory | None = None, chunk: int | None = None) -> list[int]:
    """To the end; the output."""
    prefill(kv, memory, chunk)
    while not kv.finished:
        decode(kv, memory)
    return output(kv)


def output(kv: RequestKv) -> list[int]:
    tokens: list[int] = kv.tokens.tolist()
    return tokens[kv.prompt_tokens :]


def fill_cache(manager: KvCacheManager, tokens: Sequence[int], *, salt: str = "", lora: str = "") -> None:
    """Leave the full blocks of a prompt cached and unreferenced."""
    with manager.request(tokens, 0, salt=salt, lora=lora) as kv:
        kv.match_prefix()
        kv.schedule_prefill(len(tokens) - kv.computed_tokens)
        kv.apply_prefill()


# ── Watching ──


def snapshot(kv: RequestKv) -> dict[str, object]:
    """Everything that a request tells about itself."""
    out: dict[str, object] = {name: getattr(kv, name) for name in COUNTERS}
    out["tokens"] = kv.tokens.tolist()
    if kv.state not in ("idle", "closed"):
        out["view"] = kv.view()
    return out


def assert_sound(
    manager: KvCacheManager, requests: Iterable[RequestKv] = (), ahead: Sequence[int] | None = None
) -> None:
    """What holds between any two calls. `ahead`: blocks that each request has taken for the step after."""
    for number, kv in enumerate(requests):
        assert_request_sound(manager, kv, 0 if ahead is None else ahead[number])
    metrics = manager.blocks.metrics()
    unreferenced = metrics.reset_blocks + metrics.inactive_blocks
    held = metrics.mutable_blocks + metrics.staged_blocks + metrics.active_blocks
    assert unreferenced + held == metrics.total_blocks == manager.total_blocks
    assert unreferenced == manager.available_blocks
    assert metrics.staged_blocks == 0
    manager.blocks.store.check()


def assert_request_sound(manager: KvCacheManager, kv: RequestKv, ahead: int = 0) -> None:
    computed, known, block = kv.computed_tokens, len(kv.tokens), kv.block_size
    assert computed <= known
    assert kv.cached_tokens <= computed
    assert kv.cached_tokens % block == 0
    assert kv.generated_tokens == known - kv.prompt_tokens <= max(kv.max_output_tokens, 0)
    if kv.state == "closed":
        assert (kv.held_blocks, kv.registered_blocks, kv.scheduled_tokens) == (0, 0, 0)
        return
    if computed >= kv.prefill_target and kv.generated_tokens:
        assert known - computed == 1  # the newest token is known, not computed
    # Registered: every block whose rows are all there, and no other.
    assert kv.registered_blocks == (computed // block if manager.prefix_caching else 0)
    # Held: exactly the pages that the computed and the scheduled rows need.
    assert kv.held_blocks == -(-(computed + kv.scheduled_tokens) // block) + ahead
    if kv.state == "idle":
        assert kv.scheduled_tokens == 0
        return
    view = kv.view()
    assert kv.scheduled_tokens >= 1
    assert view.seq_len == computed + kv.scheduled_tokens
    assert view.num_pages == -(-view.seq_len // block) == kv.held_blocks - ahead
    assert (view.num_pages - 1) * block + view.last_page_len == view.seq_len
    pages = view.page_ids.tolist()
    assert len(set(pages)) == len(pages)
    assert manager.padding_block not in pages
    assert all(0 <= page < manager.total_blocks for page in pages)


def assert_idle(manager: KvCacheManager) -> None:
    """Every request is gone: only the padding block is held."""
    assert_sound(manager)
    metrics = manager.blocks.metrics()
    assert manager.available_blocks == manager.total_blocks - 1
    assert (metrics.active_blocks, metrics.active_references, metrics.mutable_blocks) == (0, 0, 1)
