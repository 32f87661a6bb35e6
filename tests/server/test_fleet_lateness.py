"""The verdict of a fleet that stops: this machine was late, by the rule of online replays."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from server.client import QUICK
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("late_s", "ttft_s", "speed", "is_late"),
    [
        (0.009, 0.1, 1.0, False),
        (0.011, 0.1, 1.0, True),  # more than a tenth of the mean TTFT
        (0.003, 0.1, 5.0, True),  # in simulated time
        (0.004, 0.01, 1.0, False),  # less than 5 ms
    ],
)
def test_lateness_is_judged_as_of_an_online_replay(
    late_s: float, ttft_s: float, speed: float, is_late: bool
) -> None:
    pool = ServerSettings(engine=QUICK, max_model_len=4096, clock_speed=speed)
    fleet = Fleet(FleetSettings(pools=((2, pool),), base_port=0, port=0))
    assert fleet.judge_lateness() is None
    fleet.runtime.token_lateness.record(late_s, 100)
    assert fleet.judge_lateness() is None, "nothing was served"
    for server in fleet.servers:
        server.worker.metrics[0].first_token.observe(ttft_s)
    verdict = fleet.judge_lateness()
    assert (verdict is not None) == is_late
    if verdict is not None:
        assert verdict.rule == "machine_late"
        assert f"the mean TTFT is {ttft_s * 1e3:,.0f} ms" in verdict.finding


@pytest.mark.parametrize("flags", [[], ["--processes", "2"]])
def test_a_fleet_that_was_late_says_so_when_it_stops(flags: list[str]) -> None:
    fleet = [sys.executable, "-m", "understudy", "fleet", "m", "--workers", "2"]
    ports = ["--base-port", "0", "--port", "0"]
    speed = ["--clock-speed", "10000"]  # a millisecond of this machine is ten simulated seconds
    process = subprocess.Popen([*fleet, *ports, *speed, *flags], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    found = None
    while found is None:
        line = process.stderr.readline()
        assert line, f"the fleet ended with {process.wait()}"
        found = re.search(r"page on http://127\.0\.0\.1:(\d+)", line)
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 5}).encode()
    for _ in range(4):
        request = urllib.request.Request(
            f"http://127.0.0.1:{found[1]}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert "This machine was late: the numbers are not the fleet's." in said
    assert "Lower --clock-speed (now 10000)" in said
