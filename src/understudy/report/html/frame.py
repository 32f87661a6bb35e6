"""The HTML frame of every page: inline style and script, light and dark theme."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from understudy.report.html.style import SCRIPT, STYLE, THEME_SCRIPT
from understudy.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

THEME_BUTTON = '<button id="theme" type="button" title="Switch between light and dark">◐ Theme</button>'


_FLAG = re.compile(r"--[a-z0-9][a-z0-9-]*(?:[ =](?:\d(?:[\w.,]*\w)?|[A-Z]\b))?")


def prose(text: str) -> str:
    """Escape a sentence; flags, with a number behind them, are set as code and not broken across lines."""
    return _FLAG.sub(lambda flag: f'<code class="flag">{flag[0]}</code>', escape(text))


def build_document(title: str, body: Iterable[str], *, footer: str = "", style: str = "") -> str:
    """Build a complete HTML document from `body`, skipping empty parts; equal parts give equal text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:\">\n"
        f'<link rel="icon" href="data:,">\n<title>{escape(title)} · Understudy</title>\n'
        f"<style>{STYLE}{style}</style>\n<script>{THEME_SCRIPT}</script>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + f"\n<footer>{footer}Understudy {__version__}.</footer>\n"
        f'</main>\n<div id="tip" role="tooltip"></div>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )
