"""CPU time that the fleet page costs a browser while it watches a busy fleet.

    python benchmarks/fleet_page_browser.py [--workers 200] [--changing 0.5] [--seconds 30] [--rounds 3]

The loads of the workers are made up from a seed, so that every run draws the same: each second a share of them changes,
24 requests are routed, and the charts have five minutes of history. The cost is the CPU time of all of Chromium's
processes, from /proc, minus that of an empty page, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness.publish import add_json_flag, publish
from understudy.engines.vllm_config import VllmConfig
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.router.dispatch import Decision, LiveRouteRequest
from understudy.server.settings import ServerSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from server.browser import Browser

if TYPE_CHECKING:
    from harness.result import Number
    from understudy.fleets.report import Report

ROUTED = 24
SETTLE_S = 6.0
START_S = 30.0


class Busy:
    """Simulated changes of a fleet's report."""

    def __init__(self, fleet: Fleet, changing: float) -> None:
        self.fleet, self.changing, self.rng = fleet, changing, random.Random(0)
        self.read = fleet.front.report
        count = len(fleet.servers)
        self.running, self.waiting = [8] * count, [0] * count
        self.usage, self.hit = [0.4] * count, [0.5] * count
        self.late_ms = [1.0] * count
        rows = fleet.front.monitor.history.rows
        for age_s in range(299, 0, -1):
            rows.append(self.row(time.time() - age_s))

    def row(self, unix_s: float) -> list[float | None]:
        """Return a row of the charts' history."""
        draw = self.rng.uniform
        latencies = [draw(50, 80), draw(90, 150), draw(160, 300), draw(8, 9), draw(9, 12), draw(12, 20)]
        return [
            round(unix_s, 1),
            *latencies,
            draw(8000, 9000),
            draw(3e4, 4e4),
            draw(20, 30),
            1600 + draw(-50, 50),
            draw(0, 40),
        ]

    def report(self) -> Report:
        """Report on the simulated workers, after another second."""
        rng, report = self.rng, self.read()
        for worker in range(len(self.running)):
            if rng.random() >= self.changing:
                continue
            self.running[worker] = min(16, max(1, self.running[worker] + rng.randrange(-2, 3)))
            self.waiting[worker] = rng.randrange(3) if rng.random() < 0.1 else 0
            self.usage[worker] = round(min(0.95, max(0.05, self.usage[worker] + rng.uniform(-0.05, 0.05))), 3)
            self.hit[worker] = round(rng.uniform(0.4, 0.6), 3)
            self.late_ms[worker] = round(rng.uniform(0, 5), 1)
            metrics = self.fleet.servers[worker].worker.metrics[0]
            metrics.generation_tokens.add(rng.randrange(50, 500))
            metrics.first_token.observe(rng.uniform(0.05, 0.3))
            metrics.gap.observe(rng.uniform(0.008, 0.02), 49)
        for row in range(ROUTED):
            worker = rng.randrange(len(self.running))
            prompt: Any = [0] * rng.randrange(10, 200)
            asked = LiveRouteRequest(row, 0, rng.randrange(100, 4000), 100, 0, 16, prompt)
            decision = Decision(
                row, worker, rng.randrange(10), 0, rng.randrange(10, 20), rng.uniform(10, 200), 1
            )
            self.fleet.front.monitor.decided(decision, asked, worker, "/v1/completions", self.running[worker])
        changed: dict[str, list[Any]] = {
            "running": self.running,
            "waiting": self.waiting,
            "usage": self.usage,
            "hit": self.hit,
            "late_ms": self.late_ms,
        }
        columns = {**report.columns, **{name: list(column) for name, column in changed.items()}}
        totals = msgspec.structs.replace(report.totals, running=sum(self.running), waiting=sum(self.waiting))
        return msgspec.structs.replace(report, columns=columns, totals=totals)


