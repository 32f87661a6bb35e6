"""The fleet's page in a real browser, where there is one."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import msgspec
import pytest

from server.browser import Browser, needs_chromium
from server.client import QUICK
from server.fleet_scene import fleet_of
from understudy.cli.fleet import read_fleet
from understudy.fleets import fleet as fleet_module
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.server.faults import FaultOrder
from understudy.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

C = "/v1/completions"
CELLS = "document.querySelectorAll('.w').length"
VISIBLE_S = 2.0
"""A state is on the page within this time."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@asynccontextmanager
async def waiting_fleet(workers: int, requests: int) -> AsyncIterator[Fleet]:
    """A paused fleet with so many requests, two of them at the first worker."""
    async with fleet_of(workers) as (client, fleet):
        for server in fleet.servers:
            server.worker.pauses.pause("keep", clear_cache=False, then=lambda: None)
        body = b'{"prompt": "x"}'
        head = f"POST {C} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writers = []
        for port in (fleet.ports[0], *[client.port] * (requests - 1)):
            _reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            writers.append(writer)
        await live_requests(fleet, requests)
        yield fleet
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        await live_requests(fleet, 0)


async def live_requests(fleet: Fleet, wanted: int) -> None:
    """Wait until the fleet has so many requests."""
    async with asyncio.timeout(60):
        while sum(len(server.worker.live()) for server in fleet.servers) != wanted:
            await asyncio.sleep(0.01)


def test_the_form_offers_every_fault_that_the_server_knows() -> None:
    script = (Path(fleet_module.__file__).parent / "page" / "faults.js").read_text()
    kinds = set(re.findall(r"^  (\w+): \{about:", script, re.MULTILINE))
    ended_by_a_button = {"resume_events", "none"}
    assert kinds == set(get_args(get_type_hints(FaultOrder)["kind"])) - ended_by_a_button


@needs_chromium
def test_the_cells_of_few_workers_fill_the_width_and_a_count_of_one_is_singular(browser: Browser) -> None:
    def look() -> None:
        browser.wait_for(f"{CELLS} === 1")
        width = "{}.getBoundingClientRect().width"
        cell, pools = (width.format(f"document.querySelector('{name}')") for name in (".w", "#pools"))
        assert browser.run(f"{cell} === {pools}")
        browser.run("document.querySelector('.w').click()")
        browser.wait_for("document.getElementById('worker').textContent.includes('1 restart')")
        assert "1 restarts" not in browser.run("document.getElementById('worker').textContent")

    async def main() -> None:
        async with fleet_of(1) as (client, fleet):
            await client.post("/admin/fault", {"kind": "kill", "workers": [0]})
            await visit(browser, fleet, look)

    asyncio.run(main())


async def visit(browser: Browser, fleet: Fleet, look: Callable[[], None]) -> None:
    """Open the page and look at it. Errors on its console fail the test."""

    def main() -> None:
        browser.open("about:blank")
        browser.errors.clear()
        browser.resize(1400)
        browser.open(f"http://127.0.0.1:{fleet.port}/")
        look()
        assert browser.errors == []
        browser.open("about:blank")

    await asyncio.to_thread(main)
    for connection in tuple(fleet.runtime.outbox.open):  # a browser keeps connections for later requests
        connection.drop()
    await asyncio.sleep(0.05)


