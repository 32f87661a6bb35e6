"""Checks for contradictory fields, which vLLM runs before those of the fields' types."""

from __future__ import annotations

from typing import Any

from understudy.server.api.errors import ApiError, bad_value

MAX_SALT = 128
NO_SUCH_TOOL = "The tool specified in `tool_choice` does not match any of the specified `tools`"


def check_completion(body: dict[str, Any], max_prompts: int) -> None:
    """Check a body of `/v1/completions` in vLLM's order. ApiError for the first problem."""
    prompt, embeds = body.get("prompt"), body.get("prompt_embeds")
    if (
        isinstance(prompt, list)
        and len(prompt) > max_prompts
        and not {int, bool}.issuperset(map(type, prompt))
    ):
        raise bad_value(
            f"prompt list length {len(prompt)} exceeds the maximum allowed count of {max_prompts}.", "prompt"
        )
    if prompt in (None, "") and embeds in (None, []):
        raise bad_value("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    _check_stream(body)
    _check_logprobs(body, "logprobs", given=body.get("logprobs") is not None)
    _check_structure(body, "structured_outputs")
    _check_format(body)
    check_salt(body)


def check_chat(body: dict[str, Any]) -> None:
    """Check a body of `/v1/chat/completions` in vLLM's order. ApiError for the first problem."""
    messages = body.get("messages", [])
    if not isinstance(messages, list | str | dict):
        raise ApiError("messages must be a list")
    if body.get("continue_final_message") and body.get("add_generation_prompt"):
        raise ApiError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    _check_tools(body)
    _check_structure(body, None)
    _check_logprobs(body, "top_logprobs", given=bool(body.get("logprobs")))
    _check_stream(body)
    _check_format(body)
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if calls is not None and not isinstance(calls, list | str | dict):
            raise ApiError("tool_calls must be a list")
    check_salt(body)


def check_batch(body: dict[str, Any]) -> None:
    """Check a body of `/v1/chat/completions/batch`. ApiError for the first problem."""
    if body.get("use_beam_search"):
        raise bad_value("a batch does not search beams", "use_beam_search")
    _check_structure(body, None)
    if body.get("n", 1) not in (None, 1):
        raise bad_value("a batch has one answer to a conversation", "n", body["n"])
    _check_logprobs(body, "top_logprobs", given=bool(body.get("logprobs")))
    check_salt(body)


def _check_stream(body: dict[str, Any]) -> None:
    if body.get("stream_options") and not body.get("stream"):
        raise bad_value("Stream options can only be defined when `stream=True`.", "stream_options")


def _check_logprobs(body: dict[str, Any], name: str, *, given: bool) -> None:
    if body.get("logprob_token_ids") and not given:
        raise bad_value("when using `logprob_token_ids`, `logprobs` must be set.", "logprob_token_ids")
    for field in ("prompt_logprobs", name):
        value = body.get(field)
        if value is not None and not isinstance(value, int | float):
            raise bad_value(f"`{field}` must be an integer.", field, value)
    prompt, own = body.get("prompt_logprobs"), body.get(name)
    if prompt is not None:
        if body.get("stream") and (prompt > 0 or prompt == -1):
            raise bad_value("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
        if prompt < 0 and prompt != -1:
            raise bad_value("`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs", prompt)
    if own is not None:
        if own < 0 and own != -1:
            raise bad_value(f"`{name}` must be a positive value or -1.", name, own)
        if name == "top_logprobs" and own != 0 and not given:
            raise bad_value("when using `top_logprobs`, `logprobs` must be set to true.", name)


def _check_structure(body: dict[str, Any], param: str | None) -> None:
    wanted = body.get("structured_outputs")
    if not isinstance(wanted, dict):
        return
    kinds = [name for name in ("json", "regex", "choice") if wanted.get(name) is not None]
    if len(kinds) > 1:
        text = (
            "You can only use one kind of constraints for structured outputs ('json', 'regex' or 'choice')."
        )
        raise ApiError(text) if param is None else bad_value(text, param)
    if param is None and kinds and body.get("tool_choice", "none") not in ("none", "auto", "required"):
        raise ApiError("You can only either use constraints for structured outputs or tools, not both.")


def _check_format(body: dict[str, Any]) -> None:
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") == "json_schema" and form.get("json_schema") is None:
        raise bad_value(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
            "response_format",
        )


def _check_tools(body: dict[str, Any]) -> None:
    tools = body.get("tools")
    if tools == []:
        raise bad_value(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
            "tools",
        )
    choice = body.get("tool_choice")
    if choice is None or choice == "none":
        return
    if tools is None:
        raise bad_value("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if choice in ("auto", "required"):
        return
    if not isinstance(choice, dict):
        raise bad_value('tool_choice must be "none", "auto", "required" or name a function', "tool_choice")
    function = choice.get("function")
    if not isinstance(function, dict):
        raise bad_value("tool_choice must name a function", "tool_choice.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise bad_value("tool_choice must name a function", "tool_choice.function.name")
    given = (
        [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    )
    if not any(isinstance(one, dict) and one.get("name") == name for one in given):
        raise bad_value(NO_SUCH_TOOL, "tool_choice")


def check_salt(body: dict[str, Any]) -> None:
    """Raise ApiError when cache_salt is invalid."""
    salt = body.get("cache_salt")
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise bad_value("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > MAX_SALT or set(salt) & set("@/\\\x00"):
        raise bad_value(
            f"Parameter 'cache_salt' must be at most {MAX_SALT} characters and must not contain "
            "'@', '/', '\\\\', or NUL.",
            "cache_salt",
        )
