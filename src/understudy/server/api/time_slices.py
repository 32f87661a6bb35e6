"""Splits long work into time slices, so that the event loop serves other requests in between."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from understudy.server.api.errors import answer_error

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from understudy.server.api.generation import Generation

SLICE_COST = 1 << 13
"""Work of one slice in generated tokens and characters: some milliseconds."""


def run_in_slices(work: Generator[int], generation: Generation, on_started: Callable[[], object]) -> None:
    """Run `work`, which yields the cost of each part, one slice per pass of the event loop.

    `on_started` is called after the first slice. Exceptions of the first slice are raised; those of later ones are
    sent to the client.
    """
    if _run_slice(work):
        on_started()
        return
    loop = asyncio.get_running_loop()

    def run_next() -> None:
        if generation.gone:
            work.close()
            generation.cancel_before_run()
            return
        try:
            done = _run_slice(work)
        except Exception as error:
            generation.cancel_before_run()
            answer_error(error, generation.connection)
            return
        if not done:
            loop.call_soon(run_next)

    on_started()
    generation.connection.on_close = generation.client_gone
    loop.call_soon(run_next)


def _run_slice(work: Generator[int]) -> bool:
    """Run one slice; True when the work is complete."""
    left = SLICE_COST
    for cost in work:
        left -= cost
        if left <= 0:
            return False
    return True
