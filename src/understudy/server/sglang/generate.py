"""`/generate`: reads its body, and formats its answers."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from understudy.server.api.errors import ApiError, Problem, invalid_body
from understudy.server.api.fields import Fields
from understudy.server.api.generation import DONE
from understudy.server.api.logprobs import logprobs_at
from understudy.server.api.sampling import MAX_CHOICES, Sampling, check_choices
from understudy.server.push.rooms import take_fields
from understudy.server.sglang.errors import ContractError, error_event
from understudy.server.sglang.lengths import read_tokens
from understudy.server.sglang.meta import meta_info

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from understudy.server.api.choice import Choice
    from understudy.server.api.generation import Generation
    from understudy.server.worker import Worker

_DEFAULT_TOKENS = 128
_PARAMETERS = (
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "beam_width"),
    *("json_schema", "regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens"),
    *("spaces_between_special_tokens", "no_stop_trim", "stream_interval", "logit_bias", "sampling_seed"),
    *("custom_params", "watermark"),
)
_REFUSED = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "session_params",
    "return_hidden_states",
)
_REFUSED_PARAMETERS = ("stop_regex", "beam_width", "ebnf", "structural_tag", "watermark")
_RANGES: tuple[tuple[str, float, Callable[[float], bool], str], ...] = (
    (
        "temperature",
        1.0,
        lambda value: 0 <= value < float("inf"),
        "temperature must be a non-negative finite number, got {}.",
    ),
    ("top_p", 1.0, lambda value: 0 < value <= 1, "top_p must be in (0, 1], got {}."),
    ("min_p", 0.0, lambda value: 0 <= value <= 1, "min_p must be in [0, 1], got {}."),
    (
        "top_k",
        1,
        lambda value: value == -1 or value >= 1,
        "top_k must be -1 (disable) or at least 1, got {}.",
    ),
    (
        "frequency_penalty",
        0.0,
        lambda value: -2 <= value <= 2,
        "frequency_penalty must be in [-2, 2], got {}.",
    ),
    (
        "presence_penalty",
        0.0,
        lambda value: -2 <= value <= 2,
        "presence_penalty must be in [-2, 2], got {}.",
    ),
    (
        "repetition_penalty",
        1.0,
        lambda value: 0 < value <= 2,
        "repetition_penalty must be in (0, 2] (1.0 = no penalty), got {}.",
    ),
    (
        "min_new_tokens",
        0,
        lambda value: value >= 0,
        "min_new_tokens must be in [0, max_new_tokens], got {}.",
    ),
    ("max_new_tokens", 0, lambda value: value >= 0, "max_new_tokens must be at least 0, got {}."),
)


class GenerateRead(NamedTuple):
    """The content of a request: one entry per prompt."""

    tokens: list[npt.NDArray[np.uint32]]
    samplings: list[Sampling]
    rids: list[str]
    n: int
    single: bool
    """True when the answer is an object; False: a list."""
    returns_prompt: bool


def read_generate(body: dict[str, Any], worker: Worker) -> GenerateRead:
    """Read the body of `/generate`. ApiError with SGLang's status and form for an invalid one."""
    fields = Fields(body)
    stream = fields.boolean("stream")
    prompts, single = _read_prompts(fields)
    _check_contract(body)
    fields.done()
    for name in _REFUSED:
        if body.get(name):
            raise ApiError(f"{name}: is not simulated; leave it out")
    if prompts is None:
        raise ApiError("Either text, input_ids or input_embeds should be provided.")
    given = body.get("sampling_params")
    parameters = (
        [{} if one is None else one for one in given]
        if isinstance(given, list)
        else [given if isinstance(given, dict) else {} for _ in prompts]
    )
    if len(parameters) != len(prompts):
        raise ApiError("The length of sampling_params should be equal to the batch size.")
    counts = {_whole(one.get("n"), 1) for one in parameters}
    if len(counts) > 1:
        raise ApiError("The parallel_sample_num should be the same for all samples in sample params.")
    n = counts.pop() if counts else 1
    check_choices(n)
    if n * len(prompts) > MAX_CHOICES:
        raise ApiError(
            f"one request has at most {MAX_CHOICES} answers, got {n} for each of {len(prompts)} prompts."
        )
    samplings = [
        _read_sampling(one, fields, place, stream=stream, worker=worker)
        for place, one in enumerate(parameters)
    ]
    rids = _read_rids(body.get("rid"), len(prompts), single=single and n == 1)
    name = "text" if body.get("text") is not None else "input_ids"
    context = worker.settings.max_model_len
    tokens = [read_tokens(prompt, worker.tokenizer, context, field=name) for prompt in prompts]
    returned = fields.boolean("return_prompt_token_ids")
    return GenerateRead(tokens, samplings, rids, n, single and n == 1, returned)


