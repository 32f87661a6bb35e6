"""Write a run as a Perfetto trace: protobuf track events, or the JSON of Chrome's trace viewer."""

from __future__ import annotations

import json
from os import fspath
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from understudy.explain.trace_events import build_trace
from understudy.outputs import create

if TYPE_CHECKING:
    from os import PathLike

    from numpy.typing import NDArray

    from understudy.explain.saved_run import SavedRun
    from understudy.explain.trace_events import CounterTrack, SliceTrack, Trace

# Field numbers of perfetto_trace.proto, as (number << 3 | wire type).
_PACKET = 1 << 3 | 2
_TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _INTERNED, _FLAGS = 8 << 3, 10 << 3, 11 << 3 | 2, 12 << 3 | 2, 13 << 3
_DESCRIPTOR = 60 << 3 | 2
_TYPE, _TRACK, _NAME_IID, _ANNOTATION = 9 << 3, 11 << 3, 10 << 3, 4 << 3 | 2
_COUNTER, _FLOW, _FLOW_END = 30 << 3, 47 << 3 | 1, 48 << 3 | 1
_BEGIN, _END, _VALUE = 1, 2, 4  # TrackEvent.Type
_SEQUENCE_ID, _CLEARED, _NEEDS_STATE = 1, 1, 2
_TOKENS_IID = 1
_ROWS = 1 << 17  # slices at a time: limits the memory of the arrays below


def write_trace(run: SavedRun, path: str | PathLike[str]) -> None:
    """Write a run's trace; JSON if the name ends in .json. InvalidArgument when the file cannot be written."""
    trace = build_trace(run)
    with create(path) as file:
        if fspath(path).endswith(".json"):
            _write_json(trace, file)
        else:
            write_protobuf(trace, file)


def write_protobuf(trace: Trace, file: IO[bytes]) -> None:
    """Write the trace as packets of perfetto_trace.proto."""
    uuids = _describe_tracks(trace, file)
    times = [track.end_ns for track in trace.slices] + [track.time_ns for track in trace.counters]
    latest = max((int(part[-1]) for part in times if len(part)), default=0)
    width = _varint_width(latest)
    for slices, uuid in zip(trace.slices, uuids[0], strict=True):
        for packets in _slice_packets(slices, uuid, width):
            file.write(packets.data)
    for counter, uuid in zip(trace.counters, uuids[1], strict=True):
        file.write(_counter_packets(counter, uuid, width).data)


# ── Single messages ──


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _message(tag: int, content: bytes) -> bytes:
    return _varint(tag) + _varint(len(content)) + content


def _text(number: int, text: str) -> bytes:
    return _message(number << 3 | 2, text.encode())


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _packet(content: bytes) -> bytes:
    return _message(_PACKET, content + _varint(_SEQUENCE) + _varint(_SEQUENCE_ID))


def _describe_tracks(trace: Trace, file: IO[bytes]) -> tuple[list[int], list[int]]:
    """Write the processes, tracks and names; return the ids of slice and counter tracks."""
    names = b"".join(
        _message(2 << 3 | 2, _number(1, iid) + _text(2, name)) for iid, name in enumerate(trace.names, 1)
    )
    names += _message(3 << 3 | 2, _number(1, _TOKENS_IID) + _text(2, "tokens"))
    file.write(_packet(_varint(_FLAGS) + _varint(_CLEARED) + _message(_INTERNED, names)))
    for number, name in enumerate(trace.processes):
        process = _message(3 << 3 | 2, _number(1, number + 1) + _text(6, name))
        file.write(_packet(_message(_DESCRIPTOR, _number(1, number + 1) + process)))
    next_uuid = len(trace.processes) + 1
    uuids: tuple[list[int], list[int]] = ([], [])
    several: tuple[list[SliceTrack] | list[CounterTrack], ...] = (trace.slices, trace.counters)
    for kind, tracks in enumerate(several):
        for track in tracks:
            content = _number(1, next_uuid) + _text(2, track.name) + _number(5, track.process + 1)
            if kind == 1:
                content += _message(8 << 3 | 2, b"")
            file.write(_packet(_message(_DESCRIPTOR, content)))
            uuids[kind].append(next_uuid)
            next_uuid += 1
    return uuids


