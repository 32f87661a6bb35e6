"""Differences between vLLM versions, as data."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from understudy.defaults import EARLIER_MEMORY_SHARE, MEMORY_SHARE
from understudy.errors import ConfigError

Method = Literal["mtp", "eagle", "eagle3", "ngram", "draft_model"]
"""Speculation methods."""

_DRAFTERS: frozenset[Method] = frozenset({"mtp", "eagle", "eagle3", "draft_model"})
_EAGLE_LIKE = _DRAFTERS - {"draft_model"}

FreeOrder = Literal["unkeyed_first", "all_last", "uncached_last"]


class VersionProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of one vLLM version's scheduler.

    `free_order`: where a freed block enters the free list. `unkeyed_first`: blocks without a key at the front, the
    others at the end; `all_last`: every block at the end; `uncached_last`: all at the end if prefix caching is off.
    `caps_lone_prefill`: the long-prefill threshold also applies to a request that runs alone.
    `has_active_seqs`: `max_num_active_seqs` and `long_prefill_token_threshold_adaptive` are settings.
    `phantom_hits`: under the priority policy, a preempted request that was already scheduled keeps the keys of blocks
    that are never computed, so that they can be hit. A known defect; the report counts such hits.
    `async_methods`: speculation methods with which batches are scheduled one ahead by default (without speculation,
    every release since 0.14 does).
    `preempted_first`: a preempted request goes to the front of the queue, before requests that were skipped because
    of `max_loras`.
    `self_preemption_ends`: when a request preempts itself, no running request behind it is scheduled in that step.
    `counts_running_loras`: `max_loras` counts the adapters of all running requests, else of those already scheduled.
    `has_prefill_interval`: `prefill_schedule_interval` has an effect on a single engine.
    `has_batch_queue`: the queue of batches of a pipeline is known.
    `has_largest_limits`: a device of at least 160 GiB has limits of a batch of its own (`understudy.defaults`).
    `memory_share`: default of `gpu_memory_utilization`.
    `front_counts_sent`: the front end of data-parallel ranks balances by the requests that it has sent to each, and by
    their KV usage; `front_rotates`: it searches for the minimum from a rotating start.

    Speculation. `spec_admission_lookahead`: an admission allocates blocks for future drafts. `spec_pads_admissions`: a
    request that joins decodes with one token to compute gets blank drafts, and waits where budget or context has no
    room for them; `spec_pads_within_context`: it gets none where the context has no room; `spec_pads_hits`: a request
    whose other tokens are cached also gets them when no other request decodes. `spec_slots_by_request`: a draft model
    takes a slot of the budget per scheduled request, not per possible one. `spec_hashes_ahead`: with mtp, eagle and
    eagle3 the key of a block covers the token behind it too, so that the last block of a hit need not be dropped.
    `spec_keys_in_update`: synchronously too, blocks of accepted drafts get their keys when the tokens arrive.
    """

    name: str
    free_order: FreeOrder = "unkeyed_first"
    has_watermark: bool = True
    has_reserve_full_isl: bool = True
    caps_lone_prefill: bool = True
    has_active_seqs: bool = False
    phantom_hits: bool = True
    async_methods: frozenset[Method] = _DRAFTERS
    preempted_first: bool = False
    self_preemption_ends: bool = True
    counts_running_loras: bool = False
    has_prefill_interval: bool = False
    has_batch_queue: bool = False
    has_largest_limits: bool = False
    memory_share: float = MEMORY_SHARE
    front_counts_sent: bool = True
    front_rotates: bool = True
    spec_admission_lookahead: bool = True
    spec_pads_admissions: bool = True
    spec_pads_within_context: bool = False
    spec_pads_hits: bool = False
    spec_slots_by_request: bool = True
    spec_hashes_ahead: bool = False
    spec_keys_in_update: bool = False