def browser_cpu_s(root: int) -> dict[str, float]:
    """Return the CPU time so far of a process and its descendants, in s by process and thread."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):  # it has ended, or is no process
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])

    def is_ours(pid: int) -> bool:
        while pid and pid != root:
            pid = parents.get(pid, 0)
        return pid == root

    found: dict[str, float] = {}
    for pid in filter(is_ours, parents):
        process = Path(f"/proc/{pid}")
        with suppress(OSError):
            named = re.search(rb"--type=([a-z-]+)", (process / "cmdline").read_bytes())
            kind = named[1].decode() if named else "browser"
            user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
            # A process counts its threads that have ended too, which the list of threads no longer has.
            ended_s = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
            for task in (process / "task").iterdir():
                with suppress(OSError):
                    name = f"{pid} {kind}/{(task / 'comm').read_text().strip()}"
                    cpu_s = int((task / "schedstat").read_text().split()[0]) / 1e9
                    found[name] = found.get(name, 0.0) + cpu_s
                    ended_s -= cpu_s
            found[f"{pid} {kind}/ended"] = ended_s
    return found


def measure(browser: Browser, url: str, args: argparse.Namespace) -> None:
    """Print the browser's cost of a page, and write a profile where one is wanted."""
    shares: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    time.sleep(START_S)
    for _ in range(args.rounds):
        for is_open in (False, True):
            browser.open(url + args.hash if is_open else "about:blank")
            if is_open:
                browser.wait_for("document.querySelector('#pools').children.length")
            time.sleep(SETTLE_S)
            began, began_s = browser_cpu_s(browser.pid), time.monotonic()
            time.sleep(args.seconds)
            passed_s = time.monotonic() - began_s
            ended = browser_cpu_s(browser.pid)
            share: dict[str, float] = {}
            for name, cpu_s in ended.items():  # a process that ended meanwhile has served an earlier page
                thread = name.partition(" ")[2]
                share[thread] = share.get(thread, 0.0) + 100 * (cpu_s - began.get(name, 0.0)) / passed_s
            shares[is_open].append(share)
    empty, page = ([sum(one.values()) for one in shares[is_open]] for is_open in (False, True))
    print(f"each round, % of a core: {', '.join(f'{one:.2f}' for one in page)}")
    numbers: dict[str, Number] = {
        "with the page": (min(page), max(page)),
        "empty page": statistics.median(empty),
        "the page": statistics.median(page) - statistics.median(empty),
    }
    publish("fleet_page_browser", {f"{args.workers} workers": numbers}, args.json)
    for name in sorted(shares[True][-1], key=lambda name: -shares[True][-1][name])[: args.threads]:
        with_page = statistics.median(one.get(name, 0.0) for one in shares[True])
        without = statistics.median(one.get(name, 0.0) for one in shares[False])
        print(f"  {with_page:6.2f} % {name} (empty page {without:.2f} %)")
    print(f"  errors on the console: {browser.errors}")
    if args.profile:
        browser.call("Profiler.enable")
        browser.call("Profiler.setSamplingInterval", interval=200)
        browser.call("Profiler.start")
        time.sleep(args.seconds)
        args.profile.write_text(json.dumps(browser.call("Profiler.stop")["profile"]))


async def main() -> None:
    """Simulate a fleet, and measure its page."""
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("--workers", type=int, default=200)
    read.add_argument(
        "--changing", type=float, default=0.5, help="share of the workers that change each second"
    )
    read.add_argument("--seconds", type=float, default=30.0)
    read.add_argument("--rounds", type=int, default=3)
    read.add_argument("--hash", default="", help="end of the page's address: #6 shows worker 6")
    read.add_argument("--threads", type=int, default=0, help="print the cost of this many threads")
    read.add_argument("--profile", type=Path, help="write a CPU profile of the page's script, for DevTools")
    add_json_flag(read)
    args = read.parse_args()
    engine = VllmConfig(num_gpu_blocks=1024, max_model_len=4096)
    pool = ServerSettings(model="stub", engine=engine, max_model_len=4096)
    fleet = Fleet(FleetSettings(pools=((args.workers, pool),), base_port=0, port=0, routing="kv"))
    await fleet.start()
    busy: Any = Busy(fleet, args.changing)
    fleet.front.report = busy.report  # type: ignore[method-assign]
    try:
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
            Browser(Path(profile)) as browser,
        ):
            await asyncio.to_thread(measure, browser, f"http://127.0.0.1:{fleet.port}/", args)
    finally:
        await fleet.stop()
        fleet.runtime.driver.stop()


if __name__ == "__main__":
    asyncio.run(main())
