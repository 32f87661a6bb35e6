"""Shrinking a scenario as long as a predicate is true."""

from __future__ import annotations

from typing import Any

from release.shrink import shrink

Scenario = dict[str, Any]


def big() -> Scenario:
    return {
        "name": "big",
        "config": {"block_size": 16, "num_blocks": 500, "policy": "priority", "async_scheduling": True},
        "max_steps": 600,
        "requests": [
            {
                "id": f"r{i}",
                "arrival_step": i,
                "max_tokens": 40,
                "prompt": [[i * 1000, 100], 5],
                "priority": i,
            }
            for i in range(30)
        ],
        "aborts": [{"id": f"r{i}", "step": 50, "when": "mid"} for i in range(0, 30, 3)],
    }


def tokens(request: dict[str, Any]) -> int:
    return sum(1 if isinstance(item, int) else item[1] for item in request["prompt"])


def test_only_the_requests_that_matter_remain() -> None:
    def differs(scenario: Scenario) -> bool:
        return {"r7", "r22"} <= {request["id"] for request in scenario["requests"]}

    small = shrink(big(), differs)
    assert [request["id"] for request in small["requests"]] == ["r7", "r22"]
    assert small["aborts"] == []
    assert small["max_steps"] == 1
    assert small["config"] == {"block_size": 1, "num_blocks": 1}


def test_numbers_shrink_to_the_smallest_that_still_differs() -> None:
    def differs(scenario: Scenario) -> bool:
        request = scenario["requests"][0]
        return request["max_tokens"] >= 13 and tokens(request) > 41 and scenario["config"]["num_blocks"] > 77

    small = shrink(big(), differs)
    assert len(small["requests"]) == 1
    assert small["requests"][0]["max_tokens"] == 13
    assert tokens(small["requests"][0]) == 42
    assert small["config"]["num_blocks"] == 78
    assert small["requests"][0]["arrival_step"] == 0


def test_a_setting_that_matters_is_kept() -> None:
    small = shrink(big(), lambda scenario: scenario["config"].get("policy") == "priority")
    assert small["config"]["policy"] == "priority"
    assert "async_scheduling" not in small["config"]


def test_an_abort_of_a_removed_request_is_removed() -> None:
    def differs(scenario: Scenario) -> bool:
        names = {request["id"] for request in scenario["requests"]}
        assert {abort["id"] for abort in scenario["aborts"]} <= names
        return bool(scenario["aborts"])

    small = shrink(big(), differs)
    assert len(small["aborts"]) == len(small["requests"]) == 1


def test_it_stops_after_the_given_number_of_calls() -> None:
    calls = 0

    def differs(scenario: Scenario) -> bool:
        nonlocal calls
        calls += 1
        return True

    shrink(big(), differs, calls=9)
    assert calls == 9


def test_the_scenario_that_was_given_is_unchanged() -> None:
    given = big()
    shrink(given, lambda scenario: "config" in scenario)
    assert given == big()


def pair() -> Scenario:
    def side() -> Scenario:
        return {"config": {"block_size": 8, "num_blocks": 90, "watermark": 0.1}, "side": {"every": 2}}

    requests = [
        {"id": f"r{i}", "arrival_tick": 2 * i, "prompt": [[i * 1000, 40]], "max_tokens": 9, "proxy": 3}
        for i in range(12)
    ]
    aborts = [{"id": f"r{i}", "side": "d", "tick": 30, "when": "mid"} for i in range(6)]
    fail = {"r2": "read", "r5": "setup", "handshake": True}
    scenario: Scenario = {"name": "pair", "p": side(), "d": side(), "wire": {"latency": 4, "handshake": 3}}
    return {**scenario, "requests": requests, "aborts": aborts, "fail": fail, "max_ticks": 500}


def test_a_pair_of_instances_shrinks_on_both_sides() -> None:
    def differs(scenario: Scenario) -> bool:
        return "r5" in scenario["fail"] and scenario["d"]["side"].get("every") == 2

    small = shrink(pair(), differs)
    assert [request["id"] for request in small["requests"]] == ["r5"]
    assert (small["aborts"], small["fail"], small["wire"]) == ([], {"r5": "setup"}, {})
    assert small["p"] == {"config": {"block_size": 8, "num_blocks": 1}, "side": {}}
    assert small["d"] == {"config": {"block_size": 8, "num_blocks": 1}, "side": {"every": 2}}
    assert small["max_ticks"] == 1
