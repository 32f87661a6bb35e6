"""Mistakes of callers and of their policies: told by name, and the engine is as good as before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from eviction.strict import StrictLru
from tiers.building import BLOCK, MS, Only, Worker, chain, reader_of, shared, tiers
from understudy import _core
from understudy.errors import ConfigError, InvalidArgument, PolicyError
from understudy.kv import EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt


class Failing(Only):
    """Raises the first time, and then keeps everything."""

    def select(self, lineages: Any, reuse: Any) -> list[bool]:
        self.asked.append((len(lineages), int(max(reuse))))
        if len(self.asked) == 1:
            raise RuntimeError("not today")
        return [True] * len(lineages)


def test_a_step_in_the_past_of_the_transfers_changes_nothing() -> None:
    worker = Worker(1, tiers(), step_ms=0.0)
    worker.cache(1, 1)
    worker.cache(2, 1)
    request = worker.submit(3, BLOCK)
    with pytest.raises(InvalidArgument, match="time never goes backwards"):
        worker.engine.begin_step(0)
    worker.check()
    with pytest.raises(InvalidArgument, match="time never goes backwards"):
        worker.engine.prefetch(chain(1)[:1], 0)
    worker.check()
    for call in (
        worker.engine.land,
        worker.engine.forget_cache,
        lambda now_ns: worker.engine.cancel(request, now_ns),
    ):
        with pytest.raises(InvalidArgument, match="time never goes backwards"):
            call(0)
        worker.check()
    assert worker.begin() is False
    worker.play()
    assert worker.emitted(request) == 1


@pytest.mark.parametrize("write_through", [False, True], ids=["on eviction", "write-through"])
def test_an_offload_policy_that_raises_costs_one_step(write_through: bool) -> None:
    policy = Failing()
    worker = Worker(2, tiers(offload_filter=policy, write_through=write_through), step_ms=0.0)
    requests = [worker.submit(tag, 2 * BLOCK) for tag in (1, 2, 3)]
    with pytest.raises(RuntimeError, match="not today"):
        worker.play()
    worker.check()
    if worker.engine.in_step:
        worker.end()
    worker.play()
    assert [worker.emitted(request) for request in requests] == [1, 1, 1]
    assert len(policy.asked) > 1


def test_an_offload_policy_that_raises_for_the_room_of_a_load_costs_one_step() -> None:
    policy = Failing()
    reader, _ = reader_of([(chain(1), 2)], 3, offload_filter=policy)
    reader.cache(9, 3)
    request = reader.submit(1, 9)
    with pytest.raises(RuntimeError, match="not today"):
        reader.play()
    reader.check()
    assert reader.active() == 0
    reader.play()
    assert reader.below_tokens(request) == (0, 8, 0)


TRUTHS = "must answer with a truth value for each of 2 blocks"


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (lambda n: [True] * (n - 1), "asked about 2 blocks and answered for 1"),
        (lambda _: None, TRUTHS),
        (lambda _: 5, TRUTHS),
        (lambda n: (True for _ in range(n)), TRUTHS),
        (lambda n: np.ones((n, 2)), TRUTHS),
    ],
    ids=["one too few", "nothing", "a number", "a generator", "a table"],
)
def test_an_offload_policy_must_answer_for_every_block(answer: Callable[[int], Any], match: str) -> None:
    class Other:
        def select(self, lineages: list[int], reuse: npt.NDArray[np.uint32]) -> Any:  # noqa: ARG002
            return answer(len(lineages))

    worker = Worker(2, tiers(offload_filter=Other()), step_ms=0.0)
    worker.cache(1, 2)
    worker.submit(2, 2 * BLOCK)
    with pytest.raises(PolicyError, match=match):
        worker.begin()
    worker.engine.check()


class Queue(EvictionPolicy):
    """First freed, first taken; raises the third time that it is asked."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.asked = 0

    def on_freed(self, blocks: npt.NDArray[np.int32], lineage_hashes: list[int | None]) -> None:
        assert len(blocks) == len(lineage_hashes)
        self.order += blocks.tolist()

    def on_taken(self, blocks: npt.NDArray[np.int32]) -> None:
        self.order = [block for block in self.order if block not in set(blocks.tolist())]

    def select(self, count: int) -> list[int]:
        self.asked += 1
        if self.asked == 3:
            raise RuntimeError("no victims today")
        return self.order[:count]


def assert_goes_on(worker: Worker, prompt_tokens: int) -> None:
    """Six requests: a policy raises on the way, and all of them end."""
    requests = [worker.submit(tag, prompt_tokens) for tag in range(6)]
    with pytest.raises(RuntimeError, match="no victims today"):
        worker.play()
    worker.check()
    if worker.engine.in_step:
        worker.end()
    worker.play()
    assert [worker.emitted(request) for request in requests] == [1] * 6


@pytest.mark.parametrize("write_through", [False, True], ids=["on eviction", "write-through"])
def test_an_eviction_policy_of_the_host_that_raises_costs_one_step(write_through: bool) -> None:
    policies: list[Queue] = []

    def make() -> Queue:
        policies.append(Queue())
        return policies[-1]

    worker = Worker(2, tiers(g2_blocks=2, g2_policy=make, write_through=write_through), step_ms=0.0)
    assert_goes_on(worker, 2 * BLOCK)
    assert len(policies) == 1
    assert policies[0].asked > 3


