"""Several groups on the engine's pool of runs: the blocks are those of vLLM's pool, one by one."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model.vllm_queue import Table, VllmQueue

core = pytest.importorskip("understudy._core")
if not hasattr(core, "TestBlockPool"):
    pytest.skip("compiled without test engines", allow_module_level=True)
Pool = core.TestBlockPool

FULL, WINDOWS = 0, (1, 2)
GROUPS = (FULL, *WINDOWS)
MOST_BLOCKS = 60

contents = st.one_of(
    st.integers(1, 10).map(lambda blocks: "a" * blocks),
    st.lists(st.sampled_from("aaaab"), min_size=1, max_size=12).map("".join),
)


def names_of(content: str) -> list[int]:
    """A name per block, equal where the block and all before it are."""
    names = [1]
    for letter in content:
        names.append(names[-1] * 2 + (letter == "b"))
    return names[1:]


def in_group(name: int, group: int) -> int:
    """The name of a group's block in the literal map, which has one index."""
    return name * len(GROUPS) + group


class Request:
    def __init__(self, number: int, names: list[int]) -> None:
        self.number = number * len(GROUPS)
        self.names = names
        self.tables = [Table() for _ in GROUPS]
        self.skipped = [0] * len(GROUPS)
        self.considered = [0] * len(GROUPS)  # positions before which no block gets a name

    def has(self, group: int) -> int:
        return self.skipped[group] + len(self.tables[group].blocks)


