"""Description of the server's routes: `/openapi.json` and `/docs`."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING, Any

from understudy.server.api import schema

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.http import Request
    from understudy.server.release import ApiRelease

    Plain = Callable[[Request, dict[str, str]], tuple[int, Any]]

_BODIES = {
    "/v1/messages": ("AnthropicMessagesRequest", schema.MESSAGES),
    "/v1/messages/count_tokens": ("AnthropicCountTokensRequest", schema.COUNT),
    "/generative_scoring": ("GenerativeScoringRequest", schema.SCORING),
    "/tokenize": ("TokenizeCompletionRequest", schema.TOKENIZE),
    "/detokenize": ("DetokenizeRequest", schema.DETOKENIZE),
    "/v1/load_lora_adapter": ("LoadLoRAAdapterRequest", schema.LOAD_LORA),
    "/v1/unload_lora_adapter": ("UnloadLoRAAdapterRequest", schema.UNLOAD_LORA),
}
_GENERATING = {
    "/v1/completions": "CompletionRequest",
    "/v1/chat/completions": "ChatCompletionRequest",
    "/v1/chat/completions/batch": "BatchChatCompletionRequest",
    "/v1/responses": "ResponsesRequest",
}
"""Bodies that differ between releases, in the order of `Schemas`."""
_OWN = {"/health": ("GET",), "/load": ("GET",), "/metrics": ("GET",), "/admin/config": ("GET", "POST")}
_PAGES = ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc")
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"type": "integer"},
            },
        }
    },
}
_TYPES: dict[str, dict[str, Any]] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "ints": {"type": "array", "items": {"type": "integer"}},
    "strs": {"type": "array", "items": {"type": "string"}},
    "floats by name": {"type": "object", "additionalProperties": {"type": "number"}},
    "object": {"type": "object"},
    "objects": {"type": "array", "items": {"type": "object"}},
    "any": {},
}


def pages(
    release: ApiRelease,
    paths: Callable[[], list[str]],
    methods: Callable[[str], tuple[str, ...]],
) -> dict[str, dict[str, Plain]]:
    """Build the description routes; `paths` is read at each request."""

    def document(*_: object) -> tuple[int, Any]:
        return 200, describe(
            release, {**{path: methods(path) for path in paths() if path not in _PAGES}, **_OWN}
        )

    def page(*_: object) -> tuple[int, Any]:
        return 200, Html(_page(document()[1]))

    def redirect(*_: object) -> tuple[int, Any]:
        return 200, Html("<!doctype html><title>no sign-in</title>")

    answers: dict[str, Plain] = dict(zip(_PAGES, (document, page, redirect, page), strict=True))
    return {path: {"GET": answer, "HEAD": answer} for path, answer in answers.items()}


class Html(str):
    """A reply in HTML."""


def describe(release: ApiRelease, routes: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Build an OpenAPI document of paths and their methods."""
    schemas: dict[str, Any] = {"ErrorResponse": _ERROR}
    bodies = dict(_BODIES)
    for (path, name), fields in zip(_GENERATING.items(), schema.SCHEMAS[release.version], strict=True):
        bodies[path] = name, fields
    paths: dict[str, Any] = {}
    for path, methods in sorted(routes.items()):
        paths[path] = {}
        for method in methods:
            answer: dict[str, Any] = {
                "summary": _words(path),
                "operationId": f"{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_')}_{method.lower()}",
                "responses": {
                    "200": {"description": "It worked"},
                    "400": {"description": "It could not be read", "content": _json("ErrorResponse")},
                },
            }
            if method == "POST" and path in bodies:
                name, fields = bodies[path]
                schemas[name] = _schema(fields)
                answer["requestBody"] = {"required": True, "content": _json(name)}
            paths[path][method.lower()] = answer
    return {
        "openapi": "3.1.0",
        "info": {"title": "understudy, in vLLM's place", "version": release.version},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _schema(fields: dict[str, schema.Shape]) -> dict[str, Any]:
    described = {"type": "object", "properties": {name: _field(shape) for name, shape in fields.items()}}
    required = [name for name, shape in fields.items() if shape.required]
    return {**described, "required": required} if required else described


def _field(shape: schema.Shape) -> dict[str, Any]:
    described = dict(_TYPES[shape.kind])
    if shape.choices:
        described["enum"] = list(shape.choices)
    if shape.kind in ("int", "float"):
        bounds = {"minimum": shape.least, "maximum": shape.most}
        described |= {name: value for name, value in bounds.items() if value is not None}
    return {"anyOf": [described, {"type": "null"}]} if shape.null and described else described


def _words(path: str) -> str:
    return path.strip("/").replace("/", " ").replace("_", " ") or "the page"


def _page(document: dict[str, Any]) -> str:
    """Render the list of routes as a page without external resources."""
    rows = []
    for path, methods in document["paths"].items():
        for method, answer in methods.items():
            body = (
                answer.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            )
            name = body.get("$ref", "").rpartition("/")[2]
            fields = document["components"]["schemas"].get(name, {}).get("properties", {})
            shown = (
                f"<details><summary>{escape(name)}</summary>{escape(', '.join(fields))}</details>"
                if name
                else ""
            )
            rows.append(f"<tr><td>{method.upper()}<td><code>{escape(path)}</code><td>{shown}")
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
        "color-scheme:light dark}"
        "td{padding:.2rem .8rem .2rem 0;vertical-align:top;border-top:1px solid #8884}"
    )
    title = escape(document["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width"><style>' + style + f"</style><h1>{title}</h1>"
        f"<p>vLLM {escape(document['info']['version'])}'s routes; "
        '<a href="/openapi.json">openapi.json</a> describes them to programs.</p>'
        f"<table>{''.join(rows)}</table></html>"
    )
