"""Slow model of the lowering of Weka traces: one trace as decoded JSON in, nodes with named dependencies out.

Times are integers of nanoseconds. The rules are those of docs/agents.md, written down one by one; the core
(`core/traces/weka_lowering.cpp`) does the same over columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MICROSECOND = 1_000
HOUR = 3_600_000_000_000
PREAMBLE_OUTPUT = 64


@dataclass
class Node:
    """A request of the trace; `position` is its place in the file."""

    name: str
    position: int
    start: int
    end: int
    model: str
    input_length: int
    output_length: int
    ids: list[int]
    session: str = ""
    dependencies: list[tuple[str, str, int, str]] = field(default_factory=list)

    def depend(self, on: Node, trigger: str, delay: int, relation: str) -> None:
        """Add an edge, unless one with this request, trigger and relation is there."""
        if not any(
            known[0] == on.name and known[1] == trigger and known[3] == relation
            for known in self.dependencies
        ):
            self.dependencies.append((on.name, trigger, max(0, delay), relation))


@dataclass
class Chain:
    """Requests that follow one another, and the request that the first of them forked from."""

    nodes: list[Node]
    fork: Node | None = None
    common: int = 0

    @property
    def tail(self) -> Node:
        """The last request with ids; requests without any follow a chain, and nothing forks from them."""
        return next((node for node in reversed(self.nodes) if node.ids), self.nodes[-1])


def to_ns(seconds: float) -> int:
    """Return whole nanoseconds."""
    return round(seconds * 1e9)


def common_prefix(one: list[int], other: list[int]) -> int:
    """Return the number of equal leading ids."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def nested_times_are_relative(traces: list[dict[str, Any]]) -> bool:
    """Whether any nested time of the corpus lies before its marker."""
    return any(
        to_ns(inner["t"]) < to_ns(request["t"]) - MICROSECOND
        for trace in traces
        for request in trace["requests"]
        if request["type"] == "subagent"
        for inner in request["requests"]
    )


def lower(trace: dict[str, Any], relative: bool) -> list[Node]:
    """Lower one trace."""
    top: list[Node] = []
    groups: list[tuple[int, dict[str, Any], list[Node], Node | None]] = []
    position = 0
    for index, request in enumerate(trace["requests"]):
        if request["type"] != "subagent":
            top.append(_node(f"outer:{index}", position, request, 0, relative=False))
            position += 1
            continue
        marker = to_ns(request["t"])
        inner = []
        for number, nested in enumerate(request["requests"]):
            inner.append(_node(f"outer:{index}:inner:{number}", position, nested, marker, relative))
            position += 1
        groups.append((index, request, inner, top[-1] if top else None))
    streams = _lower_scope(top, "root")
    of = {node.name: stream for stream in streams for node in stream}
    for index, request, inner, owner in groups:
        scoped = _lower_scope(inner, f"subagent:{index}:{request['agent_id']}")
        if not scoped:
            continue
        if owner is not None:
            _spawn(scoped[0][0], owner)
        if request["status"] == "completed" and owner is not None:
            _join(scoped, owner, of[owner.name], request)
    everything = [*streams]
    for index, request, inner, _ in groups:
        prefix = f"subagent:{index}:{request['agent_id']}"
        found: dict[str, list[Node]] = {}
        for node in inner:
            found.setdefault(node.session, []).append(node)
        everything += [sorted(nodes, key=_order) for nodes in found.values()]
        assert all(session.startswith(prefix) for session in found)
    if streams:
        first = streams[0][0]
        for stream in everything:
            if stream[0] is not first and not any(node.dependencies for node in stream[:1]):
                stream[0].depend(first, "dispatch", stream[0].start - first.start, "spawn")
    return sorted([*top, *(node for _, _, inner, _ in groups for node in inner)], key=_order)


def _node(name: str, position: int, request: dict[str, Any], marker: int, relative: bool) -> Node:
    start = to_ns(request["t"])
    start = start + marker if relative else max(start, marker)
    end = start + to_ns(request.get("api_time") or 0)
    ids = list(request.get("hash_ids") or [])
    return Node(name, position, start, end, request["model"], request["in"], request["out"], ids)


def _order(node: Node) -> tuple[int, int]:
    return node.start, node.position


def _lower_scope(nodes: list[Node], name: str) -> list[list[Node]]:
    """Divide requests of one scope into streams, the root's first, and link them."""
    ordered = sorted(nodes, key=_order)
    if not ordered:
        return []
    preamble = _preamble(ordered)
    chains = _chains([node for node in ordered if node is not preamble])
    _seams(chains)
    chains.sort(key=lambda chain: _order(chain.nodes[0]))
    if preamble is not None:
        if not chains:
            chains.append(Chain([]))
        chains[0].nodes.insert(0, preamble)
    for place, chain in enumerate(chains):
        for node in chain.nodes:
            node.session = name if place == 0 else f"{name}:worker:{place - 1}"
        for before, node in zip(chain.nodes, chain.nodes[1:], strict=False):
            node.depend(before, "completion", node.start - before.end, "sequence")
        if chain.fork is not None and place > 0:
            _spawn(chain.nodes[0], chain.fork)
    _barriers(ordered, [chain.nodes for chain in chains])
    return [chain.nodes for chain in chains]


def _preamble(ordered: list[Node]) -> Node | None:
    first = ordered[0]
    if not first.ids:
        return None
    others = [node for node in ordered[1:] if node.ids]
    if any(node.ids[0] == first.ids[0] for node in others):
        return None
    known = {number for node in others for number in node.ids}
    return first if first.output_length <= PREAMBLE_OUTPUT or known.isdisjoint(first.ids) else None


def _chains(ordered: list[Node]) -> list[Chain]:
    chains: list[Chain] = []
    for node in ordered:
        if not chains:
            chains.append(Chain([node]))
            continue
        if not node.ids or not any(any(other.ids for other in chain.nodes) for chain in chains):
            chains[0].nodes.append(node)
            continue
        fitting = [
            chain
            for chain in chains
            if common_prefix(chain.tail.ids, node.ids) == len(chain.tail.ids)
            and chain.tail.model == node.model
            and chain.tail.end <= node.start + MICROSECOND
        ]
        if fitting:
            max(fitting, key=lambda chain: len(chain.tail.ids)).nodes.append(node)
            continue
        best = max(chains, key=lambda chain: (common_prefix(chain.tail.ids, node.ids), len(chain.tail.ids)))
        common = common_prefix(best.tail.ids, node.ids)
        chains.append(Chain([node], best.tail if common else None, common))
    return chains


def _seams(chains: list[Chain]) -> None:
    done: set[int] = set()
    while True:
        forks = {id(chain.fork): chain.fork for chain in chains if chain.fork is not None}
        todo = [node for node in forks.values() if id(node) not in done]
        if not todo:
            return
        tail = min(todo, key=lambda node: node.position)
        done.add(id(tail))
        own = next((chain for chain in chains if chain.tail is tail), None)
        if own is None:
            continue
        siblings = [chain for chain in chains if chain.fork is tail and chain.common > 0]
        fitting = [
            chain
            for chain in siblings
            if chain.nodes[0].start >= tail.end - MICROSECOND
            and chain.nodes[0].model == tail.model
            and not (chain.nodes[0].start - tail.end > HOUR and chain.common / len(tail.ids) < 0.5)
        ]
        if not fitting:
            continue
        taken = min(fitting, key=lambda chain: (-chain.common, chain.nodes[0].start, chains.index(chain)))
        own.nodes = sorted([*own.nodes, *taken.nodes], key=_order)  # requests without ids may come later
        chains.remove(taken)
        new = own.tail
        for chain in siblings:
            if chain is taken or chain.nodes[0].start < new.start:
                continue
            common = common_prefix(new.ids, chain.nodes[0].ids)
            if common:
                chain.fork, chain.common = new, common


def _spawn(node: Node, fork: Node) -> None:
    if node.start < fork.end:
        node.depend(fork, "dispatch", node.start - fork.start, "spawn")
    else:
        node.depend(fork, "completion", node.start - fork.end, "spawn")


def _join(streams: list[list[Node]], owner: Node, stream: list[Node], request: dict[str, Any]) -> None:
    duration = request["duration_ms"]
    until = max(nodes[-1].end for nodes in streams)
    if duration is not None:
        until = to_ns(request["t"]) + round(duration * 1e6)
    later = stream[stream.index(owner) + 1 :]
    target = next((node for node in later if node.start + MICROSECOND >= until), None)
    if target is None:
        return
    for nodes in streams:
        assert target.start - nodes[-1].end >= -MICROSECOND
        target.depend(nodes[-1], "completion", target.start - nodes[-1].end, "join")


def _barriers(ordered: list[Node], streams: list[list[Node]]) -> None:
    for node in ordered:
        found = []
        for stream in streams:
            if node in stream:
                continue
            before = [
                other
                for other in stream
                if other.start < node.start and other.end <= node.start + MICROSECOND
            ]
            if before:
                found.append(max(before, key=lambda other: (other.end, *_order(other))))
        for one in found:
            if not any(one.end <= other.start for other in found if other is not one):
                node.depend(one, "completion", 0, "replay_barrier")
