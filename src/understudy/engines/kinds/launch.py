"""`LaunchCommand`: how the real engine of a kind is started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """Words of the command, its flags without dashes, and the container image."""

    words: tuple[str, ...]
    """Words before the model."""
    image: str
    """Container image; its tag is the release."""
    tag_is_release: bool = False
    """Whether the tag of the image is the release unchanged; else it is v and three numbers."""
    tensor_parallel: str
    data_parallel: str
    memory_share: str
    """Flag for the share of a GPU's memory."""
    pool: str
    """Flag for the KV pool: blocks, or tokens if the kind's flags give those."""
    fp8_kv: str = "fp8"
    """Type of a KV cache in fp8."""
    always_gives_share: bool = False
    """Whether the share is given although it is the engine's default."""
    splits_experts: bool = False
    """Whether experts can be split over any number of GPUs; else there is one group, or one per GPU."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Flags of settings that have another name here."""
    always: tuple[str, ...] = ()
    """Settings that are given although they have their default."""
    left_out: tuple[str, ...] = ()
    """Settings without a flag; number of blocks, timing, tiers and release are without one everywhere."""
