"""Log probabilities: from a real engine, or synthetic and deterministic for a simulated one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy.server.api.growing import GrowingPlan

if TYPE_CHECKING:
    from understudy.server.api.choice import Choice
    from understudy.server.api.generation import Generation
    from understudy.server.api.texts import TokenTexts


def logprob_of(token: int, rank: int = 0) -> float:
    """Return a synthetic logprob: −0.1 … −1.0 for the chosen token, 0.01 less per rank."""
    return round(-0.1 * ((token % 10) + 1) - 0.01 * rank, 6)


def others(token: int, count: int, vocabulary: list[int]) -> list[int]:
    """List `count` alternative tokens, without the chosen one."""
    size = len(vocabulary)
    found: list[int] = []
    place = token % size
    while len(found) < min(count, size - 1):
        candidate = vocabulary[place % size]
        if candidate != token and candidate not in found:
            found.append(candidate)
        place += 1
    return found


def logprobs_at(
    choice: Choice, place: int, wanted: int, vocabulary: list[int]
) -> tuple[float, list[tuple[int, float]]]:
    """Return the logprob of the token at `place`, and those of `wanted` top tokens, which may include it."""
    plan = choice.plan
    token = plan.tokens[place]
    if isinstance(plan, GrowingPlan):
        known = plan.logprobs[place]
        return (0.0, []) if known is None else (known[0], list(known[1][:wanted]))
    return logprob_of(token), [
        (other, logprob_of(token, rank)) for rank, other in enumerate(others(token, wanted, vocabulary), 1)
    ]


def completion_logprobs(generation: Generation, choice: Choice, first: int, count: int) -> dict[str, Any]:
    """Build the logprobs of a completion."""
    texts, sampling = generation.worker.texts, generation.sampling
    wanted = max(sampling.logprobs or 0, 0)
    words = texts.words
    offset = choice.decoded
    offsets: list[int] = []
    names: list[str] = []
    tops: list[msgspec.Raw] = []
    values: list[float] = []
    for place, token in enumerate(choice.plan.tokens[first : first + count], first):
        key = ("completion", sampling.tokens_as_ids, token, wanted)
        found = texts.logprobs.get(key)
        if found is None:
            value, tops_of = logprobs_at(choice, place, wanted, words)
            name = _name(texts, token, sampling.tokens_as_ids)
            top = {name: value}
            for other, of in tops_of:
                top.setdefault(_name(texts, other, sampling.tokens_as_ids), of)
            found = (name, value, msgspec.Raw(msgspec.json.encode(top)))
            if not isinstance(choice.plan, GrowingPlan):
                texts.keep_logprobs(key, found)
        name, value, raw = found
        values.append(value)
        names.append(name)
        offsets.append(offset)
        offset += len(name)
        tops.append(raw)
    choice.decoded = offset
    return {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": names,
        "top_logprobs": tops,
    }


def _name(texts: TokenTexts, token: int, as_id: bool) -> str:
    return f"token_id:{token}" if as_id else texts.tokenizer.decode([token], skip_special=False)


def chat_logprobs(generation: Generation, choice: Choice, first: int, count: int) -> dict[str, Any]:
    """Build the logprobs of a chat answer."""
    texts, tokenizer = generation.worker.texts, generation.worker.tokenizer
    words = texts.words
    wanted = max(generation.sampling.logprobs or 0, 0)

    def entry(token: int, value: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": value, "bytes": list(data)}

    content: list[msgspec.Raw] = []
    for place, token in enumerate(choice.plan.tokens[first : first + count], first):
        key = ("chat", False, token, wanted)
        found = texts.logprobs.get(key)
        if found is None:
            made_up = not isinstance(choice.plan, GrowingPlan)
            value, top_values = logprobs_at(choice, place, wanted - made_up, words)
            if made_up:
                top_values = [(token, value), *top_values] if wanted else []
            shown = {**entry(token, value), "top_logprobs": [entry(other, of) for other, of in top_values]}
            found = ("", value, msgspec.Raw(msgspec.json.encode(shown)))
            if made_up:
                texts.keep_logprobs(key, found)
        content.append(found[2])
    return {"content": content}
