"""The fields of requests in vLLM's order, each with its type."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

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
    "skip_special_tokens": _BOOL,
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
    "return_weight_versions": _FLAG,
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
    "skip_special_tokens": _BOOL,
    "spaces_between_special_tokens": _FLAG,
    "include_stop_str_in_output": _FLAG,
    "presence_penalty": Shape("float", least=-2, most=2),
    "frequency_penalty": Shape("float", least=-2, most=2),
    "prompt_cache_key": _TEXT,
    "prompt_cache_options": _ANY,
    "prompt_cache_retention": Shape("str", choices=("in_memory", "in-memory", "24h")),
    "safety_identifier": _TEXT,
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


class Schemas(NamedTuple):
    """Fields of the generation requests of one vLLM release."""

    completion: dict[str, Shape]
    chat: dict[str, Shape]
    batch: dict[str, Shape]
    responses: dict[str, Shape]


def _before_0_33(schema: dict[str, Shape]) -> dict[str, Shape]:
    """Return the fields of 0.32: without newer ones, and with skip_special_tokens not null."""
    newer = {"return_weight_versions", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"}
    if schema is RESPONSES:
        newer.add("spaces_between_special_tokens")
    kept = {name: shape for name, shape in schema.items() if name not in newer}
    return {**kept, "skip_special_tokens": _FLAG}


_NEWEST = Schemas(COMPLETION, CHAT, BATCH, RESPONSES)
SCHEMAS = {"0.33.0": _NEWEST, "0.32.0": Schemas(*map(_before_0_33, _NEWEST))}
"""Fields by release."""
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
