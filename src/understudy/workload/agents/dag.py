"""Reader of AIPerf's `dag_jsonl`: a session per line, whose turns fork and spawn other sessions.

A fork inherits the history and ends its parent, unless it is in the background; a spawned session starts fresh, and the
parent's next turn (or `join_at`) waits for its last turn. A session that no other names is the root of a play.
docs/agents.md has the keys and the rules.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from understudy.checks import whole_number
from understudy.errors import InvalidArgument
from understudy.workload.agents.builder import Dependency, Node, build
from understudy.workload.agents.lines import fail, read_records
from understudy.workload.conversations import DEFAULT_BLOCK, message_text
from understudy.workload.graph import COMPLETION, JOIN, SEQUENCE, SPAWN
from understudy.workload.text import BytesEncoder, PromptHasher, TokenizerEncoder

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from understudy.workload.text import Encoder
    from understudy.workload.workload import Workload

_ANSWERS = 2**31
"""Units from here on are those of answers, whose text is unknown; each answer has one of its own."""
_ISOLATED = "message_array_with_responses"
_MODES = Literal["message_array_with_responses", "deltas_without_responses"]


class _Fork(msgspec.Struct, forbid_unknown_fields=True):
    child: str
    background: bool = False


class _Spawn(msgspec.Struct, forbid_unknown_fields=True):
    children: list[str]
    join_at: int | None = None


class _Turn(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None
    forks: list[str | _Fork] = []
    spawns: list[str | _Spawn] = []
    delay: float = 0.0


class _Round(msgspec.Struct, forbid_unknown_fields=True):
    spawns: list[str]
    think_time_ms: float | None = None


class _Session(msgspec.Struct, forbid_unknown_fields=True):
    session_id: str
    turns: list[_Turn] = []
    orchestrator: bool = False
    spawns: list[str] = []
    rounds: int | list[_Round] | None = None
    think_time_ms: float | None = None
    think_time_sigma: float | None = None
    think_time_min_ms: float | None = None
    think_time_max_ms: float | None = None
    context_mode: _MODES | None = None
    pre_session_spawns: list[str] = []


_DECODER = msgspec.json.Decoder(_Session)


@dataclass(slots=True)
class _Line:
    where: str
    session: _Session


@dataclass(slots=True)
class _Gate:
    """A request that is waited for, and why."""

    on: int
    relation: int
    delay_ns: int = 0


@dataclass(slots=True)
class _Play:
    """A play in the making: how often each session has been instantiated."""

    name: str
    instances: dict[str, int] = field(default_factory=dict)


def read_dag(path: Path, *, tokenizer: str | None = None, trace_block_size: int = DEFAULT_BLOCK) -> Workload:
    """Read AIPerf's `dag_jsonl`; the workload has no arrivals: its plays run in lanes.

    Lengths of prompts are counted with the tokenizer, else estimated from bytes; an answer has `max_tokens` tokens.
    Errors: InvalidArgument `FILE:LINE: KEY: …`.
    """
    trace_block_size = whole_number("trace_block_size", trace_block_size, 1)
    sessions: dict[str, _Line] = {}
    for where, session in read_records(path, _DECODER):
        if session.session_id in sessions:
            fail(
                where,
                "session_id",
                f"{session.session_id!r} is already in {sessions[session.session_id].where}",
            )
        sessions[session.session_id] = _Line(where, session)
    if not sessions:
        raise InvalidArgument(f"{path}: no session; give a file with a JSON object per line")
    encoder: Encoder = TokenizerEncoder(tokenizer) if tokenizer else BytesEncoder()
    return _Expansion(sessions, encoder, trace_block_size).workload()


class _Expansion:
    """Instantiates the sessions of each play, from its root."""

    def __init__(self, sessions: dict[str, _Line], encoder: Encoder, block_size: int) -> None:
        self._sessions = sessions
        self._encoder = encoder
        self._block_size = block_size
        self._hasher = PromptHasher(block_size, encoder.units_per_token)
        self._nodes: list[Node] = []
        self._ids: list[list[int]] = []
        self._open: list[str] = []  # sessions being instantiated, from the root

    def workload(self) -> Workload:
        """Expand all roots, and build the workload."""
        children = {name: line for line in self._sessions.values() for name in self._check(line)}
        for name, line in children.items():
            if name not in self._sessions:
                fail(line.where, "spawns", f"session {name!r} is not in the file")
        roots = [line for name, line in self._sessions.items() if name not in children]
        if not roots:
            first = next(iter(self._sessions.values()))
            fail(first.where, "session_id", "every session is the child of another; one must begin")
        for line in roots:
            self._expand(line.session.session_id, _Play(line.session.session_id), [], self._nothing())
        counts = np.array([len(ids) for ids in self._ids], np.int64)
        notes = [
            "answers have max_tokens tokens; their text is unknown, and shared with the turns that follow"
        ]
        if self._encoder.units_per_token != 1:
            notes.append(
                f"lengths are approximate: {self._encoder.units_per_token:.3g} bytes count as a token (no tokenizer)"
            )
        built = build(
            self._nodes,
            counts,
            np.array([number for ids in self._ids for number in ids], np.uint64),
            self._block_size,
            tuple(notes),
        )
        return replace(built, has_arrivals=False)

    @staticmethod
    def _nothing() -> NDArray[np.uint32]:
        return np.empty(0, np.uint32)

    def _check(self, line: _Line) -> list[str]:
        """Check one session; return the names of the sessions that it starts."""
        session, where = line.session, line.where
        children = [*session.pre_session_spawns, *session.spawns]
        if session.orchestrator:
            return children + self._check_orchestrator(line)
        if session.spawns or session.rounds is not None or session.think_time_ms is not None:
            fail(where, "orchestrator", "spawns, rounds and think_time_ms of a session need it to be true")
        if not session.turns:
            fail(where, "turns", "must not be empty")
        for index, turn in enumerate(session.turns):
            key = f"turns[{index}]"
            if turn.max_tokens is None or not 1 <= turn.max_tokens < 2**31:
                fail(
                    where,
                    f"{key}.max_tokens",
                    f"must be at least 1: the length of the answer, got {turn.max_tokens}",
                )
            if not turn.messages:
                fail(where, f"{key}.messages", "must not be empty")
            _to_ns(turn.delay, where, f"{key}.delay")
            is_last = index + 1 == len(session.turns)
            for fork in turn.forks:
                if not is_last and (isinstance(fork, str) or not fork.background):
                    fail(
                        where,
                        f"{key}.forks",
                        "a fork ends its parent; move it to the last turn, or set background",
                    )
                children.append(fork if isinstance(fork, str) else fork.child)
            for spawn in turn.spawns:
                if isinstance(spawn, str):
                    children.append(spawn)
                    continue
                if spawn.join_at is not None and not index < spawn.join_at < len(session.turns):
                    fail(
                        where,
                        f"{key}.spawns",
                        f"join_at must be a later turn of the session, got {spawn.join_at}",
                    )
                children += spawn.children
        return children

    @staticmethod
    def _check_orchestrator(line: _Line) -> list[str]:
        session, where = line.session, line.where
        if session.turns or session.pre_session_spawns:
            fail(where, "orchestrator", "sends no request itself; leave out turns and pre_session_spawns")
        if session.think_time_sigma is not None:
            fail(where, "think_time_sigma", "sampled think times are not supported; give think_time_ms alone")
        if isinstance(session.rounds, list):
            for index, part in enumerate(session.rounds):
                _to_ns(part.think_time_ms or 0, where, f"rounds[{index}].think_time_ms")
            return [name for part in session.rounds for name in part.spawns]
        if not session.spawns or (session.rounds is not None and session.rounds < 1):
            fail(where, "spawns", "an orchestrator needs spawns, and at least one round")
        _to_ns(session.think_time_ms or 0, where, "think_time_ms")
        return []

    def _expand(self, name: str, play: _Play, gates: list[_Gate], history: NDArray[np.uint32]) -> list[int]:
        """Add a session's requests; return the last ones, for which a join waits."""
        line = self._sessions[name]
        if name in self._open:
            fail(line.where, "session_id", f"session {name!r} starts itself, over others")
        self._open.append(name)
        number = play.instances.get(name, 0)
        play.instances[name] = number + 1
        label = name if not number else f"{name}#{number + 1}"
        if line.session.orchestrator:
            last = self._expand_rounds(line, play, gates)
        else:
            last = self._expand_turns(line, label, play, gates, history)
        self._open.pop()
        return last

    def _expand_turns(
        self, line: _Line, label: str, play: _Play, gates: list[_Gate], history: NDArray[np.uint32]
    ) -> list[int]:
        turns = line.session.turns
        for child in line.session.pre_session_spawns:
            self._expand(
                child, play, [_Gate(gate.on, SPAWN, gate.delay_ns) for gate in gates], self._nothing()
            )
        joins: list[list[_Gate]] = [[] for _ in turns]
        own: list[int] = []
        for index, turn in enumerate(turns):
            delay_ns = _to_ns(turn.delay, line.where, f"turns[{index}].delay")
            waits = gates if not own else [_Gate(own[-1], SEQUENCE)]
            isolated = line.session.context_mode == _ISOLATED
            before = self._nothing() if isolated else history
            text = self._text(turn, line.where, with_tools=isolated or not own)
            units = np.concatenate([before, self._encoder.encode(text)])
            own.append(self._add(line, label, play, turn, units, [*waits, *joins[index]], delay_ns, len(own)))
            history = np.concatenate([units, self._answer(own[-1], turn)])
            for fork in turn.forks:
                child = fork if isinstance(fork, str) else fork.child
                self._expand(child, play, [_Gate(own[-1], SPAWN)], history)
            for spawn in turn.spawns:
                children, join_at = (
                    ([spawn], None) if isinstance(spawn, str) else (spawn.children, spawn.join_at)
                )
                for child in children:
                    last = self._expand(child, play, [_Gate(own[-1], SPAWN)], self._nothing())
                    target = index + 1 if join_at is None else join_at
                    if target < len(turns):
                        joins[target] += [_Gate(row, JOIN) for row in last]
        return own[-1:]

    def _expand_rounds(self, line: _Line, play: _Play, gates: list[_Gate]) -> list[int]:
        session = line.session
        if isinstance(session.rounds, list):
            rounds = [(part.spawns, part.think_time_ms) for part in session.rounds]
        else:
            rounds = [(session.spawns, None)] * (session.rounds or 1)
        last: list[int] = []
        for children, think_ms in rounds:
            last = [row for child in children for row in self._expand(child, play, gates, self._nothing())]
            think = session.think_time_ms if think_ms is None else think_ms
            think_ns = _to_ns(think or 0, line.where, "think_time_ms")
            gates = [_Gate(row, JOIN, think_ns) for row in last]
        return last

    def _add(
        self,
        line: _Line,
        label: str,
        play: _Play,
        turn: _Turn,
        units: NDArray[np.uint32],
        gates: list[_Gate],
        delay_ns: int,
        index: int,
    ) -> int:
        assert turn.max_tokens is not None
        tokens = max(1, round(len(units) / self._encoder.units_per_token))
        self._ids.append(self._hasher.ids(units, tokens))
        self._nodes.append(
            Node(
                where=line.where,
                request_id=f"{label}:{index}",
                play_id=play.name,
                session_id=label,
                model="model" if turn.model is None else turn.model,
                prompt_tokens=tokens,
                output_tokens=turn.max_tokens,
                not_before_ns=0 if gates else delay_ns,
                dependencies=[
                    Dependency(gate.on, COMPLETION, gate.delay_ns + delay_ns, gate.relation) for gate in gates
                ],
            )
        )
        return len(self._nodes) - 1

    def _text(self, turn: _Turn, where: str, *, with_tools: bool) -> str:
        tools = json.dumps(turn.tools, sort_keys=True) if turn.tools and with_tools else ""
        return tools + "".join(message_text(message, where) for message in turn.messages)

    def _answer(self, row: int, turn: _Turn) -> NDArray[np.uint32]:
        """Return the units of an answer that no other request has."""
        length = round((turn.max_tokens or 0) * self._encoder.units_per_token)
        return np.full(length, _ANSWERS + row, np.uint32)


def _to_ns(milliseconds: float, where: str, key: str) -> int:
    if not math.isfinite(milliseconds) or not 0 <= milliseconds < 2**62 / 1e6:
        fail(where, key, f"must be at least 0 ms and below 2^62 ns, got {milliseconds}")
    return round(milliseconds * 1e6)
