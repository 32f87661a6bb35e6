"""Wire formats of KV events by engine release: a table of rules, selected by version."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from understudy._core import Tier
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

Producer: TypeAlias = Literal["vllm", "sglang"]
Version: TypeAlias = tuple[int, int, int, int]  # major, minor, patch, post

# A field with its first release and the events that have it. `always` is written even when it is None;
# the others are left out of a map (an array has a place for every field).
_Field: TypeAlias = tuple[Version, str, bool, bool, bool]  # since, name, on stored, on removed, always

_BASE: tuple[_Field, ...] = (
    ((0, 0, 0, 0), "block_hashes", True, True, True),
    ((0, 0, 0, 0), "parent_block_hash", True, False, True),
    ((0, 0, 0, 0), "token_ids", True, False, True),
    ((0, 0, 0, 0), "block_size", True, False, True),
    ((0, 0, 0, 0), "lora_id", True, False, True),
)
_VLLM: tuple[_Field, ...] = (
    *_BASE,
    ((0, 10, 2, 0), "medium", True, True, True),
    ((0, 14, 0, 0), "lora_name", True, False, True),
    ((0, 17, 0, 0), "extra_keys", True, False, False),
    ((0, 20, 0, 0), "group_idx", True, True, False),
    ((0, 22, 0, 0), "kv_cache_spec_kind", True, False, False),
    ((0, 22, 0, 0), "kv_cache_spec_sliding_window", True, False, False),
    ((0, 26, 0, 0), "locality", True, True, False),
    ((0, 29, 0, 0), "ownership", True, True, False),
    ((0, 30, 0, 0), "session_id", True, False, False),
    ((0, 33, 0, 0), "lookahead_token_ids", True, False, False),
)
_SGLANG: tuple[_Field, ...] = (
    *_BASE,
    ((0, 5, 9, 0), "medium", True, True, False),
    ((0, 5, 20, 0), "cache_salt", True, False, False),
    ((0, 5, 20, 0), "session_id", True, False, False),
    ((0, 5, 22, 0), "lora_name", True, False, False),
)

# Tier names by release; an engine publishes no events for a tier without a name.
_VLLM_MEDIA: tuple[tuple[Version, dict[Tier, str]], ...] = (
    ((0, 0, 0, 0), {}),
    ((0, 10, 2, 0), {Tier.G1: "GPU", Tier.G2: "CPU"}),
    ((0, 26, 0, 0), {Tier.G1: "GPU", Tier.G2: "CPU", Tier.G3: "FS", Tier.G4: "OBJ"}),
    ((0, 27, 0, 0), {Tier.G1: "GPU", Tier.G2: "CPU", Tier.G3: "STORAGE", Tier.G4: "STORAGE"}),
)
_SGLANG_MEDIA: tuple[tuple[Version, dict[Tier, str]], ...] = (
    ((0, 0, 0, 0), {}),
    ((0, 5, 9, 0), {Tier.G1: "GPU", Tier.G2: "CPU_PINNED"}),
    ((0, 5, 11, 0), {Tier.G1: "GPU", Tier.G2: "CPU_PINNED", Tier.G3: "DISK", Tier.G4: "EXTERNAL"}),
)

# All tier names of all producers. A reader accepts each, because a relay may be of another release.
TIER_OF_MEDIUM: dict[str | None, Tier] = {
    None: Tier.G1,
    "GPU": Tier.G1,
    "CPU": Tier.G2,
    "CPU_PINNED": Tier.G2,
    "HOST_PINNED": Tier.G2,
    "DISK": Tier.G3,
    "FS": Tier.G3,
    "STORAGE": Tier.G3,
    "OBJ": Tier.G4,
    "EXTERNAL": Tier.G4,
}

FIRST: dict[Producer, Version] = {"vllm": (0, 9, 0, 0), "sglang": (0, 4, 6, 5)}
LAST: dict[Producer, str] = {"vllm": "0.33.0", "sglang": "0.5.23"}


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """Wire format of one release: its events, batches and frames.

    `stored_fields` and `removed_fields` are in wire order; those in `always` are written to a map even
    when they are None. `array_events`: an event is an array without names, else a map. `salt_element`: a salted store
    carries a map with its salt after its last element. `has_rank`: a batch ends with its data-parallel rank, and a
    rank's port is the first port plus the rank. `signed_hashes`: hashes are int64. `replay_topic`: replies of the
    replay socket carry the topic. `media`: tier names (empty: only GPU events, without a tier name).
    `joins_events`: an event continues the one before it where it can; else the device sends one BlockRemoved per block.
    `starts_cleared`: a stream starts with AllBlocksCleared. `offloads_by_chunk`: native offload sends one event per
    chunk, with its cache group.
    """

    producer: Producer
    version: str
    array_events: bool
    stored_fields: tuple[str, ...]
    removed_fields: tuple[str, ...]
    always: frozenset[str]
    media: dict[Tier, str]
    has_rank: bool
    salt_element: bool
    signed_hashes: bool
    replay_topic: bool
    joins_events: bool
    starts_cleared: bool
    offloads_by_chunk: bool

    @property
    def name(self) -> str:
        """Name that `dialect` accepts, e.g. "vllm-0.24.0"."""
        return f"{self.producer}-{self.version}"

    def publishes_tier(self, tier: Tier) -> bool:
        """Return whether such an engine publishes events of blocks on that tier."""
        return tier in self.media or tier == Tier.G1


def dialect(name: str) -> Dialect:
    """Return the dialect of a release: "vllm-0.24.0", "sglang-0.5.20"; "vllm" alone is the newest known one.

    A rule applies from its first release on, so every version has a dialect; versions newer than all known ones get
    the newest rules. ConfigError for another producer, an invalid version, or one without KV events.
    """
    found = re.fullmatch(r"(vllm|sglang)(?:[-_: =@]+(.+))?", name.strip().lower())
    if found is None:
        raise ConfigError(
            f"dialect: {name!r} is not known; give a producer and its version, as in vllm-0.24.0 or sglang-0.5.20"
        )
    producer: Producer = "vllm" if found[1] == "vllm" else "sglang"
    return _dialect(producer, found[2] or LAST[producer])


def known_dialects() -> Iterator[Dialect]:
    """Yield the first release of every set of rules, oldest first, vLLM before SGLang."""
    vllm = (
        {since for since, *_ in _VLLM} | {since for since, _ in _VLLM_MEDIA} | {(0, 9, 1, 0), (0, 24, 0, 0)}
    )
    sglang = {since for since, *_ in _SGLANG} | {since for since, _ in _SGLANG_MEDIA}
    sglang |= {(0, 4, 7, 0), (0, 5, 18, 0)}
    for producer, changes in (("vllm", vllm), ("sglang", sglang)):
        first = FIRST["vllm" if producer == "vllm" else "sglang"]
        for major, minor, patch, post in sorted({first} | changes - {(0, 0, 0, 0)}):
            yield dialect(f"{producer}-{major}.{minor}.{patch}" + (f".post{post}" if post else ""))


@cache
def _dialect(producer: Producer, text: str) -> Dialect:
    version = _version(producer, text)
    if version < FIRST[producer]:
        major, minor, patch, post = FIRST[producer]
        raise ConfigError(
            f"dialect: {producer} {text} sends no KV events; choose at least {major}.{minor}.{patch}"
            + (f".post{post}" if post else "")
        )
    vllm = producer == "vllm"
    fields = [field for field in (_VLLM if vllm else _SGLANG) if field[0] <= version]
    media = [names for since, names in (_VLLM_MEDIA if vllm else _SGLANG_MEDIA) if since <= version]
    return Dialect(
        producer=producer,
        version=text.removeprefix("v"),
        array_events=version < ((0, 24, 0, 0) if vllm else (0, 5, 20, 0)),
        stored_fields=tuple(name for _, name, stored, _, _ in fields if stored),
        removed_fields=tuple(name for _, name, _, removed, _ in fields if removed),
        always=frozenset(name for _, name, _, _, always in fields if always),
        media=media[-1],
        has_rank=version >= ((0, 9, 1, 0) if vllm else (0, 4, 7, 0)),
        salt_element=not vllm and (0, 5, 18, 0) <= version < (0, 5, 20, 0),
        signed_hashes=not vllm,
        replay_topic=version >= ((0, 26, 0, 0) if vllm else (0, 5, 22, 0)),
        joins_events=not vllm,
        starts_cleared=not vllm,
        offloads_by_chunk=vllm and version >= (0, 24, 0, 0),
    )


def _version(producer: Producer, text: str) -> Version:
    """Parse a version; a pre-release or local build counts as its release."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.\d+)*(?:\.?post(\d+))?(?!\d)", text)
    if found is None:
        raise ConfigError(
            f"dialect: {text!r} is not a version of {producer}; write it as in {producer}-{LAST[producer]}"
        )
    major, minor, patch, post = found.groups()
    return int(major), int(minor), int(patch or 0), int(post or 0)
