"""Calls of `llguidance`: grammars from requests, as vLLM makes them, and matchers that read single bytes."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, TokenizerWrapper, grammar_from

from understudy.structured.formed import FormError
from understudy.structured.limits import MAX_PATTERN, MAX_TEXT, MAX_WRITTEN, check_grammar, check_schema

if TYPE_CHECKING:
    from collections.abc import Callable

    from llguidance._lib import JsonCompileOptions

_COMPACT: JsonCompileOptions = {"whitespace_flexible": False}
_LIMITS = LLParserLimits(
    verbose_errors=False, max_lexer_states=10_000, initial_lexer_fuel=300_000, step_lexer_fuel=100_000
)
"""So many states take half a second of CPU time; the library's own limits are ten and more times as large."""
END = 256
"""The token that ends an answer; the others are bytes."""


class _Bytes:
    """A vocabulary of all bytes and an end."""

    eos_token_id = END
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<|end|>")
    special_token_ids = (END,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def _vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


def compile_grammar(grammar: str) -> LLMatcher:
    """Return a matcher at the start of the grammar. FormError in the library's words if it is refused."""
    if len(grammar) > MAX_WRITTEN:
        raise FormError(
            f"Grammar error: the form has more than {MAX_WRITTEN:,} characters; send a shorter one"
        )
    matcher = LLMatcher(_vocabulary(), grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise FormError(f"Grammar error: {matcher.get_error()}")
    return matcher


def write_grammar(kind: str, value: Any) -> str:
    """Return the library's grammar of a form. FormError for values that are no such form."""
    writers: dict[str, Callable[[Any], str]] = {
        "json": _of_schema,
        "regex": lambda text: grammar_from("regex", text),
        "grammar": _of_grammar,
        "structural_tag": _of_tags,
    }
    try:
        return writers[kind](value)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise FormError(f"Invalid grammar specification: {error}") from None


def read_form(kind: str, value: Any) -> Any:
    """Return the value of a form, with schemas and tags as objects. FormError for values that are no such form."""
    if kind == "json":
        return _read_schema(value)
    if kind != "structural_tag":
        if not isinstance(value, str):
            raise FormError(f"structured_outputs.{kind} must be a string.")
        most = MAX_PATTERN if kind == "regex" else MAX_TEXT
        if len(value) > most:
            raise FormError(
                f"structured_outputs.{kind} has more than {most:,} characters; send a shorter one"
            )
        return value
    value = _read_json(kind, value)
    try:
        tags = [
            {**one, "schema": _read_schema(one["schema"]), "begin": str(one["begin"])}
            for one in value["structures"]
        ]
        return {**value, "structures": tags}
    except (KeyError, TypeError) as error:
        raise FormError(f"Invalid grammar specification: {error}") from None


def _read_json(kind: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise FormError(f"structured_outputs.{kind} is no JSON: {error}") from None


def _read_schema(value: Any) -> Any:
    value = _read_json("json", value)
    return {} if value is True else {"enum": []} if value is False else value


def _of_grammar(text: str) -> str:
    is_gbnf = "::=" in text
    check_grammar(text, is_gbnf=is_gbnf)
    return grammar_from("grammar" if is_gbnf else "lark", text)


def _of_schema(schema: Any) -> str:
    if not isinstance(schema, dict):
        raise TypeError("the schema must be an object")
    check_schema(schema)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_COMPACT)


def _of_tags(value: Any) -> str:
    tags = []
    for one in value["structures"]:
        trigger = next((text for text in value["triggers"] if one["begin"].startswith(text)), None)
        if not trigger:
            raise ValueError(f"Trigger {one['begin']} not found in triggers {value['triggers']}")
        check_schema(one["schema"])
        grammar = json.dumps({"x-guidance": _COMPACT, **one["schema"]})
        tags.append(StructTag(trigger=trigger, begin=one["begin"], grammar=grammar, end=one["end"]))
    if not tags:
        raise ValueError("No structural tags found in the grammar spec.")
    return StructTag.to_grammar(tags, assume_special=False)
