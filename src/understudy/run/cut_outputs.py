"""Outputs that an engine's own rule ends before their asked length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from understudy.run.timeline import Timeline


def note_cut_outputs(timeline: Timeline) -> tuple[str, ...]:
    """Return a note that counts completed requests with fewer tokens than asked; nothing without any."""
    asked = timeline.requested_output_tokens.astype(np.int64)
    lacking = np.where(timeline.completed, asked - timeline.output_tokens, 0)
    cut = int(np.count_nonzero(lacking > 0))
    if cut == 0:
        return ()
    return (
        f"outputs cut: {cut:,} of {int(timeline.completed.sum()):,} completed requests lack "
        f"{int(lacking[lacking > 0].sum()):,} of the tokens that they asked for, as the real engine ends a request "
        "that its context or KV pool cannot hold; for whole outputs give more blocks, or a larger max_model_len",
    )
