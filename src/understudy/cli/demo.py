"""`understudy demo`: two requests share a prefix, a third evicts their last blocks, the first is sent again."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import argparse

    from rich.table import Table
    from rich.text import Text

    from understudy.cli.verbs import Verbs
    from understudy.kv import BlockManager, MutableBlocks, PoolMetrics, RegisteredBlocks
    from understudy.tokens import Identity, TokenBlocks

EXAMPLES = """\
examples:
  understudy demo                  evict leaves first, by their last use
  understudy demo --policy vllm    evict in the order of vLLM's free list
"""
NUM_BLOCKS = 12
BLOCK_SIZE = 16

# The prompts of alice and bob share their first three blocks; each prompt ends inside a block.
SHARED_PREFIX = range(1_000, 1_048)
PROMPTS = {
    "alice": [*SHARED_PREFIX, *range(2_000, 2_036)],
    "bob": [*SHARED_PREFIX, *range(3_000, 3_036)],
    "carol": [*range(4_000, 4_132)],
}
COLOURS = {"alice": "cyan", "bob": "magenta", "carol": "yellow"}
ACTIVE, MUTABLE, INACTIVE, RESET = "█", "▒", "▁", "·"


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy demo`."""
    demo = verbs.add_parser(
        "demo",
        help="show the block manager in a small example",
        description="Two requests share a prefix, a third evicts their last blocks, the first is sent again.",
        epilog=EXAMPLES,
    )
    demo.add_argument(
        "--policy",
        default="lineage",
        metavar="NAME",
        help="eviction policy (default: lineage); an unknown name lists the valid ones",
    )


def run(args: argparse.Namespace) -> int:
    """Run the example on a block manager and print the pool's state after every change."""
    from rich.console import Console
    from rich.padding import Padding

    from understudy.kv import BlockManager

    manager = BlockManager(NUM_BLOCKS, block_size=BLOCK_SIZE, policy=args.policy, events=True)
    demo = Demo(manager)
    demo.admit("alice", "alice arrives")
    demo.admit("bob", "bob arrives")
    demo.finish("alice", "bob", title="both finish")
    demo.admit("carol", "carol arrives")
    demo.finish("carol", title="carol finishes")
    demo.admit("alice", "alice arrives again")
    demo.close()

    console = Console(highlight=False)
    console.print(Padding(build_table(demo, args.policy), (1, 0, 0, 0)))
    console.print(Padding(build_legend(), (0, 1)))
    console.print(Padding(summarize(demo), (1, 1)))
    return 0


class PoolState(NamedTuple):
    """State of the pool after one change."""

    title: str
    pool: Text
    metrics: PoolMetrics
    stored: int
    removed: int
    prompt_tokens: int = 0
    hit_tokens: int = 0


class Request(NamedTuple):
    """Blocks of a running request: cache hits, blocks it computed, and the block of its incomplete tail."""

    hits: RegisteredBlocks
    computed: RegisteredBlocks
    tail: MutableBlocks


