"""KV cache groups of models whose layers keep different kinds of KV."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from understudy._core import KvGroup
from understudy.checks import whole_number
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.groups import GroupPlan

Kind = Literal[
    "full", "mla", "sliding_window", "sliding_window_mla", "chunked_local", "mamba", "rswa", "circular"
]
_EVENT_KINDS = {
    "full": "full_attention",
    "rswa": "full_attention",
    "mla": "mla_attention",
    "chunked_local": "chunked_local_attention",
}
_KIND_OF_NAME = {
    "full_attention": "full",
    "mla_attention": "mla",
    "chunked_local_attention": "chunked_local",
}
"""Other names of kinds in settings: those of KV events and of `understudy capacity`."""
_SLIDING = ("sliding_window", "sliding_window_mla")


class KvCacheGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers of one kind, which share a block table; sizes in tokens.

    Example:
        window = us.KvCacheGroup(kind="sliding_window", block_size=16, window=128)
        engine = us.VllmConfig(kv_cache_groups=(window, us.KvCacheGroup(kind="full", block_size=16)))
    """

    kind: Kind
    """Kind of attention or state; `mamba` is any state layer."""
    block_size: int
    """Tokens per block of this group."""
    window: int | None = None
    """Window of the sliding kinds and of rswa."""
    chunk: int | None = None
    """Chunk of local attention, a multiple of `block_size`."""
    mode: Literal["align", "none"] = "align"
    """State layers: cache states at block ends, or (without prefix caching) one block per request."""
    checkpoint_blocks: int = 0
    """State layers: extra blocks for a state inside a chunk of the prompt."""
    checkpoint_alignment: int | None = None
    """State layers: such a state is a multiple of this many tokens behind the start of its chunk."""
    bounded_replay: bool = False
    """Sliding MLA layers: not cached; the tokens of the window are computed again after a hit."""

    def __post_init__(self) -> None:
        whole_number("kv_cache_groups: block_size", self.block_size, 1, 2**20)
        self._check_span()
        if self.kind != "mamba":
            self._refuse_state_settings()
        whole_number("kv_cache_groups: checkpoint_blocks", self.checkpoint_blocks)
        if self.checkpoint_alignment is not None:
            whole_number("kv_cache_groups: checkpoint_alignment", self.checkpoint_alignment, 1)
        if self.bounded_replay and self.kind != "sliding_window_mla":
            raise ConfigError("kv_cache_groups: bounded_replay is for kind sliding_window_mla; leave it out")

    def _check_span(self) -> None:
        """Raise ConfigError for a window or a chunk that is missing, not of the kind, or too small."""
        needs_window = self.kind in (*_SLIDING, "rswa")
        if needs_window != (self.window is not None):
            problem = "needs a window" if needs_window else "has no window; leave it out"
            raise ConfigError(f"kv_cache_groups: kind {self.kind} {problem}")
        if (self.kind == "chunked_local") != (self.chunk is not None):
            problem = "needs a chunk" if self.chunk is None else "has no chunk; leave it out"
            raise ConfigError(f"kv_cache_groups: kind {self.kind} {problem}")
        if self.window is not None:
            whole_number("kv_cache_groups: window", self.window, 2)
        if self.chunk is not None and (
            whole_number("kv_cache_groups: chunk", self.chunk, 1) % self.block_size
        ):
            raise ConfigError(
                f"kv_cache_groups: chunk must be a multiple of block_size={self.block_size}, got {self.chunk}"
            )

    def _refuse_state_settings(self) -> None:
        """Raise ConfigError for settings of states in a group of another kind."""
        given = {
            "mode": self.mode != "align",
            "checkpoint_blocks": bool(self.checkpoint_blocks),
            "checkpoint_alignment": self.checkpoint_alignment is not None,
        }
        for name, is_given in given.items():
            if is_given:
                raise ConfigError(f"kv_cache_groups: {name} is for kind mamba; leave it out")

    def native(self) -> KvGroup:
        """Return the core's form."""
        return KvGroup(
            self.kind,
            block_size=self.block_size,
            window=self.window or 0,
            chunk=self.chunk or 0,
            align=self.mode == "align",
            checkpoint_blocks=self.checkpoint_blocks,
            checkpoint_alignment=1 if self.checkpoint_alignment is None else self.checkpoint_alignment,
            bounded_replay=self.bounded_replay,
        )

    def describe_kind(self) -> tuple[str, int | None]:
        """Return kind and window as KV events name them."""
        return _EVENT_KINDS.get(self.kind, self.kind), self.window if self.kind in _SLIDING else None


def take_kind_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Return engine settings whose groups have their kinds' own names, also where events name them otherwise."""
    groups = settings.get("kv_cache_groups")
    if not isinstance(groups, list | tuple):
        return settings
    named = [
        {**group, "kind": _KIND_OF_NAME.get(kind, kind)}
        if isinstance(group, dict) and isinstance(kind := group.get("kind"), str)
        else group
        for group in groups
    ]
    return {**settings, "kv_cache_groups": named}


def kv_cache_groups(plan: GroupPlan) -> tuple[KvCacheGroup, ...]:
    """Return the groups of a model's plan (`understudy.groups.groups_of_model`), for `VllmConfig`."""
    found = []
    unit = math.lcm(*(group.block_size for group in plan.groups if group.align or group.kind != "mamba"))
    for group in plan.groups:
        layer = group.layer
        is_full = group.kind == "full_attention" and layer.kind != "rswa"
        kind = "full" if is_full else layer.kind
        found.append(
            KvCacheGroup(
                kind=kind,
                # A state that is not cached has one block of any size: one that the others' blocks divide.
                block_size=group.block_size
                if group.align or kind != "mamba"
                else -(-group.block_size // unit) * unit,
                window=layer.window if kind in (*_SLIDING, "rswa") else None,
                chunk=layer.chunk if kind == "chunked_local" else None,
                mode="align" if group.align or kind != "mamba" else "none",
                checkpoint_blocks=layer.checkpoint_blocks if group.align and kind == "mamba" else 0,
                checkpoint_alignment=group.checkpoint_alignment if kind == "mamba" else None,
                bounded_replay=layer.bounded_replay,
            )
        )
    return tuple(found)
