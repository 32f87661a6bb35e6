"""`understudy demo`: two requests share a prefix, a third evicts their tails, the first comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import argparse

    from rich.table import Table
    from rich.text import Text

    from understudy.cli import Verbs
    from understudy.kv import BlockManager, MutableBlocks, PoolMetrics, RegisteredBlocks
    from understudy.tokens import Identity, TokenBlocks

NUM_BLOCKS = 12
BLOCK_SIZE = 16

# Token ids stand for text. Alice and Bob open with the same three blocks; each prompt ends inside a block.
OPENING = range(1_000, 1_048)
PROMPTS = {
    "alice": [*OPENING, *range(2_000, 2_036)],
    "bob": [*OPENING, *range(3_000, 3_036)],
    "carol": [*range(4_000, 4_132)],
}
COLOURS = {"alice": "cyan", "bob": "magenta", "carol": "yellow"}
ACTIVE, MUTABLE, INACTIVE, RESET = "█", "▒", "▁", "·"


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy demo`."""
    demo = verbs.add_parser(
        "demo",
        help="show the block manager at work",
        description="Two requests share a prefix, a third evicts their tails, the first comes back.",
    )
    demo.add_argument(
        "--policy",
        default="lineage",
        metavar="NAME",
        help="eviction policy (default: lineage); an unknown name lists those there are",
    )


def run(args: argparse.Namespace) -> int:
    """Play the story on a real block manager and print what the manager says after every beat."""
    from rich.console import Console
    from rich.padding import Padding

    from understudy.kv import BlockManager

    manager = BlockManager(NUM_BLOCKS, block_size=BLOCK_SIZE, policy=args.policy, events=True)
    story = Story(manager)
    story.arrive("alice", "alice arrives")
    story.arrive("bob", "bob arrives")
    story.leave("alice", "bob", title="both leave")
    story.arrive("carol", "carol arrives")
    story.leave("carol", title="carol leaves")
    story.arrive("alice", "alice is back")
    story.close()

    console = Console(highlight=False)
    console.print(Padding(table(story, args.policy), (1, 0, 0, 0)))
    console.print(Padding(legend(), (0, 1)))
    console.print(Padding(summary(story), (1, 1)))
    return 0


class Beat(NamedTuple):
    """What the manager said when something had happened."""

    title: str
    pool: Text
    metrics: PoolMetrics
    stored: int
    removed: int
    prompt_tokens: int = 0
    hit_tokens: int = 0


class Request(NamedTuple):
    """The blocks of a running request: found in the cache, computed by itself, and the one its tail is in."""

    hits: RegisteredBlocks
    computed: RegisteredBlocks
    tail: MutableBlocks


class Story:
    """Requests come and go on one manager; every change is a beat."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.beats: list[Beat] = []
        self._running: dict[str, Request] = {}
        self._wrote: dict[Identity, tuple[int, str]] = {}  # where a block was computed, and by whom

    def arrive(self, name: str, title: str) -> None:
        """Match the prompt, allocate what the cache does not hold, register what is complete."""
        from understudy.tokens import TokenBlocks

        prompt = TokenBlocks(PROMPTS[name], self.manager.block_size)
        hits = self.manager.match_prefix(prompt.identities)
        blocks = self.manager.allocate(prompt.num_blocks + 1 - len(hits))
        fresh = prompt.identities[len(hits) :]
        computed = blocks.take(len(fresh)).register(fresh)
        self._running[name] = Request(hits, computed, tail=blocks)
        self._wrote.update(zip(fresh, ((slot, name) for slot in computed.ids.tolist()), strict=True))
        self._note(title, prompt, hit_tokens=len(hits) * prompt.block_size)

    def leave(self, *names: str, title: str) -> None:
        """Release everything that the requests hold: complete blocks stay cached, tails are empty again."""
        for name in names:
            request = self._running.pop(name)
            request.tail.release()
            request.computed.release()
            request.hits.release()
        self._note(title)

    def close(self) -> None:
        """Let the last requests go and have the manager check itself."""
        for request in self._running.values():
            for guard in (request.tail, request.computed, request.hits):
                guard.release()
        self.manager.store.check()

    def _note(self, title: str, prompt: TokenBlocks | None = None, hit_tokens: int = 0) -> None:
        events = self.manager.store.drain_events()
        removed = int(events.kinds.sum())
        self.beats.append(
            Beat(
                title=title,
                pool=self._picture(),
                metrics=self.manager.metrics(),
                stored=len(events) - removed,
                removed=removed,
                prompt_tokens=len(prompt) if prompt is not None else 0,
                hit_tokens=hit_tokens,
            )
        )

    def _picture(self) -> Text:
        """Draw the pool slot by slot: the glyph is the state, the colour who computed the block."""
        from rich.text import Text

        from understudy.tokens import Identities

        cells = [(RESET, "dim")] * self.manager.num_blocks
        known = list(self._wrote)
        present = self.manager.has_blocks(
            Identities.from_lineage_hashes([identity.lineage_hash for identity in known])
        )
        for identity, here in zip(known, present.tolist(), strict=True):
            slot, name = self._wrote[identity]
            if here:
                cells[slot] = (INACTIVE, COLOURS[name])
        for name, request in self._running.items():
            for slot in [*request.hits.ids.tolist(), *request.computed.ids.tolist()]:
                cells[slot] = (ACTIVE, cells[slot][1])
            for slot in request.tail.ids.tolist():
                cells[slot] = (MUTABLE, COLOURS[name])
        return Text.assemble(*cells)


def table(story: Story, policy: str) -> Table:
    """One row per beat."""
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
    out.add_column("beat", no_wrap=True)
    out.add_column("pool", no_wrap=True)
    for name in ("hit\ntokens", "reset", "mutable", "active", "inactive"):
        out.add_column(name, justify="right")
    out.add_column("events", justify="right", no_wrap=True)
    for beat in story.beats:
        hit = f"[green]{beat.hit_tokens}[/green]" if beat.hit_tokens else str(beat.hit_tokens)
        events = [f"[green]+{beat.stored}[/green]"] * (beat.stored > 0)
        events += [f"[red]−{beat.removed}[/red]"] * (beat.removed > 0)
        now = beat.metrics
        out.add_row(
            beat.title,
            beat.pool,
            f"{hit}[dim]/{beat.prompt_tokens}[/dim]" if beat.prompt_tokens else "",
            str(now.reset_blocks),
            str(now.mutable_blocks),
            str(now.active_blocks),
            str(now.inactive_blocks),
            " ".join(events),
        )
    return out


def legend() -> Text:
    """Name the glyphs and the colours of the pool's picture."""
    from rich.text import Text

    glyphs = f"{ACTIVE} active  {MUTABLE} mutable  {INACTIVE} inactive  {RESET} reset     computed by "
    names = [part for name, colour in COLOURS.items() for part in ((name, colour), " ")]
    return Text.assemble((glyphs, "dim"), *names)


def summary(story: Story) -> str:
    """Add up the beats."""
    prompt_tokens = sum(beat.prompt_tokens for beat in story.beats)
    hit_tokens = sum(beat.hit_tokens for beat in story.beats)
    return (
        f"[bold]{hit_tokens}[/bold] of {prompt_tokens} prompt tokens came from the cache "
        f"([bold]{hit_tokens / prompt_tokens:.0%}[/bold]); "
        f"{story.manager.metrics().evictions} blocks were evicted."
    )
