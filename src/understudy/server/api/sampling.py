"""Sampling parameters of a request, and vLLM's checks of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy.server.api.errors import ApiError, bad_value
from understudy.server.api.fields import Fields, whole_number

if TYPE_CHECKING:
    from understudy.structured.form import Form

MAX_CHOICES = 16384


class Sampling(msgspec.Struct, kw_only=True):
    """Sampling parameters. `asked_tokens`: the requested length, if any."""

    n: int = 1
    asked_tokens: int | None = None
    tokens_field: str = "max_tokens"
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    steered: bool = False
    """True when a penalty, a bias or min_p was requested."""
    seed: int | None = None
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special: bool = True
    logprobs: int | None = None
    """Number of alternatives to return per token; None: no logprobs."""
    prompt_logprobs: int | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    stream_interval: int = 1
    priority: int = 0
    priority_given: bool = True
    """False when the client gave none, in a server where that has a meaning of its own."""
    cache_salt: str = ""
    request_id: str | None = None
    session_id: str = ""
    reports_hits: bool = False
    """True when events are to repeat the cached blocks of the prompt (`kv_cache_report_mode` "full")."""
    return_token_ids: bool = False
    return_weight_versions: bool = False
    tokens_as_ids: bool = False
    truncate: int | None = None
    truncate_left: bool = True
    structure: dict[str, Any] | None = None
    form: Form | None = None
    """The structure, once it was read."""
    formed_characters: int = 0
    """Characters generated for `structure` so far."""
    formed_cost: int = 0
    """Cost of generating them, in the unit of `run_in_slices`."""
    kv_transfer_params: dict[str, Any] | None = None
    bootstrap: dict[str, Any] | None = None
    """SGLang: where the prefill and the decode server of the request meet, as the client gives it."""
    cache_hit_threshold: float | None = None


def read_sampling(fields: Fields, *, chat: bool) -> Sampling:
    """Read the fields that completions and chat share. Records wrong types in `fields`."""
    sampling = Sampling()
    sampling.n = _or(fields.integer("n", 1), 1)
    sampling.min_tokens = _or(fields.integer("min_tokens", 0), 0)
    neutral = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0}
    steering = [_orf(fields.number(name), least) != least for name, least in neutral.items()]
    sampling.steered = any(steering) or bool(fields.raw("logit_bias"))
    sampling.top_p = _orf(fields.number("top_p"), 1.0)
    sampling.top_k = _or(fields.integer("top_k"), 0)
    sampling.temperature = _orf(fields.number("temperature", 1.0), 1.0)
    sampling.seed = fields.integer("seed")
    sampling.stop = fields.texts("stop")
    sampling.stop_token_ids = fields.integers("stop_token_ids")
    sampling.include_stop = fields.boolean("include_stop_str_in_output")
    sampling.ignore_eos = fields.boolean("ignore_eos")
    sampling.skip_special = fields.boolean("skip_special_tokens", True)
    sampling.stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if options is not None:
        stream_fields = Fields(options)
        sampling.include_usage = stream_fields.boolean("include_usage")
        sampling.continuous_usage = stream_fields.boolean("continuous_usage_stats") and sampling.include_usage
    sampling.stream_interval = _or(fields.integer("stream_interval", 1), 1)
    sampling.priority = _or(fields.integer("priority", 0), 0)
    sampling.cache_salt = fields.text("cache_salt") or ""
    sampling.request_id = fields.text("request_id")
    sampling.session_id = fields.text("session_id") or ""
    extra = fields.object("vllm_xargs") or {}
    sampling.reports_hits = extra.get("kv_cache_report_mode") == "full"
    fields.text("user")
    fields.text("model")
    sampling.return_token_ids = fields.boolean("return_token_ids")
    sampling.tokens_as_ids = fields.boolean("return_tokens_as_token_ids")
    sampling.truncate = fields.integer("truncate_prompt_tokens")
    sampling.truncate_left = fields.text("truncation_side", "left") != "right"
    sampling.prompt_logprobs = fields.integer("prompt_logprobs")
    if chat and sampling.prompt_logprobs is None and fields.boolean("echo"):
        sampling.prompt_logprobs = 0
    sampling.kv_transfer_params = fields.object("kv_transfer_params")
    share = sampling.cache_hit_threshold = fields.number("cache_hit_threshold")
    given = fields.raw("cache_hit_threshold")
    if given is not None and (share is None or not 0 <= share <= 1):
        raise bad_value("cache_hit_threshold must be from 0 to 1", "cache_hit_threshold", given)
    if chat:
        wanted = fields.integer("max_completion_tokens")
        if wanted is not None:
            sampling.tokens_field = "max_completion_tokens"
        sampling.asked_tokens = wanted if wanted is not None else fields.integer("max_tokens")
        if fields.boolean("logprobs"):
            sampling.logprobs = _or(fields.integer("top_logprobs", 0), 0)
    else:
        sampling.asked_tokens = _or(fields.integer("max_tokens", 16), 16)
        sampling.logprobs = fields.integer("logprobs")
    sampling.structure = _structure(fields)
    return sampling


def check_sampling(fields: Fields, sampling: Sampling, *, max_logprobs: int, vocabulary: int) -> None:
    """Check the values, with vLLM's error type and param. ApiError for the first invalid one."""
    _check_budget(fields.raw("thinking_token_budget"))
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        if fields.raw(name):
            raise bad_value(f"{name} of a request are not trusted here", name)
    wanted = fields.object("structured_outputs")
    if wanted is not None and all(value is None for value in wanted.values()):
        raise ApiError("structured_outputs says nothing of the answer; leave it out")
    _check_ranges(fields, sampling)
    check_choices(sampling.n)
    if sampling.n > 1 and sampling.temperature == 0:
        raise ApiError(f"n must be 1 when using greedy sampling, got {sampling.n}.")
    if any(not stop for stop in sampling.stop):
        raise ApiError("stop cannot contain an empty string.")
    if sampling.min_tokens < 0:
        raise ApiError(f"min_tokens must be greater than or equal to 0, got {sampling.min_tokens}.")
    asked = sampling.asked_tokens
    if asked is not None and asked < 1:
        raise bad_value(f"max_tokens must be at least 1, got {asked}.", "max_tokens", asked)
    if asked is not None and sampling.min_tokens > asked:
        raise ApiError(
            f"min_tokens must be less than or equal to max_tokens={asked}, got {sampling.min_tokens}."
        )
    if any(not word for word in fields.texts("bad_words")):
        raise ApiError("bad_words cannot contain an empty string.")
    _check_logprobs(sampling, vocabulary if max_logprobs == -1 else max_logprobs, vocabulary)
    _check_ids(fields, vocabulary)


