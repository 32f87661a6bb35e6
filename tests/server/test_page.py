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

    from understudy.server.http import Connection, Request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WORKERS = 200


def look(folder: Path, port: int, fragment: str = "") -> str:
    """Return the page after two seconds, as the browser has it then."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    command += ["--virtual-time-budget=2000", "--dump-dom", f"http://127.0.0.1:{port}/{fragment}"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_chromium_shows_every_worker_what_it_does_and_the_requests_of_one(tmp_path: Path) -> None:
    pool = ServerSettings(model="stub", engine=QUICK, max_model_len=4096)

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
            page = await asyncio.to_thread(look, tmp_path, fleet.port, "#0")
            for server in fleet.servers:
                server.worker.pauses.resume()
            await asyncio.gather(*asked)
            return page
        finally:
            await fleet.stop()
            fleet.runtime.driver.stop()

    page = asyncio.run(main())
    assert len(re.findall(r'<button class="w', page)) == WORKERS
    assert len(re.findall(r'<span class="wait">\+1</span>', page)) == WORKERS - 1
    assert len(re.findall(r'<span class="wait">\+2</span>', page)) == 1
    assert re.search(rf'<b id="t-workers">{WORKERS}</b>', page)
    assert re.search(rf'<b id="t-waiting">{WORKERS + 1}</b>', page)
    assert page.count("by round robin") == 14  # why the last ones went where they went
    assert re.search(r"Worker 0, port \d+, 2 requests", page)
    assert page.count(">waits<") == 2


FILL = b"""<script>setTimeout(() => {
  document.getElementById("key").value = "%b";
  document.querySelector("#access form").requestSubmit();
}, 100)</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("given", [b"", b"wrong", b"k"])
def test_the_page_asks_for_a_key_and_sends_it_with_every_request(given: bytes, tmp_path: Path) -> None:
    pool = ServerSettings(model="stub", engine=QUICK, max_model_len=4096, api_keys=("k",))

    async def main() -> tuple[str, list[str]]:
        fleet = Fleet(FleetSettings(pools=((3, pool),), base_port=0, port=0))
        await fleet.start()
        try:
            if given:
                fleet.front._page = fleet.front._page.replace(b"</body>", FILL % given)
            followed: list[str] = []
            watch = fleet.front.own["/fleet/events"]["GET"]

            def watching(request: Request, connection: Connection) -> None:
                followed.append(request.headers["authorization"])
                watch(request, connection)

            fleet.front.own["/fleet/events"]["GET"] = watching
            return await asyncio.to_thread(look, tmp_path, fleet.port), followed
        finally:
            await fleet.stop()
            fleet.runtime.driver.stop()

    page, followed = asyncio.run(main())
    opened = given == b"k"
    assert len(re.findall(r'<button class="w', page)) == (3 if opened else 0)
    assert ('<section id="access" hidden="">' in page) == opened
    assert ("does not accept this key" in page.partition("<script>")[0]) == (given == b"wrong")
    assert followed == (["Bearer k"] if opened else [])
