"""The documentation site has every page, in the order of mkdocs.yml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
OUTSIDE = {"contributing.md", "changelog.md"}
"""Pages that tools/docs_site.py adds from outside docs/."""


def pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in pages(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    docs = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages(SITE["nav"])) == sorted(docs | OUTSIDE)


def test_the_navigation_goes_from_tutorial_to_proof() -> None:
    assert [name for part in SITE["nav"] for name in part] == [
        "Home", "Tutorial", "How-to", "Reference", "Explanation", "Proof", "Project",
    ]  # fmt: skip


def test_the_index_links_every_page_of_its_folder() -> None:
    linked = set(
        re.findall(r"\]\((\w[\w-]*\.md)\)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    )
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}


def test_the_site_requests_nothing_from_other_hosts() -> None:
    assert SITE["theme"]["font"] is False
    assert SITE["plugins"] == ["search"]  # the theme's offline plugin loads a script from unpkg.com
