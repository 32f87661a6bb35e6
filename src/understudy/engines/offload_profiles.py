"""Differences between vLLM releases in their native host offload, as data."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from understudy._core import VllmOffload
from understudy.engines.core_fields import fields_of
from understudy.engines.profiles import REVISION
from understudy.errors import ConfigError


class OffloadProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of one release's OffloadingConnector and of its scheduler.

    `touches`: lookups and stores mark chunks as recently used on the host; else the end of a request does, for all its
    chunks. `arc_falls_back`: under ARC, if no chunk of the frequent list may be evicted, one of the recent list is.
    `stores_last_token`: a finished request also offers the chunk of its last token, whose KV was never computed.
    `holders_first`: waiting requests with blocks have their own queue, which is served first.
    `spares_in_flight`: with async scheduling, a request with a step in flight is not preempted, because that would
    free no block. `ranks`: under LRU, a request's chunks lie together, ranked by the request that used them last.
    `offers_again`: a request that is looked up offers all its chunks again. `has_arc`: ARC is available. `defect`: a
    way in which the release stops making progress, or empty.
    """

    name: str
    touches: bool
    arc_falls_back: bool
    stores_last_token: bool
    holders_first: bool
    spares_in_flight: bool
    ranks: bool = False
    offers_again: bool = False
    has_arc: bool = True
    defect: str = ""

    def native(self, **settings: Any) -> VllmOffload:
        """Build the core's configuration of an offload with these settings and this release's rules."""
        release = (
            f"revision {REVISION} (recorded)" if self.name == "recorded" else self.name.removeprefix("v")
        )
        return VllmOffload(**fields_of(VllmOffload, self, release=release, **settings))


RECORDED = OffloadProfile(
    name="recorded",
    touches=True,
    arc_falls_back=False,
    stores_last_token=True,
    holders_first=False,
    spares_in_flight=False,
    defect=(
        "a failed allocation at the head of the skipped queue ends the scan, and later requests in it keep their "
        "loaded blocks forever"
    ),
)
V0_32 = OffloadProfile(
    name="v0.32",
    touches=False,
    arc_falls_back=True,
    stores_last_token=False,
    holders_first=True,
    spares_in_flight=True,
)

RELEASES: dict[int, OffloadProfile] = {
    28: msgspec.structs.replace(RECORDED, name="v0.28"),
    29: msgspec.structs.replace(RECORDED, name="v0.29"),
    30: msgspec.structs.replace(
        RECORDED, name="v0.30", arc_falls_back=True, stores_last_token=False, spares_in_flight=True
    ),
    31: msgspec.structs.replace(V0_32, name="v0.31"),
    32: V0_32,
    33: msgspec.structs.replace(V0_32, name="v0.33", ranks=True, offers_again=True),
}
"""Profiles by the minor number of 0.x. `recorded`, 0.32 and 0.33 are compared with recordings; the others follow from
differences in their connector, host policies and scheduler."""


def offload_profile(version: str) -> OffloadProfile:
    """Return the offload rules of a vLLM release, or of the revision that is called `recorded`.

    ConfigError for a release whose rules are not known.
    """
    if version == "recorded" or version.startswith(REVISION):
        return RECORDED
    match = re.fullmatch(r"v?0\.(\d+)(\.\d+)?(\.post\d+)?", version)
    if match and int(match[1]) in RELEASES:
        return RELEASES[int(match[1])]
    raise ConfigError(
        f"offload mode vllm: the native offload of vllm_version {version!r} is not simulated; "
        f"give 0.{min(RELEASES)} to 0.{max(RELEASES)}, or recorded"
    )