@needs_chromium
def test_every_worker_is_a_cell_and_a_click_shows_its_requests_and_cache(browser: Browser) -> None:
    workers = 200

    def look() -> None:
        browser.wait_for(f"{CELLS} === {workers}")
        count = "document.querySelectorAll(`.w.s-paused:not([aria-label$=', 0 waiting'])`).length"
        browser.wait_for(f"{count} === {workers}")
        assert browser.run("document.getElementById('k-workers').textContent") == "0 / 200"
        assert "201 waiting" in browser.run("document.getElementById('k-requests-more').textContent")
        routed = "[...document.querySelectorAll('#routed .why')].map(cell => cell.textContent)"
        assert browser.wait_for(f"{routed}.length === 14 && {routed}") == ["by round robin"] * 14
        browser.run("document.querySelectorAll('.w')[0].click()")
        panel = "document.getElementById('worker').textContent"
        browser.wait_for(f"{panel}.includes('Worker 0')")
        assert browser.run("document.querySelectorAll('#worker .tight').length") == 2
        assert "0 blocks held by requests, 0 cached, 1,024 free" in browser.run(panel)
        assert browser.run("location.hash") == "#0"

    async def main() -> None:
        async with waiting_fleet(workers, workers + 1) as fleet:
            await visit(browser, fleet, look)

    asyncio.run(main())


@needs_chromium
@pytest.mark.parametrize("workers", [1, 30, 400])
def test_no_text_is_clipped_at_three_widths_in_light_and_dark(workers: int, browser: Browser) -> None:
    def look() -> None:
        browser.wait_for(f"{CELLS} === {workers}")
        browser.run("document.querySelectorAll('.w')[0].click()")
        browser.wait_for("document.querySelectorAll('#worker .tight').length")
        for width in (600, 1400, 2000):
            browser.resize(width)
            browser.set_scheme(dark=width == 1400)
            drawn = "document.querySelector('.chart svg').viewBox.baseVal.width"
            shown = "Math.round(document.querySelector('.chart svg').getBoundingClientRect().width)"
            browser.wait_for(f"{drawn} === {shown}")
            assert browser.clipped() == [], width

    async def main() -> None:
        async with waiting_fleet(workers, 2) as fleet:
            fleet.front.monitor.history.marks.append({"t": 0, "kind": "kill", "ended": False, "workers": [0]})
            await visit(browser, fleet, look)

    asyncio.run(main())


@needs_chromium
def test_a_fault_is_set_and_ended_on_the_page_and_marked_on_the_time_axis(browser: Browser) -> None:
    dead = "[...document.querySelectorAll('.w.s-dead')].map(cell => +cell.dataset.worker)"

    def look() -> None:
        browser.wait_for(CELLS)
        browser.run("document.getElementById('f-workers').value = '3, 5-6'")
        browser.run("document.getElementById('fault').requestSubmit()")
        assert browser.wait_for(f"{dead}.length && {dead}") == [3, 5, 6]
        assert browser.run("document.getElementById('attention').textContent") == "dead: 3, 5, 6"
        assert "5 / 8" in browser.run("document.getElementById('k-workers').textContent")
        marks = "[...document.querySelectorAll('.mark-text')].map(text => text.textContent)"
        assert browser.wait_for(f"{marks}.length === 4 && {marks}") == ["kill 3, 5, 6"] * 4
        assert browser.run("document.querySelector('#faults li').textContent").startswith(
            "kill workers 3, 5, 6"
        )
        browser.run("document.querySelector('#faults button').click()")
        browser.wait_for(f"{dead}.length === 0 && !document.querySelector('#faults li')")
        browser.wait_for("document.querySelectorAll('.mark.ended').length === 4")
        # A kill without an end restarts at once: the cell is marked for some seconds.
        browser.run("document.getElementById('f-workers').value = '2'")
        browser.run("document.getElementById('f-duration').value = ''")
        browser.run("document.getElementById('fault').requestSubmit()")
        browser.wait_for("document.querySelector('.w.restarted')?.dataset.worker === '2'")
        # The server's message about an invalid order is shown.
        browser.run("document.getElementById('f-workers').value = '99'")
        browser.run("document.getElementById('fault').requestSubmit()")
        browser.wait_for("document.getElementById('f-why').textContent.includes('there is no worker 99')")
        browser.errors.clear()  # the console names the 400

    async def main() -> None:
        async with fleet_of(8) as (_, fleet):
            await visit(browser, fleet, look)

    asyncio.run(main())


