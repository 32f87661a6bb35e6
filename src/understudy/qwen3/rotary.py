"""Tables of rotary position embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from understudy.qwen3.config import Qwen3Config


def rotary_tables(config: Qwen3Config, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cosines and sines [position, head_dim / 2] in float32 for all positions of the model."""
    half = config.head_dim // 2
    frequencies = 1.0 / config.rope_theta ** (torch.arange(half, dtype=torch.float32, device=device) / half)
    angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float32, device=device), frequencies)
    return angles.cos(), angles.sin()
