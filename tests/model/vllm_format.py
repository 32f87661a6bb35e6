"""The formats of the golden set: scenarios in, one record a step out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence


class RequestSpec(TypedDict):
    """A request of a scenario. `prompt` items are token ids or [start, length] runs of consecutive ids."""

    id: str
    arrival_step: int
    prompt: list[int | list[int]]
    max_tokens: int
    priority: NotRequired[int]
    arrival_time: NotRequired[float]
    lora: NotRequired[int]  # its adapter, 0 for none
    eos_at: NotRequired[int]  # its output token of this number, from 1, is EOS


class Abort(TypedDict):
    """An abort: `before` a step's schedule, after arrivals, or `mid`, between it and the update that follows."""

    id: str
    step: int
    when: Literal["before", "mid"]


class Scenario(TypedDict):
    """An input file of the golden set; a request's index is its position in the list."""

    name: str
    config: dict[str, Any]
    max_steps: int
    requests: list[RequestSpec]
    aborts: NotRequired[list[Abort]]


class KvEvent(TypedDict):
    """A KV event as the golden files write it; the last four keys belong to stored events."""

    type: Literal["stored", "removed"]
    n: int
    h: list[int]
    parent: NotRequired[int | None]
    pos: NotRequired[int]
    first_tokens: NotRequired[list[int]]
    lookahead: NotRequired[list[list[int]]]  # tokens behind each block that its hash covers


class StepRecord(TypedDict):
    """What one step did: the keys, and their order, of a golden line."""

    step: int
    scheduled: dict[str, int]
    new: list[str]
    cached: dict[str, int]
    resumed: list[str]
    preempted: list[str]
    finished: list[str]
    running: list[str]
    waiting: int
    waiting_head: list[str]
    free_blocks: int
    free_after_schedule: int
    free_head: list[int]
    kv_events: list[KvEvent]
    aborted: NotRequired[list[str]]  # of scenarios that abort


def expand_prompt(prompt: Sequence[int | Sequence[int]]) -> list[int]:
    """The token ids of a scenario's prompt."""
    tokens: list[int] = []
    for item in prompt:
        tokens.extend([item] if isinstance(item, int) else range(item[0], item[0] + item[1]))
    return tokens


def output_token(index: int, position: int) -> int:
    """The id of output token `position` (from 0) of the request with that index in its scenario."""
    return 1_000_000 + index * 100_000 + position