def check_choices(n: int) -> None:
    """Check the number of answers to a prompt before any is made. ApiError outside 1 to MAX_CHOICES."""
    if n < 1:
        raise ApiError(f"n must be at least 1, got {n}.")
    if n > MAX_CHOICES:
        raise ApiError(f"n must be at most {MAX_CHOICES}, got {n}.")


def _check_budget(value: Any) -> None:
    """Check the thinking budget. ApiError when it is invalid, or the model does not reason."""
    if value is None or value == -1:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise bad_value(
            "thinking_token_budget must be a whole number, 0 or more, or -1", "thinking_token_budget", value
        )
    raise ApiError("thinking_token_budget needs a model that thinks: --reasoning-parser")


def _check_ids(fields: Fields, vocabulary: int) -> None:
    """Check that all token ids in a request are in the vocabulary."""
    biased = fields.object("logit_bias") or {}
    numbers = [whole_number(key) for key in biased]
    if None in numbers:
        shown = [key[:20] for key in biased][:10]
        raise bad_value("logit_bias names tokens by their ids", "logit_bias", shown)
    named = {
        "logit_bias": [number for number in numbers if number is not None],
        "stop_token_ids": fields.integers("stop_token_ids"),
        "allowed_token_ids": fields.integers("allowed_token_ids"),
    }
    if fields.raw("allowed_token_ids") == []:
        raise bad_value("allowed_token_ids must not be empty; leave it out instead", "allowed_token_ids", [])
    for name, ids in named.items():
        unknown = [token for token in ids if not 0 <= token < vocabulary]
        if unknown:
            raise bad_value(
                f"token_id(s) {unknown[:10]} in {name} contain out-of-vocab token ids. "
                f"Vocabulary size: {vocabulary}",
                name,
                unknown[:10],
            )


def _check_logprobs(sampling: Sampling, most: int, vocabulary: int) -> None:
    for what, name, value in (
        ("sample", "logprobs", sampling.logprobs),
        ("prompt", "prompt_logprobs", sampling.prompt_logprobs),
    ):
        if value is None:
            continue
        wanted = vocabulary if value == -1 else value
        if wanted > most:
            raise bad_value(
                f"Requested {what} logprobs of {wanted}, which is greater than max allowed: {most}",
                name,
                wanted,
            )


def _check_ranges(fields: Fields, sampling: Sampling) -> None:
    temperature = sampling.temperature
    if not 0 <= temperature <= 2:
        range_ = "non-negative" if temperature < 0 else "in [0, 2]"
        raise bad_value(f"temperature must be {range_}, got {temperature}.", "temperature", temperature)
    top_p = fields.number("top_p", 1.0)
    if top_p is not None and not 0 < top_p <= 1:
        raise bad_value(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    top_k = fields.integer("top_k", 0)
    if top_k is not None and top_k < -1:
        raise ApiError(f"top_k must be 0 (disable), or at least 1, got {top_k}.")
    min_p = fields.number("min_p", 0.0)
    if min_p is not None and not 0 <= min_p <= 1:
        raise ApiError(f"min_p must be in [0, 1], got {min_p}.")
    for name in ("presence_penalty", "frequency_penalty"):
        value = fields.number(name, 0.0)
        if value is not None and not -2 <= value <= 2:
            raise ApiError(f"{name} must be in [-2, 2], got {value}.")
    repetition = fields.number("repetition_penalty", 1.0)
    if repetition is not None and not repetition > 0:
        raise ApiError(f"repetition_penalty must be greater than zero, got {repetition}.")


def _structure(fields: Fields) -> dict[str, Any] | None:
    """Read the required form: its kind (json, choice, regex, grammar, structural_tag or object) and value."""
    wanted = fields.object("structured_outputs")
    if wanted is not None:
        for name in ("json", "choice", "regex", "grammar", "structural_tag"):
            if wanted.get(name) is not None:
                return {name: wanted[name]}
        if wanted.get("json_object"):
            return {"object": True}
    form = fields.object("response_format")
    if form is None or form.get("type") in (None, "text"):
        return None
    if form["type"] == "structural_tag":
        return {"structural_tag": form} if "structures" in form else None
    if form["type"] == "json_object":
        return {"object": True}
    if form["type"] == "json_schema":
        schema = form.get("json_schema")
        return {"json": schema.get("schema", {}) if isinstance(schema, dict) else {}}
    return None


def _or(value: int | None, other: int) -> int:
    return other if value is None else value


def _orf(value: float | None, other: float) -> float:
    return other if value is None else value
