"""Hooks of mkdocs: include pages and files from outside docs/ in the site, so that every link leads somewhere.

`make docs` builds the site from mkdocs.yml.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.txt",
}
"""Files of the repository and their places in the site."""

ORIGINS = {page: source for source, page in PAGES.items()}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links to files outside docs/ at their copies in the site."""
    here = page.file.src_uri
    origin = ORIGINS.get(here, f"docs/{here}")

    def in_site(link: re.Match[str]) -> str:
        path, mark, anchor = link[1].partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        if "://" in path or not path or not (ROOT / target).exists():
            return link[0]
        place = PAGES.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
        if place is None:  # a script or an example: copied as it is
            place = f"files/{target}"
            if (ROOT / target).is_file() and files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, abs_src_path=str(ROOT / target)))
        return f"]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{mark}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", in_site, markdown)
