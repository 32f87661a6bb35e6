"""Log probabilities: made up, well-formed, and the same every time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def completion_logprobs(generation: Generation, choice: Choice, first: int, count: int) -> dict[str, Any]:
    """In the form of completions."""
    texts = generation.worker.texts
    wanted = max(generation.sampling.logprobs or 0, 0)
    words = generation.worker.tokenizer.words()
    tokens = choice.plan.tokens[first : first + count]
    offset = choice.decoded
    offsets: list[int] = []
    names: list[str] = []
    tops: list[dict[str, float]] = []
    for token in tokens:
        text = texts.tokenizer.decode([token], skip_special=False)
        offsets.append(offset)
        offset += len(text)
        names.append(f"token_id:{token}" if generation.sampling.tokens_as_ids else text)
        top = {names[-1]: logprob_of(token)}
        for rank, other in enumerate(others(token, wanted, words), 1):
            top[texts.tokenizer.decode([other])] = logprob_of(token, rank)
        tops.append(top)
    choice.decoded = offset
    return {
        "text_offset": offsets,
        "token_logprobs": [logprob_of(token) for token in tokens],
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
    for token in choice.plan.tokens[first : first + count]:
        chosen = entry(token, logprob_of(token))
        top = [entry(token, logprob_of(token))] if wanted else []
        top += [
            entry(other, logprob_of(token, rank))
            for rank, other in enumerate(others(token, wanted - 1, words), 1)
        ]
        content.append({**chosen, "top_logprobs": top})
    return {"content": content}
