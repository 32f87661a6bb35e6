"""The fields of requests in vLLM's order, each with its type: what of a body is wrong before its values are read."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from understudy.server.api.fields import Fields

MAX_STOPS = 4
_INT64 = (-(2**63), 2**63 - 1)


class Shape(msgspec.Struct, frozen=True):
    """Type and limits of a field. `null`: may be null; `least` and `most`: limits of numbers."""

    kind: Literal["str", "int", "float", "bool", "ints", "strs", "floats by name", "object", "objects", "any"]
    null: bool = True
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()
    required: bool = False


_TEXT, _INT, _FLOAT, _BOOL = Shape("str"), Shape("int"), Shape("float"), Shape("bool")
_INTS, _OBJECT, _ANY = Shape("ints"), Shape("object"), Shape("any")
_FLAG = Shape("bool", null=False)
_SIGNED = Shape("int", least=_INT64[0], most=_INT64[1])
_PRIORITY = Shape("int", null=False, least=_INT64[0], most=_INT64[1])
_PAYLOAD = Shape("str", null=False, choices=("tensors", "none"))

_BEHIND_STREAM = {
    "use_beam_search": _FLAG,
    "top_k": _INT,
    "min_p": _FLOAT,
    "repetition_penalty": _FLOAT,
    "watermarking": _BOOL,
    "length_penalty": Shape("float", null=False),
    "stop_token_ids": _INTS,
    "include_stop_str_in_output": _FLAG,
    "ignore_eos": _FLAG,
    "min_tokens": Shape("int", null=False),
    "skip_special_tokens": _FLAG,
    "spaces_between_special_tokens": _FLAG,
    "truncate_prompt_tokens": Shape("int", least=-1, most=_INT64[1]),
    "truncation_side": Shape("str", choices=("left", "right")),
    "allowed_token_ids": _INTS,
    "prompt_logprobs": _INT,
    "logprob_token_ids": _INTS,
    "bad_words": Shape("strs", null=False),
}
_AT_THE_END = {
    "structured_outputs": _OBJECT,
    "priority": _PRIORITY,
    "request_id": Shape("str", null=False),
    "session_id": _TEXT,
    "return_tokens_as_token_ids": _BOOL,
    "return_token_ids": _BOOL,
    "routed_experts_prompt_start": Shape("int", null=False, least=0),
    "return_token_offsets": _BOOL,
    "mm_payload": _PAYLOAD,
    "return_mm_kwargs": _BOOL,
    "cache_salt": _TEXT,
    "kv_transfer_params": _OBJECT,
    "ec_transfer_params": _OBJECT,
    "vllm_xargs": _OBJECT,
    "repetition_detection": _OBJECT,
    "stream_interval": Shape("int", least=1),
}

COMPLETION = {
    "model": _TEXT,
    "prompt": _ANY,
    "echo": _BOOL,
    "frequency_penalty": _FLOAT,
    "logit_bias": Shape("floats by name"),
    "logprobs": _INT,
    "max_tokens": _INT,
    "n": Shape("int", null=False),
    "presence_penalty": _FLOAT,
    "seed": _SIGNED,
    "stop": _ANY,
    "stream": _BOOL,
    "stream_options": _ANY,
    "suffix": _TEXT,
    "temperature": _FLOAT,
    "top_p": _FLOAT,
    "user": _TEXT,
    **_BEHIND_STREAM,
    "prompt_embeds": _ANY,
    "add_special_tokens": _FLAG,
    "response_format": _ANY,
    **_AT_THE_END,
}
CHAT = {
    "messages": _ANY,
    "model": _TEXT,
    "frequency_penalty": _FLOAT,
    "logit_bias": Shape("floats by name"),
    "logprobs": _BOOL,
    "top_logprobs": _INT,
    "max_tokens": _INT,
    "max_completion_tokens": _INT,
    "n": _INT,
    "presence_penalty": _FLOAT,
    "response_format": _ANY,
    "seed": _SIGNED,
    "stop": _ANY,
    "stream": _BOOL,
    "stream_options": _ANY,
    "temperature": _FLOAT,
    "top_p": _FLOAT,
    "tools": _ANY,
    "reasoning_effort": Shape("str", choices=("none", "minimal", "low", "medium", "high", "xhigh", "max")),
    "include_reasoning": _FLAG,
    "parallel_tool_calls": _BOOL,
    "user": _TEXT,
    **_BEHIND_STREAM,
    "echo": _FLAG,
    "add_generation_prompt": _FLAG,
    "continue_final_message": _FLAG,
    "add_special_tokens": _FLAG,
    "documents": Shape("objects"),
    "chat_template": _TEXT,
    "chat_template_kwargs": _OBJECT,
    "media_io_kwargs": _OBJECT,
    "mm_processor_kwargs": _OBJECT,
    "return_prompt_text": _BOOL,
    **_AT_THE_END,
}
BATCH = {
    name: shape
    for name, shape in CHAT.items()
    if name not in ("stream", "stream_options", "tools", "parallel_tool_calls", "stream_interval")
}
RESPONSES = {
    "background": _BOOL,
    "input": _ANY,
    "instructions": _TEXT,
    "max_output_tokens": _INT,
    "max_tool_calls": _INT,
    "metadata": _OBJECT,
    "model": _TEXT,
    "logit_bias": Shape("floats by name"),
    "parallel_tool_calls": _BOOL,
    "previous_response_id": _TEXT,
    "reasoning": _OBJECT,
    "include_reasoning": _FLAG,
    "service_tier": Shape("str", null=False, choices=("auto", "default", "flex", "scale", "priority")),
    "store": _BOOL,
    "stream": _BOOL,
    "temperature": _FLOAT,
    "text": _OBJECT,
    "top_logprobs": _INT,
    "top_p": _FLOAT,
    "top_k": _INT,
    "min_p": _FLOAT,
    "truncation": Shape("str", choices=("auto", "disabled")),
    "user": _TEXT,
    "skip_special_tokens": _FLAG,
    "include_stop_str_in_output": _FLAG,
    "presence_penalty": Shape("float", least=-2, most=2),
    "frequency_penalty": Shape("float", least=-2, most=2),
    "prompt_cache_key": _TEXT,
    "request_id": Shape("str", null=False),
    "session_id": _TEXT,
    "priority": _PRIORITY,
    "mm_payload": _PAYLOAD,
    "cache_salt": _TEXT,
    "enable_response_messages": _FLAG,
    "structured_outputs": _OBJECT,
    "repetition_penalty": _FLOAT,
    "seed": _SIGNED,
    "stop": _ANY,
    "stop_token_ids": _INTS,
    "ignore_eos": _FLAG,
    "vllm_xargs": _OBJECT,
    "kv_transfer_params": _OBJECT,
    "chat_template_kwargs": _OBJECT,
}
_MODEL = Shape("str", null=False, required=True)
COUNT = {
    "model": _MODEL,
    "messages": _ANY,
    "system": _ANY,
    "thinking": _ANY,
    "tool_choice": _OBJECT,
    "tools": Shape("objects"),
}
MESSAGES = {
    "model": _MODEL,
    "messages": _ANY,
    "max_tokens": Shape("int", null=False, least=1, required=True),
    "metadata": _OBJECT,
    "thinking": _ANY,
    "stop_sequences": Shape("strs"),
    "stream": _BOOL,
    "system": _ANY,
    "temperature": _FLOAT,
    "tool_choice": _OBJECT,
    "tools": Shape("objects"),
    "top_k": _INT,
    "top_p": _FLOAT,
    "cache_salt": _TEXT,
    "kv_transfer_params": _OBJECT,
    "vllm_xargs": _OBJECT,
    "chat_template_kwargs": _OBJECT,
}
SCORING = {
    "model": _TEXT,
    "query": _ANY,
    "items": _ANY,
    "label_token_ids": Shape("ints", null=False, required=True),
    "apply_softmax": _FLAG,
    "item_first": _FLAG,
    "add_special_tokens": _FLAG,
    "cache_salt": _TEXT,
    "priority": _PRIORITY,
    "request_id": Shape("str", null=False),
}
TOKENIZE = {
    "model": _TEXT,
    "prompt": Shape("str", null=False, required=True),
    "add_special_tokens": _FLAG,
    "return_token_strs": _BOOL,
}
TOKENIZE_CHAT = {
    "model": _TEXT,
    "messages": _ANY,
    "add_generation_prompt": _FLAG,
    "return_token_strs": _BOOL,
    "continue_final_message": _FLAG,
    "add_special_tokens": _FLAG,
    "chat_template": _TEXT,
    "chat_template_kwargs": _OBJECT,
    "tools": _ANY,
}
DETOKENIZE = {
    "model": _TEXT,
    "tokens": Shape("ints", null=False, required=True, least=0, most=_INT64[1]),
}
LOAD_LORA = {
    "lora_name": Shape("str", null=False, required=True),
    "lora_path": Shape("str", null=False, required=True),
    "load_inplace": _FLAG,
}
UNLOAD_LORA = {"lora_name": Shape("str", null=False, required=True), "lora_int_id": _INT}

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


_SPECIAL = {
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
