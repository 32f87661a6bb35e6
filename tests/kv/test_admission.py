"""Admission arithmetic against what the allocator really draws."""

from __future__ import annotations

import random

import pytest

from kv.request_building import ANY, BLOCK, LAYOUT, Memory, assert_idle, assert_sound, greedy, output, prompt
from kv.request_engine import Executor, Job, Scheduler
from model.side_by_side import DUPLICATES, DuplicatesName
from understudy.errors import InvalidArgument
from understudy.kv import KvCacheManager, KvLayout, RequestKv, lifetime_blocks

PROMPTS = range(1, 81)
OUTPUTS = range(1, 65)


def draw(manager: KvCacheManager, kv: RequestKv) -> int:
    """Run the request to its end; the most blocks that it had taken out of the pool at any time."""
    start = lowest = manager.available_blocks
    kv.match_prefix()
    kv.schedule_prefill(kv.prefill_target - kv.computed_tokens)
    lowest = min(lowest, manager.available_blocks)
    finished = kv.apply_prefill(ANY).finished
    while not finished:
        kv.schedule_decode()
        lowest = min(lowest, manager.available_blocks)
        finished = kv.apply_decode(ANY).finished
        lowest = min(lowest, manager.available_blocks)
    return start - lowest


# --- one request ----------------------------------------------------------------------------------


def test_a_cold_request_draws_exactly_its_lifetime() -> None:
    wrong = []
    seed = 0
    with KvCacheManager(10, LAYOUT) as manager:
        for length in PROMPTS:
            for budget in OUTPUTS:
                seed += 1
                with manager.request(prompt(length, seed), budget) as kv:
                    drawn = draw(manager, kv)
                if drawn != manager.lifetime_blocks(length, budget):
                    wrong.append((length, budget, drawn))
        assert_idle(manager)
    assert wrong == []
    assert seed == 5_120


@pytest.mark.parametrize("duplicates", DUPLICATES)
def test_a_warm_request_draws_at_most_its_lifetime(duplicates: DuplicatesName) -> None:
    """Equal prompts and equal outputs over and over, in a pool that holds the largest and nothing more."""
    wrong, warm = [], 0
    with KvCacheManager(10, LAYOUT, duplicates=duplicates) as manager:
        for length in PROMPTS:
            for budget in OUTPUTS:
                with manager.request(prompt(length), budget) as kv:
                    drawn = draw(manager, kv)
                    warm += kv.cached_tokens
                if drawn > manager.lifetime_blocks(length, budget):
                    wrong.append((length, budget, drawn))
        assert_idle(manager)
    assert wrong == []
    assert warm > 100_000


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("duplicates", DUPLICATES)
def test_every_request_fits_twice_into_a_pool_of_its_lifetime(
    duplicates: DuplicatesName, prefix_caching: bool
) -> None:
    for length in range(1, 81, 3):
        for budget in range(1, 65, 5):
            blocks = lifetime_blocks(length, budget, BLOCK)
            with KvCacheManager(
                blocks + 1, LAYOUT, duplicates=duplicates, prefix_caching=prefix_caching
            ) as manager:
                assert manager.can_admit(length, budget, [])
                assert not manager.can_ever_fit(length, budget + BLOCK)
                for _ in range(2):
                    with manager.request(prompt(length), budget) as kv:
                        assert draw(manager, kv) <= blocks


@pytest.mark.parametrize(
    ("length", "budget", "blocks"),
    [
        (16, 1, 1),
        (16, 2, 2),
        (16, 17, 2),
        (16, 18, 3),
        (1, 16, 1),
        (1, 17, 2),
        (17, 16, 2),
        (33, 100, 9),
        (16, 0, 1),
    ],
)
def test_lifetimes_by_hand(length: int, budget: int, blocks: int) -> None:
    assert lifetime_blocks(length, budget, BLOCK) == blocks


def test_lifetimes_of_absurd_requests_are_refused() -> None:
    for arguments in [(-1, 1, 16), (1, -1, 16), (1, 1, 0), (1, 1, -1), (2**60, 1, 16), (1, 2**60, 16)]:
        with pytest.raises(InvalidArgument):
            lifetime_blocks(*arguments)


def test_a_request_of_the_largest_size_fits_exactly() -> None:
    with KvCacheManager(5, LAYOUT) as manager:
        assert manager.max_request_blocks == 4
        assert manager.can_ever_fit(64, 1)
        assert manager.can_ever_fit(1, 64)
        assert not manager.can_ever_fit(64, 2)
        assert not manager.can_ever_fit(65, 1)


# --- several at a time ----------------------------------------------------------------------------


