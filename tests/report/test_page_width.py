"""Plots of a page fit windows of any width, in a real browser: nothing scrolls, and text keeps its size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import understudy
from replay.building import conversations
from server.browser import Browser, needs_chromium
from understudy.engines.vllm_config import VllmConfig
from understudy.tiers import TiersConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYOUT = """
(() => {
  const wrong = [], size = (box) => Math.round(box.width) + "×" + Math.round(box.height);
  if (document.documentElement.scrollWidth > innerWidth) wrong.push("the page scrolls");
  for (const plot of document.querySelectorAll(".plot")) {
    const card = plot.closest(".card").getBoundingClientRect(), name = plot.querySelector("svg").ariaLabel;
    if (plot.scrollWidth > plot.clientWidth + 1) wrong.push(name + ": scrolls");
    let end = -Infinity;
    for (const text of plot.querySelectorAll("text")) {
      const box = text.getBoundingClientRect(), own = text.getBBox(), mark = `${name}: ${text.textContent} `;
      if (Math.abs(box.width - own.width) > 2 || Math.abs(box.height - own.height) > 2) wrong.push(mark + size(box));
      if (box.left < card.left || box.right > card.right) wrong.push(mark + "leaves the card");
      if (!text.matches(".tick:not([dy])") || text.style.visibility) continue;
      if (box.left < end) wrong.push(mark + "overlaps");
      end = box.right;
    }
  }
  return wrong;
})()
"""
HOVER = """
(() => {
  const plot = [...document.querySelectorAll(".full .plot")].find((one) => one.querySelector("script"));
  const svg = plot.querySelector("svg"), box = svg.getBoundingClientRect();
  const at = { clientX: box.left + 0.4 * box.width, clientY: box.top + 0.5 * box.height };
  svg.dispatchEvent(new PointerEvent("pointermove", at));
  const across = svg.querySelector(".cross").getBoundingClientRect();
  return [document.getElementById("tip").style.visibility, Math.abs(across.left - at.clientX) < 0.1 * box.width];
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    host = TiersConfig.from_dict({"tiers": [{"tier": "g2", "blocks": 400}], "kv_bytes_per_token": 1024})
    report = understudy.replay(
        conversations(40), VllmConfig(num_gpu_blocks=400), workers=3, routing="kv", tiers=host
    )
    report.to_html(path)
    return path


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [600, 1000, 1100, 1400, 2000])
def test_plots_fit_the_window_and_text_keeps_its_size(
    browser: Browser, page: Path, width: int, dark: bool
) -> None:
    browser.resize(width)
    browser.set_scheme(dark=dark)
    browser.open(page.as_uri())
    browser.wait_for("[...document.querySelectorAll('.plot svg')].every((one) => one.style.height)")
    assert browser.run(LAYOUT) == []
    assert browser.run(HOVER) == ["visible", True]
    assert browser.errors == []


@needs_chromium
def test_plots_follow_a_window_that_is_resized(browser: Browser, page: Path) -> None:
    browser.resize(2000)
    browser.open(page.as_uri())
    for width in (700, 2000):
        browser.resize(width)
        browser.wait_for(f"({LAYOUT.strip()}).length === 0")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run("document.querySelectorAll('.plot [transform], .plot svg[style*=height]').length") == 0
    browser.run("dispatchEvent(new Event('afterprint'))")
    browser.wait_for(f"({LAYOUT.strip()}).length === 0")
