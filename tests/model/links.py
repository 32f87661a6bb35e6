"""Processor sharing by the book: exact fractions, every rate computed anew at every event."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction


@dataclass(frozen=True)
class ModelLink:
    """`bandwidth` in bytes per ns, None for no limit."""

    bandwidth: Fraction | None
    fixed_ns: int = 0
    demand_first: bool = False
    cap: int | None = None  # index of the duplex cap above it


@dataclass(frozen=True)
class ModelCap:
    bandwidth: Fraction | None
    demand_first: bool = False


@dataclass
class ModelTransfer:
    start_ns: int
    path: tuple[int, ...]
    num_bytes: int
    background: bool = False
    left: Fraction = field(init=False)

    def __post_init__(self) -> None:
        self.left = Fraction(self.num_bytes)


def completions(
    links: list[ModelLink],
    caps: list[ModelCap],
    transfers: list[ModelTransfer],
    changes: list[tuple[int, str, int, Fraction]] | None = None,
) -> list[tuple[int, int]]:
    """(time_ns, index) of every transfer, by time and then by index.

    `changes`: from a time on a "link" or a "cap" has another bandwidth.
    """
    links, caps = list(links), list(caps)
    later = sorted(changes or [], key=lambda change: change[0])

    def ports(transfer: ModelTransfer) -> set[tuple[str, int]]:
        above = {("cap", cap) for i in transfer.path if (cap := links[i].cap) is not None}
        return {("link", i) for i in transfer.path} | above

    def rate(transfer: ModelTransfer, flowing: list[ModelTransfer]) -> Fraction | None:
        shares = []
        for kind, i in ports(transfer):
            port = links[i] if kind == "link" else caps[i]
            if port.bandwidth is None:
                continue
            sharers = [other for other in flowing if (kind, i) in ports(other)]
            demand = [other for other in sharers if not other.background]
            if port.demand_first and demand:
                if transfer.background:
                    return Fraction(0)
                sharers = demand
            shares.append(port.bandwidth / len(sharers))
        return min(shares) if shares else None

    begins = {i: t.start_ns + sum(links[j].fixed_ns for j in t.path) for i, t in enumerate(transfers)}
    flowing: dict[int, ModelTransfer] = {}
    ended: list[tuple[int, int]] = []
    now = Fraction(0)
    while begins or flowing:
        rates = {i: rate(t, list(flowing.values())) for i, t in flowing.items()}
        ends = {}
        for i, t in flowing.items():
            speed = rates[i]
            if speed is None or t.left == 0:
                ends[i] = now
            elif speed > 0:
                ends[i] = now + t.left / speed
        moments = [*begins.values(), *(ns for ns, *_ in later)]
        then = min([Fraction(ns) for ns in moments] + list(ends.values()))
        for i, t in flowing.items():
            t.left -= (then - now) * (rates[i] or 0)
        now = then
        while later and later[0][0] == now:
            _, kind, changed, bandwidth = later.pop(0)
            if kind == "link":
                links[changed] = replace(links[changed], bandwidth=bandwidth)
            else:
                caps[changed] = replace(caps[changed], bandwidth=bandwidth)
        for i in [i for i, end in ends.items() if end == now]:
            del flowing[i]
            ended.append((math.ceil(now), i))
        for i in [i for i, ns in begins.items() if ns == now]:
            del begins[i]
            flowing[i] = transfers[i]
    return sorted(ended)
