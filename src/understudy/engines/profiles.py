"""What differs between vLLM versions, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

from understudy.errors import ConfigError

FreeOrder = Literal["unkeyed_first", "all_last", "uncached_last"]


class VersionProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One vLLM version's scheduler.

    `free_order`: where a freed block enters the free list. `unkeyed_first`: blocks without a key in front, the others
    at the end; `all_last`: every block at the end; `uncached_last`: all at the end if prefix caching is off.
    `phantom_hits`: under the priority policy a victim that was already scheduled keeps the keys of blocks that nobody
    will compute, so that they can be hit. A known defect; the report counts such hits.
    """

    name: str
    free_order: FreeOrder = "unkeyed_first"
    has_watermark: bool = True
    has_reserve_full_isl: bool = True
    phantom_hits: bool = True


PROFILES: dict[str, VersionProfile] = {
    profile.name: profile
    for profile in (
        VersionProfile(name="recorded"),
        VersionProfile(name="v0.27", free_order="uncached_last"),
        VersionProfile(name="v0.24"),
        VersionProfile(name="v0.23", free_order="all_last", has_watermark=False),
        VersionProfile(name="v0.18", free_order="all_last", has_watermark=False, has_reserve_full_isl=False),
    )
}


def profile_named(name: str) -> VersionProfile:
    """The profile of that name. ConfigError lists the known ones."""
    if name not in PROFILES:
        raise ConfigError(f"vllm_version {name!r} is not known; choose one of {', '.join(PROFILES)}")
    return PROFILES[name]