class Demo:
    """Admit and finish requests on one manager; record the pool's state after each change."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.states: list[PoolState] = []
        self._running: dict[str, Request] = {}
        self._computed_by: dict[
            Identity, tuple[int, str]
        ] = {}  # slot, and the request that computed the block

    def admit(self, name: str, title: str) -> None:
        """Match the prompt's prefix, allocate blocks for the rest, register the complete ones."""
        from understudy.tokens import TokenBlocks

        prompt = TokenBlocks(PROMPTS[name], self.manager.block_size)
        hits = self.manager.match_prefix(prompt.identities)
        blocks = self.manager.allocate(prompt.num_blocks + 1 - len(hits))
        fresh = prompt.identities[len(hits) :]
        computed = blocks.take(len(fresh)).register(fresh)
        self._running[name] = Request(hits, computed, tail=blocks)
        self._computed_by.update(zip(fresh, ((slot, name) for slot in computed.ids.tolist()), strict=True))
        self._record(title, prompt, hit_tokens=len(hits) * prompt.block_size)

    def finish(self, *names: str, title: str) -> None:
        """Release all blocks of the requests: complete blocks stay cached, tail blocks are reset."""
        for name in names:
            request = self._running.pop(name)
            request.tail.release()
            request.computed.release()
            request.hits.release()
        self._record(title)

    def close(self) -> None:
        """Release the blocks of running requests and check the manager's invariants."""
        for request in self._running.values():
            for guard in (request.tail, request.computed, request.hits):
                guard.release()
        self.manager.store.check()

    def _record(self, title: str, prompt: TokenBlocks | None = None, hit_tokens: int = 0) -> None:
        events = self.manager.store.drain_events()
        removed = int(events.kinds.sum())
        self.states.append(
            PoolState(
                title=title,
                pool=self._draw_pool(),
                metrics=self.manager.metrics(),
                stored=len(events) - removed,
                removed=removed,
                prompt_tokens=len(prompt) if prompt is not None else 0,
                hit_tokens=hit_tokens,
            )
        )

    def _draw_pool(self) -> Text:
        """Draw the pool slot by slot: the glyph is the state, the colour the request that computed the block."""
        from rich.text import Text

        from understudy.tokens import Identities

        cells = [(RESET, "dim")] * self.manager.num_blocks
        known = list(self._computed_by)
        present = self.manager.has_blocks(
            Identities.from_lineage_hashes([identity.lineage_hash for identity in known])
        )
        for identity, here in zip(known, present.tolist(), strict=True):
            slot, name = self._computed_by[identity]
            if here:
                cells[slot] = (INACTIVE, COLOURS[name])
        for name, request in self._running.items():
            for slot in [*request.hits.ids.tolist(), *request.computed.ids.tolist()]:
                cells[slot] = (ACTIVE, cells[slot][1])
            for slot in request.tail.ids.tolist():
                cells[slot] = (MUTABLE, COLOURS[name])
        return Text.assemble(*cells)


def build_table(demo: Demo, policy: str) -> Table:
    """Build a table with one row per recorded state."""
    from rich import box
    from rich.table import Table

    out = Table(
        title=f" {NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens, policy [bold]{policy}[/bold]",
        title_justify="left",
        title_style="",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        header_style="dim",
    )
    out.add_column("event", no_wrap=True)
    out.add_column("pool", no_wrap=True)
    for name in ("hit\ntokens", "reset", "mutable", "active", "inactive"):
        out.add_column(name, justify="right")
    out.add_column("KV events", justify="right", no_wrap=True)
    for state in demo.states:
        hit = f"[green]{state.hit_tokens}[/green]" if state.hit_tokens else str(state.hit_tokens)
        events = [f"[green]+{state.stored}[/green]"] * (state.stored > 0)
        events += [f"[red]−{state.removed}[/red]"] * (state.removed > 0)
        metrics = state.metrics
        out.add_row(
            state.title,
            state.pool,
            f"{hit}[dim]/{state.prompt_tokens}[/dim]" if state.prompt_tokens else "",
            str(metrics.reset_blocks),
            str(metrics.mutable_blocks),
            str(metrics.active_blocks),
            str(metrics.inactive_blocks),
            " ".join(events),
        )
    return out


def build_legend() -> Text:
    """Name the glyphs and colours of the drawn pool."""
    from rich.text import Text

    glyphs = f"{ACTIVE} active  {MUTABLE} mutable  {INACTIVE} inactive  {RESET} reset     computed by "
    names = [part for name, colour in COLOURS.items() for part in ((name, colour), " ")]
    return Text.assemble((glyphs, "dim"), *names)


def summarize(demo: Demo) -> str:
    """Total the hit tokens and evictions of the demo."""
    prompt_tokens = sum(state.prompt_tokens for state in demo.states)
    hit_tokens = sum(state.hit_tokens for state in demo.states)
    return (
        f"[bold]{hit_tokens}[/bold] of {prompt_tokens} prompt tokens came from the cache "
        f"([bold]{hit_tokens / prompt_tokens:.0%}[/bold]); "
        f"{demo.manager.metrics().evictions} blocks were evicted."
    )
