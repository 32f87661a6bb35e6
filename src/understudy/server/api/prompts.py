"""Prompts: what a request may ask, as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.server.api.errors import ApiError, bad_value

if TYPE_CHECKING:
    import numpy.typing as npt

    from understudy.server.api.fields import Fields
    from understudy.server.api.sampling import Sampling
    from understudy.server.tokenizer import Tokenizer

MAX_PROMPTS = 1024
_CHARACTERS_A_TOKEN = 16


def read_prompts(fields: Fields) -> list[str | list[int]]:
    """`prompt` of a completion: texts, or lists of token ids. Wrong types are noted in `fields`."""
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
        raise ApiError("there must be at least one prompt")
    if len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise bad_value(f"at most {MAX_PROMPTS} prompts, got {len(value)}", "prompt", len(value))
    if all(isinstance(part, str) for part in value):
        return list(value)
    if isinstance(value[0], list):
        rows = [_ids(fields, part, f"prompt.{place}") for place, part in enumerate(value)]
        return [row for row in rows if row is not None]
    row = _ids(fields, value, "prompt")
    return [] if row is None else [row]


def _ids(fields: Fields, value: Any, name: str) -> list[int] | None:
    if not isinstance(value, list):
        fields.note("list_type", name, "must be a list of token ids", value)
        return None
    for place, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            fields.note("int_type", f"{name}.{place}", "must be a token id", token)
            return None
        if token < 0:
            fields.note("greater_than_equal", f"{name}.{place}", "a token id is not negative", token)
            return None
    return value


def tokens_of(
    prompt: str | list[int], sampling: Sampling, tokenizer: Tokenizer, max_model_len: int
) -> npt.NDArray[np.uint32]:
    """The tokens of a prompt, cut as was asked for. ApiError if it is too long, empty or unknown."""
    if isinstance(prompt, str):
        if len(prompt) > max_model_len * _CHARACTERS_A_TOKEN and sampling.truncate is None:
            raise bad_value(
                f"the model has a context of {max_model_len} tokens; a prompt of {len(prompt)} characters is longer "
                "whatever they are",
                "input_text",
                len(prompt),
            )
        ids = tokenizer.encode(prompt)
    else:
        ids = prompt
        if ids and max(ids) >= tokenizer.vocabulary:
            raise ApiError(f"the token id {max(ids)} is not in the vocabulary")
    if sampling.truncate is not None:
        ids = _truncate(ids, sampling, max_model_len)
    if not ids:
        raise ApiError("the prompt has no tokens")
    if len(ids) > max_model_len:
        raise bad_value(
            f"the model has a context of {max_model_len} tokens; the prompt alone has at least {max_model_len + 1}",
            "input_tokens",
            max_model_len + 1,
        )
    return np.array(ids, dtype=np.uint32)


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
    """Tokens that an answer may have at most. ApiError if it may have none, or if more were asked for than fit."""
    asked = sampling.asked_tokens
    field = sampling.tokens_field
    if asked is not None and asked > max_model_len:
        raise bad_value(f"{field}={asked} is more than the context of {max_model_len} tokens.", field, asked)
    left = max_model_len - prompt_tokens
    if left < 1:
        raise bad_value("max_tokens must be 1 or more; the prompt leaves no room for it.", "max_tokens", 0)
    return left if asked is None else min(asked, left)


_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
_MEDIA_PARTS = ("image_url", "input_image", "input_audio", "audio_url", "video_url", "image", "image_embeds")


def read_messages(fields: Fields, name: str, model: str) -> list[tuple[str, str]]:
    """Messages as (role, text). Wrong shapes are noted in `fields`; media is an ApiError."""
    value = fields.raw(name)
    if value is None:
        fields.note("missing", name, "must be given")
        return []
    if not isinstance(value, list):
        fields.note("list_type", name, "must be a list", value)
        return []
    messages: list[tuple[str, str]] = []
    for place, message in enumerate(value):
        where = f"{name}.{place}"
        if not isinstance(message, dict):
            fields.note("model_type", where, "must be an object", message)
            continue
        role = message.get("role")
        if not isinstance(role, str):
            fields.note(
                "string_type" if "role" in message else "missing", f"{where}.role", "must be a string", role
            )
            continue
        content = message.get("content", "")
        if content is None and role != "assistant":
            at = f"{where}.ChatCompletionDeveloperMessageParam.content"
            fields.note("string_type", at, "must be a string or parts", content)
            continue
        messages.append((role, _content(fields, where, content, model)))
    return messages


def _content(fields: Fields, where: str, content: Any, model: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        fields.note("string_type", f"{where}.content", "must be a string or parts", content)
        return ""
    texts: list[str] = []
    for place, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            fields.note("model_type", f"{where}.content.{place}", "must be an object", part)
            continue
        kind = part.get("type")
        if kind in _MEDIA_PARTS:
            raise ApiError(f"{model} reads text only")
        text = part.get("text", part.get("refusal", part.get("thinking")))
        if (kind is not None and kind not in _TEXT_PARTS) or not isinstance(text, str):
            raise ApiError(f"a part of a message must be text, got type {kind!r}")
        texts.append(text)
    return "\n".join(texts)
