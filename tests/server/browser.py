"""A headless Chromium for tests, driven over its DevTools pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on the path: apt-get install chromium runs the tests of the page"
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-extensions",
    ),
    *("--remote-debugging-pipe", "about:blank"),
)
START_S = 60.0

CLIPPED = """
(() => {
  const clipped = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const range = document.createRange(), owner = node.parentElement;
    range.selectNodeContents(node);
    if (!node.textContent.trim() || owner.closest("option, script, [hidden]")) continue;
    for (const box of range.getClientRects()) {
      if (!box.width) continue;
      if (box.right > innerWidth + 1 || box.left < -1) clipped.push([node.textContent, "leaves the window"]);
      for (let around = owner; around; around = around.parentElement) {
        if (getComputedStyle(around).overflow === "visible" || around.classList.contains("scroll")) continue;
        const edge = around.getBoundingClientRect();
        if (box.left < edge.left - 1 || box.right > edge.right + 1 ||
            box.top < edge.top - 1.5 || box.bottom > edge.bottom + 1.5)
          clipped.push([node.textContent, around.getAttribute("class") || around.tagName]);
      }
    }
  }
  for (const node of document.querySelectorAll("input, select"))
    if (node.offsetParent && node.scrollWidth > node.clientWidth + 1) clipped.push([node.id, "input"]);
  if (document.documentElement.scrollWidth > innerWidth) clipped.push(["page", "scrolls sideways"]);
  return clipped;
})()
"""
"""Texts that leave the window or the box around them."""


class Browser:
    """One page in a browser of its own; a context manager."""

    def __init__(self, folder: Path, *, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        to_browser, self._write_fd = os.pipe()
        self._read_fd, from_browser = os.pipe()

        def connect() -> None:
            # Above 4 first, because either pipe may have got the number 3 or 4.
            read, write = os.dup2(to_browser, 90), os.dup2(from_browser, 91)
            os.dup2(read, 3)
            os.dup2(write, 4)

        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder}"]
        self._process = subprocess.Popen(
            command, preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._poll = select.poll()
        self._poll.register(self._read_fd, select.POLLIN)
        self._buffer = b""
        self._calls = 0
        self._session: str | None = None
        self.errors: list[str] = []
        """Errors and warnings on the console, and exceptions."""
        pages: list[Any] = []
        while not pages:
            targets = self.call("Target.getTargets", within_s=START_S)["targetInfos"]
            pages = [one for one in targets if one["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Performance"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.set_scheme(dark=dark)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._write_fd)
        os.close(self._read_fd)

    @property
    def pid(self) -> int:
        """Process id of the browser; its other processes are descendants."""
        return self._process.pid

    # ── DevTools ──

    def call(self, method: str, *, within_s: float = 60.0, **params: Any) -> Any:
        """Call a method of the protocol and return its result. TimeoutError without an answer in time."""
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + within_s
        while (answer := self._receive(deadline)).get("id") != self._calls:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._poll.poll(left_s * 1e3):
                raise TimeoutError("the browser does not answer")
            data = os.read(self._read_fd, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.errors.append(json.dumps(params["args"])[:500])

    # ── The page ──

    def open(self, url: str) -> None:
        """Go to an address."""
        with suppress(TimeoutError):  # the answer may be lost when the page's process changes
            self.call("Page.navigate", within_s=20, url=url)
        self.wait_for(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def resize(self, width: int, height: int = 1000) -> None:
        """Set the size of the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def set_scheme(self, *, dark: bool) -> None:
        """Prefer dark or light."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def run(self, script: str, within_s: float = 60.0) -> Any:
        """Return the value of an expression in the page."""
        given = {"expression": script, "returnByValue": True, "awaitPromise": True}
        result = self.call("Runtime.evaluate", within_s=within_s, **given)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, script: str, within_s: float = 60.0) -> Any:
        """Return the value of an expression once it is true."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            with suppress(TimeoutError):
                if value := self.run(script, within_s=10):
                    return value
            time.sleep(0.05)
        raise AssertionError(f"not within {within_s} s: {script}")

    def clipped(self) -> list[list[str]]:
        """List texts that leave the window or the box around them."""
        found: list[list[str]] = self.run(CLIPPED)
        return found

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def metrics(self) -> dict[str, float]:
        """Return the browser's counts and seconds of work for the page."""
        return {row["name"]: row["value"] for row in self.call("Performance.getMetrics")["metrics"]}
