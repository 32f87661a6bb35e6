"""A router of yours that fails live: its requests are told so, and nobody else is harmed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from server.fleet_scene import run
from server.router_scene import Scene, play
from understudy.router import Router

if TYPE_CHECKING:
    from server.client import Client
    from understudy.fleets.fleet import Fleet

C = "/v1/completions"
BODY = {"prompt": [1] * 64, "max_tokens": 2}


class _Fails(Router):
    """Answers what it is told to, or raises it."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def choose(self, request: Any, view: Any) -> Any:  # noqa: ARG002
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class _Deaf(Router):
    """Fails at whatever it is told."""

    def choose(self, request: Any, view: Any) -> int:  # noqa: ARG002
        return 1

    def observe(self, batch: Any) -> None:
        raise KeyError(batch.worker)

    def first_token(self, row: int) -> None:
        raise ValueError(f"first {row}")

    def ended(self, row: int) -> None:
        raise ValueError(f"ended {row}")


class _Blind(Router):
    """Fails at events."""

    def choose(self, request: Any, view: Any) -> int:  # noqa: ARG002
        return 1

    def observe(self, batch: Any) -> None:
        raise KeyError(batch.worker)


FAILURES = [
    (ValueError("no\ntable"), "the router's choose() raised ValueError: no table"),
    (99, "the router chose worker 99, which is not ready; choose one of the 2 ids in view.ready"),
    ("x", "the router chose worker 'x', which is not ready; choose one of the 2 ids in view.ready"),
]


@pytest.mark.parametrize(("answer", "message"), FAILURES)
def test_a_choice_that_fails_is_the_answer_of_its_request_alone(
    answer: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        bad, good = [await client.post(C, BODY) for _ in range(2)]
        assert (bad.status, bad.json["error"]["message"]) == (500, message)
        assert (good.status, good.headers["x-understudy-worker"]) == (200, "1")
        assert str(fleet.routing.dispatcher.failure) == message

    run(test, 2, _Fails(answer, 1))
    assert [record.getMessage() for record in caplog.records] == [f"{message} (logged once)"]


@pytest.mark.parametrize(("answer", "message"), FAILURES)
def test_a_standalone_router_says_so_too(answer: Any, message: str) -> None:
    async def test(told: Scene) -> None:
        bad, good = [await told.client.post(C, BODY) for _ in range(2)]
        assert (bad.status, bad.json["error"]["message"]) == (500, message)
        assert (good.status, good.headers["x-understudy-worker"]) == (200, "1")

    play(test, 2, _Fails(answer, 1))


def test_a_router_that_fails_at_events_is_degraded_and_says_so() -> None:
    async def test(told: Scene) -> None:
        await told.client.post(C, BODY)

        async def missed() -> bool:
            return bool((await told.dump())["workers"][1]["missed_batches"])

        await told.until(missed)
        dump = await told.dump()
        assert 1 in dump["degraded"]
        assert dump["failure"] == "the router's observe() raised KeyError: 1"
        metrics = (await told.client.get("/metrics")).body.decode()
        assert "understudy:router_degraded 1.0" in metrics
        assert re.search(r"understudy:router_missed_event_batches\{.*\} [1-9]", metrics)

    play(test, 2, _Blind())


def test_a_router_that_fails_at_what_it_hears_harms_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        replies = [await client.post(C, BODY) for _ in range(3)]
        assert [reply.status for reply in replies] == [200] * 3
        assert (await client.get("/health")).status == 200
        assert "understudy:router_degraded 1.0" in (await client.get("/metrics")).body.decode()

    run(test, 2, _Deaf())
    assert {record.getMessage() for record in caplog.records} == {
        "the router's first_token() raised ValueError: first 1 (logged once)",
        "the router's observe() raised KeyError: 1 (logged once)",
        "the router's ended() raised ValueError: ended 1 (logged once)",
    }
    assert len(caplog.records) == 3
