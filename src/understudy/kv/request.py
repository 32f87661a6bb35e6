"""`RequestKv`: the KV blocks of one request, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy import _core
from understudy.kv.view import KvView

if TYPE_CHECKING:
    from understudy.kv.freed import FreedBlocks


class RequestKv(_core.RequestKv):
    """KV blocks of one request, whose state goes idle → scheduled → idle in every step.

    A step has three calls. *Schedule* (`schedule_prefill`, `schedule_decode`, `schedule_speculative`) allocates exactly
    the blocks that the step writes, all or none. *View* returns the pages and the length for the forward pass. *Apply*
    commits the computed tokens and registers the blocks that are now complete; `revert` rolls the schedule back
    instead. While a decode runs, `view_ahead` returns the view of the next decode, so that the engine can prepare it.

    Call `match_prefix` first, on a new or preempted request; it always leaves at least one token to compute. `preempt`
    releases all blocks and restarts with all tokens so far as the prompt. `close` (or the end of a `with`) releases all
    blocks in any state. Use from one thread at a time; a second thread gets WrongState.
    """

    freed: FreedBlocks | None = None
    """Listeners of the manager that created this request; notified when it gives blocks back."""

    def preempt(self) -> None:
        """Release all blocks; the tokens so far are the prompt of the restart."""
        super().preempt()
        if self.freed is not None:
            self.freed.notify()

    def close(self) -> None:
        """Release all blocks, in any state. Idempotent."""
        super().close()
        if self.freed is not None:
            self.freed.notify()

    def __exit__(self, *args: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<RequestKv {self.state}: {self.computed_tokens:,} of {self.prompt_tokens:,} prompt tokens and "
            f"{self.generated_tokens:,} of {self.max_output_tokens:,} output tokens, {self.held_blocks:,} blocks>"
        )

    def view(self) -> KvView:
        """Return the pages and length of the scheduled step. WrongState unless a step is scheduled."""
        return KvView.of_step(self.page_ids, self.view_length, self.block_size)

    def view_ahead(self) -> KvView | None:
        """Return the view of the decode after the scheduled one; None if the output ends before it.

        Allocates the block that the next decode writes, if it is a new one; `schedule_decode` uses and `close` releases
        it. WrongState unless a decode is scheduled; CapacityExhausted if no block is free (nothing is allocated).
        """
        pages = self.schedule_ahead()
        return None if pages is None else KvView.of_step(pages, self.view_length + 1, self.block_size)
