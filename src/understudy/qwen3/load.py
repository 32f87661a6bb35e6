"""What timing models see of an executor's step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from understudy.timing.recorded.load import StepLoad, load_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.kv import KvView
    from understudy.qwen3.executor import Step


def load_of_step(step: Step) -> StepLoad:
    """Of what an executor is given."""
    return load_of(
        ((len(chunk.tokens), chunk.view.seq_len - len(chunk.tokens)) for chunk in step.chunks),
        (decode.view.seq_len for decode in step.decodes),
        shared_tokens([decode.view for decode in step.decodes]),
        ahead=step.ahead,
    )


def shared_tokens(views: Sequence[KvView]) -> int:
    """Tokens on pages beyond their first mention."""
    if len(views) < 2:
        return 0
    pages = np.concatenate([view.page_ids for view in views])
    return int(len(pages) - len(np.unique(pages))) * views[0].page_size
