"""Write a saved run and its trace to the files that were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.explain.perfetto import write_trace

if TYPE_CHECKING:
    from os import PathLike

    from understudy.explain.saved_run import SavedRun


def write_run(
    run: SavedRun, *, save_run: str | PathLike[str] | None, perfetto: str | PathLike[str] | None
) -> None:
    """Write the run and its Perfetto trace, those of the two that are named."""
    if save_run is not None:
        run.save(save_run)
    if perfetto is not None:
        write_trace(run, perfetto)