@pytest.mark.parametrize("write_through", [False, True], ids=["on eviction", "write-through"])
@pytest.mark.parametrize("tier", ["g3", "g4"])
def test_an_eviction_policy_of_a_shared_tier_that_raises_costs_no_slots(
    tier: str, write_through: bool
) -> None:
    """It is asked when a copy has landed on the host: that copy, and others at that time, have landed all the same."""
    policy = Queue()
    below: dict[str, Any] = {tier: shared(num_blocks=2, policy=lambda: policy)}
    worker = Worker(4, tiers(offload_batch_size=1, write_through=write_through, **below), step_ms=0.0)
    assert_goes_on(worker, 4 * BLOCK)
    assert worker.held() == 0
    assert policy.asked > 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bytes_per_block", 0),
        ("offload_batch_size", 0),
        ("offload_concurrency", 0),
        ("onboard_failure_rate", 1.5),
        ("onboard_failure_rate", -0.1),
        ("onboard_failure_rate", float("nan")),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        Worker(2, tiers(**{field: value}))  # type: ignore[arg-type]


def test_tiers_without_prefix_caching_are_refused() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        Worker(2, tiers(), enable_prefix_caching=False)


def test_a_run_without_tiers_is_refused() -> None:
    run = _core.TierRun(tiers(), BLOCK)
    with pytest.raises(ConfigError, match="run needs tiers"):
        Worker(2, None, run=run)


def test_a_run_has_no_events_of_a_tier_that_it_lacks() -> None:
    run = _core.TierRun(tiers(), BLOCK)
    with pytest.raises(ConfigError, match="no tier G3"):
        run.take_events(_core.Tier.G3)[0]


@pytest.mark.parametrize("check", [False, True])
def test_what_landed_before_a_cache_was_forgotten_is_told_before(check: bool) -> None:
    worker = Worker(30, tiers(write_through=True, gbps=1.0), check=check, step_ms=10.0)
    worker.submit(1, 16, 1, name="a")
    worker.engine.begin_step(0)
    worker.engine.end_step(10 * MS)
    worker.engine.land(20 * MS)
    worker.submit(2, 16, 3, name="b")
    worker.engine.begin_step(20 * MS)
    worker.engine.end_step(30 * MS)  # its copies land at 34 ms
    worker.engine.forget_cache(35 * MS)
    worker.engine.begin_step(36 * MS)
    worker.engine.end_step(46 * MS)
    times = worker.engine.take_events()[1].tolist()
    assert 34 * MS in times
    assert times == sorted(times)


def test_what_a_prefetch_evicted_is_told_though_the_hosts_policy_raises() -> None:
    policy = Queue()
    policy.asked = -100
    below = tiers(g2_blocks=2, g2_policy=lambda: policy, write_through=True, g3=shared(100))
    worker = Worker(4, below, step_ms=0.0)
    now_ns = 0
    for tag in (1, 2, 3):
        worker.submit(tag, 2 * BLOCK + 1)
        worker.engine.advance(10**15)
        worker.engine.finish_transfers()
        now_ns = worker.engine.now_ns + 10**9
        worker.engine.skip_to(now_ns)
    policy.asked = 2
    with pytest.raises(RuntimeError, match="no victims today"):
        worker.engine.prefetch(chain(1, 2), now_ns)
    worker.engine.check()


def played_with_a_policy_that_fails(fails_at: int, fast_forward: bool) -> tuple[int, int]:
    """How often the policy of a shared tier was called and raised, while an engine is asked again until it is idle."""
    calls = raised = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise RuntimeError("no idea")

    class Fragile(StrictLru):
        def __init__(self) -> None:
            super().__init__()
            self.hook = lambda _name: count()

    config = tiers(g2_blocks=6, g3=shared(num_blocks=8, policy=Fragile))
    run = _core.TierRun(config, BLOCK, check=True)
    engine = _core.VllmEngine(
        _core.VllmEngineConfig(block_size=BLOCK, num_gpu_blocks=8, events=True),
        _core.constant_timing(0.0, 1.0),
        tiers=config,
        run=run,
    )
    engine.set_fast_forward(fast_forward)
    for request in range(12):
        engine.submit(str(request), 4 * BLOCK, 2, chain(request % 5))
    for _ in range(2):
        try:
            engine.advance(10**6 * MS)
        except RuntimeError:
            raised += 1
    assert engine.idle
    engine.check()
    run.check()
    return calls, raised


@pytest.mark.parametrize("fast_forward", [False, True])
def test_an_engine_goes_on_wherever_the_policy_of_a_shared_tier_raised(fast_forward: bool) -> None:
    calls, raised = played_with_a_policy_that_fails(-1, fast_forward)
    assert (calls > 20, raised) == (True, 0)
    for fails_at in range(1, calls + 1):
        assert played_with_a_policy_that_fails(fails_at, fast_forward)[1] == 1, fails_at
