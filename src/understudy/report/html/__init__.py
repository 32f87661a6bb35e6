"""Build the report as one self-contained HTML page: inline SVG and script, no network."""

from __future__ import annotations

from understudy.report.html.page import page

__all__ = ["page"]
