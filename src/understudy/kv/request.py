"""The KV of one request, as an engine's step sees it."""

from __future__ import annotations

from understudy import _core
from understudy.kv.view import KvView


class RequestKv(_core.RequestKv):
    """One request: idle → scheduled → idle, one step at a time.

    Each step has three beats. *Schedule* (`schedule_prefill`, `schedule_decode`, `schedule_speculative`) takes exactly
    the blocks that the step writes, all or none. *View* freezes pages and length for the forward pass. *Apply* commits
    what the pass computed and registers the blocks whose rows are now all there; `revert` undoes the schedule instead.
    While a decode runs, `view_ahead` shows the one behind it: an engine describes that one to the device meanwhile.

    `match_prefix` comes first, on a fresh or preempted request, and always leaves a token to compute. `preempt` gives
    every block back and starts over with all tokens known so far as the prompt. `close` (or the end of a `with`)
    returns every block in any state. Use from one thread at a time; a second one gets WrongState.
    """

    def view(self) -> KvView:
        """Pages and length of the scheduled step. WrongState unless a step is scheduled."""
        return KvView.of_step(self.page_ids, self.view_length, self.block_size)

    def view_ahead(self) -> KvView | None:
        """Pages and length of the decode behind the one that is scheduled, or None when the output ends before it.

        Takes the block that it writes, if that is another one; `schedule_decode` and `close` know of it. WrongState
        unless a decode is scheduled, CapacityExhausted with nothing taken.
        """
        pages = self.schedule_ahead()
        return None if pages is None else KvView.of_step(pages, self.view_length + 1, self.block_size)