# ── Many packets at once: equal fields of all rows are columns of bytes ──


def _varint_width(largest: int) -> int:
    return max(1, (largest.bit_length() + 6) // 7)


def _varints(values: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """Encode a column as varints of equal length; those that are shorter are padded, which protobuf allows."""
    shifts = np.arange(width, dtype=np.uint64) * np.uint64(7)
    out = ((values.astype(np.uint64)[:, None] >> shifts) & np.uint64(0x7F)).astype(np.uint8)
    out[:, :-1] |= 0x80
    return out


def _join(count: int, *parts: bytes | NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Put columns of bytes side by side; bytes are repeated in every row."""
    columns = [
        np.broadcast_to(np.frombuffer(part, np.uint8), (count, len(part)))
        if isinstance(part, bytes)
        else part
        for part in parts
    ]
    return np.concatenate(columns, axis=1)


def _nest(count: int, tag: int, content: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return _join(count, _varint(tag) + _varint(content.shape[1]), content)


def _packets(
    count: int, times: NDArray[np.int64], width: int, event: NDArray[np.uint8], flags: int
) -> NDArray[np.uint8]:
    tail = _varint(_SEQUENCE) + _varint(_SEQUENCE_ID)
    if flags:
        tail += _varint(_FLAGS) + _varint(flags)
    stamp = _join(count, _varint(_TIMESTAMP), _varints(times, width))
    return _nest(count, _PACKET, _join(count, stamp, _nest(count, _TRACK_EVENT, event), tail))


def _slice_packets(track: SliceTrack, uuid: int, width: int) -> list[NDArray[np.uint8]]:
    """Encode a begin and an end packet per slice, in time order."""
    total = len(track.begin_ns)
    flows = np.asarray(track.flows, np.int64).reshape(-1, 3)
    chunks = []
    for start in range(0, total, _ROWS):
        stop = min(start + _ROWS, total)
        of_chunk = flows[np.searchsorted(flows[:, 0], start) : np.searchsorted(flows[:, 0], stop)]
        chunks.append(_encode_slices(track, start, stop, of_chunk, uuid, width))
    return chunks


def _encode_slices(
    track: SliceTrack, start: int, stop: int, flows: NDArray[np.int64], uuid: int, width: int
) -> NDArray[np.uint8]:
    """Encode slices `start` to `stop`: those with equally many flows together, then all in order."""
    on_track = _varint(_TRACK) + _varint(uuid)
    name_width = _varint_width(int(track.names.max()) + 1)
    counts = np.bincount(flows[:, 0] - start, minlength=stop - start)
    first_flow = np.cumsum(counts) - counts
    groups = []
    sizes = np.zeros(stop - start, np.int64)
    for count in np.unique(counts).tolist():
        rows = np.flatnonzero(counts == count)
        n = len(rows)
        fields: list[bytes | NDArray[np.uint8]] = [
            _varint(_TYPE) + _varint(_BEGIN) + on_track + _varint(_NAME_IID),
            _varints(track.names[start + rows] + 1, name_width),
        ]
        if track.tokens is not None:
            tokens = _varints(track.tokens[start + rows], _varint_width(int(track.tokens.max())))
            note = _join(n, _number(1, _TOKENS_IID) + _varint(3 << 3), tokens)
            fields.append(_nest(n, _ANNOTATION, note))
        for which in range(count):
            chosen = flows[first_flow[rows] + which]
            # Both tags are two bytes long.
            tags = np.where(chosen[:, 2:] == 1, _tag_bytes(_FLOW_END), _tag_bytes(_FLOW))
            ids = chosen[:, 1].astype("<u8").view(np.uint8).reshape(n, 8)
            fields += [tags.astype(np.uint8), ids]
        begin = _packets(n, track.begin_ns[start + rows], width, _join(n, *fields), _NEEDS_STATE)
        end = _join(n, _varint(_TYPE) + _varint(_END) + on_track)
        pair = np.concatenate([begin, _packets(n, track.end_ns[start + rows], width, end, 0)], axis=1)
        sizes[rows] = pair.shape[1]
        groups.append((rows, pair))
    if len(groups) == 1:
        return groups[0][1].reshape(-1)
    places = np.cumsum(sizes) - sizes
    out = np.empty(int(sizes.sum()), np.uint8)
    for rows, pair in groups:
        out[places[rows][:, None] + np.arange(pair.shape[1])] = pair
    return out


def _tag_bytes(tag: int) -> NDArray[np.uint8]:
    return np.frombuffer(_varint(tag), np.uint8)


def _counter_packets(track: CounterTrack, uuid: int, width: int) -> NDArray[np.uint8]:
    """Encode one packet per change of the counter."""
    changed = np.flatnonzero(np.diff(track.values, prepend=-1) != 0)
    n = len(changed)
    if n == 0:
        return np.empty(0, np.uint8)
    values = track.values[changed]
    head = _varint(_TYPE) + _varint(_VALUE) + _varint(_TRACK) + _varint(uuid) + _varint(_COUNTER)
    event = _join(n, head, _varints(values, _varint_width(int(values.max()))))
    return _packets(n, track.time_ns[changed], width, event, 0).reshape(-1)


# ── JSON ──


def _write_json(trace: Trace, file: IO[bytes]) -> None:
    """Write the trace in Chrome's format: times in µs, a thread per track."""
    # No displayTimeUnit: Perfetto's trace processor takes it for the unit of the timestamps, which are in µs.
    file.write(b'{"traceEvents":[')
    first = True

    def put(event: dict[str, Any]) -> None:
        nonlocal first
        file.write((b"" if first else b",\n") + json.dumps(event, separators=(",", ":")).encode())
        first = False

    for number, name in enumerate(trace.processes):
        put({"ph": "M", "name": "process_name", "pid": number + 1, "args": {"name": name}})
    seen: set[int] = set()
    for thread, track in enumerate(trace.slices, 1):
        place = {"pid": track.process + 1, "tid": thread}
        put({"ph": "M", "name": "thread_name", **place, "args": {"name": track.name}})
        begins, ends = track.begin_ns.tolist(), track.end_ns.tolist()
        tokens = None if track.tokens is None else track.tokens.tolist()
        for at, name in enumerate(track.names.tolist()):
            event = {"ph": "X", "name": trace.names[name], **place}
            event |= {"ts": begins[at] / 1e3, "dur": (ends[at] - begins[at]) / 1e3}
            put(event if tokens is None else {**event, "args": {"tokens": tokens[at]}})
    # A flow's events must be in time order: it begins on the request's slot, and ends in its last step.
    flows = [
        (int(track.begin_ns[at]), track.name == "steps", flow, ends, thread, track.process)
        for thread, track in enumerate(trace.slices, 1)
        for at, flow, ends in track.flows
    ]
    for time, _, flow, ends, thread, process in sorted(flows):
        phase = ("f" if ends else "t") if flow in seen else "s"
        seen.add(flow)
        event = {"ph": phase, "name": "request", "cat": "request", "id": flow, "ts": time / 1e3}
        put(event | {"pid": process + 1, "tid": thread} | ({"bp": "e"} if phase == "f" else {}))
    for counter in trace.counters:
        count = {"ph": "C", "name": counter.name, "pid": counter.process + 1}
        for time, value in zip(counter.time_ns.tolist(), counter.values.tolist(), strict=True):
            put({**count, "ts": time / 1e3, "args": {"value": value}})
    file.write(b"]}\n")
