"""HTTP interfaces of vLLM releases: where they differ, as data."""

from __future__ import annotations

import re

import msgspec

from understudy.engines.profiles import find_profile


class ApiRelease(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of one vLLM release's HTTP server.

    `has_decisions`: `/v1/decisions` is a route, and `/is_scaling_elastic_ep` returns the phase of scaling.
    `rejects_while_paused`: requests that arrive during a pause of mode abort or wait are answered 503, else queued.
    `has_weight_versions`: choices have `weight_versions`; chunks of a stream have `kv_transfer_params`.
    `anthropic_errors`: errors of `/v1/messages` have Anthropic's types, else vLLM's.
    `marks_incomplete`: an item of a response that reached its length is incomplete, and so is the last event.
    `names_prompt`: the error for an empty list of prompts has the param `prompt`.
    `cache_labels`: further labels of cache_config_info; `has_offload_info`: the metric kv_offload_config_info exists.
    """

    version: str
    has_decisions: bool = True
    rejects_while_paused: bool = True
    has_weight_versions: bool = True
    anthropic_errors: bool = True
    marks_incomplete: bool = True
    names_prompt: bool = True
    cache_labels: tuple[str, ...] = ("simple_cpu_offload_num_blocks",)
    has_offload_info: bool = True

    @property
    def fingerprint(self) -> str:
        """Value of system_fingerprint."""
        return f"vllm-{self.version}-0d05e0a1"


NEWEST = ApiRelease(version="0.33.0")
OLDEST = ApiRelease(
    version="0.32.0",
    has_decisions=False,
    rejects_while_paused=False,
    has_weight_versions=False,
    anthropic_errors=False,
    marks_incomplete=False,
    names_prompt=False,
    cache_labels=(),
    has_offload_info=False,
)
RELEASES = (NEWEST, OLDEST)


def find_release(vllm_version: object) -> ApiRelease:
    """Return the interface for a setting `vllm_version`; releases before 0.32 have that of 0.32.

    None (an engine that is not vLLM's) has the newest. ConfigError for an unknown release.
    """
    if vllm_version is None:
        return NEWEST
    name = str(vllm_version)
    find_profile(name)
    minor = re.match(r"v?0\.(\d+)", name)
    return NEWEST if minor is not None and int(minor[1]) >= 33 else OLDEST
