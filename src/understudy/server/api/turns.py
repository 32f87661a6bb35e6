"""Work that may take seconds is done in turns, so that everybody else is answered meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from understudy.server.api.errors import answer_error

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from understudy.server.api.generation import Generation

TURN_COST = 1 << 13
"""What is done at once, in tokens and characters that are made: some milliseconds."""
CHOICE_COST = 64
"""An answer costs so much, be it ever so short."""


def in_turns(work: Generator[int], generation: Generation, begun: Callable[[], object]) -> None:
    """Do all of `work`, which tells what each part of it cost; what takes more than a turn goes on later.

    `begun` is called once its client waits. What the first turn raises is the caller's; later, its client is told.
    """
    if _turn(work):
        begun()
        return
    loop = asyncio.get_running_loop()

    def go_on() -> None:
        if generation.gone:
            work.close()
            generation.give_up()
            return
        try:
            done = _turn(work)
        except Exception as error:
            generation.give_up()
            answer_error(error, generation.connection)
            return
        if not done:
            loop.call_soon(go_on)

    begun()
    generation.connection.on_close = generation.client_gone
    loop.call_soon(go_on)


def _turn(work: Generator[int]) -> bool:
    """One turn; True when nothing is left."""
    left = TURN_COST
    for cost in work:
        left -= cost
        if left <= 0:
            return False
    return True
