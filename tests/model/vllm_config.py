"""Settings of the vLLM scheduler model, and what differs between vLLM versions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

FreeOrder = Literal["unkeyed_first", "all_last", "uncached_last"]


@dataclass(frozen=True)
class Profile:
    """What differs between vLLM versions, as data.

    `free_order` says where a freed block enters the free list:

    * ``unkeyed_first``: blocks without a key in front, blocks with one at the end (v0.24 to v0.26);
    * ``all_last``: every block at the end (up to v0.23);
    * ``uncached_last``: every block at the end if prefix caching is off, else as ``unkeyed_first`` (v0.27).

    `phantom_hit`: a priority victim that was already scheduled in the same step keeps the keys its allocation
    just registered, although nobody will compute those blocks. All versions here do. Without it such blocks
    lose their keys again (one removed event each, in table order) before the victim's blocks are freed.
    """

    name: str
    free_order: FreeOrder = "unkeyed_first"
    has_watermark: bool = True
    has_reserve_full_isl: bool = True
    caps_lone_prefill: bool = True  # the long-prefill threshold holds for a request that is alone
    phantom_hit: bool = True
    preempted_first: bool = False  # in the queue, before those who were passed over for want of an adapter


RECORDED = Profile("recorded")
V0_31 = Profile("v0.31", caps_lone_prefill=False, preempted_first=True)
V0_27 = Profile("v0.27", free_order="uncached_last")
V0_24 = Profile("v0.24")
V0_23 = Profile("v0.23", free_order="all_last", has_watermark=False)
V0_18 = Profile("v0.18", free_order="all_last", has_watermark=False, has_reserve_full_isl=False)
PROFILES = (V0_31, RECORDED, V0_27, V0_24, V0_23, V0_18)


@dataclass(frozen=True)
class Config:
    """The scheduler's settings, named as in scenarios; `num_blocks` counts the unusable block 0."""

    block_size: int = 16
    num_blocks: int = 1024
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    max_model_len: int = 131072
    async_scheduling: bool = False
    max_loras: int | None = None
    max_num_active_seqs: int | None = None
    long_prefill_token_threshold_adaptive: bool = False
    aic_nextn: int | None = None  # draft tokens in every step that samples
    aic_nextn_accept_rates: str | None = None
    aic_mtp_seed: int = 42

    def accept_rates(self) -> list[float]:
        """The rate of every draft token; empty: no speculation."""
        if self.aic_nextn is None:
            return []
        text = self.aic_nextn_accept_rates or "0.85,0.3"
        rates = [float(part) for part in text.split(",")] + [0.0] * self.aic_nextn
        return rates[: self.aic_nextn]

    @classmethod
    def parse(cls, settings: Mapping[str, Any], profile: Profile = RECORDED) -> Config:
        """Fill in the defaults. An unknown name, or a feature the profile lacks, is a ValueError."""
        settings = dict(settings)
        if settings.pop("prefill_schedule_interval", 1) != 1:
            raise ValueError("prefill_schedule_interval is not modelled")
        unknown = set(settings) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown scheduler settings: {sorted(unknown)}")
        values = dict(settings)
        if not profile.has_reserve_full_isl and values.setdefault("scheduler_reserve_full_isl", False):
            raise ValueError(f"scheduler_reserve_full_isl: vLLM {profile.name} does not have it")
        if not profile.has_watermark and values.get("watermark"):
            raise ValueError(f"watermark: vLLM {profile.name} does not have it")
        for name in ("max_num_active_seqs", "long_prefill_token_threshold_adaptive"):
            if values.get(name) and profile.caps_lone_prefill:
                raise ValueError(f"{name}: vLLM {profile.name} does not have it")
        if values.get("policy", "fcfs") not in ("fcfs", "priority"):
            raise ValueError(f"policy: {values['policy']!r} is neither 'fcfs' nor 'priority'")
        return cls(**values)