WATCH_FOR_DEAD = """
new MutationObserver(() => {
  const dead = document.querySelector(".w.s-dead");
  if (dead) window.seen ??= [+dead.dataset.worker, +document.documentElement.dataset.time];
}).observe(document.getElementById("pools"), {subtree: true, attributes: true})
"""


@needs_chromium
def test_a_worker_that_is_killed_elsewhere_is_seen_within_two_seconds(browser: Browser) -> None:
    async def main() -> None:
        async with fleet_of(50) as (client, fleet):
            loop = asyncio.get_running_loop()

            def look() -> None:
                browser.wait_for(f"{CELLS} === 50")
                browser.run(WATCH_FOR_DEAD + "; 0")
                order = {"kind": "kill", "workers": [17], "duration_s": 60}
                ordered_s = time.time()
                asyncio.run_coroutine_threadsafe(client.post("/admin/fault", order), loop).result(60)
                worker, seen_s = browser.wait_for("window.seen")
                assert worker == 17
                # The time of the state that was drawn, not that of a slow browser.
                assert seen_s - ordered_s <= VISIBLE_S
                assert browser.run("document.querySelectorAll('.w.s-dead').length") == 1

            await visit(browser, fleet, look)

    asyncio.run(main())


@needs_chromium
def test_pools_are_apart_and_names_of_models_are_text(browser: Browser) -> None:
    name = "<img src=x onerror=alert(1)>"
    pool = ServerSettings(model=name, engine=QUICK, max_model_len=4096)
    small = msgspec.structs.replace(pool, engine=msgspec.structs.replace(QUICK, num_gpu_blocks=512))

    def look() -> None:
        browser.wait_for(f"{CELLS} === 5")
        heads = browser.run("[...document.querySelectorAll('.pool h3')].map(head => head.textContent)")
        assert heads[0].startswith(f"Pool 02 workers (0–1) · {name} · 1,024 blocks of 16 tokens")
        assert "transfer" not in "".join(heads)
        assert heads[1].startswith(f"Pool 13 workers (2–4) · {name} · 512 blocks of 16 tokens")
        browser.run("document.querySelectorAll('.w')[4].click()")
        browser.wait_for(f"document.getElementById('worker').textContent.includes({name!r})")
        assert browser.run("document.images.length") == 0

    async def main() -> None:
        fleet = Fleet(FleetSettings(pools=((2, pool), (3, small)), base_port=0, port=0))
        await fleet.start()
        try:
            await visit(browser, fleet, look)
        finally:
            await fleet.stop()
            fleet.runtime.driver.stop()

    asyncio.run(main())


@needs_chromium
def test_pools_with_a_role_show_it_and_their_transfers_in_flight(browser: Browser) -> None:
    ports = ("--port", "0", "--base-port", "0", "--kv-side-channel-port", "0")
    settings, _ = read_fleet(["stub", "--prefill-workers", "2", "--decode-workers", "3", *ports])
    heads = "[...document.querySelectorAll('.pool h3')].map(head => head.textContent)"

    def look() -> None:
        browser.wait_for(f"{heads}.length === 2 && {heads}[1].includes('5 transfers in flight')")
        prefill, decode = browser.run(heads)
        assert prefill.startswith("Prefill, pool 02 workers (0–1) · stub")
        assert prefill.endswith("1 transfer in flight")
        assert decode.startswith("Decode, pool 13 workers (2–4) · stub")
        assert browser.run("document.querySelectorAll('.w .run')[0].textContent") == "sends KV"
        assert browser.run("document.querySelectorAll('.w .run')[1].textContent") == "idle"
        for width in (600, 2000):
            browser.resize(width)
            assert browser.clipped() == []

    async def main() -> None:
        fleet = Fleet(settings)
        monitor = fleet.front.monitor
        remember, counts = monitor._remember, iter([[0] * 5, [1, 0, 2, 3, 0]])
        transfers: list[int] = []

        def remember_transfers(report: Any) -> None:
            nonlocal transfers
            remember(report)
            monitor._shown["transfers"] = transfers = next(counts, transfers)

        monitor._remember = remember_transfers  # type: ignore[method-assign]
        await fleet.start()
        try:
            await visit(browser, fleet, look)
        finally:
            await fleet.stop()
            fleet.runtime.driver.stop()

    asyncio.run(main())


