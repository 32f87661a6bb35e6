"""Load of an executor's step, as timing models use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from understudy.timing.recorded.load import StepLoad, load_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.kv import KvView
    from understudy.qwen3.executor import Step


def compute_step_load(step: Step) -> StepLoad:
    """Compute the load of a step."""
    return load_of(
        ((len(chunk.tokens), chunk.view.seq_len - len(chunk.tokens)) for chunk in step.chunks),
        (decode.view.seq_len for decode in step.decodes),
        count_shared_tokens([decode.view for decode in step.decodes]),
        ahead=step.ahead,
    )


def count_shared_tokens(views: Sequence[KvView]) -> int:
    """Count tokens on pages that an earlier view already has."""
    if len(views) < 2:
        return 0
    pages = np.concatenate([view.page_ids for view in views])
    return int(len(pages) - len(np.unique(pages))) * views[0].page_size
