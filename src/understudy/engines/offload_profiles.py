"""What differs between vLLM releases in their native host offload, as data."""

from __future__ import annotations

import re

import msgspec

from understudy.engines.profiles import REVISION
from understudy.errors import ConfigError


class OffloadProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One release's OffloadingConnector, and its scheduler's part in it.

    `touches`: lookups and stores make chunks young on the host; else the end of a request does, once for all it used.
    `stores_last_token`: a request that has ended offers the chunk of its last token too, which nobody ever computed.
    `holders_first`: who waits and holds blocks has a queue of its own, which is served first.
    `spares_in_flight`: asynchronously, a victim whose step is in flight is not preempted: it would yield nothing.
    `has_arc`: the host can be kept by ARC. `defect`: a way in which the release comes to a halt, or nothing.
    """

    name: str
    touches: bool
    stores_last_token: bool
    holders_first: bool
    spares_in_flight: bool
    has_arc: bool = True
    defect: str = ""


RECORDED = OffloadProfile(
    name="recorded",
    touches=True,
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
    stores_last_token=False,
    holders_first=True,
    spares_in_flight=True,
)


def offload_profile(version: str) -> OffloadProfile:
    """The offload of a vLLM release, or of the revision that is called `recorded`.

    ConfigError for a release whose offload was not recorded.
    """
    if version == "recorded" or version.startswith(REVISION):
        return RECORDED
    if re.fullmatch(r"v?0\.32(\.\d+)?(\.post\d+)?", version):
        return V0_32
    raise ConfigError(
        f"offload mode vllm: the native offload of vllm_version {version!r} is not known; give 0.32, or recorded"
    )
