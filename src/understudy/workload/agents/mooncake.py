"""Reader and writer of `agentic_mooncake` version 2: a graph of requests, one per line behind a header.

docs/agents.md has the keys. A prompt's ids name its blocks; plays of one file share the blocks that have equal ids.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from understudy.errors import InvalidArgument
from understudy.workload.agents.builder import (
    RELATION_NUMBERS,
    TRIGGER_NUMBERS,
    Dependency,
    Node,
    build,
    reorder,
)
from understudy.workload.agents.lines import NO_IDS, describe, fail, id_lists
from understudy.workload.agents.sessions import graph_of
from understudy.workload.files import create_trace, open_trace
from understudy.workload.progress import report_progress

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from numpy.typing import NDArray

    from understudy.workload.columns import Int64Column
    from understudy.workload.workload import Workload

SCHEMA = "dynamo.agentic_mooncake"
VERSION = 2
_ROWS_AT_ONCE = 10_000
_LISTS_AT_ONCE = 1_000


class _Source(msgspec.Struct):
    format: str = ""
    digest: str = ""


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    schema: str
    version: int
    block_size: int
    hash_id_scope: str
    source: _Source | None = None


class _Dependency(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    request_id: str
    trigger: Literal["dispatch", "completion"]
    delay_ms: float
    relation: Literal["sequence", "spawn", "join", "replay_barrier"]


class _Row(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    request_id: str
    play_id: str
    session_id: str
    model: str
    input_length: int
    output_length: int
    hash_ids: msgspec.Raw
    not_before_ms: float
    dependencies: list[_Dependency]
    source_play_ordinal: int | None = None
    recorded_api_time_ms: float | None = None
    priority: int | None = None
    strict_priority: int | None = None
    policy_class: str | None = None
    output_token_ids: list[int] | None = None


_HEADERS = msgspec.json.Decoder(_Header)
_ROWS = msgspec.json.Decoder(_Row)
_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def read_agentic_mooncake(path: Path) -> Workload:
    """Read `agentic_mooncake` version 2.

    Errors: InvalidArgument `FILE:LINE: KEY: …`.
    """
    header: _Header | None = None
    rows: list[_Row] = []
    places: list[str] = []
    lists = _IdParts()
    with open_trace(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            if header is None:
                header = _read_header(line, where)
                continue
            try:
                rows.append(_ROWS.decode(line))
            except _ERRORS as error:
                raise InvalidArgument(f"{where}: {describe(error)}") from None
            places.append(where)
            if len(rows) - lists.rows == _LISTS_AT_ONCE:
                lists.take(rows, places)
    if header is None or not rows:
        raise InvalidArgument(f"{path}: expected a header and at least one request")
    lists.take(rows, places)
    counts, ids = lists.join()
    for row, where, count in zip(rows, places, counts.tolist(), strict=True):
        _check_row(row, where, count, header.block_size)
    nodes = _make_nodes(rows, places)
    order = _corpus_order(rows, places)
    if order is not None:
        nodes, counts, ids = reorder(nodes, order, counts, ids)
    return build(nodes, counts, ids, header.block_size)


class _IdParts:
    """Block ids of many rows, read in parts so that their texts need no memory."""

    def __init__(self) -> None:
        self.rows = 0
        self._counts: list[Int64Column] = []
        self._ids: list[NDArray[np.unsignedinteger]] = []

    def take(self, rows: list[_Row], places: list[str]) -> None:
        """Read the lists of the rows since the last call, and drop their texts."""
        first = self.rows
        counts, ids = id_lists(
            [row.hash_ids for row in rows[first:]], lambda row: (places[first + row], "hash_ids")
        )
        for row in rows[first:]:
            row.hash_ids = NO_IDS
        self._counts.append(counts)
        self._ids.append(ids.astype(np.uint32) if int(ids.max(initial=0)) < 2**32 else ids)
        self.rows = len(rows)

    def join(self) -> tuple[Int64Column, NDArray[np.unsignedinteger]]:
        """Return numbers of ids, and all ids."""
        ids = np.concatenate(self._ids)
        self._ids.clear()
        return np.concatenate(self._counts), ids


def _read_header(line: bytes, where: str) -> _Header:
    try:
        header = _HEADERS.decode(line)
    except _ERRORS as error:
        raise InvalidArgument(f"{where}: header: {describe(error)}") from None
    if header.schema != SCHEMA:
        fail(where, "schema", f'must be "{SCHEMA}", got {header.schema!r}')
    if header.version != VERSION:
        fail(where, "version", f"must be {VERSION}, got {header.version}; convert the source again")
    if not 1 <= header.block_size < 2**30:
        fail(where, "block_size", f"must be at least 1 and below 2^30, got {header.block_size}")
    if header.hash_id_scope != "local":
        fail(where, "hash_id_scope", f'must be "local", got {header.hash_id_scope!r}')
    return header


def _check_row(row: _Row, where: str, ids: int, block_size: int) -> None:
    if not 1 <= row.input_length < 2**31:
        fail(where, "input_length", f"must be at least 1 and below 2^31, got {row.input_length}")
    if not 0 <= row.output_length < 2**31:
        fail(where, "output_length", f"must be at least 0 and below 2^31, got {row.output_length}")
    needed = -(-row.input_length // block_size)
    if ids != needed:
        fail(
            where,
            "hash_ids",
            f"an input_length of {row.input_length} has {needed} blocks of {block_size} tokens, got {ids} ids",
        )
    if row.priority is not None and not -(2**31) <= row.priority < 2**31:
        fail(where, "priority", f"must fit 32 bits, got {row.priority}")
    if row.strict_priority is not None and not 0 <= row.strict_priority < 2**32:
        fail(where, "strict_priority", f"must lie in 0 … 2^32−1, got {row.strict_priority}")


def _make_nodes(rows: list[_Row], places: list[str]) -> list[Node]:
    known: dict[tuple[str, str], int] = {}
    plays: dict[str, set[str]] = {}
    for at, (row, where) in enumerate(zip(rows, places, strict=True)):
        if (row.play_id, row.request_id) in known:
            other = places[known[row.play_id, row.request_id]]
            fail(where, "request_id", f"{row.request_id!r} is already in {other}; give each request its own")
        known[row.play_id, row.request_id] = at
        plays.setdefault(row.request_id, set()).add(row.play_id)
    nodes = []
    for row, where in zip(rows, places, strict=True):
        dependencies = []
        for number, edge in enumerate(row.dependencies):
            on = known.get((row.play_id, edge.request_id))
            if on is None:
                elsewhere = plays.get(edge.request_id)
                what = f"is in play {min(elsewhere)!r}" if elsewhere else "is not in the file"
                fail(
                    where,
                    f"dependencies[{number}].request_id",
                    f"{edge.request_id!r} {what}; name a request of play {row.play_id!r}",
                )
            delay_ns = _to_ns(edge.delay_ms, where, f"dependencies[{number}].delay_ms")
            dependencies.append(
                Dependency(on, TRIGGER_NUMBERS[edge.trigger], delay_ns, RELATION_NUMBERS[edge.relation])
            )
        nodes.append(
            Node(
                where=where,
                request_id=row.request_id,
                play_id=row.play_id,
                session_id=row.session_id,
                model=row.model,
                prompt_tokens=row.input_length,
                output_tokens=row.output_length,
                not_before_ns=_to_ns(row.not_before_ms, where, "not_before_ms"),
                dependencies=dependencies,
                priority=row.priority or 0,
                strict_priority=row.strict_priority or 0,
                policy_class=row.policy_class,
                output_token_ids=row.output_token_ids,
                recorded_service_ns=(
                    -1
                    if row.recorded_api_time_ms is None
                    else _to_ns(row.recorded_api_time_ms, where, "recorded_api_time_ms")
                ),
            )
        )
    return nodes


def _to_ns(milliseconds: float, where: str, key: str) -> int:
    if not math.isfinite(milliseconds) or not 0 <= milliseconds < 2**62 / 1e6:
        fail(where, key, f"must be at least 0 ms and below 2^62 ns, got {milliseconds}")
    whole = math.floor(milliseconds)
    return whole * 1_000_000 + round((milliseconds - whole) * 1e6)


def _corpus_order(rows: list[_Row], places: list[str]) -> list[int] | None:
    """Return the places of the rows in the order of their plays, if the file numbers these and has them otherwise."""
    given = [row.source_play_ordinal for row in rows]
    if all(number is None for number in given):
        return None
    if None in given:
        fail(
            places[given.index(None)],
            "source_play_ordinal",
            "is missing, but other requests have one; give all or none",
        )
    order = sorted(range(len(rows)), key=lambda at: given[at] or 0)
    return None if order == list(range(len(rows))) else order


def write_agentic_mooncake(
    workload: Workload, path: str | os.PathLike[str], source: str = "understudy"
) -> None:
    """Write `workload` as `agentic_mooncake` version 2, gzipped if the name ends in `.gz`; `source` names its format.

    A workload without a graph is written as one play per session, whose turns follow one another. Errors:
    InvalidArgument, before anything is written, for a column that the format cannot express.
    """
    for name in ("adapter", "accepted_drafts", "abort_after_ns", "queue_order"):
        if getattr(workload, name) is not None:
            raise InvalidArgument(f"{name} cannot be written in {SCHEMA}; leave it out")
    graph = graph_of(workload)
    plays = graph.play_ids or [f"play_{play}" for play in range(graph.plays)]
    requests = workload.request_ids or [f"request_{row}" for row in range(len(workload))]
    sessions = workload.session_ids or [f"session_{session}" for session in range(workload.sessions)]
    outputs = workload.cut_output_tokens.tolist()
    header = {
        "schema": SCHEMA,
        "version": VERSION,
        "block_size": workload.trace_block_size,
        "hash_id_scope": "local",
        "source": {"format": source, "digest": workload.digest},
    }

    def row_of(row: int) -> dict[str, Any]:
        result: dict[str, Any] = {
            "request_id": requests[row],
            "play_id": plays[graph.play[row]],
            "session_id": sessions[workload.session[row]],
            "model": "model" if graph.model is None else graph.models[graph.model[row]],
            "input_length": int(workload.prompt_tokens[row]),
            "output_length": outputs[row],
            "hash_ids": workload.prompt_hash_ids(row).tolist(),
            "not_before_ms": _to_ms(int(graph.not_before_ns[row])),
            "dependencies": [
                {
                    "request_id": requests[on],
                    "trigger": trigger,
                    "delay_ms": _to_ms(delay),
                    "relation": relation,
                }
                for on, trigger, delay, relation in graph.dependencies(row)
            ],
        }
        if graph.recorded_service_ns is not None and graph.recorded_service_ns[row] >= 0:
            result["recorded_api_time_ms"] = _to_ms(int(graph.recorded_service_ns[row]))
        if workload.priority[row]:
            result["priority"] = int(workload.priority[row])
        if workload.strict_priority is not None and workload.strict_priority[row]:
            result["strict_priority"] = int(workload.strict_priority[row])
        if workload.policy_class is not None and workload.policy_class[row] >= 0:
            result["policy_class"] = workload.policy_classes[workload.policy_class[row]]
        offsets, ids = workload.output_token_offsets, workload.output_token_ids
        if offsets is not None and ids is not None and offsets[row + 1] > offsets[row]:
            result["output_token_ids"] = ids[offsets[row] : offsets[row] + outputs[row]].tolist()
        return result

    encoder = msgspec.json.Encoder()
    with create_trace(path) as file:
        file.write(encoder.encode(header) + b"\n")
        for start in range(0, len(workload), _ROWS_AT_ONCE):
            end = min(start + _ROWS_AT_ONCE, len(workload))
            file.write(encoder.encode_lines([row_of(row) for row in range(start, end)]))
            report_progress("writing", end, len(workload))


def _to_ms(time_ns: int) -> float:
    return time_ns / 1e6
