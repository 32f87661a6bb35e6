"""Divide layers of several page sizes into groups that overlay each other in blocks of one size.

vLLM packs where the cache's layout has blocks outermost: a block is as wide as the widest group, and the groups are
chosen so that narrow ones waste little of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.groups.layer import Layer


class _Bucket:
    """Layers of one uniform type, by page size."""

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.pages: dict[int, list[int]] = {}
        self.layer: Layer

    def add(self, index: int, layer: Layer) -> None:
        if not self.indices:
            self.layer = layer
        self.indices.append(index)
        self.pages.setdefault(layer.page_bytes, []).append(index)

    @property
    def is_balanced(self) -> bool:
        return len({len(indices) for indices in self.pages.values()}) == 1

    @property
    def is_mixed(self) -> bool:
        return len(self.pages) > 1

    @property
    def repeats(self) -> int:
        """Layers of each page size, in a balanced bucket."""
        return len(next(iter(self.pages.values())))

    def width(self, groups: int) -> int:
        """Bytes of the widest of `groups` groups."""
        return sum(page * -(-len(indices) // groups) for page, indices in self.pages.items())

    def is_loose(self, *, windows: bool) -> bool:
        """Whether the bucket is split until it does not widen the block; `windows`: windows are, too."""
        kind = self.layer.kind
        return kind in ("mamba", "circular") or (windows and kind in ("sliding_window", "sliding_window_mla"))

    def split(self, groups: int) -> list[tuple[int, ...]]:
        """Deal the layers of each page size to `groups` groups in turn, and order each group by layer."""
        dealt: list[list[int]] = [[] for _ in range(groups)]
        for indices in self.pages.values():
            for position, index in enumerate(indices):
                dealt[position % groups].append(index)
        return [tuple(sorted(one)) for one in dealt if one]


def packed_groups(layers: tuple[Layer, ...]) -> list[tuple[int, ...]]:
    """Return the layer indices of each group."""
    by_type: dict[tuple[object, ...], _Bucket] = {}
    for index, layer in enumerate(layers):
        by_type.setdefault(layer.uniform_type, _Bucket()).add(index, layer)
    buckets = list(by_type.values())
    size = _repeats_per_group(buckets)
    numbers = [
        -(-bucket.repeats // size) if size is not None and bucket.is_balanced else 1 for bucket in buckets
    ]
    loose = [bucket.is_loose(windows=size is None) for bucket in buckets]
    anchor = max(
        bucket.width(len(bucket.indices) if is_loose else number)
        for bucket, number, is_loose in zip(buckets, numbers, loose, strict=True)
    )
    groups = []
    for bucket, number, is_loose in zip(buckets, numbers, loose, strict=True):
        if is_loose:
            fitting = max(1, anchor // bucket.layer.page_bytes)
            number = max(number, -(-len(bucket.indices) // fitting))
        groups += bucket.split(number)
    return groups


def _repeats_per_group(buckets: list[_Bucket]) -> int | None:
    """Return the repeats per group that pad balanced buckets least (ties: more); None without mixed pages."""
    balanced = [bucket for bucket in buckets if bucket.is_balanced]
    mixed = [bucket.repeats for bucket in balanced if bucket.is_mixed]
    if not mixed:
        return None
    sizes = range(max(mixed), max(bucket.repeats for bucket in balanced) + 1)
    return min(sizes, key=lambda size: (sum(-bucket.repeats % size for bucket in balanced), -size))
