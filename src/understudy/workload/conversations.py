"""Readers of traces with text: OpenAI-style request logs and ShareGPT. The text is reduced to hash ids."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.checks import whole_number
from understudy.errors import InvalidArgument
from understudy.workload.columns import intern_ids, next_turn_rows
from understudy.workload.lengths import json_file, json_lines, time_ns, timestamp_ns, token_count
from understudy.workload.log_exports import unpack_export
from understudy.workload.log_sessions import LoggedRequest, find_sessions
from understudy.workload.progress import iterate_reporting
from understudy.workload.row_filter import RowFilter
from understudy.workload.text import BytesEncoder, PromptHasher, TokenizerEncoder
from understudy.workload.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from understudy.workload.text import Encoder

DEFAULT_BLOCK = 16
_TIMES = (
    *("timestamp", "created", "created_at", "start_time", "time", "request_time"),
    *("startTime", "request_created_at", "createdAt"),
)
_END_TIMES = (
    *("end_time", "ended_at", "completed_at", "finished_at"),
    *("endTime", "response_created_at"),
)
_SESSIONS = (
    *("session_id", "conversation_id", "conversation", "thread_id", "chat_id"),
    "sessionId",
)
_DATE = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d")
_EPOCHS = (
    (1e17, 1),
    (1e14, 10**3),
    (1e11, 10**6),
    (1e8, 10**9),
)  # least value and ns per unit: ns, µs, ms, s


def read_openai(
    path: Path,
    *,
    tokenizer: str | None = None,
    trace_block_size: int = DEFAULT_BLOCK,
    keep_ids: bool = False,
    time: str | None = None,
    where: Sequence[str] = (),
) -> Workload:
    """Read a request log with one JSON object per line: `messages` or `prompt`, and optionally `usage` and a time.

    Request and answer may be in the object itself or under `request` (or `body`) and `response` (or
    `response.body`), also as LiteLLM, Langfuse and Helicone export them. Times are `timestamp`, `created`,
    `created_at`, `start_time`, `time`, `request_time`, `startTime`, `request_created_at`, or the key `time`: ISO 8601,
    or a number since 1970 in s, ms, µs or ns by its size (small numbers: seconds). Lengths are those of `usage`, else
    counted. Without a tokenizer, lengths are bytes divided by the log's bytes per token of `usage`, else by four.

    Rows are sorted by time. Rows with the same `session_id` (or `conversation_id`, `conversation`, `thread_id`,
    `chat_id`, also under `metadata`) are turns of a session; in a log without ids, so are prompts of which one extends
    the other. A turn waits for the turn before and then for its think time: the time since that turn's `end_time` (or
    `ended_at`, `completed_at`, `finished_at`), else since its start.

    Errors: InvalidArgument `FILE:LINE: …`.
    """
    trace_block_size = whole_number("trace_block_size", trace_block_size, 1)
    kept = RowFilter(where)
    rows, read, hints = [], 0, dict[str, None]()
    for place, record in json_lines(path):
        read += 1
        if isinstance(record, dict) and not kept.keeps(record):
            continue
        row = _Row(place, record, _TIMES if time is None else (time,))
        rows.append(row)
        if row.time_ns is None:
            hints |= dict.fromkeys(_list_dates(record))
    kept.check(read)
    if any(row.time_ns is None for row in rows) and not all(row.time_ns is None for row in rows):
        place = next(row.where for row in rows if row.time_ns is None)
        raise InvalidArgument(
            f"{place}: has no time ({', '.join(_TIMES)}), but other rows have one; give all or none"
        )
    rows.sort(key=lambda row: row.time_ns or 0)
    encoder: Encoder = TokenizerEncoder(tokenizer) if tokenizer else BytesEncoder(_bytes_per_token(rows))
    hasher = PromptHasher(trace_block_size, encoder.units_per_token)
    prompts, outputs, ids = [], [], []
    for row in iterate_reporting("hashing", rows):
        units = encoder.encode(row.prompt)
        tokens = row.prompt_tokens or max(1, round(len(units) / encoder.units_per_token))
        prompts.append(tokens)
        ids.append(hasher.ids(units, tokens))
        outputs.append(row.output_tokens(encoder))
    found = find_sessions(
        [row.logged(tokens < trace_block_size) for row, tokens in zip(rows, prompts, strict=True)]
    )
    quoted = np.zeros(len(rows), np.bool_)
    following = next_turn_rows(found.session)
    for at in reversed(range(len(rows))):  # from the last turn, whose prompt contains the others
        later = int(following[at])
        if later >= 0 and found.repeats_answer[at] and prompts[later] >= prompts[at] + outputs[at]:
            quoted[at] = True
            ids[at] = ids[later][: len(ids[at])]
    has_times = bool(rows) and rows[0].time_ns is not None
    times = np.array([row.time_ns or 0 for row in rows], np.int64)
    elapsed_ns = None
    if has_times and found.turn.any():
        since_ns = times - times[found.first]
        elapsed_ns = np.where((found.turn > 0) & (since_ns >= 0), since_ns, -1)
    return Workload(
        arrival_ns=(times - times.min(initial=times[0] if rows else 0))[found.first],
        prompt_tokens=np.array(prompts, np.int64),
        output_tokens=np.array(outputs, np.int64),
        hash_offsets=np.cumsum([0, *map(len, ids)]),
        hash_ids=intern_ids(np.array([number for row_ids in ids for number in row_ids], np.uint32)),
        trace_block_size=trace_block_size,
        has_arrivals=has_times or not rows,
        session=found.session,
        turn=found.turn,
        delay_ns=found.delay_ns,
        elapsed_ns=elapsed_ns,
        output_in_next=quoted if quoted.any() else None,
        request_ids=_names(rows) if keep_ids else None,
        session_ids=found.names if keep_ids else None,
        notes=(
            *_list_notes(encoder, answers=False),
            *_describe_times(rows, hints, time),
            *kept.notes(),
            *found.notes,
        ),
    )


def _list_dates(record: Any) -> list[str]:
    """List the keys of a row whose values look like dates."""
    items = record.items() if isinstance(record, dict) else ()
    return [key for key, value in items if isinstance(value, str) and _DATE.match(value)]


def _describe_times(rows: Sequence[_Row], hints: Iterable[str], time: str | None) -> tuple[str, ...]:
    """Return a note on a log without times, with the keys that look like some."""
    if not rows or rows[0].time_ns is not None:
        return ()
    sought = ", ".join(_TIMES) if time is None else time
    likely = list(hints)
    found = f"; {', '.join(likely)} look like times: give --time {likely[0]}" if likely else ""
    return (f"no time was found (looked for {sought}){found}",)


def read_sharegpt(
    path: Path, *, tokenizer: str | None = None, trace_block_size: int = DEFAULT_BLOCK
) -> Workload:
    """Read ShareGPT: a JSON list of `conversations` of `from` (human or gpt, user or assistant, system) and `value`.

    A conversation is a session: each answer is a request whose prompt is everything before it, so later prompts
    contain earlier answers. There are no arrivals (closed loop). Conversations without an answer are left out; a note
    has their number.

    Errors: InvalidArgument names the file and the conversation.
    """
    trace_block_size = whole_number("trace_block_size", trace_block_size, 1)
    content = json_file(path)
    if not isinstance(content, list):
        raise InvalidArgument(f"{path}: expected a list of conversations")
    encoder: Encoder = TokenizerEncoder(tokenizer) if tokenizer else BytesEncoder()
    hasher = PromptHasher(trace_block_size, encoder.units_per_token)
    columns: dict[str, list[Any]] = {
        name: [] for name in ("prompt", "output", "session", "turn", "quoted", "ids")
    }
    sessions = 0
    for number, entry in enumerate(iterate_reporting("hashing", content)):
        turns = _turns(entry, f"{path}: conversation {number}", encoder)
        if not turns:
            continue
        whole = hasher.ids(turns[-1][2], turns[-1][0])
        for turn, (prompt, output, _) in enumerate(turns):
            columns["prompt"].append(prompt)
            columns["output"].append(output)
            columns["session"].append(sessions)
            columns["turn"].append(turn)
            columns["quoted"].append(turn + 1 < len(turns))
            columns["ids"].append(whole[: -(-prompt // trace_block_size)])
        sessions += 1
    left_out = len(content) - sessions
    note = (
        (f"{left_out:,} of {len(content):,} conversations have no answer and are left out",)
        if left_out
        else ()
    )
    return Workload(
        arrival_ns=np.zeros(len(columns["prompt"]), np.int64),
        prompt_tokens=np.array(columns["prompt"], np.int64),
        output_tokens=np.array(columns["output"], np.int64),
        hash_offsets=np.cumsum([0, *map(len, columns["ids"])]),
        hash_ids=np.array([number for row in columns["ids"] for number in row], np.uint32),
        trace_block_size=trace_block_size,
        has_arrivals=False,
        session=np.array(columns["session"], np.int64),
        turn=np.array(columns["turn"], np.int64),
        output_in_next=np.array(columns["quoted"], np.bool_),
        notes=(*_list_notes(encoder, answers=True), *note),
    )


class _Row:
    """One line of a request log."""

    def __init__(self, where: str, record: Any, times: tuple[str, ...] = _TIMES) -> None:
        if not isinstance(record, dict):
            raise InvalidArgument(f"{where}: expected an object")
        self.where = where
        record = unpack_export(record)
        self._record = record
        body = record.get("request") or record.get("body") or record
        answer = record.get("response") or record
        if isinstance(answer, dict) and isinstance(answer.get("body"), dict):
            answer = answer["body"]
        self._body = body if isinstance(body, dict) else record
        self._answer = answer if isinstance(answer, dict) else {}
        usage = self._answer.get("usage") or record.get("usage") or {}
        self.prompt_tokens = self._count(usage, "prompt_tokens", "input_tokens")
        self._completion = self._count(usage, "completion_tokens", "output_tokens")
        self._parts = self._read_parts()
        self.prompt = "".join(self._parts)
        self.time_ns = self._time(times)

    def output_tokens(self, encoder: Encoder) -> int:
        """Return the output length from `usage`, else from the answer's text, else `max_tokens`."""
        if self._completion is not None:
            return self._completion
        if parts := self._answers():
            return max(1, round(len(encoder.encode("".join(parts))) / encoder.units_per_token))
        asked = self._count(self._body, "max_completion_tokens", "max_tokens")
        if asked is None:
            raise InvalidArgument(
                f"{self.where}: the output length is missing; give usage, an answer or max_tokens"
            )
        return asked

    def logged(self, is_short: bool) -> LoggedRequest:
        """Return what the row says about its session."""
        answers = self._answers()
        return LoggedRequest(
            parts=self._parts,
            answer=answers[0] if len(answers) == 1 else "",
            session_id=self._session(),
            start_ns=self.time_ns,
            end_ns=self._time(_END_TIMES),
            is_short=is_short,
        )

    def name(self) -> str | None:
        """Return the request id that the row contains."""
        for key in ("request_id", "id", "custom_id"):
            for holder in (self._record, self._answer):
                if isinstance(holder.get(key), str):
                    return str(holder[key])
        return None

    def _count(self, holder: Any, *names: str) -> int | None:
        for name in names:
            value = holder.get(name) if isinstance(holder, dict) else None
            if value is None:
                continue
            return token_count(value, name, self.where)
        return None

    def _answers(self) -> list[str]:
        choices = self._answer.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise InvalidArgument(f"{self.where}: choices must be a list of objects")
        return [_content(choice.get("message") or choice) for choice in choices if choice]

    def _session(self) -> str | None:
        for holder in (self._record, self._body):
            metadata = holder.get("metadata")
            for place in (holder, metadata if isinstance(metadata, dict) else {}):
                for key in _SESSIONS:
                    value = place.get(key)
                    value = value.get("id") if isinstance(value, dict) else value
                    if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
                        return str(value)
        return None

    def _read_parts(self) -> tuple[str, ...] | str:
        body = self._body
        if isinstance(body.get("messages"), list):
            tools = json.dumps(body["tools"], sort_keys=True) if body.get("tools") else ""
            return (tools, *(message_text(message, self.where) for message in body["messages"]))
        prompt = body.get("prompt", body.get("input"))
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list):
            return json.dumps(prompt, sort_keys=True)
        raise InvalidArgument(f"{self.where}: has neither messages nor a prompt")

    def _time(self, keys: tuple[str, ...]) -> int | None:
        for holder in (self._record, self._body, self._answer):
            for key in keys:
                value = holder.get(key)
                if isinstance(value, str):
                    return timestamp_ns(value, self.where)
                if isinstance(value, int | float) and not isinstance(value, bool):
                    scale = next((scale for least, scale in _EPOCHS if value >= least), 10**9)
                    return time_ns(value, key, self.where, scale)
        return None


