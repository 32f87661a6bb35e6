"""Progress on a terminal, nothing elsewhere."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import TaskID


@contextmanager
def progress_bar(doing: str, total: int, of: str) -> Iterator[Callable[[int], None] | None]:
    """Yield what to tell how much is done; None where nobody would see it."""
    import sys

    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn(doing),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{of}, left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(doing, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield what to tell `(what, done, of)`, a bar for each `what`; None where nobody would see them."""
    import sys

    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def told(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=of)
            bar.update(tasks[what], completed=done, total=of)

        yield told


@contextmanager
def counter(doing: str, total: int, of: str) -> Iterator[Callable[[int], None] | None]:
    """As `progress_bar`, for what is being measured: one short line a percent, and no thread that draws beside it."""
    import sys

    if not sys.stderr.isatty():
        yield None
        return
    shown = -1

    def told(done: int) -> None:
        nonlocal shown
        percent = 100 * done // total
        if percent != shown:
            shown = percent
            sys.stderr.write(f"\r{doing} {done:,} of {total:,} {of}\x1b[K")
            sys.stderr.flush()

    told(0)
    try:
        yield told
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
