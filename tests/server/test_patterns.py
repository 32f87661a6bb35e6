"""Patterns match the texts that Python's `re` matches."""

from __future__ import annotations

import re
import warnings
from random import Random

from understudy.server.api.structured.errors import Steps
from understudy.server.api.structured.pattern import PatternReader
from understudy.server.api.structured.regex import Expressions

ATOMS = (
    *(
        "a",
        "b",
        "c",
        "ab",
        ".",
        r"\.",
        r"\d",
        r"\D",
        r"\w",
        r"\S",
        r"\x61",
        r"\u0062",
        r"\141",
        r"\N{DIGIT ONE}",
        "1",
    ),
    *(
        "[ab]",
        "[^ab]",
        "[a-c]",
        "[]a]",
        "[^]a]",
        "[a-]",
        r"[\d-]",
        r"[\w.]",
        r"[\x61-\143]",
        r"[\]\\]",
        "[a-c1]",
    ),
    *(
        "{",
        "}",
        "{,}",
        "a{",
        "{a}",
        "-",
        "(?#c)",
        "(?i:A)",
        "(?-i:a)",
        "()",
        "(?:)",
        r"\n",
        r"\t",
        r"\\",
        " ",
        "]",
    ),
)
SIGNS = ("", "", "", "*", "+", "?", "*?", "{2}", "{1,2}", "{,2}", "{1,}", "{0}", "+?", "(?#c)*")
LETTERS = "aabbccA1.-{}]\\ \n,"


def draw_pattern(rng: Random, depth: int = 3) -> str:
    parts = []
    for _ in range(rng.randint(1, 3)):
        part = rng.choice(ATOMS)
        if depth and rng.random() < 0.4:
            inner = draw_pattern(rng, depth - 1)
            part = rng.choice((f"({inner})", f"(?:{inner})", f"(?:{inner}|{draw_pattern(rng, depth - 1)})"))
        parts.append(part + rng.choice(SIGNS))
    return "".join(parts)


def test_patterns_match_what_re_matches() -> None:
    rng = Random(1)
    compared = matched = 0
    while compared < 3000:
        pattern = draw_pattern(rng)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compiled = re.compile(pattern)
        except re.error:
            continue
        expressions = Expressions()
        try:
            read = PatternReader(expressions).read(pattern, whole=True, steps=Steps())
        except ValueError as error:
            if "possessive" not in str(error):
                raise
            continue
        for _ in range(8):
            text = "".join(rng.choices(LETTERS, k=rng.randrange(5)))
            expected = compiled.fullmatch(text) is not None
            assert expressions.matches(read.node, text, Steps()) == expected, (pattern, text)
            compared, matched = compared + 1, matched + expected
    assert matched > 300
