"""What differs between vLLM releases in their native host offload, as data."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from understudy._core import VllmOffload
from understudy.engines.profiles import REVISION
from understudy.errors import ConfigError


class OffloadProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One release's OffloadingConnector, and its scheduler's part in it.

    `touches`: lookups and stores make chunks young on the host; else the end of a request does, once for all it used.
    `arc_falls_back`: under ARC, where no chunk seen again may be evicted, one seen once is, however few there are.
    `stores_last_token`: a request that has ended offers the chunk of its last token too, which nobody ever computed.
    `holders_first`: who waits and holds blocks has a queue of its own, which is served first.
    `spares_in_flight`: asynchronously, a victim whose step is in flight is not preempted: it would yield nothing.
    `has_arc`: the host can be kept by ARC. `defect`: a way in which the release comes to a halt, or nothing.
    """

    name: str
    touches: bool
    arc_falls_back: bool
    stores_last_token: bool
    holders_first: bool
    spares_in_flight: bool
    has_arc: bool = True
    defect: str = ""

    def native(self, **settings: Any) -> VllmOffload:
        """The core's form of an offload with these settings, by the rules of this release."""
        return VllmOffload(
            release=self.name.removeprefix("v")
            if self.name != "recorded"
            else f"revision {REVISION} (recorded)",
            touches=self.touches,
            arc_falls_back=self.arc_falls_back,
            stores_last_token=self.stores_last_token,
            holders_first=self.holders_first,
            spares_in_flight=self.spares_in_flight,
            **settings,
        )


RECORDED = OffloadProfile(
    name="recorded",
    touches=True,
    arc_falls_back=False,
    stores_last_token=True,
    holders_first=False,
    spares_in_flight=False,
    defect=(
        "a request at the head of the skipped queue whose allocation fails ends the scan, and those behind it whose "
        "blocks have been loaded keep them for ever"
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
}
"""By the minor number of 0.x. `recorded` and 0.32 are compared with recordings; the others follow from what their
connector, host policies and scheduler do differently."""


def offload_profile(version: str) -> OffloadProfile:
    """The offload of a vLLM release, or of the revision that is called `recorded`.

    ConfigError for a release whose offload has rules that are not known here.
    """
    if version == "recorded" or version.startswith(REVISION):
        return RECORDED
    match = re.fullmatch(r"v?0\.(\d+)(\.\d+)?(\.post\d+)?", version)
    if match and int(match[1]) in RELEASES:
        return RELEASES[int(match[1])]
    raise ConfigError(
        f"offload mode vllm: the native offload of vllm_version {version!r} has rules of its own that are not "
        f"simulated; give 0.{min(RELEASES)} to 0.{max(RELEASES)}, or recorded"
    )