def _read_prompts(fields: Fields) -> tuple[list[str | list[int]] | None, bool]:
    """Return the prompts, None if there are none, and whether there is one that is not in a list."""
    text, ids = fields.raw("text"), fields.raw("input_ids")
    if text is not None:
        if isinstance(text, str):
            return [text], True
        if not isinstance(text, list) or not all(isinstance(one, str) for one in text):
            raise _wrong_type("text", "Input should be a valid string or a list of them", text)
        return list(text), False
    if ids is None:
        return None, True
    if ids == []:
        raise ApiError("input_ids cannot be empty.")
    rows = ids if isinstance(ids, list) and isinstance(ids[0], list) else [ids]
    for row in rows:
        if not isinstance(row, list) or not set(map(type, row)) <= {int} or (row and min(row) < 0):
            raise _wrong_type("input_ids", "Input should be a list of token ids, or of such lists", row)
    return list(rows), rows is not ids


def _wrong_type(name: str, message: str, value: object) -> ApiError:
    return invalid_body([Problem("type_error", f"body.{name}", message, value)], param=False)


def _check_contract(body: dict[str, Any]) -> None:
    """Raise ContractError for sampling parameters that are no objects, or have unknown names."""
    given = body.get("sampling_params")
    for one in given if isinstance(given, list) else [given]:
        if one is None:
            continue
        if not isinstance(one, dict):
            raise ContractError("sampling_params: invalid type, expected a map or a list of maps")
        for name in one:
            if name not in _PARAMETERS:
                listed = ", ".join(f"`{known}`" for known in _PARAMETERS)
                raise ContractError(f"unknown field `{name}`, expected one of {listed}")


def _read_rids(given: Any, count: int, *, single: bool) -> list[str]:
    """Return the ids of all prompts. ApiError for a list of another length, or with an id twice."""
    if given is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(given, str):
        return [given] if single else [f"{given}_{place}" for place in range(count)]
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise _wrong_type("rid", "Input should be a valid string or a list of them", given)
    if len(given) != count:
        raise ApiError("The specified rids length mismatch with the batch_size for batch processing.")
    if len(set(given)) != len(given):
        twice = sorted({one for one in given if given.count(one) > 1})
        raise ApiError(f"Duplicate request IDs detected within the request: {twice}")
    return list(given)


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _read_sampling(
    given: dict[str, Any], body: Fields, place: int, *, stream: bool, worker: Worker
) -> Sampling:
    """Read the sampling parameters of one prompt. ApiError names the first invalid one."""
    fields = Fields(given, "body.sampling_params")
    sampling = Sampling()
    sampling.tokens_field = "max_new_tokens"
    asked = fields.integer("max_new_tokens") if fields.has("max_new_tokens") else _DEFAULT_TOKENS
    sampling.asked_tokens = asked
    sampling.min_tokens = fields.integer("min_new_tokens", 0) or 0
    numbers = {name: fields.number(name, default) for name, default, _, _ in _RANGES}
    sampling.temperature = numbers["temperature"] or 0.0
    sampling.stop = fields.texts("stop")
    sampling.stop_token_ids = fields.integers("stop_token_ids")
    sampling.include_stop = fields.boolean("no_stop_trim")
    sampling.ignore_eos = fields.boolean("ignore_eos")
    sampling.skip_special = fields.boolean("skip_special_tokens", True)
    sampling.seed = fields.integer("sampling_seed")
    sampling.n = fields.integer("n", 1) or 1
    sampling.stream = stream
    interval = max(fields.integer("stream_interval", 1) or 1, worker.settings.stream_interval)
    sampling.stream_interval = interval
    fields.done()
    for name in _REFUSED_PARAMETERS:
        if given.get(name):
            raise ApiError(f"sampling_params.{name}: is not simulated; leave it out")
    for name, _, is_valid, message in _RANGES:
        value = numbers[name]
        if value is not None and given.get(name) is not None and not is_valid(value):
            raise ApiError(message.format(given[name]))
    if asked is not None and sampling.min_tokens > asked:
        raise ApiError(f"min_new_tokens must be in [0, max_new_tokens({asked})], got {sampling.min_tokens}.")
    sampling.structure = _read_form(given)
    priority = body.integer("priority")
    sampling.priority, sampling.priority_given = priority or 0, priority is not None
    sampling.cache_salt = _at(body.raw("cache_salt"), place) + _at(body.raw("extra_key"), place)
    sampling.session_id = body.text("session_id") or ""
    sampling.bootstrap = take_fields(body)
    if _at_value(body.raw("return_logprob"), place):
        sampling.logprobs = _whole(_at_value(body.raw("top_logprobs_num"), place), 0)
    body.done()
    return sampling


