"""Rows that LiteLLM, Langfuse and Helicone export, in the shape of an OpenAI-style request log."""

from __future__ import annotations

import json
from typing import Any

_BODIES = (
    "request",
    "response",
    "messages",
    "request_body",
    "response_body",
    "input",
    "output",
    "usage",
    "metadata",
)
_PROMPT = ("prompt_tokens", "promptTokens", "input_tokens", "inputTokens")
_COMPLETION = ("completion_tokens", "completionTokens", "output_tokens", "outputTokens")


def unpack_export(record: dict[str, Any]) -> dict[str, Any]:
    """Return a row with `messages` or `prompt`, `usage` and `choices`; a row that already has them is unchanged.

    LiteLLM's spend log has JSON in texts, and lengths beside the row. Langfuse has `input`, `output` and
    `usage.input`, `usage.output` (or `usageDetails`). Helicone has `request_body` and `response_body`.
    """
    row = {key: _parse(value) if key in _BODIES else value for key, value in record.items()}
    for name, place in (("request_body", "request"), ("response_body", "response")):
        if isinstance(row.get(name), dict) and place not in row:
            row[place] = row.pop(name)
    if "messages" not in row and "prompt" not in row and _is_langfuse(row):
        given = row.pop("input")
        row["messages" if isinstance(given, list) else "prompt"] = given
        if isinstance(given, dict):
            row |= {"request": given}
            row.pop("prompt")
        answer = row.pop("output", None)
        if answer is not None:
            row["choices"] = [answer if isinstance(answer, dict) else {"text": str(answer)}]
    usage = row.get("usage") if isinstance(row.get("usage"), dict) else row.get("usageDetails")
    if isinstance(usage, dict) and "input" in usage:
        row["usage"] = {"prompt_tokens": usage["input"], "completion_tokens": usage.get("output")}
    elif not isinstance(row.get("usage"), dict) and not _has_usage(row):
        lengths = {
            "prompt_tokens": next((row[key] for key in _PROMPT if row.get(key)), None),
            "completion_tokens": next((row[key] for key in _COMPLETION if row.get(key)), None),
        }
        if any(value is not None for value in lengths.values()):
            row["usage"] = lengths
    return row


def _is_langfuse(row: dict[str, Any]) -> bool:
    return "input" in row and any(
        key in row for key in ("startTime", "usageDetails", "traceId", "observationId")
    )


def _has_usage(row: dict[str, Any]) -> bool:
    answer = row.get("response")
    body = answer.get("body") if isinstance(answer, dict) else None
    return any(isinstance(place, dict) and "usage" in place for place in (answer, body))


def _parse(value: Any) -> Any:
    """Return the value of a text that is JSON; any other value as it is."""
    if not isinstance(value, str) or value[:1] not in "[{":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
