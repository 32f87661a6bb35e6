"""Submit the requests of a scenario to an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy._core import Identities, TokenBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from understudy._core import VllmEngine
    from understudy.workload.scenario import ScenarioConfig, ScenarioRequest


def blocks_of(
    tokens: npt.NDArray[np.uint32], block_size: int, lora: int = 0, hashed_ahead: int = 0
) -> tuple[Identities, dict[int, int | None]]:
    """Return the identities of the full blocks, and the first token of each by sequence hash."""
    identities = TokenBlocks(tokens, block_size, lora=str(lora) if lora else "").identities
    if hashed_ahead:
        identities = identities.hash_ahead(tokens, hashed_ahead)
    firsts = tokens[: len(identities) * block_size : block_size]
    return identities, dict(zip(identities.sequence_hashes.tolist(), firsts.tolist(), strict=True))


def submit(
    engine: VllmEngine,
    config: ScenarioConfig,
    index: int,
    request: ScenarioRequest,
    accepts: Sequence[int] | None = None,
    hashed_ahead: int = 0,
) -> tuple[int, dict[int, int | None]]:
    """Submit the request at position `index` of its scenario; return its number and the blocks' first tokens.

    `accepts`: numbers of accepted drafts, where the scenario gives them. `hashed_ahead`: tokens behind a block that are
    part of its identity.
    """
    tokens = request.tokens(index, config.max_model_len)
    identities, firsts = blocks_of(tokens, config.block_size, request.lora, hashed_ahead)
    number = engine.submit(
        request.id,
        len(request.prompt_tokens()),
        request.max_tokens,
        identities,
        priority=request.priority,
        arrival_time=index if request.arrival_time is None else request.arrival_time,
        eos_at=request.eos_at,
        adapter=request.lora,
        accepts=accepts,
    )
    return number, firsts
