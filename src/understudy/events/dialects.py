"""What each release of an engine says on the wire, as data: a release is a set of rules, found by its version."""

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

# A field by the release that brought it, and the events that carry it. `always` is written even when it is None;
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
)
_SGLANG: tuple[_Field, ...] = (
    *_BASE,
    ((0, 5, 9, 0), "medium", True, True, False),
    ((0, 5, 20, 0), "cache_salt", True, False, False),
    ((0, 5, 20, 0), "session_id", True, False, False),
    ((0, 5, 22, 0), "lora_name", True, False, False),
)

# What a tier is called, by release; a tier without a name is one that such an engine does not speak of.
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

# Every name that any producer gives a tier. A reader knows them all: a stream may come through a relay of another age.
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
LAST: dict[Producer, str] = {"vllm": "0.32.0", "sglang": "0.5.23"}


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """How one release writes events, batches and frames.

    `stored_fields` and `removed_fields` stand in the order of the wire; those in `always` are written to a map even
    when they are None. `array_events`: an event is an array without names, else a map. `salt_element`: a salted store
    carries a map with its salt behind its last element. `has_rank`: a batch ends with its data-parallel rank, and a
    rank's port is that far above the first. `signed_hashes`: hashes are int64. `replay_topic`: replies of the replay
    socket carry the topic. `media`: what tiers are called (empty: only the GPU is spoken of, without a name).
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

    @property
    def name(self) -> str:
        """As `dialect` reads it."""
        return f"{self.producer}-{self.version}"

    def speaks_of(self, tier: Tier) -> bool:
        """Whether such an engine tells of blocks on that tier."""
        return tier in self.media or tier == Tier.G1


def dialect(name: str) -> Dialect:
    """The dialect of a release: "vllm-0.24.0", "sglang-0.5.20"; "vllm" alone is the newest that is known.

    Rules hold from the release that brought them, so any version has a dialect; one newer than all that are known
    gets the newest rules. ConfigError for another producer, a version that is none, or one before events began.
    """
    found = re.fullmatch(r"(vllm|sglang)(?:[-_: =@]+(.+))?", name.strip().lower())
    if found is None:
        raise ConfigError(
            f"dialect {name!r} is not known: name a producer and its version, as in vllm-0.24.0 or sglang-0.5.20"
        )
    producer: Producer = "vllm" if found[1] == "vllm" else "sglang"
    return _dialect(producer, found[2] or LAST[producer])


def known_dialects() -> Iterator[Dialect]:
    """One of each: the first release of every set of rules, oldest first, vLLM before SGLang."""
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
            f"{producer} {text} sends no KV events: they begin with {major}.{minor}.{patch}"
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
    )


def _version(producer: Producer, text: str) -> Version:
    """A pre-release or a local build counts as the release that it leads to."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.\d+)*(?:\.?post(\d+))?(?!\d)", text)
    if found is None:
        raise ConfigError(
            f"{text!r} is not a version of {producer}; write it as in {producer}-{LAST[producer]}"
        )
    major, minor, patch, post = found.groups()
    return int(major), int(minor), int(patch or 0), int(post or 0)
