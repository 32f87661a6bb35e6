"""What a hostile caller tries: foreign block sizes, a release in the middle of a call, a policy that never learns."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from understudy.errors import ConfigError, InvalidArgument, PolicyError, UnderstudyError
from understudy.kv import BlockManager, EvictionPolicy, KvView
from understudy.tokens import Identities, TokenBlocks

if TYPE_CHECKING:
    import numpy.typing as npt


def test_blocks_of_another_size_are_refused_by_every_call_and_change_nothing() -> None:
    manager = BlockManager(8, block_size=4)
    foreign = TokenBlocks(range(32), block_size=16).identities
    assert foreign.block_size == 16
    blocks = manager.allocate(2)
    before = manager.store.dump()
    for call in (
        lambda: blocks.stage(foreign),
        lambda: blocks.register(foreign),
        lambda: manager.match_prefix(foreign),
        lambda: manager.match_scattered(foreign),
        lambda: manager.scan(foreign),
        lambda: manager.has_blocks(foreign),
        lambda: manager.prefix_length(foreign),
        lambda: manager.touch(foreign),
    ):
        with pytest.raises(InvalidArgument, match="blocks of 16 tokens, this manager's hold 4"):
            call()
    assert manager.store.dump() == before
    assert len(blocks) == 2
    blocks.release()


def test_hashes_without_tokens_fit_any_block_size_and_slices_remember_theirs() -> None:
    hashes = Identities.from_local_hashes(np.arange(1, 4, dtype=np.uint64))
    assert hashes.block_size is None
    with BlockManager(4, block_size=4).allocate(3) as blocks:
        blocks.register(hashes).release()
    sized = TokenBlocks(range(64), block_size=16).identities
    assert sized[1:].block_size == sized[::2].block_size == (sized[:1] + sized[1:]).block_size == 16
    with pytest.raises(InvalidArgument, match="blocks of 16 and of 4 tokens"):
        sized + TokenBlocks(range(8), block_size=4).identities


class Stubborn(EvictionPolicy):
    """Gives a wrong answer, and makes news while it is asked."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer
        self.asked = 0
        self.manager: BlockManager | None = None
        self.cached = Identities.from_local_hashes(np.arange(1, 3, dtype=np.uint64))

    def on_freed(self, blocks: npt.NDArray[np.int32], lineage_hashes: list[int | None]) -> None:
        pass

    def on_taken(self, blocks: npt.NDArray[np.int32]) -> None:
        pass

    def select(self, count: int) -> list[int]:
        self.asked += 1
        if self.manager is None:
            return list(range(count))
        self.manager.touch(self.cached)
        return self.answer


@pytest.mark.parametrize("answer", [[], [3, 3], [99, 98]])
def test_a_policy_that_is_wrong_whatever_happened_is_not_asked_again(answer: list[int]) -> None:
    policy = Stubborn(answer)
    manager = BlockManager(4, policy=policy)
    manager.allocate(2).register(policy.cached).release()
    policy.manager, policy.asked = manager, 0
    with pytest.raises(PolicyError):
        manager.allocate(2)
    assert policy.asked == 1
    assert manager.available == 4
    policy.manager = None


def test_a_policy_that_insists_on_a_block_in_use_is_given_up_in_the_end() -> None:
    policy = Stubborn([])
    manager = BlockManager(4, policy=policy)
    manager.allocate(2).register(policy.cached).release()
    held = manager.allocate(2)  # blocks 0 and 1, evicting what was cached
    policy.answer = held.ids.tolist()
    policy.manager = manager
    with pytest.raises(PolicyError, match="in use"):
        manager.allocate(2)
    policy.manager = None
    held.release()


def test_a_release_during_a_call_that_fails_is_carried_out() -> None:
    manager = BlockManager(4096, block_size=16)
    wrong = Identities.from_local_hashes(np.arange(1, 4096, dtype=np.uint64))  # one too few
    for _ in range(20):
        release_while_registering(manager, wrong)
        assert manager.available == 4096


def release_while_registering(manager: BlockManager, wrong: Identities) -> None:
    blocks = manager.allocate(4096)
    start = threading.Barrier(2)

    def fail() -> None:
        start.wait()
        with pytest.raises(UnderstudyError):
            blocks.register(wrong)

    thread = threading.Thread(target=fail)
    thread.start()
    start.wait()
    blocks.release()
    thread.join()
    assert blocks.released


def test_sizes_that_no_machine_has_are_configuration_errors() -> None:
    with pytest.raises(ConfigError, match="sketch_capacity"):
        BlockManager(8, policy="multi_lru", sketch_capacity=2**31)


def test_a_view_cannot_be_made_writable() -> None:
    view = KvView(np.array([3, 1], dtype=np.int32), 20, 16)
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.page_ids.flags.writeable = True
    for bad in (1.5, None, "2", True, -1):
        with pytest.raises(InvalidArgument):
            view.positions(bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            view.require_capacity(bad)  # type: ignore[arg-type]


def test_a_script_with_a_python_policy_ends_without_leak_warnings() -> None:
    script = textwrap.dedent(
        """
        from understudy.kv import EvictionPolicy, KvCacheManager, KvLayout

        class Oldest(EvictionPolicy):
            def __init__(self):
                self.order = {}
            def on_freed(self, blocks, lineage_hashes):
                self.order.update(dict.fromkeys(blocks.tolist()))
            def on_taken(self, blocks):
                for block in blocks.tolist():
                    self.order.pop(block, None)
            def select(self, count):
                return list(self.order)[:count]

        manager = KvCacheManager(8, KvLayout(16, 1, 1, 1), policy=Oldest())
        request = manager.request(range(40), 4)
        request.schedule_prefill(40)
        request.apply_prefill(1)
        request.close()
        manager.close()
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
