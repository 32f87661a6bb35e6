"""The engine's pool of runs finds, hands out and evicts the blocks that vLLM's pool would, one by one."""

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

MOST_BLOCKS = 40

# Contents of blocks: few, so that prefixes are shared, copied and diverge anywhere.
contents = st.one_of(
    st.integers(1, 10).map(lambda blocks: "a" * blocks),
    st.lists(st.sampled_from("aaaab"), min_size=1, max_size=12).map("".join),
)


def names_of(content: str) -> list[int]:
    """A name per block, equal where the block and all before it are."""
    names = []
    name = 1
    for letter in content:
        name = name * 2 + (letter == "b")
        names.append(name)
    return names


class Request:
    def __init__(self, number: int, names: list[int], table: Table) -> None:
        self.number = number
        self.names = names
        self.table = table


class SideBySide(RuleBasedStateMachine):
    """Random calls on both. Every result, and the whole order of free blocks, must be equal."""

    @initialize(num_blocks=st.sampled_from([6, 16, 28, MOST_BLOCKS]), append_unnamed=st.booleans())
    def make(self, num_blocks: int, append_unnamed: bool) -> None:
        self.pool = Pool(num_blocks, append_unnamed=append_unnamed)
        self.queue = VllmQueue(num_blocks, append_unnamed=append_unnamed)
        self.requests: list[Request] = []
        self.number = 0

    def choose(self, data: st.DataObject) -> Request:
        return self.requests[data.draw(st.integers(0, len(self.requests) - 1))]

    @rule(content=contents, cut=st.one_of(st.none(), st.integers(0, 12)), ahead=st.integers(0, 2))
    def admit(self, content: str, cut: int | None, ahead: int) -> None:
        names = names_of(content)
        found = self.queue.find(names)
        phantoms = len(self.queue.phantoms.intersection(found))
        assert self.pool.find(names) == (found, self.queue.unreferenced(found), phantoms)
        found = found if cut is None else found[:cut]
        fresh = len(names) - len(found) + ahead
        if fresh + self.queue.unreferenced(found) > len(self.queue.free):
            return
        self.number += 1
        request = Request(self.number, names, Table())
        self.queue.touch(request.table, found)
        self.pool.place(request.number, names[: len(found)])
        assert self.pool.take(request.number, fresh) == self.queue.take(request.table, fresh)
        self.requests.append(request)

    @rule(blocks=st.integers(2, 8))
    def admit_alike(self, blocks: int) -> None:
        """Two of one prompt before either has names: their blocks are copies of each other."""
        for _ in range(2):
            self.admit("a" * blocks, 0, 0)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), times=st.integers(1, 4))
    def name(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            self.name_some(data, self.choose(data))

    def name_some(self, data: st.DataObject, request: Request) -> None:
        most = min(len(request.names), len(request.table.blocks))
        end = data.draw(st.integers(request.table.named, max(most, request.table.named)))
        self.queue.cache(request.table, request.names[:end])
        self.pool.cache(request.number, request.names[:end])

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 3))
    def grow(self, data: st.DataObject, count: int) -> None:
        request = self.choose(data)
        if count <= len(self.queue.free):
            assert self.pool.take(request.number, count) == self.queue.take(request.table, count)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), content=contents)
    def write_on(self, data: st.DataObject, content: str) -> None:
        """A request learns the contents of blocks to come."""
        request = self.choose(data)
        if len(request.names) < 48:
            for letter in content:
                request.names.append(request.names[-1] * 2 + (letter == "b"))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        request = self.choose(data)
        blocks = data.draw(st.integers(request.table.named, len(request.table.blocks)))
        self.queue.trim(request.table, blocks)
        self.pool.trim(request.number, blocks)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), keep=st.booleans())
    def undo(self, data: st.DataObject, keep: bool) -> None:
        request = self.choose(data)
        named = data.draw(st.integers(0, request.table.named))
        if keep:
            self.queue.mark_phantoms(request.table, named)
            self.pool.mark_phantoms(request.number, named)
        else:
            self.queue.withdraw(request.table, named)
            self.pool.withdraw(request.number, named)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = self.choose(data)
        self.requests.remove(request)
        self.queue.release(request.table.blocks)
        self.pool.free(request.number)

    @rule()
    def reset(self) -> None:
        self.queue.reset()
        self.pool.reset()

    @rule(content=contents)
    def look(self, content: str) -> None:
        names = names_of(content)
        assert self.pool.find(names)[0] == self.queue.find(names)

    @invariant()
    def is_equal(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.num_free == len(self.queue.free)
        assert self.pool.free_head(MOST_BLOCKS) == self.queue.free
        assert self.pool.evictions == self.queue.evictions
        assert self.pool.changes() == self.queue.changes
        self.queue.changes.clear()
        assert sorted(self.pool.contents()) == sorted(self.queue.index)
        for request in self.requests:
            assert self.pool.ids(request.number) == request.table.blocks
            assert self.pool.named(request.number) == request.table.named


TestSideBySide = SideBySide.TestCase
TestSideBySide.settings = settings(
    max_examples=50,
    stateful_step_count=60,
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.shrink],  # minutes
)


def test_one_prompt_is_one_run_while_it_grows() -> None:
    pool = Pool(64)
    names = list(range(1, 41))
    pool.take(1, 20)
    pool.cache(1, names[:20])
    for end in range(21, 41):
        pool.take(1, 1)
        pool.cache(1, names[:end])
    assert (pool.num_runs, pool.num_nodes) == (1, 1)
    pool.free(1)
    assert pool.free_head(64)[24:] == list(reversed(range(40)))


def test_later_turns_of_a_conversation_continue_its_run() -> None:
    pool = Pool(64)
    for turn in range(1, 5):
        names = list(range(1, 10 * turn + 1))
        pool.place(turn, names)
        pool.take(turn, 10)
        pool.cache(turn, names)
        pool.free(turn)
    assert (pool.num_runs, pool.num_nodes) == (1, 1)


def test_a_shared_prompt_is_one_run_however_many_hold_it() -> None:
    pool = Pool(4096)
    prompt = list(range(1, 101))
    for request in range(1, 31):
        pool.place(request, prompt)
        pool.take(request, 100 - pool.named(request) + 1)
        pool.cache(request, [*prompt, 1000 + request])
    assert pool.num_runs == 31
    assert pool.num_nodes <= 32
    pool.check()


def test_a_long_life_keeps_the_pool_small() -> None:
    pool = Pool(256, listens=False)
    for request in range(1, 3000):
        names = [request % 7 * 1000 + i for i in range(20)] + [request * 100_000 + i for i in range(20)]
        pool.place(request, names)
        fresh = 40 - pool.named(request)
        pool.take(request, fresh)
        pool.cache(request, names)
        pool.free(request)
    assert pool.num_runs < 40
    assert pool.num_nodes < 40
    pool.check()


def test_a_reset_counts_copies_within_a_group() -> None:
    pool = Pool(16)
    names = [1, 2, 3]
    for group in (0, 1):
        pool.take(group, 3)
        pool.cache(group, names, group=group)
        pool.take(2 + group, 3)
        pool.cache(2 + group, names, group=group)
    assert [sole for _, _, sole in pool.changes()] == [*[True] * 3, *[False] * 3] * 2
    assert pool.find(names, group=1)[0] == [6, 7, 8]
    assert pool.find(names, group=2)[0] == []
    for table in range(4):
        pool.free(table)
    pool.reset()
    assert pool.changes() == [("removed", block, block % 6 >= 3) for block in range(12)]
    pool.check()
