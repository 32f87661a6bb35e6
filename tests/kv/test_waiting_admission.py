"""Admission waits for room in the order of the calls, and listeners learn of freed blocks."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from understudy.errors import CapacityExhausted
from understudy.kv import KvCacheManager, KvLayout, RequestKv


def manager(blocks: int = 10) -> KvCacheManager:
    return KvCacheManager(blocks + 1, KvLayout(page_size=4, num_layers=1, kv_heads=1, head_dim=8))


def test_listeners_are_called_after_close_and_preempt_until_they_end() -> None:
    with manager() as pool:
        seen: list[int] = []
        end = pool.on_freed(lambda: seen.append(pool.available_blocks))
        with pool.request([1, 2, 3, 4, 5], 4) as kv:
            kv.match_prefix()
            kv.schedule_prefill(5)
            kv.apply_prefill(9)
            kv.preempt()
            assert seen == [10]
        assert seen == [10, 10]
        end()
        end()
        pool.request([1], 1).close()
        assert len(seen) == 2


async def run_to_end(kv: RequestKv) -> None:
    kv.match_prefix()
    kv.schedule_prefill(kv.prompt_tokens)
    kv.apply_prefill(7)
    while not kv.finished:
        await asyncio.sleep(0)
        kv.schedule_decode()
        kv.apply_decode(7)


def test_requests_are_admitted_in_order_and_none_runs_out_of_blocks() -> None:
    async def play() -> list[int]:
        order: list[int] = []
        with manager() as pool:

            async def serve(number: int, prompt: int, output: int) -> None:
                kv = await pool.admit([number] * prompt, output)
                with kv:
                    order.append(number)
                    assert (
                        sum(
                            pool.lifetime_blocks(one.prompt_tokens, one.max_output_tokens)
                            for one in pool.admitted
                        )
                        <= 10
                    )
                    await run_to_end(kv)

            await asyncio.gather(*(serve(number, 8 + 4 * (number % 5), 6) for number in range(40)))
            assert pool.available_blocks == 10
            assert not pool.admitted
        return order

    assert asyncio.run(play()) == list(range(40))


def test_a_request_that_never_fits_is_refused_at_once() -> None:
    with manager(3) as pool, pytest.raises(CapacityExhausted, match="never fits into 3 blocks"):
        asyncio.run(pool.admit([1] * 40, 4))


def test_a_close_in_another_thread_and_a_cancelled_wait_admit_the_next() -> None:
    async def play() -> None:
        with manager(4) as pool:
            first = await pool.admit([1] * 12, 4)
            second = asyncio.create_task(pool.admit([2] * 12, 4))
            third = asyncio.create_task(pool.admit([3] * 12, 4))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.sleep(0)
            assert not third.done()
            threading.Thread(target=first.close).start()
            kv = await asyncio.wait_for(third, 30)
            kv.close()

    asyncio.run(play())


def test_a_request_that_was_dropped_is_not_counted_for_ever() -> None:
    async def play() -> None:
        with manager(4) as pool:
            kv = await pool.admit([1] * 12, 4)
            kv.close()
            del kv
            gc.collect()
            (await pool.admit([1] * 12, 4)).close()

    asyncio.run(play())


def test_managers_hits_and_requests_say_what_they_hold() -> None:
    with manager() as pool, pool.request([1, 2, 3, 4, 5], 4) as kv:
        assert repr(pool) == "<KvCacheManager: 10 blocks of 4 tokens, 10 available>"
        assert repr(pool.blocks) == "<BlockManager G1: 11 blocks of 4 tokens, 10 available>"
        assert repr(kv) == "<RequestKv idle: 0 of 5 prompt tokens and 0 of 4 output tokens, 0 blocks>"
        blocks = pool.blocks.allocate(2)
        assert repr(blocks) == "<MutableBlocks: 2 blocks>"
        blocks.release()
        assert repr(blocks) == "<MutableBlocks: released>"
        assert repr(pool.blocks.metrics()).startswith("PoolMetrics({'allocations': 3, ")
