"""The fleet's page in a real browser, where there is one."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from server.client import QUICK, Client
from understudy.server.fleet.fleet import Fleet, FleetSettings
from understudy.server.settings import ServerSettings

if TYPE_CHECKING:
    from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WORKERS = 200


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_chromium_shows_every_worker_what_it_does_and_the_requests_of_one(tmp_path: Path) -> None:
    pool = ServerSettings(model="stub", engine=QUICK, max_model_len=4096)

    def look(port: int) -> str:
        command = [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path}",
        ]
        command += ["--virtual-time-budget=2000", "--dump-dom", f"http://127.0.0.1:{port}/#0"]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout

    async def main() -> str:
        fleet = Fleet(FleetSettings(pools=((WORKERS, pool),), base_port=0, port=0, routing="round_robin"))
        await fleet.start()
        try:
            for server in fleet.servers:  # requests that stay: the page shows them
                server.worker.pauses.pause("keep", clear_cache=False, then=lambda: None)
            asked = [
                asyncio.create_task(Client(fleet.port).post("/v1/completions", {"prompt": "x"}))
                for _ in range(WORKERS + 1)
            ]
            while sum(len(server.worker.live()) for server in fleet.servers) < WORKERS + 1:
                await asyncio.sleep(0.01)
            page = await asyncio.to_thread(look, fleet.port)
            for server in fleet.servers:
                server.worker.pauses.resume()
            await asyncio.gather(*asked)
            return page
        finally:
            await fleet.stop()
            fleet.stage.driver.stop()

    page = asyncio.run(main())
    assert len(re.findall(r'<button class="w', page)) == WORKERS
    assert len(re.findall(r'<span class="wait">\+1</span>', page)) == WORKERS - 1
    assert len(re.findall(r'<span class="wait">\+2</span>', page)) == 1
    assert re.search(rf'<b id="t-workers">{WORKERS}</b>', page)
    assert re.search(rf'<b id="t-waiting">{WORKERS + 1}</b>', page)
    assert page.count("by round robin") == 14  # why the last ones went where they went
    assert re.search(r"Worker 0, port \d+, 2 requests", page)
    assert page.count(">waits<") == 2
