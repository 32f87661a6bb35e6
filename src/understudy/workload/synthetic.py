"""Generate synthetic workloads from a specification; equal specifications give equal workloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy.errors import ConfigError
from understudy.workload.arrivals import ArrivalProcess, Burst, arrival_times_ns
from understudy.workload.columns import Int64Column, column, intern_ids, offsets_of, ragged_positions
from understudy.workload.distributions import Distribution, Fixed, check_distribution, draw, draw_whole
from understudy.workload.times import milliseconds_to_ns
from understudy.workload.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Mapping


class SystemPrompts(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="system_prompts"
):
    """Start each session with one of `groups` system prompts of `tokens` tokens."""

    groups: int
    tokens: int

    def __post_init__(self) -> None:
        _check_whole("groups", self.groups, 1)
        _check_whole("tokens", self.tokens, 1)


class SharedRatio(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="shared_ratio"
):
    """Share round(`ratio`·blocks) of a first prompt's full trace blocks within one of `groups` groups."""

    groups: int
    ratio: float

    def __post_init__(self) -> None:
        _check_whole("groups", self.groups, 1)
        if (
            isinstance(self.ratio, bool)
            or not isinstance(self.ratio, int | float)
            or not 0 <= self.ratio <= 1
        ):
            raise ConfigError(f"ratio must lie in 0 … 1, got {self.ratio!r}")


class SyntheticSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Specification for `synthesise`. Lengths are in tokens; a default `min` of a distribution is 1 token or 0 ms.

    A session is one stream of tokens. The first prompt is the system prompt, if any, plus `prompt_tokens` of new
    text; the prompt of turn k is turn k−1 (prompt and output) plus `followup_tokens` of new text. The stream's blocks
    have unique hash ids, after the shared ones of the session's group, and each prompt of the session has the first of
    them: the ids of turn k extend those of turn k−1, including the block in which prompt k−1 ended.

    Hits between sessions of a group: the shared blocks (only full trace blocks are shared). Hits within a session:
    every engine block inside the previous prompt, at any engine block size. With `outputs_recur` the engine generates
    exactly the tokens that the next prompt repeats (`output_in_next`), so blocks inside the previous prompt *and
    output* hit too, as far as the engine computed them (it never computes the last sampled token). Without it, outputs
    are unique to their request.
    """

    sessions: int
    """Number of sessions."""
    prompt_tokens: Distribution
    """New text of a first turn, not counting a system prompt."""
    output_tokens: Distribution
    """Output of each turn."""
    arrivals: ArrivalProcess = Burst()
    """Arrival process of sessions; qps is sessions per second."""
    turns: Distribution = Fixed(1)
    """Turns per session."""
    followup_tokens: Distribution | None = None
    """New text of later turns; required if sessions may have several turns."""
    think_time_ms: Distribution = Fixed(0)
    """Pause between the end of a turn and the next one."""
    prefixes: SystemPrompts | SharedRatio | None = None
    """Prefixes that sessions share; a session's group is random."""
    outputs_recur: bool = True
    """Whether later prompts repeat exactly the tokens that the engine generated."""
    trace_block_size: int = 64
    """Tokens per hash id."""
    content_seed: int = 42
    """Seed of lengths, turns and groups."""
    arrival_seed: int = 42
    """Seed of arrivals and think times."""

    def __post_init__(self) -> None:
        _check_whole("sessions", self.sessions, 0)
        _check_whole("trace_block_size", self.trace_block_size, 1)
        _check_whole("content_seed", self.content_seed, 0)
        _check_whole("arrival_seed", self.arrival_seed, 0)
        check_distribution("prompt_tokens", self.prompt_tokens, 1, whole=True)
        check_distribution("output_tokens", self.output_tokens, 0, whole=True)
        check_distribution("turns", self.turns, 1, whole=True)
        check_distribution("think_time_ms", self.think_time_ms, 0, whole=False)
        if self.followup_tokens is not None:
            check_distribution("followup_tokens", self.followup_tokens, 1, whole=True)
        elif self.turns != Fixed(1):
            raise ConfigError("followup_tokens is required if sessions may have several turns; give it")
        if isinstance(self.prefixes, SystemPrompts) and self.prefixes.tokens % self.trace_block_size:
            raise ConfigError(
                f"prefixes.tokens must be a multiple of trace_block_size, because only full blocks are shared, "
                f"got {self.prefixes.tokens} and {self.trace_block_size}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SyntheticSpec:
        """Build a specification from plain data, as in a YAML file; `kind` names distributions and arrivals.

        Errors: ConfigError, naming the field, for an unknown key, kind or value.
        """
        try:
            return msgspec.convert(dict(config), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"synthetic workload: {error}") from error


def synthesise(spec: SyntheticSpec) -> Workload:
    """Generate the workload: sessions in arrival order, the turns of a session next to each other.

    Every quantity has its own random stream, so changing one distribution leaves the values of the others.
    Errors: ConfigError if a distribution cannot be sampled or a prompt exceeds 2^31 tokens.
    """
    if not isinstance(spec, SyntheticSpec):
        raise ConfigError(f"spec must be a SyntheticSpec, got {spec!r}")
    turns = draw_whole("turns", spec.turns, spec.sessions, _rng(spec.content_seed, 0), 1)
    session = np.repeat(np.arange(spec.sessions), turns)
    first_row = offsets_of(turns)[:-1]
    rows = len(session)
    turn = np.arange(rows) - first_row[session]

    output = draw_whole("output_tokens", spec.output_tokens, rows, _rng(spec.content_seed, 2), 0)
    prompt = _prompt_lengths(spec, session, turn, first_row, output)
    if rows and prompt.max() >= 2**31:
        raise ConfigError(
            f"a prompt has {prompt.max()} tokens, past 2^31; use fewer turns or shorter lengths"
        )
    hash_offsets = offsets_of(-(-prompt // spec.trace_block_size))
    last = turn == (turns - 1)[session]
    think_ms = draw("think_time_ms", spec.think_time_ms, rows, _rng(spec.arrival_seed, 1), 0)
    if rows and think_ms.max() * 1e6 >= 2**63:
        raise ConfigError(f"think_time_ms reaches {think_ms.max()} ms, past 2^63 ns")
    think_ms[turn == 0] = 0
    return Workload(
        arrival_ns=arrival_times_ns(spec.arrivals, spec.sessions, _rng(spec.arrival_seed, 0))[session],
        prompt_tokens=prompt.astype(np.int32),
        output_tokens=column("output_tokens", output, np.int32),
        hash_offsets=hash_offsets,
        hash_ids=intern_ids(_stream_blocks(spec, session, prompt, first_row, hash_offsets)),
        trace_block_size=spec.trace_block_size,
        session=session.astype(np.int32),
        turn=turn.astype(np.int32),
        delay_ns=milliseconds_to_ns(think_ms),
        output_in_next=None if not spec.outputs_recur or last.all() else ~last,
    )


def _rng(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, stream]))


def _prompt_lengths(
    spec: SyntheticSpec, session: Int64Column, turn: Int64Column, first_row: Int64Column, output: Int64Column
) -> Int64Column:
    """Compute prompt lengths: everything before a turn in its session, plus its new text."""
    rng = _rng(spec.content_seed, 1)
    grows_by = np.zeros(len(session), np.int64)
    grows_by[first_row] = draw_whole("prompt_tokens", spec.prompt_tokens, spec.sessions, rng, 1)
    if isinstance(spec.prefixes, SystemPrompts):
        grows_by[first_row] += spec.prefixes.tokens
    later = np.flatnonzero(turn > 0)
    if spec.followup_tokens is not None:
        followup = draw_whole(
            "followup_tokens", spec.followup_tokens, len(later), _rng(spec.content_seed, 3), 1
        )
        grows_by[later] = followup + output[later - 1]
    total = np.cumsum(grows_by)
    before_session = (total - grows_by)[first_row]
    return total - before_session[session]


def _stream_blocks(
    spec: SyntheticSpec,
    session: Int64Column,
    prompt: Int64Column,
    first_row: Int64Column,
    hash_offsets: Int64Column,
) -> Int64Column:
    """Number the blocks of each prompt by position in the session's stream or in its group's prefix."""
    size = spec.trace_block_size
    blocks = np.diff(hash_offsets)
    position = ragged_positions(np.zeros(len(blocks), np.int64), blocks)
    owner = np.repeat(session, blocks)
    longest = int(blocks.max(initial=0))
    names = owner * longest + position
    if spec.prefixes is None:
        return names
    if isinstance(spec.prefixes, SystemPrompts):
        shared = np.full(spec.sessions, spec.prefixes.tokens // size)
    else:
        shared = np.rint(spec.prefixes.ratio * (prompt[first_row] // size)).astype(np.int64)
    group = _rng(spec.content_seed, 4).integers(spec.prefixes.groups, size=spec.sessions)
    in_prefix = position < shared[owner]
    group_names = (spec.sessions + group[owner]) * longest + position
    return np.where(in_prefix, group_names, names)


def _check_whole(field: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{field} must be a whole number of at least {least}, got {value!r}")