def _read_form(given: dict[str, Any]) -> dict[str, Any] | None:
    """Return the form that the answer must have. ApiError for a schema that is no JSON."""
    schema, regex = given.get("json_schema"), given.get("regex")
    if schema and regex:
        raise ApiError("Only one of json_schema, regex, ebnf, or structural_tag can be set.")
    if regex:
        return {"regex": str(regex)}
    if not schema:
        return None
    try:
        return {"json": msgspec.json.decode(str(schema))}
    except msgspec.DecodeError:
        raise ApiError("json_schema: is no JSON; give a schema as text") from None


def _at_value(value: Any, place: int) -> Any:
    """Return the entry of a prompt, of a value for all or a list."""
    if not isinstance(value, list):
        return value
    return value[place] if place < len(value) else None


def _at(value: Any, place: int) -> str:
    found = _at_value(value, place)
    return found if isinstance(found, str) else ""


class GenerateStyle:
    """Formats the answers of `/generate`; a stream repeats the text so far, or with `incremental` does not."""

    def __init__(self, read: GenerateRead, *, incremental: bool) -> None:
        self._single = read.single
        self._returns_prompt = read.returns_prompt
        self._incremental = incremental
        self._texts: dict[int, str] = {}

    def begin(self, generation: Generation) -> None:
        """Do nothing: chunks have no common part."""

    def chunk(self, generation: Generation, choice: Choice, first: int, count: int, last: bool) -> bytes:
        """Format the answer so far; the last chunk has the finish reason."""
        text = _text_between(generation, choice, first, first + count)
        if not self._incremental:
            text = self._texts[choice.index] = self._texts.get(choice.index, "") + text
            first, count = 0, first + count
        body = self._answer(generation, choice, text, first, count, last=last)
        if not self._single:
            body["index"] = choice.index
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    def close(self, generation: Generation) -> bytes:  # noqa: ARG002
        """Format the end of the stream."""
        return DONE

    def reject(self, generation: Generation, error: ApiError) -> bytes:  # noqa: ARG002
        """Format an error as the only event."""
        return error_event(error)

    def whole(self, generation: Generation) -> bytes:
        """Format the answer, or a list of all."""
        answers = [
            self._answer(
                generation,
                choice,
                choice.plan.text(generation.worker.texts, choice.emitted),
                0,
                choice.emitted,
                last=True,
            )
            for choice in generation.choices
        ]
        return msgspec.json.encode(answers[0] if self._single else answers)

    def _answer(
        self, generation: Generation, choice: Choice, text: str, first: int, count: int, *, last: bool
    ) -> dict[str, Any]:
        meta = meta_info(generation, choice, first + count, last=last)
        if choice.sampling.logprobs is not None:
            meta |= _logprobs(generation, choice, first, count)
        body = {"text": text, "output_ids": choice.plan.tokens[first : first + count], "meta_info": meta}
        if self._returns_prompt:
            body["prompt_token_ids"] = choice.prompt.tolist()
        return body


def _text_between(generation: Generation, choice: Choice, first: int, end: int) -> str:
    """Return the visible text of these tokens."""
    plan, texts = choice.plan, generation.worker.texts
    if plan.pieces is not None:
        return "".join(plan.pieces[first:end])
    return texts.tokenizer.decode(plan.tokens[first:end])


def _logprobs(generation: Generation, choice: Choice, first: int, count: int) -> dict[str, Any]:
    """Build the logprobs of the outputs as (logprob, token id, text); those of the prompt are not simulated."""
    wanted = choice.sampling.logprobs or 0
    words = generation.worker.texts.words
    chosen: list[tuple[float, int, None]] = []
    tops: list[list[tuple[float, int, None]]] = []
    for place in range(first, first + count):
        value, others = logprobs_at(choice, place, max(wanted - 1, 0), words)
        token = choice.plan.tokens[place]
        chosen.append((value, token, None))
        tops.append([(value, token, None), *((of, other, None) for other, of in others)][:wanted])
    built: dict[str, Any] = {
        "input_token_logprobs": [],
        "output_token_logprobs": chosen,
        "output_token_logprobs_length": len(chosen),
    }
    if wanted:
        built |= {"input_top_logprobs": [], "output_top_logprobs": tops}
    return built