def message_text(message: Any, where: str) -> str:
    """Return the text of a chat message behind its role. Errors: InvalidArgument."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidArgument(f"{where}: a message needs a role, got {type(message).__name__}")
    return f"\n<{message['role']}>\n{_content(message)}"


def _content(message: Any) -> str:
    """Return the text of a message or a choice, with images and tool calls as JSON."""
    content = message.get("content", message.get("text")) if isinstance(message, dict) else None
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if isinstance(content, list):
        content = "".join(
            part["text"]
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else json.dumps(part, sort_keys=True)
            for part in content
        )
    return (content if isinstance(content, str) else "") + (
        json.dumps(calls, sort_keys=True) if calls else ""
    )


def _bytes_per_token(rows: list[_Row]) -> float:
    """Return the log's mean bytes per prompt token if every row has usage, else the default."""
    if rows and all(row.prompt_tokens for row in rows):
        return max(
            1.0, sum(len(row.prompt.encode()) for row in rows) / sum(row.prompt_tokens or 0 for row in rows)
        )
    return BytesEncoder().units_per_token


def _names(rows: list[_Row]) -> list[str]:
    return [row.name() or f"request_{number}" for number, row in enumerate(rows)]


def _turns(entry: Any, where: str, encoder: Encoder) -> list[tuple[int, int, NDArray[np.uint32]]]:
    """List (prompt tokens, output tokens, units of the prompt) per answer; a prompt is a prefix of the next one."""
    messages = entry.get("conversations", entry.get("messages")) if isinstance(entry, dict) else None
    if not isinstance(messages, list):
        raise InvalidArgument(f"{where}: conversations are missing")
    turns, text = [], np.empty(0, np.uint32)
    for message in messages:
        role = message.get("from", message.get("role")) if isinstance(message, dict) else None
        value = message.get("value", message.get("content")) if isinstance(message, dict) else None
        if not isinstance(role, str) or not isinstance(value, str):
            raise InvalidArgument(f"{where}: a message needs from and value")
        is_answer = role in ("gpt", "assistant", "chatgpt", "bing", "bard")
        if not is_answer:
            text = np.concatenate([text, encoder.encode(f"\n<{role}>\n{value}")])
            continue
        if not len(text):
            continue  # an answer without a prompt
        after = np.concatenate([text, encoder.encode(value)])
        prompt = max(1, round(len(text) / encoder.units_per_token))
        output = max(1, round(len(after) / encoder.units_per_token) - prompt)
        turns.append((prompt, output, text))
        text = after
    return _drop_short_prompts(turns)


def _drop_short_prompts(
    turns: list[tuple[int, int, NDArray[np.uint32]]],
) -> list[tuple[int, int, NDArray[np.uint32]]]:
    """Drop turns whose prompt is too short to contain the turn before, as after an answer without text."""
    kept: list[tuple[int, int, NDArray[np.uint32]]] = []
    for turn in turns:
        if kept and turn[0] < kept[-1][0] + kept[-1][1]:
            continue
        kept.append(turn)
    return kept


def _list_notes(encoder: Encoder, *, answers: bool) -> tuple[str, ...]:
    notes = []
    if encoder.units_per_token != 1:
        notes.append(
            f"lengths are approximate: {encoder.units_per_token:.3g} bytes count as a token (no tokenizer)"
        )
    if not answers:
        notes.append("generated tokens count as cached only if the next prompt of the session repeats them")
    return tuple(notes)
