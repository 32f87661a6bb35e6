"""Lengths of prompts and answers, with SGLang's limits and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from understudy.server.api.errors import ApiError

if TYPE_CHECKING:
    import numpy.typing as npt

    from understudy.server.settings import ServerSettings
    from understudy.server.tokenizer import Tokenizer

_RESERVED = 5
"""Tokens below the limit of a request's length that no prompt may fill."""
_CHARACTERS_A_TOKEN = 16


def read_tokens(
    prompt: str | list[int], tokenizer: Tokenizer, context: int, *, field: str = "input_ids"
) -> npt.NDArray[np.uint32]:
    """Tokenize a prompt. ApiError if it is empty, out of vocabulary, or as long as the context."""
    if isinstance(prompt, str):
        # The count is exact only for texts of a usual length; a longer one is refused without tokenizing all of it.
        bounded = len(prompt) > context * _CHARACTERS_A_TOKEN
        ids = tokenizer.encode(prompt, enough=context + 1) if bounded else tokenizer.encode(prompt)
    else:
        ids = prompt
        if ids and max(ids) >= tokenizer.vocabulary:
            raise ApiError(
                f"The input_ids {ids[:8]}... contains values greater than the vocab size ({tokenizer.vocabulary})."
            )
    if not ids:
        raise ApiError(f"{field} cannot be empty.")
    if len(ids) >= context:
        raise ApiError(
            f"The input ({len(ids)} tokens) is longer than the model's context length ({context} tokens)."
        )
    return np.array(ids, dtype=np.uint32)


def room_for(prompt_tokens: int, asked: int | None, settings: ServerSettings) -> int:
    """Return the most tokens of an answer, as the scheduler limits it. ApiError if the request is too long."""
    context, page = settings.max_model_len, settings.engine.block_size
    if asked is not None and asked + prompt_tokens > context:
        raise ApiError(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {asked + prompt_tokens} tokens: {prompt_tokens} tokens from the input messages and {asked} "
            "tokens for the completion. Please reduce the number of tokens in the input messages or the completion to "
            "fit within the limit."
        )
    pool = settings.engine.num_gpu_blocks * page
    most = min(context, pool) - 1
    if prompt_tokens >= most - _RESERVED:
        raise ApiError(
            f"Input length ({prompt_tokens} tokens) exceeds the maximum allowed length ({most - _RESERVED} tokens). "
            "Use a shorter input or enable --allow-auto-truncate."
        )
    filled = -(-prompt_tokens // page) * page
    room = min(most - prompt_tokens - 1, pool - filled - page - 1)
    return max(room if asked is None else min(asked, room), 0)
