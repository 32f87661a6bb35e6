"""CPU time that the fleet page costs a browser and the server, under load, and pictures of the page.

    python benchmarks/fleet_page_browser.py [--workers 200] [--seconds 20] [--pictures FOLDER]

Starts a fleet, sends it requests, and opens its page in a headless Chromium. The server's cost is the difference
between its CPU time with and without the page, in turns; the browser's is the CPU time of the page's own process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from server.browser import Browser

PORT = 18800
BODY = {"stream": True}


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, in s."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def send_requests(per_second: float, stop: threading.Event) -> None:
    """Send completions with shared prefixes until `stop` is set; their answers are read and dropped."""
    rng, tasks = random.Random(0), set()

    async def one() -> None:
        prompt = [rng.randrange(8)] * rng.choice([200, 800, 1600]) + [rng.randrange(100) for _ in range(64)]
        body = json.dumps({**BODY, "prompt": prompt, "max_tokens": rng.randrange(50, 400)}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        while await reader.read(65536):
            pass
        writer.close()

    while not stop.is_set():
        task = asyncio.create_task(one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(rng.expovariate(per_second))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def browser_cpu_s(browser: Browser) -> dict[str, float]:
    """Return the CPU time of the browser's processes so far by kind, in s; the page runs in a renderer."""
    session, browser._session = browser._session, None  # a question to the whole browser
    try:
        rows = browser.call("SystemInfo.getProcessInfo")["processInfo"]
    finally:
        browser._session = session
    totals: dict[str, float] = {}
    for row in rows:
        totals[row["type"]] = totals.get(row["type"], 0.0) + row["cpuTime"]
    return totals


def order(fault: dict[str, Any]) -> None:
    """Set a fault."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/admin/fault",
        json.dumps(fault).encode(),
        {"content-type": "application/json"},
    )
    urllib.request.urlopen(request).read()


def take_pictures(browser: Browser, folder: Path, name: str) -> None:
    """Write pictures at three widths, light and dark; print texts that are clipped."""
    folder.mkdir(parents=True, exist_ok=True)
    for width in (600, 1400, 2000):
        for dark in (False, True):
            browser.resize(width)
            browser.set_scheme(dark=dark)
            time.sleep(1.5)
            browser.picture(folder / f"{name}-{width}-{'dark' if dark else 'light'}.png")
            if found := browser.clipped():
                print(f"clipped at {width}: {found}")
    browser.resize(1400)


def main() -> None:
    """Measure, and print one line."""
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("--workers", type=int, default=200)
    read.add_argument("--seconds", type=float, default=20.0)
    read.add_argument("--rounds", type=int, default=3)
    read.add_argument("--requests-per-second", type=float, default=20.0)
    read.add_argument("--pictures", type=Path)
    read.add_argument("--flags", default="", help="more flags of `understudy fleet`")
    args = read.parse_args()
    command = [sys.executable, "-m", "understudy", "fleet", "--workers", str(args.workers), "--routing", "kv"]
    command += [
        "--port",
        str(PORT),
        "--base-port",
        str(PORT + 1),
        "--num-gpu-blocks",
        "2048",
        *args.flags.split(),
    ]
    url = f"http://127.0.0.1:{PORT}/"
    stop = threading.Event()
    with (
        tempfile.TemporaryDirectory() as profile,
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as fleet,
        Browser(Path(profile)) as browser,
    ):
        try:
            while True:
                try:
                    urllib.request.urlopen(url + "health").read()
                    break
                except OSError:
                    time.sleep(0.2)
            load = threading.Thread(
                target=lambda: asyncio.run(send_requests(args.requests_per_second, stop)), daemon=True
            )
            load.start()
            time.sleep(5)
            server: dict[bool, list[float]] = {True: [], False: []}
            shown: list[dict[str, float]] = []
            tasks: list[float] = []
            for _ in range(args.rounds):
                for is_open in (False, True):
                    browser.open(url if is_open else "about:blank")
                    if is_open:
                        browser.wait_for("document.querySelectorAll('.w').length")
                    time.sleep(2)
                    before, work = browser_cpu_s(browser), browser.metrics()["TaskDuration"]
                    began, began_s = cpu_s(fleet.pid), time.monotonic()
                    time.sleep(args.seconds)
                    passed_s = time.monotonic() - began_s
                    server[is_open].append((cpu_s(fleet.pid) - began) / passed_s)
                    if is_open:
                        after = browser_cpu_s(browser)
                        shown.append({kind: (after[kind] - before[kind]) / passed_s for kind in before})
                        tasks.append((browser.metrics()["TaskDuration"] - work) / passed_s)
            medians = {is_open: statistics.median(values) for is_open, values in server.items()}
            print(
                f"{args.workers} workers, {args.requests_per_second:g} requests/s, in shares of a core: server "
                f"{100 * medians[False]:.1f} % without the page, {100 * medians[True]:.1f} % with it; browser: "
                + ", ".join(
                    f"{kind} {100 * statistics.median(one[kind] for one in shown):.2f} %" for kind in shown[0]
                )
                + f", main thread {100 * statistics.median(tasks):.2f} % (elapsed)"
            )
            print(f"errors on the console: {browser.errors}")
            if args.pictures:
                last = args.workers - 1
                order({"kind": "kill", "workers": sorted({0, last}), "duration_s": 300})
                if args.workers > 8:
                    order({"kind": "slow", "workers": [3, 4, 5], "delay_ms": 300, "duration_s": 300})
                time.sleep(3)
                chosen = min(6, last)
                browser.run(f"document.querySelectorAll('.w')[{chosen}].click()")
                take_pictures(browser, args.pictures, str(args.workers))
        finally:
            stop.set()
            fleet.terminate()
            fleet.wait(30)


if __name__ == "__main__":
    main()
