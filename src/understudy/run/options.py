"""Options of a replay that do not change its result: files to write, and how the simulation runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from os import PathLike, fspath
from typing import TYPE_CHECKING, Literal

from understudy.checks import switch
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    Path = str | PathLike[str] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Files that a replay writes; those left out are not written. Names ending in .npz hold columns.

    Errors: ConfigError for a value that is not a path.

    Example:
        outputs = us.Outputs(events="events.jsonl", decisions="decisions.jsonl")
        us.replay("trace.jsonl", workers=2, routing="kv", outputs=outputs)
    """

    events: Path = None
    """Consolidated KV events, as JSON lines or .npz."""
    raw_events: Path = None
    """KV events as engines send them, as JSON lines or .npz."""
    kv_trace: Path = None
    """Block allocations and evictions, one line each."""
    record_steps: Path = None
    """Every step of every worker, in the format of `understudy conformance` (.gz: gzipped)."""
    decisions: Path = None
    """Costs behind each choice of a KV-aware router, one line each."""
    save_run: Path = None
    """The run with every step, for `understudy explain` and `understudy diff` (.npz)."""
    perfetto: Path = None
    """A trace for ui.perfetto.dev: protobuf, or JSON if the name ends in .json."""
    synthesize_tokens: bool = False
    """Add generated token ids and their local hashes to event lines (equal hash ids, equal tokens)."""

    def __post_init__(self) -> None:
        for name, path in self.paths().items():
            if not isinstance(path, str | PathLike | None):
                raise ConfigError(f"{name} must be the path of a file to write, got {path!r}")
        if switch("synthesize_tokens", self.synthesize_tokens):
            lines = [path for path in (self.events, self.raw_events) if path is not None]
            if not lines or any(fspath(path).endswith(".npz") for path in lines):
                raise ConfigError(
                    "synthesize_tokens needs events written as JSON lines; name a .jsonl file for them"
                )

    def paths(self) -> dict[str, Path]:
        """Return the paths by name; None for files that are not written."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "synthesize_tokens"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How a replay runs; the result is equal for every choice.

    Errors: `replay` raises ConfigError for a wrong value, InvariantViolated if a check fails.

    Example:
        us.replay("trace.jsonl", workers=2, execution=us.Execution(check=True))
    """

    threads: int = 1
    """Threads for independent workers: open loop, single turns, round_robin or random routing, neither g3 nor g4."""
    fast_forward: bool = True
    """False simulates every decode step one by one."""
    check: bool | Literal["deep"] = False
    """Verify the state after every step; "deep" also replays step by step and compares."""
    progress: Callable[[int], None] | None = None
    """Called with the number of requests done."""
    keep_steps: bool = False
    """Keep every step in `Report.saved`; steps are then simulated one by one."""
