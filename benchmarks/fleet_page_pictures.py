"""Pictures of the fleet page under load, at three widths, light and dark; prints texts that are clipped.

    python benchmarks/fleet_page_pictures.py FOLDER [--workers 200] [--flags "--prefill-workers 2 --decode-workers 3"]

Starts a fleet, sends it requests, kills the first and the last worker, and opens the page in a headless Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
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
    """Start a fleet and take the pictures."""
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("folder", type=Path)
    read.add_argument("--workers", type=int, help="default: those that --flags name")
    read.add_argument("--name", help="start of the files' names; default: the number of workers")
    read.add_argument("--seconds", type=float, default=20.0, help="time under load before the pictures")
    read.add_argument("--requests-per-second", type=float, default=20.0)
    read.add_argument("--flags", default="", help="more flags of `understudy fleet`")
    args = read.parse_args()
    command = [sys.executable, "-m", "understudy", "fleet", "--port", str(PORT), "--base-port", str(PORT + 1)]
    command += ["--num-gpu-blocks", "2048", *args.flags.split()]
    if args.workers:
        command += ["--workers", str(args.workers), "--routing", "kv"]
    url = f"http://127.0.0.1:{PORT}/"
    stop = threading.Event()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as fleet,
        Browser(Path(profile)) as browser,
    ):
        try:
            while fleet.poll() is None:
                try:
                    urllib.request.urlopen(url + "health").read()
                    break
                except OSError:
                    time.sleep(0.2)
            load = threading.Thread(
                target=lambda: asyncio.run(send_requests(args.requests_per_second, stop)), daemon=True
            )
            load.start()
            browser.open(url)
            count = browser.wait_for("document.querySelectorAll('.w').length")
            time.sleep(args.seconds)
            order({"kind": "kill", "workers": sorted({0, count - 1}), "duration_s": 300})
            if count > 8:
                order({"kind": "slow", "workers": [3, 4, 5], "delay_ms": 300, "duration_s": 300})
            time.sleep(3)
            browser.run(f"document.querySelectorAll('.w')[{min(6, count - 1)}].click()")
            take_pictures(browser, args.folder, args.name or str(count))
            print(f"errors on the console: {browser.errors}")
        finally:
            stop.set()
            fleet.terminate()
            fleet.wait(30)


if __name__ == "__main__":
    main()