@pytest.mark.parametrize("duplicates", DUPLICATES)
@pytest.mark.parametrize("blocks", [5, 7, 9, 12])
def test_admitted_requests_never_run_out_of_blocks(duplicates: DuplicatesName, blocks: int) -> None:
    rng = random.Random(blocks)
    with KvCacheManager(blocks + 1, LAYOUT, duplicates=duplicates) as manager:
        scheduler = Scheduler(Executor(manager), chunk=rng.choice([5, 16, 33]))
        jobs = [
            Job(f"{i}", prompt(rng.randint(1, 40), rng.choice([1, 1, 2, i + 3])), rng.randint(1, 36))
            for i in range(60)
        ]
        scheduler.submit(*jobs)
        scheduler.run()
        assert [job.events for job in jobs] == [[f"length after {job.max_output}"] for job in jobs]
        assert all(job.tokens == greedy(job.prompt, job.max_output) for job in jobs)
        assert_idle(manager)


class Simulation:
    """Requests come, run in random order and chunks, speculate, stop early, are preempted and come again."""

    BLOCK = 4

    def __init__(self, seed: int, duplicates: DuplicatesName) -> None:
        self.rng = random.Random(seed)
        self.manager = KvCacheManager(
            self.rng.randint(4, 14),
            KvLayout(page_size=self.BLOCK, num_layers=1, kv_heads=1, head_dim=1),
            policy=self.rng.choice(["lru", "lineage", "vllm", "multi_lru"]),
            duplicates=duplicates,
            prefix_caching=self.rng.random() < 0.9,
        )
        self.memory = Memory()
        self.active: list[RequestKv] = []
        self.preempted: list[RequestKv] = []
        self.admitted = 0

    def admit(self) -> None:
        """A new request or one that was preempted, if it can run to its end beside the active ones."""
        if self.preempted and self.rng.random() < 0.5:
            kv = self.preempted[0]
            if self.manager.can_admit(kv.prompt_tokens, kv.max_output_tokens, self.active):
                self.active.append(self.preempted.pop(0))
                kv.match_prefix()
                self.admitted += 1
            return
        length, budget = self.rng.randint(1, 24), self.rng.randint(0, 24)
        if self.manager.can_admit(length, budget, self.active):
            kv = self.manager.request(prompt(length, self.rng.randint(1, 3)), budget)
            self.active.append(kv)
            if self.rng.random() < 0.8:
                kv.match_prefix()
            self.admitted += 1

    def schedule(self, kv: RequestKv) -> list[int]:
        """The drafts that the step verifies."""
        if kv.computed_tokens < kv.prefill_target:
            kv.schedule_prefill(self.rng.randint(1, kv.prefill_target - kv.computed_tokens))
            return []
        if self.rng.random() < 0.7:
            kv.schedule_decode()
            return []
        rows = kv.schedule_speculative(self.rng.randint(1, 9))
        drafts = greedy(kv.tokens.tolist(), rows - 1)
        right = self.rng.randint(0, rows - 1)
        return [*drafts[:right], *[77_777] * (rows - 1 - right)]

    def apply(self, kv: RequestKv, drafts: list[int]) -> None:
        sampled = self.memory.forward(kv, drafts)
        if kv.state == "decode_scheduled":
            kv.apply_decode(sampled[-1])
        elif kv.state == "speculative_scheduled":
            right = 0
            while right < len(drafts) and drafts[right] == sampled[right]:
                right += 1
            kv.apply_speculative(sampled[: right + 1])
        else:
            last = kv.view().seq_len == kv.prefill_target
            kv.apply_prefill(sampled[-1] if last and kv.generated_tokens < kv.max_output_tokens else None)

    def turn(self) -> None:
        self.admit()
        batch = self.rng.sample(self.active, self.rng.randint(0, len(self.active)))
        drafts = [self.schedule(kv) for kv in batch]  # all of them, before any is applied
        assert_sound(self.manager, self.active)
        for kv, own in zip(batch, drafts, strict=True):
            if self.rng.random() < 0.05:
                kv.revert()
            else:
                self.apply(kv, own)
        assert_sound(self.manager, self.active)
        for kv in batch:
            said = output(kv)
            assert said == greedy(kv.tokens.tolist()[: kv.prompt_tokens], len(said))
            if kv.finished or self.rng.random() < 0.03:  # a stop token, or the client is gone
                self.active.remove(kv)
                kv.close()
            elif self.rng.random() < 0.03:
                self.active.remove(kv)
                kv.preempt()
                self.preempted.append(kv)
        # What admission promised: the active ones can all run to their ends.
        assert self.manager.future_blocks(self.active) <= self.manager.available_blocks

    def close(self) -> None:
        for kv in [*self.active, *self.preempted]:
            kv.close()
        assert_idle(self.manager)
        self.manager.close()


@pytest.mark.parametrize("duplicates", DUPLICATES)
def test_random_traffic_in_tight_pools_never_runs_out_of_blocks(duplicates: DuplicatesName) -> None:
    admitted = 0
    for seed in range(40):
        simulation = Simulation(seed, duplicates)
        for _ in range(120):
            simulation.turn()
        simulation.close()
        admitted += simulation.admitted
    assert admitted > 500
