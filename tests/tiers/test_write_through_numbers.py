"""Who holds a block of the device while its copy is on the way to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiers.building import BLOCK, MS, Worker, chain, tiers
from understudy import _core

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt


def slow_copies(num_gpu_blocks: int = 8, **settings: int) -> Worker:
    """A block takes 10 ms to the host, a step 1 ms."""
    return Worker(num_gpu_blocks, tiers(write_through=True, gbps=0.1, **settings))


def device(worker: Worker) -> tuple[int, int, int, int]:
    """Empty, held by somebody, cached, and on their way out."""
    return worker.engine.tier_blocks(_core.Tier.G1)


def test_blocks_of_a_request_that_has_ended_are_held_until_their_copy_has_landed() -> None:
    worker = slow_copies()
    worker.submit(1, 2 * BLOCK)
    worker.step()
    assert (worker.engine.idle, device(worker)) == (True, (6, 2, 0, 0))
    worker.land(21 - 1 / MS)
    assert device(worker) == (6, 2, 0, 0)
    worker.land(21)
    assert device(worker) == (6, 0, 2, 0)


def test_a_copy_that_lands_while_its_request_runs_leaves_the_device_as_it_is() -> None:
    worker = slow_copies()
    request = worker.submit(1, 2 * BLOCK, outputs=60)
    worker.step()
    before = device(worker)
    worker.land(21)
    assert device(worker) == before
    worker.engine.cancel(request, worker.now_ns)
    worker.check()
    assert device(worker) == (6, 0, 2, 0)


def test_each_copy_of_a_request_that_is_cancelled_lets_go_of_its_own_blocks() -> None:
    worker = slow_copies(offload_batch_size=1, offload_concurrency=1)
    request = worker.submit(1, 3 * BLOCK, outputs=60)
    worker.step()
    worker.land(11)  # the first of three has landed
    worker.engine.cancel(request, worker.now_ns)
    worker.check()
    assert device(worker) == (5, 2, 1, 0)
    worker.land(21)
    assert device(worker) == (5, 1, 2, 0)
    worker.land(31)
    assert device(worker) == (5, 0, 3, 0)


def test_a_block_of_two_requests_stays_while_the_second_runs() -> None:
    worker = slow_copies()
    worker.submit(1, 2 * BLOCK)
    worker.step()
    second = worker.submit(1, 2 * BLOCK + 1, outputs=60)
    worker.step()
    assert worker.engine.tier_totals.offloaded_blocks == 2  # the copy of the first is the second's, too
    worker.land(21)
    assert device(worker) == (5, 3, 0, 0)
    worker.engine.cancel(second, worker.now_ns)
    worker.check()
    assert device(worker) == (6, 0, 2, 0)


def test_a_preempted_request_leaves_its_blocks_to_its_copies() -> None:
    worker = slow_copies(num_gpu_blocks=5)
    worker.submit(1, 2 * BLOCK, outputs=3)
    late = worker.submit(2, 2 * BLOCK, outputs=3)
    worker.step()
    assert worker.begin()  # both need a third block
    assert worker.engine.preempted == [late]
    assert device(worker) == (0, 5, 0, 0)  # three of the one that runs, and two that are on their way down
    worker.end()
    worker.play()
    assert [record.output_tokens for record in worker.records.values()] == [3, 3]
    assert device(worker)[1] == 0


class Listening:
    """An offload policy that keeps everything, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def select(self, lineages: Sequence[int], _reuse: npt.NDArray[np.uint32]) -> list[bool]:
        self.asked.append(list(lineages))
        return [True] * len(lineages)


def test_a_policy_is_asked_about_evicted_blocks_in_the_order_in_which_they_go() -> None:
    policy = Listening()
    worker = Worker(3, tiers(offload_filter=policy))
    worker.cache(1, 3)
    worker.cache(2, 3)
    assert policy.asked == [[block.lineage_hash for block in reversed(list(chain(1, 3)))]]


def test_a_policy_is_asked_about_computed_blocks_parents_first() -> None:
    policy = Listening()
    worker = Worker(3, tiers(write_through=True, offload_filter=policy))
    worker.cache(1, 3)
    assert policy.asked == [[block.lineage_hash for block in chain(1, 3)]]
