"""Log probabilities: a real engine's own; of a simulated one made up, well-formed, and the same every time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.server.api.growing import GrowingPlan

if TYPE_CHECKING:
    from understudy.server.api.generation import Choice, Generation


def logprob_of(token: int, rank: int = 0) -> float:
    """−0.1 … −1.0 for the token that was chosen, a little less for each that was not."""
    return round(-0.1 * ((token % 10) + 1) - 0.01 * rank, 6)


def others(token: int, count: int, vocabulary: list[int]) -> list[int]:
    """The tokens that could have come instead, the chosen one not among them."""
    size = len(vocabulary)
    found: list[int] = []
    place = token % size
    while len(found) < min(count, size - 1):
        candidate = vocabulary[place % size]
        if candidate != token and candidate not in found:
            found.append(candidate)
        place += 1
    return found


def told(
    choice: Choice, place: int, wanted: int, vocabulary: list[int]
) -> tuple[float, list[tuple[int, float]]]:
    """Of the token at `place`: its own, and those of `wanted` tokens, of which the likeliest may be itself."""
    plan = choice.plan
    token = plan.tokens[place]
    if isinstance(plan, GrowingPlan):
        known = plan.logprobs[place]
        return (0.0, []) if known is None else (known[0], list(known[1][:wanted]))
    return logprob_of(token), [
        (other, logprob_of(token, rank)) for rank, other in enumerate(others(token, wanted, vocabulary), 1)
    ]


def completion_logprobs(generation: Generation, choice: Choice, first: int, count: int) -> dict[str, Any]:
    """In the form of completions."""
    texts = generation.worker.texts
    wanted = max(generation.sampling.logprobs or 0, 0)
    words = generation.worker.tokenizer.words()
    tokens = choice.plan.tokens[first : first + count]
    offset = choice.decoded

    def name(token: int) -> str:
        if generation.sampling.tokens_as_ids:
            return f"token_id:{token}"
        return texts.tokenizer.decode([token], skip_special=False)

    offsets: list[int] = []
    names: list[str] = []
    tops: list[dict[str, float]] = []
    values: list[float] = []
    for place, token in enumerate(tokens, first):
        value, tops_of = told(choice, place, wanted, words)
        values.append(value)
        names.append(name(token))
        offsets.append(offset)
        offset += len(names[-1])
        top = {names[-1]: value}
        for other, of in tops_of:
            top.setdefault(name(other), of)
        tops.append(top)
    choice.decoded = offset
    return {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": names,
        "top_logprobs": tops,
    }


def chat_logprobs(generation: Generation, choice: Choice, first: int, count: int) -> dict[str, Any]:
    """In the form of chat."""
    tokenizer = generation.worker.tokenizer
    words = tokenizer.words()
    wanted = max(generation.sampling.logprobs or 0, 0)

    def entry(token: int, value: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": value, "bytes": list(data)}

    content = []
    for place, token in enumerate(choice.plan.tokens[first : first + count], first):
        if isinstance(choice.plan, GrowingPlan):
            value, top_values = told(choice, place, wanted, words)
        else:
            value, top_values = told(choice, place, wanted - 1, words)
            top_values = [(token, value), *top_values] if wanted else []
        chosen = entry(token, value)
        top = [entry(other, of) for other, of in top_values]
        content.append({**chosen, "top_logprobs": top})
    return {"content": content}
