"""Random traces: chats, agents, one-turn requests and bursts, as rows of Mooncake's format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from random import Random

Row = dict[str, Any]
BLOCK = 16
"""Tokens per hash id of every random trace."""


def random_trace(rng: Random) -> list[Row]:
    """Draw a trace of at most some 40 requests, in order of the sessions' first arrivals."""
    kind = rng.choice([_one_turn, _one_turn, _chats, _chats, _agents])
    rows: list[Row] = kind(rng, _Ids(rng))
    if rng.random() < 0.15:
        for row in rows:
            if rng.random() < 0.2:
                row["abort_after_ms"] = rng.choice([0.5, 3, 20, 150])
    if rng.random() < 0.15:
        for row in rows:
            if rng.random() < 0.3:
                row["max_tokens"] = rng.randint(1, 20)
    return rows


class _Ids:
    """Hash ids: a few shared beginnings, and numbers that no other prompt has."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._next = 1000
        self._shared = [list(range(100 * text, 100 * text + 40)) for text in range(rng.randint(1, 4))]

    def start(self, tokens: int) -> list[int]:
        """Return ids for a new prompt, of which a random part is shared."""
        blocks = -(-tokens // BLOCK)
        shared = self._rng.choice(self._shared)[: self._rng.choice([0, blocks // 2, blocks])]
        return self.extend(shared, tokens)

    def extend(self, ids: list[int], tokens: int) -> list[int]:
        """Return the ids of a prompt of so many tokens that begins with these."""
        more = -(-tokens // BLOCK) - len(ids)
        self._next += max(more, 0)
        return (ids + list(range(self._next - max(more, 0), self._next)))[: -(-tokens // BLOCK)]


def _arrivals(rng: Random, count: int) -> list[float]:
    gap_ms = rng.choice([0.0, 2.0, 25.0, 25.0, 400.0])
    now, times = rng.choice([0.0, 0.0, 1234.5]), []
    for _ in range(count):
        times.append(round(now, 3))
        now += rng.expovariate(1.0) * gap_ms
    return times


def _one_turn(rng: Random, ids: _Ids) -> list[Row]:
    rows = []
    longest = rng.choice([20, 90, 300])
    for at in _arrivals(rng, rng.randint(1, 30)):
        prompt = rng.randint(1, longest)
        rows.append(_row(prompt, rng.randint(1, rng.choice([1, 12, 60])), ids.start(prompt), timestamp=at))
    return rows


def _chats(rng: Random, ids: _Ids) -> list[Row]:
    sessions = rng.randint(1, 9)
    return _sessions(rng, ids, [rng.randint(1, 4) for _ in range(sessions)], more=60, output=40)


def _agents(rng: Random, ids: _Ids) -> list[Row]:
    sessions = rng.randint(1, 3)
    return _sessions(rng, ids, [rng.randint(4, 12) for _ in range(sessions)], more=50, output=25)


def _sessions(rng: Random, ids: _Ids, turns: list[int], *, more: int, output: int) -> list[Row]:
    rows: list[Row] = []
    longest_delay = rng.choice([0, 5, 80, 1500])
    for session, (at, count) in enumerate(zip(_arrivals(rng, len(turns)), turns, strict=True)):
        prompt = rng.randint(1, 120)
        content = ids.start(prompt)
        for turn in range(count):
            row = _row(prompt, rng.randint(1, output), content, session_id=f"s{session}")
            if turn == 0:
                row["timestamp"] = at
            else:
                row["delay"] = round(rng.random() * longest_delay, 3)
            rows.append(row)
            if turn + 1 < count:
                quoted = rng.random() < 0.6
                if quoted:
                    row["output_in_next_turn"] = True
                prompt += row["output_length"] * quoted + rng.randint(1, more)
                content = ids.extend(content, prompt)
    return rows


def _row(prompt: int, output: int, ids: list[int], **more: object) -> Row:
    return {"input_length": prompt, "output_length": output, "hash_ids": ids, **more}
