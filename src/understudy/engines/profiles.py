"""What differs between vLLM versions, as data."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from understudy.errors import ConfigError

Method = Literal["mtp", "eagle", "eagle3", "ngram", "draft_model"]
"""How drafts are made."""

_DRAFTERS: frozenset[Method] = frozenset({"mtp", "eagle", "eagle3", "draft_model"})
_EAGLE_LIKE = _DRAFTERS - {"draft_model"}

FreeOrder = Literal["unkeyed_first", "all_last", "uncached_last"]


class VersionProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One vLLM version's scheduler.

    `free_order`: where a freed block enters the free list. `unkeyed_first`: blocks without a key in front, the others
    at the end; `all_last`: every block at the end; `uncached_last`: all at the end if prefix caching is off.
    `caps_lone_prefill`: the long-prefill threshold holds for a request that is alone, too.
    `has_active_seqs`: `max_num_active_seqs` and `long_prefill_token_threshold_adaptive` are settings.
    `phantom_hits`: under the priority policy a victim that was already scheduled keeps the keys of blocks that nobody
    will compute, so that they can be hit. A known defect; the report counts such hits.
    Batches are scheduled one ahead unless told otherwise (every release since 0.14); `async_methods`: with these
    methods of speculation, too.
    `preempted_first`: a preempted request goes to the front of the queue, before those who were passed over because the
    batch had its adapters (`max_loras`).
    `front_counts_sent`: the front of data-parallel ranks goes by what it has sent to each, and by their KV usage;
    `front_rotates`: it looks for the least from a place that moves on.

    Speculation. `spec_admission_lookahead`: an admission takes blocks for the drafts to come. `spec_pads_admissions`: a
    request that joins decodes with one token to compute is given blank drafts, and waits where budget or context has no
    room for them; `spec_pads_within_context`: it does without them where the context has none; `spec_pads_hits`: one
    whose other tokens are cached gets them too, though nobody else decodes. `spec_slots_by_request`: a draft model
    takes a slot of the budget for every request that is scheduled, and not for as many as may run.
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
    front_counts_sent: bool = True
    front_rotates: bool = True
    spec_admission_lookahead: bool = True
    spec_pads_admissions: bool = True
    spec_pads_within_context: bool = False
    spec_pads_hits: bool = False
    spec_slots_by_request: bool = True


PROFILES: dict[str, VersionProfile] = {
    profile.name: profile
    for profile in (
        VersionProfile(
            name="v0.31",
            caps_lone_prefill=False,
            has_active_seqs=True,
            preempted_first=True,
            spec_pads_within_context=True,
            spec_pads_hits=True,
        ),
        VersionProfile(name="recorded"),
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
    **dict.fromkeys((31, 32), PROFILES["v0.31"]),
    # The same but for speculation.
    30: msgspec.structs.replace(PROFILES["recorded"], spec_pads_within_context=True, spec_pads_hits=True),
    29: msgspec.structs.replace(PROFILES["recorded"], spec_pads_within_context=True),
    28: PROFILES["recorded"],
    27: PROFILES["v0.27"],
    **dict.fromkeys(
        (25, 26), msgspec.structs.replace(PROFILES["v0.24"], spec_pads_admissions=True, front_rotates=True)
    ),
    24: PROFILES["v0.24"],
    23: PROFILES["v0.23"],
    **dict.fromkeys(
        (19, 20, 21, 22), msgspec.structs.replace(PROFILES["v0.23"], spec_admission_lookahead=False)
    ),
    18: PROFILES["v0.18"],
}
"""The profile of every release 0.N that is known, by N; newest first."""

NEWEST = f"0.{max(RELEASES)}"
OLDEST = f"0.{min(RELEASES)}"

REVISION = "a014e35f"
"""The revision of vLLM (of August 2026) whose name is `recorded`."""


def profile_named(name: str) -> VersionProfile:
    """The profile of a release (`0.26.0`, `v0.30`, `0.18`), or of the revision that is called `recorded`.

    ConfigError for a release that is not known, with the newest or the oldest that is.
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
        raise ConfigError(f"vllm_version {name!r} is not known: the newest that is known is {NEWEST}")
    raise ConfigError(f"vllm_version {name!r} is not known: the oldest that is known is {OLDEST}")


def profile_recorded(version: object) -> VersionProfile:
    """The profile of what the header of a recording names as its vLLM: a release, or the recorded revision."""
    if not isinstance(version, str):
        raise ConfigError(f"the recording does not say which vLLM it is of: {version!r}")
    if version == "vllm-src" or version.startswith(REVISION):
        return PROFILES["recorded"]
    return profile_named(version)
