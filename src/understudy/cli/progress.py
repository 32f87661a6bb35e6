"""Show progress if standard error is a terminal."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import TaskID


@contextmanager
def progress_bar(doing: str, total: int, of: str) -> Iterator[Callable[[int], None] | None]:
    """Show a bar and yield a function that updates it with the number done; yield None without a terminal."""
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
    """Show one bar per task and yield `update(task, done, total)`; yield None without a terminal."""
    import sys

    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def update(task: str, done: int, total: int) -> None:
            if task not in tasks:
                tasks[task] = bar.add_task(task, total=total)
            bar.update(tasks[task], completed=done, total=total)

        yield update


@contextmanager
def counter(doing: str, total: int, of: str) -> Iterator[Callable[[int], None] | None]:
    """Show a counter for timed work: it redraws once per percent and starts no thread that would disturb it."""
    import sys

    if not sys.stderr.isatty():
        yield None
        return
    shown = -1

    def update(done: int) -> None:
        nonlocal shown
        percent = 100 * done // total
        if percent != shown:
            shown = percent
            sys.stderr.write(f"\r{doing} {done:,} of {total:,} {of}\x1b[K")
            sys.stderr.flush()

    update(0)
    try:
        yield update
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
