"""Files of the fleet's page: HTML, style and scripts, read once."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from understudy.server.api.errors import ApiError

if TYPE_CHECKING:
    from understudy.http import Connection, Request

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = (
    b"content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    b"x-content-type-options: nosniff\r\nreferrer-policy: no-referrer\r\ncache-control: no-cache\r\n"
)
"""The browser loads files from this server alone, runs no inline script or style, and lets no page frame this one."""


@cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """Read the files: content and type by path."""
    found: dict[str, tuple[bytes, str]] = {}
    for file in files(__package__).joinpath("page").iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            found["/" if file.name == "page.html" else f"/page/{file.name}"] = (file.read_bytes(), kind)
    return found


def show_page(request: Request, connection: Connection) -> None:
    """Send the page or one of its files. ApiError (404) for another path."""
    found = page_files().get(request.path)
    if found is None:
        raise ApiError(f"there is no {request.path}", status=404, kind="NotFoundError")
    connection.respond(200, found[0], found[1], _HEADERS)
