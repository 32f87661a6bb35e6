"""Collect requests and their dependencies by name, and build a workload of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from understudy.errors import InvalidArgument
from understudy.workload.agents.lines import fail
from understudy.workload.columns import Int64Column, column, intern_ids, offsets_of, take_ragged
from understudy.workload.graph import RELATIONS, TRIGGERS, RequestGraph, find_cycle
from understudy.workload.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(slots=True)
class Dependency:
    """A request of the same play that is waited for: its row, the trigger, the delay and the relation."""

    on: int
    trigger: int
    delay_ns: int
    relation: int


@dataclass(slots=True)
class Node:
    """One request before it becomes a row."""

    where: str
    request_id: str
    play_id: str
    session_id: str
    model: str
    prompt_tokens: int
    output_tokens: int
    not_before_ns: int
    dependencies: list[Dependency] = field(default_factory=list)
    priority: int = 0
    strict_priority: int = 0
    policy_class: str | None = None
    output_token_ids: Sequence[int] | None = None
    recorded_service_ns: int = -1
    """Recorded time to its last token; −1: unknown."""


def build(
    nodes: Sequence[Node],
    hash_counts: Int64Column,
    hash_ids: NDArray[np.unsignedinteger],
    block_size: int,
    notes: tuple[str, ...] = (),
) -> Workload:
    """Build a workload; rows are the nodes in order, and dependencies name them by place.

    Names that two plays use get their play's name in front. Errors: InvalidArgument `FILE:LINE: dependencies: …` for
    requests that wait for each other in a circle.
    """
    plays: dict[str, int] = {}
    sessions: dict[tuple[int, str], int] = {}
    session, turn, turns = [], [], list[int]()
    for node in nodes:
        play = plays.setdefault(node.play_id, len(plays))
        number = sessions.setdefault((play, node.session_id), len(turns))
        if number == len(turns):
            turns.append(0)
        session.append(number)
        turn.append(turns[number])
        turns[number] += 1
    models = {name: at for at, name in enumerate(dict.fromkeys(node.model for node in nodes))}
    counts = np.array([len(node.dependencies) for node in nodes], np.int64)
    edges = [edge for node in nodes for edge in node.dependencies]
    on = np.array([edge.on for edge in edges], np.int64)
    stuck = find_cycle(np.repeat(np.arange(len(nodes)), counts), on, len(nodes))
    if stuck is not None:
        fail(
            nodes[stuck].where,
            "dependencies",
            f"request {nodes[stuck].request_id!r} waits for itself, over others",
        )
    offsets, outputs = _outputs(nodes)
    numbers = hash_ids
    if outputs is not None and offsets is not None:  # tokens of answers and of prompts share one space
        largest = int(hash_ids.max(initial=0))
        if largest >= 2**32:
            raise InvalidArgument(
                f"{nodes[0].where}: output_token_ids: need hash_ids below 2^32, got {largest}; leave them out"
            )
    else:
        numbers = intern_ids(hash_ids)
    policies = list(dict.fromkeys(node.policy_class for node in nodes if node.policy_class is not None))
    service = np.array([node.recorded_service_ns for node in nodes], np.int64)
    strict = np.array([node.strict_priority for node in nodes], np.int64)
    play_names = list(plays)
    return Workload(
        arrival_ns=np.zeros(len(nodes), np.int64),
        prompt_tokens=np.array([node.prompt_tokens for node in nodes], np.int64),
        output_tokens=np.array([node.output_tokens for node in nodes], np.int64),
        hash_offsets=offsets_of(hash_counts),
        hash_ids=column("hash_ids", numbers, np.uint32),
        trace_block_size=block_size,
        session=np.array(session, np.int32),
        turn=np.array(turn, np.int32),
        priority=np.array([node.priority for node in nodes], np.int64),
        strict_priority=strict if strict.any() else None,
        policy_class=None
        if not policies
        else np.array(
            [-1 if node.policy_class is None else policies.index(node.policy_class) for node in nodes]
        ),
        policy_classes=tuple(policies),
        output_token_offsets=offsets,
        output_token_ids=outputs,
        request_ids=_qualify([(node.play_id, node.request_id) for node in nodes]),
        session_ids=_qualify([(play_names[play], name) for play, name in sessions]),
        graph=RequestGraph(
            play=np.array([plays[node.play_id] for node in nodes], np.int32),
            not_before_ns=np.array([node.not_before_ns for node in nodes], np.int64),
            dependency_offsets=offsets_of(counts),
            dependency_rows=on,
            dependency_triggers=np.array([edge.trigger for edge in edges], np.uint8),
            dependency_delay_ns=np.array([edge.delay_ns for edge in edges], np.int64),
            dependency_relations=np.array([edge.relation for edge in edges], np.uint8),
            play_ids=play_names,
            model=np.array([models[node.model] for node in nodes], np.int32),
            models=tuple(models),
            recorded_service_ns=None if bool((service < 0).all()) else service,
        ),
        notes=notes,
    )


def reorder(
    nodes: Sequence[Node], order: Sequence[int], counts: Int64Column, ids: NDArray[np.unsignedinteger]
) -> tuple[list[Node], Int64Column, NDArray[np.unsignedinteger]]:
    """Return nodes and their ids in another order; dependencies name the new places."""
    place = {old: new for new, old in enumerate(order)}
    moved = [nodes[old] for old in order]
    for node in moved:
        for edge in node.dependencies:
            edge.on = place[edge.on]
    index = np.array(order, np.int64)
    return moved, counts[index], take_ragged(offsets_of(counts), ids, index)[1]


def _qualify(names: list[tuple[str, str]]) -> list[str]:
    plain = [name for _, name in names]
    if len(set(plain)) == len(plain):
        return plain
    return [f"{play}:{name}" for play, name in names]


def _outputs(nodes: Sequence[Node]) -> tuple[Int64Column | None, NDArray[np.uint32] | None]:
    if all(node.output_token_ids is None for node in nodes):
        return None, None
    lists = [node.output_token_ids or () for node in nodes]
    for node, ids in zip(nodes, lists, strict=True):
        if node.output_token_ids is not None and len(ids) != node.output_tokens:
            fail(
                node.where,
                "output_token_ids",
                f"needs output_length ({node.output_tokens}) entries, got {len(ids)}",
            )
        if any(not 0 <= token < 2**32 for token in ids):
            fail(node.where, "output_token_ids", "must lie in 0 … 2^32−1")
    offsets = offsets_of(np.array([len(ids) for ids in lists], np.int64))
    return offsets, np.array([token for ids in lists for token in ids], np.uint32)


TRIGGER_NUMBERS = {name: at for at, name in enumerate(TRIGGERS)}
RELATION_NUMBERS = {name: at for at, name in enumerate(RELATIONS)}
