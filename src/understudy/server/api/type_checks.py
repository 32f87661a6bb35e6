"""Checks the types of a body's fields against a schema, before their values are read."""

from __future__ import annotations

from typing import Any

from understudy.server.api.fields import Fields
from understudy.server.api.schema import Shape

MAX_STOPS = 4
_CACHE_OPTIONS = {
    "mode": Shape("str", null=False, choices=("implicit", "explicit")),
    "ttl": Shape("str", null=False, choices=("30m",)),
    "comparison_response_id": Shape("str"),
    "prewarm": Shape("bool"),
}
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def check_types(fields: Fields, schema: dict[str, Shape]) -> None:
    """Note in `fields` every field of another type than the schema's, in its order."""
    for name, shape in schema.items():
        if not fields.has(name):
            if shape.required:
                fields.note("missing", name, "must be given")
            continue
        value = fields.raw(name)
        if value is None:
            if not shape.null:
                fields.note(f"{shape.kind}_type", name, "must not be null")
            continue
        if shape.kind == "any" and name in _SPECIAL:
            _SPECIAL[name](fields, name, value)
        else:
            _check(fields, name, shape)


def _check(fields: Fields, name: str, shape: Shape) -> None:
    number: float | None = None
    match shape.kind:
        case "str":
            text = fields.text(name)
            if text is not None and shape.choices and text not in shape.choices:
                fields.note("literal_error", name, f"must be one of {', '.join(shape.choices)}", text)
        case "int":
            number = fields.integer(name)
        case "float":
            number = fields.number(name)
        case "bool":
            fields.boolean(name)
        case "ints":
            _check_ids(fields, name, shape)
        case "strs":
            _check_texts(fields, name)
        case "object":
            fields.object(name)
        case "objects":
            _check_objects(fields, name)
        case "floats by name":
            for key, value in (fields.object(name) or {}).items():
                if not _is_number(value):
                    fields.note("float_type", f"{name}.{key}", "must be a number", value)
        case "any":
            pass
    if number is not None and shape.least is not None and number < shape.least:
        fields.note(
            "greater_than_equal", name, f"Input should be greater than or equal to {shape.least}", number
        )
    if number is not None and shape.most is not None and number > shape.most:
        fields.note("less_than_equal", name, f"Input should be less than or equal to {shape.most}", number)


def _check_ids(fields: Fields, name: str, shape: Shape) -> None:
    value, numbers = fields.raw(name), fields.integers(name)
    least, most = shape.least, shape.most
    if not numbers or least is None or most is None or (min(numbers) >= least and max(numbers) <= most):
        return
    place, number = next((place, one) for place, one in enumerate(numbers) if not least <= one <= most)
    if number < least:
        fields.note(
            "greater_than_equal", f"{name}.{place}", "Input should be greater than or equal to 0", number
        )
    else:
        fields.note("less_than_equal", f"{name}.{place}", "is too large for a token id", value)


def _check_texts(fields: Fields, name: str) -> None:
    if isinstance(fields.raw(name), str):
        fields.note("list_type", name, "must be a list", fields.raw(name))
    else:
        fields.texts(name)


def _check_objects(fields: Fields, name: str) -> None:
    value = fields.raw(name)
    if not isinstance(value, list):
        fields.note("list_type", name, "must be a list", value)
        return
    for place, member in enumerate(value):
        if not isinstance(member, dict):
            fields.note("dict_type", f"{name}.{place}", "must be an object", member)


def _check_stop(fields: Fields, name: str, value: Any) -> None:
    if isinstance(value, str):
        return
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        fields.note("string_type", name, "must be a string or a list of strings", value)
    elif len(value) > MAX_STOPS:
        fields.note("too_long", name, f"at most {MAX_STOPS} stop strings", value)


def _check_format(fields: Fields, name: str, value: Any) -> None:
    if not isinstance(value, dict):
        fields.note("model_type", name, "must be an object", value)
    elif value.get("type") not in _FORMATS:
        known = f"must be one of {', '.join(_FORMATS)}"
        fields.note("literal_error" if "type" in value else "missing", f"{name}.type", known, value)


def _check_tools(fields: Fields, name: str, value: Any) -> None:
    if not isinstance(value, list):
        fields.note("list_type", name, "must be a list", value)
        return
    for place, tool in enumerate(value):
        where = f"{name}.{place}"
        if not isinstance(tool, dict):
            fields.note("model_type", where, "must be an object", tool)
            continue
        function = tool.get("function")
        if not isinstance(function, dict):
            kind = "model_type" if "function" in tool else "missing"
            fields.note(kind, f"{where}.function", "must be an object", function)
        elif not isinstance(function.get("name"), str):
            kind = "string_type" if "name" in function else "missing"
            fields.note(kind, f"{where}.function.name", "must be a string", function)


def _check_embeds(fields: Fields, name: str, value: Any) -> None:
    if not isinstance(value, str | list):
        fields.note("bytes_type", name, "must be bytes in base64, or a list of them", value)


def _check_stream_options(fields: Fields, name: str, _: Any) -> None:
    options = fields.object(name)
    if options is not None:
        within = Fields(options, f"body.{name}")
        for flag in ("include_usage", "continuous_usage_stats"):
            within.boolean(flag)
        fields.problems += within.problems


def _check_cache_options(fields: Fields, name: str, _: Any) -> None:
    options = fields.object(name)
    if options is not None:
        within = Fields(options, f"body.{name}")
        check_types(within, _CACHE_OPTIONS)
        fields.problems += within.problems


_SPECIAL = {
    "prompt_cache_options": _check_cache_options,
    "stream_options": _check_stream_options,
    "stop": _check_stop,
    "response_format": _check_format,
    "tools": _check_tools,
    "prompt_embeds": _check_embeds,
}


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, int | float)
