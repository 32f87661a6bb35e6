"""Synthetic agents: plays with the shape of recorded ones, from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy.checks import positive_number, whole_number
from understudy.errors import ConfigError
from understudy.workload.columns import column, offsets_of
from understudy.workload.graph import COMPLETION, JOIN, SEQUENCE, SPAWN, RequestGraph
from understudy.workload.workload import Workload

if TYPE_CHECKING:
    from understudy.workload.columns import Int32Column


class AgentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of synthetic agents; the defaults are the preset `agents-2026`, measured on public traces of 2026.

    Medians and spreads (σ of the logarithm) are those of log-normal distributions. docs/agents.md compares a generated
    workload with the traces.
    """

    plays: int = 100
    turns: float = 46.0
    """Median of the main session's turns."""
    turns_spread: float = 0.97
    most_turns: int = 561
    block_size: int = 64
    """Tokens per hash id."""
    system_tokens: int = 17_000
    """System prompt and tools, which all main sessions share."""
    first_tokens: float = 6_000.0
    """Median of the rest of a first prompt."""
    first_spread: float = 1.0
    growth_tokens: float = 1_500.0
    """Median of the tokens that a turn adds, answer included."""
    growth_spread: float = 1.4
    context_limits: tuple[tuple[float, int], ...] = ((0.85, 190_000), (0.15, 700_000))
    """(Share of plays, tokens): at this length a context is cut to 15 to 40 % of what is the play's own."""
    output_tokens: float = 213.0
    output_spread: float = 1.15
    gap_s: float = 9.0
    """Median of the time of tools, from an answer to the next request."""
    gap_spread: float = 0.9
    pause_share: float = 0.08
    """Share of gaps in which a person is away."""
    pause_s: float = 600.0
    pause_spread: float = 1.5
    fan_out: float = 0.0013
    """Probability that a turn starts a sub-agent, for which the next turn waits."""
    sub_agent_turns: float = 6.0
    sub_agent_system_tokens: int = 4_000
    """System prompt of sub-agents, which all of them share."""

    def __post_init__(self) -> None:
        for name in ("plays", "most_turns", "block_size", "system_tokens", "sub_agent_system_tokens"):
            whole_number(name, getattr(self, name), 1, 2**31 - 1)
        for name in (
            "turns",
            "first_tokens",
            "growth_tokens",
            "output_tokens",
            "gap_s",
            "pause_s",
            "sub_agent_turns",
        ):
            positive_number(name, getattr(self, name))
        for name in (
            "turns_spread",
            "first_spread",
            "growth_spread",
            "output_spread",
            "gap_spread",
            "pause_spread",
        ):
            if not 0 <= getattr(self, name) <= 10:
                raise ConfigError(f"{name} must lie in 0 … 10, got {getattr(self, name)}")
        for name in ("pause_share", "fan_out"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must lie in 0 … 1, got {getattr(self, name)}")
        shares = [share for share, _ in self.context_limits]
        if not shares or abs(sum(shares) - 1) > 1e-9 or min(shares) < 0:
            raise ConfigError(f"context_limits: shares must be at least 0 and add up to 1, got {shares}")
        longest = max(self.system_tokens, self.sub_agent_system_tokens)
        if min(limit for _, limit in self.context_limits) <= longest:
            raise ConfigError(f"context_limits: must exceed the system prompts ({longest} tokens)")


AGENT_PRESETS = {"agents-2026": AgentSpec()}
"""Named shapes; `msgspec.structs.replace(AGENT_PRESETS["agents-2026"], plays=…)` changes one."""


def synthesise_agents(spec: AgentSpec, *, seed: int = 0) -> Workload:
    """Generate plays of agents; equal specs and seeds give equal workloads.

    Errors: ConfigError if there are too many blocks.
    """
    seed = whole_number("seed", seed, 0, 2**64 - 1)
    made = _Making(spec, np.random.default_rng(seed))
    for play in range(spec.plays):
        made.add_play(play)
    return made.workload()


@dataclass(slots=True)
class _Rows:
    """Columns in the making, a list entry per request."""

    play: list[int] = field(default_factory=list)
    session: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    edges: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """Of each request: (row waited for, delay in ns, relation); all of them completions."""


class _Making:
    def __init__(self, spec: AgentSpec, rng: np.random.Generator) -> None:
        self._spec = spec
        self._rng = rng
        self._rows = _Rows()
        self._ids: list[Int32Column] = []
        self._sessions: list[str] = []
        # Blocks of the system prompts of main sessions, then those of sub-agents.
        self._main = np.arange(spec.system_tokens // spec.block_size, dtype=np.int32)
        self._sub = np.arange(spec.sub_agent_system_tokens // spec.block_size, dtype=np.int32) + len(
            self._main
        )
        self._next = len(self._main) + len(self._sub)

    def add_play(self, play: int) -> None:
        """Add a main session with its sub-agents."""
        spec, rng = self._spec, self._rng
        turns = int(np.clip(round(rng.lognormal(np.log(spec.turns), spec.turns_spread)), 1, spec.most_turns))
        shares = [share for share, _ in spec.context_limits]
        limit = spec.context_limits[rng.choice(len(shares), p=shares)][1] * rng.uniform(0.8, 1.0)
        self._add_session(play, f"play_{play}:root", turns, limit, self._main, spec.system_tokens, None)

    def _add_session(
        self,
        play: int,
        name: str,
        turns: int,
        limit: float,
        system: Int32Column,
        system_tokens: int,
        parent: int | None,
    ) -> int:
        """Add a session's requests; return the row of its last."""
        spec, rng, rows = self._spec, self._rng, self._rows
        session = len(self._sessions)
        self._sessions.append(name)
        outputs = np.maximum(1, rng.lognormal(np.log(spec.output_tokens), spec.output_spread, turns)).astype(
            int
        )
        growth = rng.lognormal(np.log(spec.growth_tokens), spec.growth_spread, turns)
        own = float(rng.lognormal(np.log(spec.first_tokens), spec.first_spread))
        begin = used = self._next  # first block of the context, and the first that is not used yet
        before = parent
        first_row = len(rows.play)
        for turn in range(turns):
            if turn:
                own += growth[turn]
            if system_tokens + own > limit:  # the context is cut: what is left is written anew
                own = min(own, limit - system_tokens) * rng.uniform(0.15, 0.4)
                begin = used
            tokens = system_tokens + max(1, int(own))
            end = begin + max(0, tokens // spec.block_size - len(system))
            used = max(used, end)
            parts = [system[: tokens // spec.block_size], np.arange(begin, end, dtype=np.int32)]
            if tokens % spec.block_size:
                parts.append(
                    np.array([-1], np.int32)
                )  # partly filled: of this request alone, numbered at the end
            self._ids.append(np.concatenate(parts))
            before = self._add_row(play, session, turn, tokens, int(outputs[turn]), before)
        self._next = used
        for row in range(first_row, first_row + turns - 1):
            if parent is None and rng.random() < spec.fan_out:
                last = self._add_sub_agent(play, row)
                rows.edges[row + 1].append((last, 0, JOIN))
        return first_row + turns - 1

    def _add_row(
        self, play: int, session: int, turn: int, tokens: int, output: int, before: int | None
    ) -> int:
        rows = self._rows
        rows.play.append(play)
        rows.session.append(session)
        rows.turn.append(turn)
        rows.prompt.append(tokens)
        rows.output.append(output)
        rows.edges.append([] if before is None else [(before, self._gap_ns(), SEQUENCE if turn else SPAWN)])
        return len(rows.play) - 1

    def _add_sub_agent(self, play: int, parent: int) -> int:
        spec = self._spec
        turns = int(
            np.clip(round(self._rng.lognormal(np.log(spec.sub_agent_turns), 0.7)), 1, spec.most_turns)
        )
        name = f"play_{play}:subagent:{len(self._sessions)}"
        limit = float(spec.context_limits[0][1])
        return self._add_session(play, name, turns, limit, self._sub, spec.sub_agent_system_tokens, parent)

    def _gap_ns(self) -> int:
        spec, rng = self._spec, self._rng
        if rng.random() < spec.pause_share:
            return round(rng.lognormal(np.log(spec.pause_s), spec.pause_spread) * 1e9)
        return round(rng.lognormal(np.log(spec.gap_s), spec.gap_spread) * 1e9)

    def workload(self) -> Workload:
        """Join the columns."""
        spec, rows = self._spec, self._rows
        count = len(rows.play)
        hash_ids = np.concatenate(self._ids)
        own = hash_ids < 0
        if self._next + int(own.sum()) >= 2**31:
            raise ConfigError(f"plays: {spec.plays:,} have too many blocks; give fewer")
        hash_ids[own] = self._next + np.arange(int(own.sum()), dtype=np.int32)
        edges = [edge for found in rows.edges for edge in found]
        return Workload(
            arrival_ns=np.zeros(count, np.int64),
            prompt_tokens=np.array(rows.prompt, np.int32),
            output_tokens=np.array(rows.output, np.int32),
            hash_offsets=offsets_of(np.array([len(ids) for ids in self._ids], np.int64)),
            hash_ids=column("hash_ids", hash_ids, np.uint32),
            trace_block_size=spec.block_size,
            session=np.array(rows.session, np.int32),
            turn=np.array(rows.turn, np.int32),
            request_ids=[
                f"{self._sessions[session]}:{turn}"
                for session, turn in zip(rows.session, rows.turn, strict=True)
            ],
            session_ids=self._sessions,
            graph=RequestGraph(
                play=np.array(rows.play, np.int32),
                not_before_ns=np.zeros(count, np.int64),
                dependency_offsets=offsets_of(np.array([len(found) for found in rows.edges], np.int64)),
                dependency_rows=np.array([on for on, _, _ in edges], np.int64),
                dependency_triggers=np.full(len(edges), COMPLETION, np.uint8),
                dependency_delay_ns=np.array([delay_ns for _, delay_ns, _ in edges], np.int64),
                dependency_relations=np.array([relation for _, _, relation in edges], np.uint8),
                play_ids=[f"play_{play}" for play in range(spec.plays)],
            ),
        )