PROFILES: dict[str, VersionProfile] = {
    profile.name: profile
    for profile in (
        VersionProfile(
            name="v0.33",
            has_largest_limits=True,
            caps_lone_prefill=False,
            has_active_seqs=True,
            preempted_first=True,
            self_preemption_ends=False,
            counts_running_loras=True,
            has_prefill_interval=True,
            has_batch_queue=True,
            spec_pads_within_context=True,
            spec_pads_hits=True,
            spec_hashes_ahead=True,
            spec_keys_in_update=True,
        ),
        VersionProfile(
            name="v0.31",
            has_largest_limits=True,
            caps_lone_prefill=False,
            has_active_seqs=True,
            preempted_first=True,
            spec_pads_within_context=True,
            spec_pads_hits=True,
        ),
        VersionProfile(name="recorded", has_largest_limits=True),
        VersionProfile(
            name="v0.27", free_order="uncached_last", spec_slots_by_request=False, async_methods=_EAGLE_LIKE
        ),
        VersionProfile(
            name="v0.24",
            spec_pads_admissions=False,
            spec_slots_by_request=False,
            async_methods=_EAGLE_LIKE,
            front_counts_sent=False,
            front_rotates=False,
        ),
        VersionProfile(
            name="v0.23",
            free_order="all_last",
            has_watermark=False,
            spec_pads_admissions=False,
            spec_slots_by_request=False,
            async_methods=_EAGLE_LIKE,
            front_counts_sent=False,
            front_rotates=False,
        ),
        VersionProfile(
            name="v0.18",
            memory_share=EARLIER_MEMORY_SHARE,
            free_order="all_last",
            has_watermark=False,
            has_reserve_full_isl=False,
            spec_admission_lookahead=False,
            spec_pads_admissions=False,
            spec_slots_by_request=False,
            async_methods=_EAGLE_LIKE,
            front_counts_sent=False,
            front_rotates=False,
        ),
    )
}

RELEASES: dict[int, VersionProfile] = {
    33: PROFILES["v0.33"],
    **dict.fromkeys((31, 32), PROFILES["v0.31"]),
    # Equal except for speculation.
    30: msgspec.structs.replace(PROFILES["recorded"], spec_pads_within_context=True, spec_pads_hits=True),
    29: msgspec.structs.replace(PROFILES["recorded"], spec_pads_within_context=True),
    28: PROFILES["recorded"],
    27: PROFILES["v0.27"],
    **dict.fromkeys(
        (25, 26), msgspec.structs.replace(PROFILES["v0.24"], spec_pads_admissions=True, front_rotates=True)
    ),
    24: PROFILES["v0.24"],
    23: PROFILES["v0.23"],
    **dict.fromkeys((20, 21, 22), msgspec.structs.replace(PROFILES["v0.23"], spec_admission_lookahead=False)),
    19: msgspec.structs.replace(
        PROFILES["v0.23"], spec_admission_lookahead=False, memory_share=EARLIER_MEMORY_SHARE
    ),
    18: PROFILES["v0.18"],
}
"""Profiles of the known releases 0.N by N, newest first."""

NEWEST = f"0.{max(RELEASES)}"
OLDEST = f"0.{min(RELEASES)}"

REVISION = "a014e35f"
"""The vLLM revision (August 2026) that is called `recorded`."""


def find_profile(name: str) -> VersionProfile:
    """Return the profile of a release (`0.26.0`, `v0.30`, `0.18`), or of the revision called `recorded`.

    ConfigError for an unknown release names the newest or oldest known one.
    """
    if name in PROFILES:
        return PROFILES[name]
    release = re.fullmatch(r"v?(\d+)\.(\d+)(\.\d+)?(\.post\d+)?", name)
    if release is None:
        raise ConfigError(
            f"vllm_version {name!r} is not known; give a release from {OLDEST} to {NEWEST} (as 0.26.0 or v0.30), "
            "or recorded"
        )
    major, minor = int(release[1]), int(release[2])
    if major == 0 and minor in RELEASES:
        return RELEASES[minor]
    if (major, minor) > (0, max(RELEASES)):
        raise ConfigError(f"vllm_version {name!r} is not known; the newest known release is {NEWEST}")
    raise ConfigError(f"vllm_version {name!r} is not known; the oldest known release is {OLDEST}")


def find_memory_share(release: str) -> float:
    """Return the share of memory that a vLLM release takes by default, also of one older than the known ones.

    A release that is not named, as a nightly build, has the newest one's.
    """
    numbers = re.match(r"v?0\.(\d+)", release)
    minor = max(RELEASES) if numbers is None else int(numbers[1])
    if minor < min(RELEASES):
        return EARLIER_MEMORY_SHARE
    return RELEASES[minor].memory_share if minor in RELEASES else MEMORY_SHARE


def find_recorded_profile(version: object) -> VersionProfile:
    """Return the profile of the vLLM in a recording's header: a release, or the recorded revision."""
    if not isinstance(version, str):
        raise ConfigError(f"vllm: the recording's header has {version!r}, not a version")
    if version == "vllm-src" or version.startswith(REVISION):
        return PROFILES["recorded"]
    return find_profile(version)
