"""Makes `merges.txt` from `words.txt`: plain byte-pair merges until every word, with a space before it, is one token.

Run after a change of the words: `python tools/train_tokenizer.py`. It changes the ids of all tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

_HERE = Path(__file__).parents[1] / "src" / "understudy" / "server" / "tokenizer"


def learn_merges(words: list[str]) -> list[tuple[str, str]]:
    """Learn merges in the order of their rank. Earlier words count more; ties go to the lesser pair."""
    pieces: Counter[tuple[str, ...]] = Counter()
    for place, word in enumerate(words):
        weight = 1 + 20_000 // (place + 10)
        pieces[tuple(f" {word}")] += 4 * weight
        pieces[tuple(word)] += weight
        pieces[tuple(word.capitalize())] += weight
        pieces[tuple(f" {word.capitalize()}")] += weight
    for digits in range(100):
        pieces[tuple(str(digits))] += 50
    must = {tuple(f" {word}") for word in words}
    pairs: Counter[tuple[str, str]] = Counter()
    where: defaultdict[tuple[str, str], set[tuple[str, ...]]] = defaultdict(set)
    for symbols, weight in pieces.items():
        for pair in pairwise(symbols):
            pairs[pair] += weight
            where[pair].add(symbols)
    merges: list[tuple[str, str]] = []
    while must:
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for symbols in where.pop(best):
            weight = pieces.pop(symbols)
            for pair in pairwise(symbols):
                pairs[pair] -= weight
                where[pair].discard(symbols)
            merged = _merge(symbols, best)
            pieces[merged] += weight
            for pair in pairwise(merged):
                pairs[pair] += weight
                where[pair].add(merged)
            if symbols in must:
                must.discard(symbols)
                if len(merged) > 1:
                    must.add(merged)
        del pairs[best]
    return merges


def _merge(symbols: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    if pair[0] not in symbols or pair[1] not in symbols:
        return symbols
    out: list[str] = []
    place = 0
    while place < len(symbols):
        if place + 1 < len(symbols) and (symbols[place], symbols[place + 1]) == pair:
            out.append(pair[0] + pair[1])
            place += 2
        else:
            out.append(symbols[place])
            place += 1
    return tuple(out)


def main() -> None:
    """Write the merges, one per line, with `_` for a space."""
    words = (_HERE / "words.txt").read_text().split()
    lines = (f"{left} {right}\n" for left, right in _named(learn_merges(words)))
    (_HERE / "merges.txt").write_text("".join(lines))


def _named(merges: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(left.replace(" ", "_"), right.replace(" ", "_")) for left, right in merges]


if __name__ == "__main__":
    main()