@needs_chromium
def test_a_cell_names_its_waiting_requests_and_counts_have_whole_numbers(browser: Browser) -> None:
    def look() -> None:
        cell = "document.querySelector('.w .run')"
        browser.wait_for(f"{cell} && {cell}.textContent === '0 +3'")
        assert browser.run(f"getComputedStyle({cell}.querySelector('em')).display") != "none"
        ticks = browser.run(
            "[...document.querySelectorAll('.chart')].slice(2).map(chart =>"
            " [...chart.querySelectorAll('text[text-anchor=end]')].slice(0, 3).map(text => text.textContent))"
        )
        assert ticks[0] == ["0", "1", "2"]
        assert all(len(set(one)) == 3 for one in ticks)

    async def main() -> None:
        async with waiting_fleet(1, 3) as fleet:
            await visit(browser, fleet, look)

    asyncio.run(main())


@needs_chromium
@pytest.mark.parametrize("given", ["", "wrong", "k"])
def test_the_page_asks_for_a_key_and_sends_it_with_every_request(given: str, browser: Browser) -> None:
    def look() -> None:
        browser.wait_for("!document.getElementById('access').hidden")
        if given:
            browser.run(f"document.getElementById('key').value = {given!r}")
            browser.run("document.querySelector('#access form').requestSubmit()")
        if given == "k":
            browser.wait_for(f"{CELLS} === 3")
            assert browser.run("document.getElementById('access').hidden")
        elif given:
            browser.wait_for(
                "document.getElementById('why').textContent.includes('does not accept this key')"
            )
        assert browser.run(CELLS) == (3 if given == "k" else 0)
        browser.errors.clear()  # the console names the 401

    async def main() -> None:
        async with fleet_of(3, api_keys=("k",)) as (_, fleet):
            await visit(browser, fleet, look)

    asyncio.run(main())


@needs_chromium
def test_a_second_costs_the_browser_few_changes_and_no_layout_of_idle_cells(browser: Browser) -> None:
    """Cells that do not change are not touched: the work of a second does not grow with the fleet."""
    count = """new Promise(done => {
      let changes = 0;
      const observer = new MutationObserver(records => { changes += records.length; });
      const all = {subtree: true, childList: true, attributes: true, characterData: true};
      observer.observe(document.getElementById('pools'), all);
      setTimeout(() => { observer.disconnect(); done(changes); }, 2500);
    })"""

    def look() -> None:
        browser.wait_for(f"{CELLS} === 200")
        browser.wait_for("document.querySelectorAll('.w.s-ready').length === 200")
        assert browser.run(count) == 0

    async def main() -> None:
        async with fleet_of(200) as (_, fleet):
            await visit(browser, fleet, look)

    asyncio.run(main())


def test_the_pages_files_come_from_here_alone_and_no_other_file_is_served() -> None:
    async def main() -> None:
        async with fleet_of(1, api_keys=("k",)) as (client, _):
            page = await client.get("/")
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            for path in ("/page/main.js", "/page/page.css", "/page/icon.svg", "/page/cells.js"):
                file = await client.get(path)
                assert file.status == 200, path
                assert file.headers["x-content-type-options"] == "nosniff"
                text = file.body.decode().replace("http://www.w3.org/", "")
                assert "//" not in text.replace("// ", "").replace("\n//", ""), path
            for path in ("/page/", "/page/page.html", "/page/../front.py", "/page/%2e%2e/front.py"):
                assert (await client.get(path)).status == 404, path

    asyncio.run(main())
