"""The scheduler with an executor that only counts: admission, plans, ends, failures."""

from __future__ import annotations

from itertools import product

import pytest

from qwen3.building import OPEN, ends, whole
from understudy.errors import ConfigError, InvalidArgument
from understudy.kv import KvCacheManager, KvLayout
from understudy.qwen3.engine import Engine
from understudy.qwen3.executor import Computed, Step
from understudy.qwen3.limits import SchedulerConfig
from understudy.qwen3.request import Output, Request
from understudy.qwen3.scheduler import Scheduler


class Fake:
    """Answers with the length of each view. `fails` says which steps do not succeed, and in which beat."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.prepared: list[Step] = []
        self.poison: set[int] = set()
        self.at_begin = False
        self._step = Step()

    def prepare(self, step: Step) -> None:
        self.prepared.append(step)

    def begin(self, step: Step) -> None:
        self._step = step
        if self.at_begin:
            self._fail(step)

    def finish(self) -> Computed:
        self._fail(self._step)
        self.steps.append((len(self._step.chunks), len(self._step.decodes)))
        views = [chunk.view for chunk in self._step.chunks] + [decode.view for decode in self._step.decodes]
        return Computed([view.seq_len for view in views], [None] * len(views))

    def _fail(self, step: Step) -> None:
        fed = {int(chunk.tokens[0]) for chunk in step.chunks} | {decode.token for decode in step.decodes}
        if fed & self.poison:
            raise RuntimeError("the device says no")

    def close(self) -> None:
        pass


def engine_with(
    blocks: int, *, page: int = 16, budget: int = 512, seqs: int = 64, window: int = 4096
) -> tuple[Engine, Fake]:
    fake = Fake()
    manager = KvCacheManager(blocks + 1, KvLayout(page, 1, 1, 1), prefix_caching=False)
    engine = Engine(Scheduler(manager, SchedulerConfig(budget, seqs, window)), fake)
    OPEN.append(engine)
    return engine, fake


def request(name: str, prompt: int, output: int, *, token: int = 1000, **more: object) -> Request:
    return Request(name, [token] * prompt, output, **more)  # type: ignore[arg-type]


def names(outputs: list[Output]) -> list[str]:
    return [output.request_id for output in outputs]


def test_one_token_on_a_page_boundary_fits_a_pool_of_one_block() -> None:
    engine, fake = engine_with(1)
    engine.submit(request("a", 16, 1))
    assert ends(engine.run()) == {"a": "length"}
    assert fake.steps == [(1, 0)]
    whole(engine)


def test_a_second_request_waits_until_its_whole_life_fits() -> None:
    engine, _ = engine_with(4)
    engine.submit(request("first", 16, 18))  # three blocks at its peak
    engine.submit(request("second", 17, 1))  # two
    outputs = engine.run()
    assert names(outputs).index("second") == len(names(outputs)) - 1
    assert ends(outputs) == {"first": "length", "second": "length"}


def test_a_request_that_can_never_fit_is_rejected_with_the_reason_and_the_next_runs() -> None:
    engine, _ = engine_with(2)
    engine.submit(request("huge", 16, 34))
    engine.submit(request("small", 16, 1))
    outputs = engine.run()
    assert ends(outputs) == {"huge": "rejected", "small": "length"}
    assert "4 blocks; the KV cache has 2" in next(o.error for o in outputs if o.request_id == "huge")  # type: ignore[operator]


@pytest.mark.parametrize(
    ("prompt", "output", "word"),
    [(100, 29, "context window of 128"), (0, 1, "at least one"), (1, 0, "at least 1")],
)
def test_a_request_outside_of_the_window_or_without_tokens_is_rejected(
    prompt: int, output: int, word: str
) -> None:
    engine, _ = engine_with(64, window=128)
    engine.submit(request("a", prompt, output))
    (answer,) = engine.run()
    assert answer.finish_reason == "rejected"
    assert word in str(answer.error)


def test_an_admitted_request_never_runs_out_of_blocks() -> None:
    """B2: admission against the allocator, over the grid, with a neighbour that takes the rest."""
    for prompt, output in product(range(1, 34, 4), range(1, 36, 3)):
        engine, _ = engine_with(6)
        engine.submit(request("a", prompt, output))
        engine.submit(request("b", 30, 20, token=7))
        engine.submit(request("c", 3, 30, token=8))
        assert ends(engine.run()) == dict.fromkeys("abc", "length"), (prompt, output)
        whole(engine)


def test_chunks_share_the_budget_of_a_step_with_decodes() -> None:
    engine, fake = engine_with(64, budget=20, seqs=20)
    engine.submit(request("first", 10, 4))
    engine.submit(request("second", 30, 2))
    engine.run()
    assert fake.steps == [(2, 0), (1, 1), (1, 1), (0, 2)]  # 10 + 10; 19 + 1; 1 + 1; two decodes


def test_urgent_requests_go_first_and_equal_ones_in_order() -> None:
    engine, _ = engine_with(64, seqs=1, budget=64)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -1)):
        engine.submit(request(name, 4, 1, priority=priority))
    assert names(engine.run()) == ["d", "a", "c", "b"]


def test_the_plan_is_decode_prefill_or_both() -> None:
    engine, fake = engine_with(64)
    assert engine.step() == []
    assert fake.steps == []
    engine.submit(request("a", 4, 3))
    engine.step()
    engine.submit(request("b", 4, 2))
    engine.run()
    assert fake.steps[0] == (1, 0)
    assert (1, 1) in fake.steps
    assert (0, 2) in fake.steps or (0, 1) in fake.steps


def test_a_stop_token_ends_a_request_and_is_not_part_of_its_output() -> None:
    engine, _ = engine_with(64)
    engine.submit(request("a", 4, 9, stop_ids=frozenset({6})))
    outputs = engine.run()
    assert [(output.token, output.finish_reason) for output in outputs] == [
        (4, None),
        (5, None),
        (None, "stop"),
    ]
    whole(engine)


@pytest.mark.parametrize("steps", range(6))
def test_a_request_that_is_cancelled_at_any_moment_leaves_nothing(steps: int) -> None:
    engine, _ = engine_with(64, budget=8, seqs=8)
    engine.submit(request("a", 20, 4))
    engine.submit(request("b", 3, 9, token=5))
    for _ in range(steps):
        engine.step()
    assert engine.cancel("a")
    assert not engine.cancel("a")
    assert not engine.cancel("nobody")
    assert ends(engine.run())["a"] == "abort"
    whole(engine)


@pytest.mark.parametrize("at_begin", [False, True])
def test_of_a_failed_step_only_the_culprit_ends(at_begin: bool) -> None:
    engine, fake = engine_with(64, budget=64)
    fake.at_begin = at_begin
    fake.poison = {13}
    for name, token in (("a", 1), ("bad", 13), ("c", 3)):
        engine.submit(request(name, 8, 4, token=token))
    outputs = engine.run()
    assert ends(outputs) == {"a": "length", "bad": "error", "c": "length"}
    assert [o.error for o in outputs if o.request_id == "bad"] == ["the device says no"]
    assert [o.token for o in outputs if o.request_id == "a"] == [8, 9, 10, 11]
    whole(engine)


def test_a_failure_in_the_middle_of_decoding_loses_no_token_of_the_others() -> None:
    engine, fake = engine_with(64)
    engine.submit(request("a", 8, 6, token=1))
    engine.submit(request("bad", 20, 6, token=2))
    fake.poison = {22}  # what "bad" feeds in its third step
    outputs = engine.run()
    assert [o.token for o in outputs if o.request_id == "a"] == [8, 9, 10, 11, 12, 13]
    assert [o.token for o in outputs if o.request_id == "bad"] == [20, 21, 22, None]
    assert ends(outputs) == {"a": "length", "bad": "error"}
    whole(engine)


def test_after_a_decode_that_failed_the_engine_serves_the_next() -> None:
    engine, fake = engine_with(4)
    fake.poison = {16}  # its first token, fed
    engine.submit(request("bad", 16, 18))
    outputs = engine.run()
    assert [(o.token, o.finish_reason) for o in outputs] == [
        (16, None),
        (None, "error"),
    ]  # one token, then the error
    whole(engine)
    engine.submit(request("next", 17, 1))
    assert ends(engine.run()) == {"next": "length"}


@pytest.mark.parametrize(
    ("prompt", "output", "decodes", "held", "most"),
    [(16, 1, 0, 1, 1), (16, 3, 0, 1, 2), (16, 3, 1, 2, 2), (17, 16, 15, 2, 2)],
)
def test_the_last_token_is_never_written(
    prompt: int, output: int, decodes: int, held: int, most: int
) -> None:
    engine, _ = engine_with(8)
    manager = engine.scheduler.manager
    with manager.request([7] * prompt, output) as kv:
        kv.schedule_prefill(prompt)
        kv.apply_prefill(1)
        for _ in range(decodes):
            kv.schedule_decode()
            kv.apply_decode(1)
        assert kv.computed_tokens == prompt + decodes
        assert kv.held_blocks == held
        assert manager.lifetime_blocks(prompt, output) == most


def test_an_id_that_is_under_way_is_refused_and_may_come_again_later() -> None:
    engine, _ = engine_with(64)
    engine.submit(request("a", 4, 2))
    with pytest.raises(InvalidArgument, match="'a' is already running or queued"):
        engine.submit(request("a", 4, 2))
    engine.run()
    engine.submit(request("a", 4, 2))
    assert ends(engine.run()) == {"a": "length"}


def test_a_closed_engine_has_given_everything_back() -> None:
    engine, _ = engine_with(64)
    engine.submit(request("a", 30, 9))
    engine.step()
    manager = engine.scheduler.manager
    engine.close()
    engine.close()
    assert manager.available_blocks == manager.total_blocks


def test_a_budget_below_the_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_batched_tokens=8"):
        SchedulerConfig(max_batched_tokens=8, max_num_seqs=9)


@pytest.mark.parametrize("token", [-1, 2**32, "x", None])
def test_a_prompt_that_is_not_of_tokens_is_refused_where_the_request_is_made(token: object) -> None:
    with pytest.raises(InvalidArgument, match="request 'r': prompt"):
        Request("r", [1, token], 1)  # type: ignore[list-item]
