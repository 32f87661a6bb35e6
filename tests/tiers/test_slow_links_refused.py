"""Links that are absurdly slow: refused where they are configured, and told for good where it shows later."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import understudy
from replay.building import single_turns
from tiers.building import BLOCK, INF, MS, Worker, chain, tiers, way
from understudy import _core
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import CapacityExhausted, ConfigError, InvalidArgument
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SLOW = 1e-9  # a byte a second: 288 MB in nine years
ROWS = 4 * '{"timestamp": 0, "input_length": 100, "output_length": 2, "hash_ids": [1]}\n'


def lower(worker: _core.LinkPairConfig | None = None, backend: _core.LinkPairConfig | None = None) -> Any:
    return _core.SharedTierConfig(num_blocks=1000, worker=worker or way(INF), backend=backend or way(INF))


# --- configuration ----------------------------------------------------------------------------------------------------

SLOW_WAYS: dict[str, dict[str, Any]] = {
    "g2: down_gbps": {"host": way(SLOW, 1.0)},
    "g2: up_gbps": {"host": way(1.0, SLOW)},
    "g2: duplex_gbps": {"host": way(1.0, duplex_gbps=SLOW)},
    "g3: down_gbps": {"g3": lower(way(SLOW, 1.0))},
    "g3: up_gbps": {"g3": lower(way(1.0, SLOW))},
    "g3: duplex_gbps": {"g3": lower(way(1.0, duplex_gbps=SLOW))},
    "g3: backend_down_gbps": {"g3": lower(backend=way(SLOW, 1.0))},
    "g4: backend_up_gbps": {"g4": lower(backend=way(1.0, SLOW))},
    "g4: backend_duplex_gbps": {"g4": lower(backend=way(1.0, duplex_gbps=SLOW))},
}


@pytest.mark.parametrize("field", SLOW_WAYS)
def test_a_link_that_no_batch_crosses_in_nine_years_is_refused_by_name(field: str) -> None:
    settings = {"offload_batch_size": 400, **SLOW_WAYS[field]}
    with pytest.raises(ConfigError, match=rf"^{field} of 1e-09 is too slow.* years; give more, or inf"):
        Worker(400, tiers(g2_blocks=1000, **settings))


@pytest.mark.parametrize("field", SLOW_WAYS)
def test_the_same_link_is_taken_where_transfers_are_small(field: str) -> None:
    worker = Worker(200, tiers(g2_blocks=1000, **SLOW_WAYS[field]))
    assert worker.engine.idle


def test_copies_are_counted_by_the_batch_and_loads_by_what_device_and_host_hold() -> None:
    Worker(400, tiers(g2_blocks=1000, host=way(SLOW, 1.0), offload_batch_size=288))
    with pytest.raises(ConfigError, match=r"g2: down_gbps of 1e-09.* 289000000 bytes"):
        Worker(400, tiers(g2_blocks=1000, host=way(SLOW, 1.0), offload_batch_size=289))
    Worker(400, tiers(g2_blocks=288, host=way(1.0, SLOW)))
    with pytest.raises(ConfigError, match=r"g2: up_gbps of 1e-09.* 400000000 bytes"):
        Worker(400, tiers(g2_blocks=1000, host=way(1.0, SLOW)))


def test_a_store_of_vllms_offload_is_as_large_as_the_device() -> None:
    below = tiers(g2_blocks=1000, host=way(SLOW, 1.0), write_through=True)
    with pytest.raises(ConfigError, match=r"g2: down_gbps of 1e-09.* 400000000 bytes"):
        Worker(400, below, offload=_core.VllmOffload(host_chunks=1000))


@pytest.mark.parametrize("name", ["down_fixed_ns", "up_fixed_ns"])
def test_a_fixed_cost_of_years_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^link worker g\d_to_g\d: fixed_ns must be at most 2\^58"):
        Worker(4, tiers(host=way(1.0, **{name: 2**62})))


def test_a_block_that_no_transfer_can_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^bytes_per_block must be at most 2\^38"):
        Worker(4, tiers(bytes_per_block=2**39))


def settings(**link: Any) -> dict[str, Any]:
    return {"kv_bytes_per_token": 1 << 20, "tiers": [{"tier": "g2", "blocks": 1000, "link": link}]}


def test_the_settings_of_a_run_are_refused_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(ROWS)
    config = TiersConfig.from_dict(settings(up_gbps=SLOW))
    with pytest.raises(ConfigError, match=r"^g2: up_gbps of 1e-09 is too slow"):
        understudy.replay(tmp_path / "trace.jsonl", tiers=config)


def test_the_command_line_tells_it_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.jsonl").write_text(ROWS)
    (tmp_path / "fleet.yaml").write_text(json.dumps(settings(down_gbps=SLOW)))
    assert main(["replay", str(tmp_path / "trace.jsonl"), "--config", str(tmp_path / "fleet.yaml")]) == 2
    told = capsys.readouterr().err
    assert "g2: down_gbps of 1e-09 is too slow" in told
    assert "Traceback" not in told


def test_an_estimate_of_many_that_share_a_slow_link_stays_a_time() -> None:
    estimate = _core.TransferEstimate(tiers(host=way(SLOW, up_fixed_ns=5, down_fixed_ns=5)))
    assert estimate.load_ns(10**8, 0, 0) == 10**17 + 5
    assert estimate.load_ns(10**8, 10**6, 0) >= 2**60
    assert estimate.copy_ns(10**8, 10**6) >= 2**60


# --- in a run ---------------------------------------------------------------------------------------------------------

REFUSED = r"link .*g\d_to_g\d\S*: the transfers in flight would take years"
DOWN = way(SLOW, INF)
CROWDED: dict[str, tuple[int, int, dict[str, Any]]] = {  # blocks of the device and of a prompt, tiers
    "write-through": (500, 100, {"host": DOWN, "write_through": True}),
    "on eviction": (312, 300, {"host": DOWN}),
    "further down": (500, 100, {"host": way(INF), "write_through": True, "g3": lower(DOWN)}),
    "a backend": (500, 100, {"host": way(INF), "write_through": True, "g4": lower(backend=DOWN)}),
}


def crowded(how: str, **engine: Any) -> Worker:
    """Prompts, no two alike: every copy of a batch is short enough, those of 300 blocks are not together."""
    num_gpu_blocks, blocks, below = CROWDED[how]
    worker = Worker(num_gpu_blocks, tiers(1000, **below), max_num_batched_tokens=blocks * BLOCK, **engine)
    for tag in range(1, 7):
        worker.submit(chain(tag, 350), blocks * BLOCK, 40)
    return worker


def assert_told_every_time(call: Callable[[], object], worker: Worker) -> None:
    for _ in range(3):
        with pytest.raises(CapacityExhausted, match=REFUSED):
            call()
        worker.check()


@pytest.mark.parametrize("fast_forward", [True, False], ids=["fast_forward", "stepping"])
@pytest.mark.parametrize("ahead", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("how", CROWDED)
def test_a_transfer_that_is_refused_later_is_told_every_time(
    how: str, ahead: bool, fast_forward: bool
) -> None:
    worker = crowded(how, async_scheduling=ahead)
    worker.engine.set_fast_forward(fast_forward)
    assert_told_every_time(lambda: worker.engine.advance(10**15), worker)
    assert_told_every_time(worker.engine.finish_transfers, worker)
    now_ns = worker.engine.now_ns + MS
    assert_told_every_time(lambda: worker.engine.land(now_ns), worker)
    assert_told_every_time(lambda: worker.engine.cancel(5, now_ns), worker)
    assert_told_every_time(lambda: worker.engine.tier_lookup(chain(5)[:4]), worker)


@pytest.mark.parametrize("ahead", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("how", CROWDED)
def test_fast_forwards_come_as_far_as_steps_before_a_refusal(how: str, ahead: bool) -> None:
    ends = []
    for fast_forward in (True, False):
        worker = crowded(how, async_scheduling=ahead)
        worker.engine.set_fast_forward(fast_forward)
        with pytest.raises(CapacityExhausted, match=REFUSED):
            worker.engine.advance(10**15)
        ended = worker.engine.take_finished()
        ends.append((ended, [worker.engine.emitted(request) for request in range(6) if request not in ended]))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("how", CROWDED)
def test_a_transfer_that_is_refused_step_by_step_leaves_the_step_as_it_was(how: str) -> None:
    worker = crowded(how)
    with pytest.raises(CapacityExhausted, match=REFUSED):
        worker.play()
    worker.check()
    wake_ns = worker.engine.wake_ns
    assert wake_ns is not None
    step = worker.engine.end_step if worker.engine.in_step else worker.engine.begin_step
    assert_told_every_time(lambda: step(max(wake_ns, worker.now_ns)), worker)


def test_every_worker_on_shared_links_gets_the_error() -> None:
    config = tiers(1000, INF, write_through=True, g3=lower(backend=DOWN))
    run = _core.TierRun(config, BLOCK)
    workers = [Worker(500, config, run=run, name=name, max_num_batched_tokens=4000) for name in ("a", "b")]
    for tag, worker in enumerate(workers):
        worker.submit(chain(tag, 200), 150 * BLOCK, 40)
        worker.begin()
    workers[0].end()
    workers[1].end()  # beside what is under way, its copies are too many
    for worker in workers:
        assert_told_every_time(lambda worker=worker: worker.engine.advance(10**15), worker)  # type: ignore[misc]
    assert_told_every_time(lambda: run.run_until(10 * MS), workers[0])


def test_a_transfer_next_to_a_refused_one_does_not_delay_the_error() -> None:
    config = tiers(1000, host=DOWN, write_through=True, g3=lower())
    run = _core.TierRun(config, BLOCK)
    workers = [Worker(500, config, run=run, name=name, max_num_batched_tokens=4000) for name in ("a", "b")]
    for tag, (worker, blocks) in enumerate(zip(workers, (350, 8), strict=True)):
        worker.submit(chain(tag, 400), blocks * BLOCK)
        worker.begin()
    for worker in workers:
        worker.end()  # at the same time: the first has too many copies, and those of the other would take days
    run.run_until(workers[1].now_ns)
    assert_told_every_time(lambda: run.run_until(workers[1].now_ns + 1), workers[1])


def test_a_load_that_is_refused_leaves_its_request_where_it_is() -> None:
    worker = Worker(250, tiers(1000, host=way(INF, SLOW)), max_num_batched_tokens=1000)
    for tag in (1, 2):
        worker.cache(chain(tag, 256), 200)
    worker.engine.set_link_share(worker.now_ns, _core.Tier.G2, 0.5)
    request = worker.submit(chain(1, 256), 201 * BLOCK)
    with pytest.raises(
        CapacityExhausted, match=r"link worker g2_to_g1: the transfers in flight would take years"
    ):
        worker.play()
    assert worker.engine.parked == 1
    assert_told_every_time(lambda: worker.engine.advance(10**15), worker)
    assert worker.emitted(request) == 0


@pytest.mark.parametrize("ahead", [True, False], ids=["async", "sync"])
def test_a_store_of_vllms_offload_that_is_refused_is_told_every_time(ahead: bool) -> None:
    below = tiers(1000, host=way(SLOW, INF), write_through=True)
    worker = Worker(
        250,
        below,
        async_scheduling=ahead,
        max_num_batched_tokens=1000,
        offload=_core.VllmOffload(host_chunks=1000, offload_prompt_only=False),
    )
    worker.engine.set_link_share(0, _core.Tier.G2, 0.1)
    for tag in range(1, 7):
        worker.submit(chain(tag, 128), 100 * BLOCK, 40)
    assert_told_every_time(lambda: worker.engine.advance(10**15), worker)


def test_a_replay_ends_with_the_refusal() -> None:
    workload = single_turns([400] * 6, 2, [0] * 6, [[i] for i in range(6)], trace_block_size=400)
    engine = VllmConfig(block_size=4, num_gpu_blocks=500)
    link = {"down_gbps": SLOW, "up_gbps": "inf"}
    for shared in (False, True):
        below: list[dict[str, Any]] = [{"tier": "g2", "blocks": 1000, "link": {} if shared else link}]
        if shared:
            slow = {f"backend_{name}": value for name, value in link.items()}
            below.append({"tier": "g3", "blocks": 1000, "link": slow})
        config = TiersConfig.from_dict({"kv_bytes_per_token": 250_000, "tiers": below})
        with pytest.raises(CapacityExhausted, match=REFUSED):
            run_offline(RunPlan(workload, engine, tiers=config, workers=2))


# --- slowed -----------------------------------------------------------------------------------------------------------


def test_links_are_not_slowed_so_far_that_what_is_under_way_takes_years() -> None:
    config = tiers(1000, host=way(1e-6, 1e-6, duplex_gbps=1e-6), write_through=True)
    worker = Worker(500, config, max_num_batched_tokens=4000)
    worker.submit(chain(1, 400), 350 * BLOCK)
    worker.step()
    wake_ns = worker.engine.wake_ns
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"link worker g1_to_g2: .*years; give a larger share"):
            worker.engine.set_link_share(worker.now_ns, _core.Tier.G2, 0.001)
        assert worker.engine.wake_ns == wake_ns
        worker.check()
    worker.engine.set_link_share(worker.now_ns, _core.Tier.G2, 0.5)
    slowed_ns = worker.engine.wake_ns
    assert slowed_ns is not None
    assert wake_ns is not None
    assert slowed_ns - worker.now_ns == 2 * (wake_ns - worker.now_ns)


def test_a_refusal_is_not_forgotten_when_links_get_their_bandwidth_back() -> None:
    worker = Worker(24, tiers(1000, host=way(SLOW, INF)), max_num_batched_tokens=4000)
    worker.engine.set_link_share(0, _core.Tier.G2, 0.001)
    worker.submit(chain(1, 64), 20 * BLOCK, 2)
    for _ in range(2):
        worker.begin()
        worker.end()
    worker.submit(chain(2, 64), 20 * BLOCK, 8)
    worker.begin()  # which evicts what cannot leave
    with pytest.raises(CapacityExhausted, match="years"):
        worker.engine.set_link_share(worker.now_ns, _core.Tier.G2, 1.0)
    with pytest.raises(CapacityExhausted, match="years"):
        worker.engine.advance(10**15)
