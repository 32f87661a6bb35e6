"""Reads the prompts of requests as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.server.api.errors import ApiError, bad_value
from understudy.server.api.fields import Fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from understudy.server.api.sampling import Sampling
    from understudy.server.release import ApiRelease
    from understudy.server.tokenizer import Tokenizer

MAX_PROMPTS = 1024
_CHARACTERS_A_TOKEN = 16


def read_prompts(fields: Fields, release: ApiRelease) -> list[str | list[int]]:
    """Read `prompt` of a completion: texts, or lists of token ids. Records wrong types in `fields`."""
    value = fields.raw("prompt")
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        fields.note(
            "list_type", "prompt", "must be a string, a list of strings, token ids, or lists of them", value
        )
        return []
    if not value:
        message = "You must pass at least one prompt"
        raise bad_value(message, "prompt") if release.names_prompt else ApiError(message)
    if all(isinstance(part, str) for part in value):
        return list(value)
    if isinstance(value[0], list):
        rows = [_ids(part) for part in value]
        if not all(
            isinstance(row, list) for row in rows
        ):  # of the forms that it could be, the first says where
            fields.note("int_type", "prompt.0", "must be a token id", value[0])
            return []
        return [row for row in rows if isinstance(row, list)]
    row = _ids(value)
    if isinstance(row, list):
        return [row]
    fields.note(*row)
    return []


def _ids(value: Any) -> list[int] | tuple[str, str, str, Any]:
    """Return token ids, or the problem of the first invalid one."""
    if not isinstance(value, list):
        return "list_type", "prompt", "must be a list of token ids", value
    if set(map(type, value)) <= {int} and (not value or min(value) >= 0):  # there may be a million of them
        return list(value)
    for place, token in enumerate(value):
        if not isinstance(token, int):
            kind = "int_parsing" if isinstance(token, str) else "int_type"
            return kind, f"prompt.{place}", "must be a token id", token
        if token < 0:
            return (
                "greater_than_equal",
                f"prompt.{place}",
                "Input should be greater than or equal to 0",
                token,
            )
    return [int(token) for token in value]


def tokens_of(
    prompt: str | list[int], sampling: Sampling, tokenizer: Tokenizer, max_model_len: int
) -> npt.NDArray[np.uint32]:
    """Tokenize a prompt, truncated as requested. ApiError if it is too long, empty or out of vocabulary."""
    if isinstance(prompt, str):
        whole = sampling.truncate is not None
        ids = tokenizer.encode(prompt) if whole else encode_within(prompt, tokenizer, max_model_len)
    else:
        ids = prompt
        if ids and max(ids) >= tokenizer.vocabulary:
            raise ApiError(f"Token id {max(ids)} is out of vocabulary")
    if sampling.truncate is not None:
        ids = _truncate(ids, sampling, max_model_len)
    if not ids:
        raise ApiError("The decoder prompt cannot be empty")
    check_length(ids, max_model_len)
    return np.array(ids, dtype=np.uint32)


def encode_within(text: str, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
    """Tokenize a text. ApiError if it exceeds the context; then the rest is not tokenized."""
    if len(text) > max_model_len * _CHARACTERS_A_TOKEN:
        most = max_model_len * _CHARACTERS_A_TOKEN
        raise _too_long(
            f"{len(text)} characters (more than {most} characters, which is the upper bound for {max_model_len} "
            "input tokens)",
            max_model_len,
            "input_text",
            len(text),
        )
    ids = tokenizer.encode(text, enough=max_model_len + 1)
    check_length(ids, max_model_len)
    return ids


def check_length(ids: Sequence[object], max_model_len: int) -> None:
    """Raise ApiError if the tokens exceed the context."""
    if len(ids) > max_model_len:
        raise _too_long(
            f"at least {max_model_len + 1} input tokens, which exceeds this limit even without any output tokens",
            max_model_len,
            "input_tokens",
            max_model_len + 1,
        )


def _too_long(contains: str, max_model_len: int, param: str, value: int) -> ApiError:
    """Return the error of a prompt that exceeds the context, in the words that clients search for."""
    return bad_value(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains {contains}. "
        "Please reduce the length of the input prompt.",
        param,
        value,
    )


def _truncate(ids: list[int], sampling: Sampling, max_model_len: int) -> list[int]:
    keep = sampling.truncate
    assert keep is not None
    if keep < -1:
        raise bad_value(
            f"truncate_prompt_tokens must be -1 or more, got {keep}", "truncate_prompt_tokens", keep
        )
    if keep > max_model_len:
        raise bad_value(
            f"truncate_prompt_tokens must be at most {max_model_len}, got {keep}",
            "truncate_prompt_tokens",
            keep,
        )
    if keep == -1:
        keep = max_model_len - max(sampling.asked_tokens or 1, 1)
    if len(ids) <= keep:
        return ids
    return ids[len(ids) - keep :] if sampling.truncate_left else ids[:keep]


def room_for(prompt_tokens: int, sampling: Sampling, max_model_len: int) -> int:
    """Return the most tokens of an answer. ApiError if none fit, or more were requested than fit."""
    asked = sampling.asked_tokens
    field = sampling.tokens_field
    if asked is not None and asked > max_model_len:
        raise bad_value(
            f"{field}={asked} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            field,
            asked,
        )
    left = max_model_len - prompt_tokens
    if left < 1:
        raise bad_value("max_tokens must be at least 1, got 0.", "max_tokens", 0)
    return left if asked is None else min(asked, left)


def chat_text(fields: Fields, messages: list[tuple[str, str]], tokenizer: Tokenizer, *, trusted: bool) -> str:
    """Render a conversation with the chat template; leave the last message open if it is to be continued."""
    if not messages:
        raise ApiError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    if fields.raw("chat_template") is not None and not trusted:
        raise ApiError(
            "Chat template is passed with request, but --trust-request-chat-template is not set. "
            "Refused request with untrusted chat template."
        )
    add_prompt = fields.boolean("add_generation_prompt", True)
    goes_on = fields.boolean("continue_final_message")
    if goes_on and add_prompt:
        raise ApiError("continue_final_message needs add_generation_prompt to be false")
    text = tokenizer.render_chat(messages, add_generation_prompt=add_prompt)
    if not goes_on:
        return text
    last = messages[-1][1].rstrip()
    return text[: text.rindex(last) + len(last)]


def read_conversations(fields: Fields, model: str) -> list[list[tuple[str, str]]]:
    """Read the conversations of a batch. Records wrong shapes in `fields`."""
    value = fields.raw("messages")
    if not isinstance(value, list) or not value:
        kind = "missing" if not fields.has("messages") else "too_short" if value == [] else "list_type"
        fields.note(kind, "messages", "must be a list of conversations", value)
        return []
    found: list[list[tuple[str, str]]] = []
    for place, conversation in enumerate(value):
        if not isinstance(conversation, list) or not conversation:
            kind = "too_short" if conversation == [] else "list_type"
            fields.note(kind, f"messages.{place}", "must be a list of messages", conversation)
            continue
        one = Fields({f"messages.{place}": conversation})
        found.append(read_messages(one, f"messages.{place}", model))
        fields.problems += one.problems
    return found


def read_scoring(fields: Fields) -> tuple[str | list[int], list[Any]]:
    """Read query and items, each texts or token ids. Records wrong shapes in `fields`."""

    def ids(value: Any) -> bool:
        return isinstance(_ids(value), list)

    query, items = fields.raw("query"), fields.raw("items")
    if not isinstance(query, str) and not ids(query):
        fields.note(
            "string_type" if fields.has("query") else "missing", "query", "must be a text or ids", query
        )
    texts = isinstance(items, list) and all(isinstance(item, str) for item in items)
    if not texts and not (isinstance(items, list) and all(ids(item) for item in items)):
        fields.note("list_type" if fields.has("items") else "missing", "items", "must be texts or ids", items)
    return query, items if isinstance(items, list) else []


_FIRST_FORM = "ChatCompletionDeveloperMessageParam"
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
_MEDIA_PARTS = ("image_url", "input_image", "input_audio", "audio_url", "video_url", "image", "image_embeds")


def read_messages(fields: Fields, name: str, model: str) -> list[tuple[str, str]]:
    """Read messages as (role, text). Records wrong shapes in `fields`; media is an ApiError."""
    value = fields.raw(name)
    if value is None:
        fields.note("missing", name, "must be given")
        return []
    if not isinstance(value, list):
        fields.note("list_type", name, "must be a list", value)
        return []
    messages: list[tuple[str, str]] = []
    for place, message in enumerate(value):
        where = f"{name}.{place}.{_FIRST_FORM}"  # of the forms that it could have, the first says where
        if not isinstance(message, dict):
            fields.note("model_type", where, "must be an object", message)
            continue
        role = message.get("role")
        content = message.get("content", "")
        lacks = content is None and role != "assistant"
        if (
            lacks
            or not isinstance(content, str | list | None)
            or not ("content" in message or "role" in message)
        ):
            fields.note("string_type", f"{where}.content", "must be a string or parts", content)
        elif not isinstance(role, str):
            fields.note(
                "string_type" if "role" in message else "missing", f"{where}.role", "must be a string", role
            )
        else:
            messages.append((role, _content(content, model)))
    return messages


def _content(content: str | list[Any] | None, model: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for place, part in enumerate(content):
        if not isinstance(part, dict):
            raise ApiError(f"part {place} of a message must be an object")
        kind = part.get("type")
        if kind in _MEDIA_PARTS:
            raise ApiError(f"{model} is not a multimodal model")
        text = part.get("text", part.get("refusal", part.get("thinking")))
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise ApiError(f"a part of a message must be text, got type {kind!r}")
        texts.append(text)
    return "\n".join(texts)