class GroupsSideBySide(RuleBasedStateMachine):
    """Random calls on both. Every result, and the whole order of free blocks, must be equal."""

    @initialize(num_blocks=st.sampled_from([12, 24, 40, MOST_BLOCKS]))
    def make(self, num_blocks: int) -> None:
        self.pool = Pool(num_blocks)
        self.queue = VllmQueue(num_blocks, append_unnamed=False)
        self.requests: list[Request] = []
        self.number = 0

    def choose(self, data: st.DataObject) -> Request:
        return self.requests[data.draw(st.integers(0, len(self.requests) - 1))]

    def has(self, names: list[int], position: int, group: int) -> bool:
        return in_group(names[position], group) in self.queue.index

    def last_window(self, names: list[int], need: int) -> int:
        run = 0
        for position in reversed(range(len(names))):
            found = all(self.has(names, position, group) for group in WINDOWS)
            run = run + 1 if found else 0
            if run == need:
                return position + need
        return run

    def prefix(self, names: list[int]) -> int:
        length = 0
        while length < len(names) and self.has(names, length, FULL):
            length += 1
        return length

    @rule(content=contents, need=st.integers(1, 4), ahead=st.integers(0, 2))
    def admit(self, content: str, need: int, ahead: int) -> None:
        names = names_of(content)
        prefix = self.prefix(names)
        assert self.pool.last_window(names, [FULL], 0) == prefix
        hit = self.last_window(names[:prefix], need)
        assert self.pool.last_window(names[:prefix], list(WINDOWS), need) == hit
        self.start(names, hit, need, ahead)

    @rule(blocks=st.integers(2, 8))
    def admit_alike(self, blocks: int) -> None:
        """Two of one prompt that find nothing: their blocks become copies of each other."""
        for _ in range(2):
            self.start(names_of("a" * blocks), 0, 1, 0)

    def start(self, names: list[int], hit: int, need: int, ahead: int) -> None:
        firsts = [0 if group == FULL else max(0, hit - need) for group in GROUPS]
        found = [
            [next(iter(self.queue.index[in_group(names[position], group)])) for position in range(first, hit)]
            for group, first in zip(GROUPS, firsts, strict=True)
        ]
        fresh = len(names) - hit + ahead
        if fresh * len(GROUPS) + sum(map(self.queue.unreferenced, found)) > len(self.queue.free):
            return
        self.number += 1
        request = Request(self.number, names)
        for group in GROUPS:
            self.queue.touch(request.tables[group], found[group])
            self.pool.hold(request.number + group, names[:hit], firsts[group], group)
            request.skipped[group] = firsts[group]
            request.considered[group] = hit
        for group in GROUPS:
            self.take(request, group, fresh)
        self.requests.append(request)

    def take(self, request: Request, group: int, count: int) -> None:
        taken = self.queue.take(request.tables[group], count)
        assert self.pool.take(request.number + group, count) == taken

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), group=st.sampled_from(GROUPS))
    def name(self, data: st.DataObject, group: int) -> None:
        """A range of blocks gets names; with a window those before it may stay without."""
        request = self.choose(data)
        low, most = self.range_of(request, group)
        if low < most:
            first = low if group == FULL else data.draw(st.integers(low, most - 1))
            self.name_range(request, group, first, data.draw(st.integers(first + 1, most)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), kept=st.integers(1, 4))
    def name_prompt(self, data: st.DataObject, kept: int) -> None:
        """All groups name what they have, windows the last blocks of it."""
        request = self.choose(data)
        for group in GROUPS:
            low, most = self.range_of(request, group)
            first = low if group == FULL else max(low, most - kept)
            if first < most:
                self.name_range(request, group, first, most)

    def range_of(self, request: Request, group: int) -> tuple[int, int]:
        low = max(request.considered[group], request.skipped[group])
        return low, min(len(request.names), request.has(group))

    def name_range(self, request: Request, group: int, first: int, end: int) -> None:
        table = request.tables[group]
        for position in range(first, end):
            block, name = table.blocks[position - request.skipped[group]], request.names[position]
            key = in_group(name, group)
            self.queue.changes.append(("stored", block, key not in self.queue.index))
            self.queue.names[block] = key
            self.queue.index.setdefault(key, {})[block] = None
        self.pool.cache_from(request.number + group, request.names[:end], first, group)
        request.considered[group] = end

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 3))
    def grow(self, data: st.DataObject, count: int) -> None:
        request = self.choose(data)
        for group in GROUPS:
            if count <= len(self.queue.free):
                self.take(request, group, count)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), content=contents)
    def write_on(self, data: st.DataObject, content: str) -> None:
        """A request learns the contents of blocks to come."""
        request = self.choose(data)
        if len(request.names) < 40:
            for letter in content:
                request.names.append(request.names[-1] * 2 + (letter == "b"))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), group=st.sampled_from(WINDOWS))
    def leave(self, data: st.DataObject, group: int) -> None:
        """A window moves on."""
        request = self.choose(data)
        table = request.tables[group]
        blocks = data.draw(st.integers(0, len(table.blocks)))
        self.queue.release(table.blocks[:blocks])
        del table.blocks[:blocks]
        request.skipped[group] += blocks
        self.pool.skip(request.number + group, blocks)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), group=st.sampled_from(GROUPS))
    def undo(self, data: st.DataObject, group: int) -> None:
        """Names are taken back, behind the last block that another request has too."""
        request = self.choose(data)
        blocks = request.tables[group].blocks
        kept = data.draw(st.integers(0, len(blocks)))
        first = len(blocks)
        while first > kept and (
            self.queue.names[blocks[first - 1]] is None or self.queue.references[blocks[first - 1]] == 1
        ):
            first -= 1
        for block in blocks[first:]:
            if self.queue.names[block] is not None:
                self.queue.remove_name(block)
        self.pool.withdraw(request.number + group, kept)
        named = [i + 1 for i, block in enumerate(blocks) if self.queue.names[block] is not None]
        request.considered[group] = request.skipped[group] + max(named, default=0)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = self.choose(data)
        self.requests.remove(request)
        for group in GROUPS:
            self.queue.release(request.tables[group].blocks)
            self.pool.free(request.number + group)

    @rule()
    def reset(self) -> None:
        evictions = self.queue.evictions
        for block in self.queue.free:
            if self.queue.names[block] is not None:
                self.queue.remove_name(block)
                evictions += 1
        self.queue.evictions = evictions
        self.pool.hand_out_cached()

    @invariant()
    def is_equal(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.free_head(MOST_BLOCKS) == self.queue.free
        assert self.pool.evictions == self.queue.evictions
        assert self.pool.changes() == self.queue.changes
        self.queue.changes.clear()
        keys = [in_group(name, group) for group in GROUPS for name in self.pool.contents(group)]
        assert sorted(keys) == sorted(self.queue.index)
        for request in self.requests:
            for group in GROUPS:
                assert self.pool.ids(request.number + group) == request.tables[group].blocks


TestGroupsSideBySide = GroupsSideBySide.TestCase
TestGroupsSideBySide.settings = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.shrink],  # minutes
)


def test_a_window_leaves_the_last_of_its_blocks_first() -> None:
    pool = Pool(8)
    pool.take(1, 2)
    pool.cache_from(1, [1, 2], 0, 1)
    pool.hold(2, [1, 2], 0, 1)
    pool.take(2, 2)
    pool.cache_from(2, [1, 2, 3, 4], 2, 1)  # a run of its own: another request has those before
    pool.free(1)
    pool.skip(2, 4)
    assert pool.free_head(8) == [4, 5, 6, 7, 3, 2, 1, 0]


def test_blocks_of_a_prompt_that_a_window_leaves_out_have_no_names() -> None:
    pool = Pool(8)
    pool.take(1, 6)
    pool.cache_from(1, [1, 2, 3, 4, 5, 6], 4, 1)
    assert pool.last_window([1, 2, 3, 4, 5, 6], [1], 2) == 6
    assert pool.last_window([1, 2, 3, 4, 5, 6], [1], 3) == 0
    pool.skip(1, 3)
    assert pool.ids(1) == [3, 4, 5]
    assert pool.free_head(3) == [2, 1, 0]
    pool.check()
