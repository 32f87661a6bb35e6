"""Bodies of `/v1/messages`, in Anthropic's form, and errors in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.server.api.fields import Fields
from understudy.server.api.type_checks import check_types

if TYPE_CHECKING:
    from understudy.server.api.errors import ApiError
    from understudy.server.api.schema import Shape
    from understudy.server.release import ApiRelease


def check_anthropic(body: dict[str, Any], schema: dict[str, Shape]) -> None:
    """Check a body in Anthropic's form. ApiError in vLLM's form lists the problems."""
    fields = Fields(body)
    messages = body.get("messages")
    if "messages" not in body:
        fields.note("missing", "messages", "must be given")
    elif not isinstance(messages, list):
        fields.note("list_type", "messages", "must be a list", messages)
    else:
        for place, message in enumerate(messages):
            _check_turn(fields, f"messages.{place}", message)
    check_types(fields, schema)
    if not isinstance(body.get("system", ""), str | list | None):
        fields.note("string_type", "system", "must be a text or blocks", body["system"])
    _check_tools(fields, body.get("tools"), body.get("tool_choice"))
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        budget = thinking.get("budget_tokens")
        if not isinstance(budget, int) or budget < _LEAST_THOUGHT:
            where = "thinking.enabled.budget_tokens"
            fields.note("greater_than_equal", where, f"must be {_LEAST_THOUGHT} or more", budget)
    order = [f"body.{name}" for name in schema]
    fields.problems.sort(key=lambda problem: order.index(".".join(problem.where.split(".")[:2])))
    fields.done()


_LEAST_THOUGHT = 1024
_CHOICES = ("auto", "any", "tool", "none")


def _check_turn(fields: Fields, where: str, message: Any) -> None:
    if not isinstance(message, dict):
        fields.note("model_type", where, "must be an object", message)
        return
    if message.get("role") not in ("user", "assistant", "system"):
        kind = "literal_error" if "role" in message else "missing"
        fields.note(kind, f"{where}.role", "must be user or assistant", message.get("role"))
    if not isinstance(message.get("content"), str | list):
        kind = "string_type" if "content" in message else "missing"
        fields.note(kind, f"{where}.content", "must be a text or blocks", message.get("content"))


def _check_tools(fields: Fields, tools: Any, choice: Any) -> None:
    """Note problems inside tools and tool_choice; `check_types` checks that they are objects."""
    for place, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict):
            continue
        for field, type_, wanted in (("name", str, "string"), ("input_schema", dict, "dict")):
            if not isinstance(tool.get(field), type_):
                wrong = f"{wanted}_type" if field in tool else "missing"
                fields.note(wrong, f"tools.{place}.{field}", f"must be a {wanted}", tool.get(field))
    if not isinstance(choice, dict):
        return
    kind, name = choice.get("type"), choice.get("name")
    if kind not in _CHOICES:
        wrong = "literal_error" if "type" in choice else "missing"
        fields.note(wrong, "tool_choice.type", f"must be one of {', '.join(_CHOICES)}", kind)
    if not isinstance(name, str | None):
        fields.note("string_type", "tool_choice.name", "must be a string", name)
    elif kind == "tool" and not name:
        fields.note("value_error", "tool_choice", "tool_choice.name is required when type is 'tool'", choice)


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def use_anthropic_form(error: ApiError, release: ApiRelease) -> ApiError:
    """Switch an error about values to Anthropic's form, with Anthropic's type if the release has them."""
    error.anthropic = error.kind != "Bad Request"
    if error.anthropic and release.anthropic_errors:
        error.kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return error


def to_chat_messages(body: dict[str, Any]) -> Any:
    """Return the messages in the form of a chat, with the system message first."""
    messages = body.get("messages")
    system = body.get("system")
    if system is None or not isinstance(messages, list):
        return messages
    return [{"role": "system", "content": system}, *messages]


def to_chat_tools(body: dict[str, Any]) -> dict[str, Any]:
    """Return tools and tool_choice in the form of a chat."""
    tools = body.get("tools")
    if not tools:
        return {}
    choice = body.get("tool_choice") or {"type": "auto"}
    kind = choice["type"]
    named = {"type": "function", "function": {"name": choice.get("name")}}
    functions = [{"name": tool["name"], "parameters": tool["input_schema"]} for tool in tools]
    return {
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": {"any": "required", "tool": named}.get(kind, kind),
    }
