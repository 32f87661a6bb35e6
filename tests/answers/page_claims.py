"""Claims of a page about what its commands print: quoted lines, and bold figures in its text.

- A ```text block quotes commands that stand before it in the same section. `…` stands for what was left out.
- A bold phrase in the text of a section occurs in the output of the section's commands.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

FENCED = re.compile(r"^```(\w*)\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)
BOLD = re.compile(r"\*\*(.+?)\*\*", re.DOTALL)
FREE = re.compile(r"`[^`]*`|!?\[[^]]*\]\([^)]*\)|\*\*.+?\*\*|\b[A-Z]+[a-z]*\d+[-\w.]*", re.DOTALL)
"""Parts of a text whose digits are no figures to check: code, links, checked figures, and names such as H200."""


class Part(NamedTuple):
    """A fenced block of a section (`sh`, `text`, …), or text between two of them (no language)."""

    language: str
    text: str


def split_sections(page: str) -> Iterator[tuple[str, list[Part]]]:
    """Yield each heading with the parts below it."""
    hidden = FENCED.sub(lambda match: re.sub(r"(?m)^#", "\0", match[0]), page)
    for section in re.split(r"(?m)^(?=#+ )", hidden):
        heading, _, body = section.replace("\0", "#").partition("\n")
        pieces = FENCED.split(body)
        parts = [Part("", pieces[0])]
        for language, block, text in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            parts += [Part(language, block), Part("", text)]
        yield heading, parts


class Claim(NamedTuple):
    """What a page says is printed, with the text around it."""

    text: str
    context: str


def list_claims(parts: list[Part]) -> Iterator[Claim]:
    """Yield what the parts claim to be printed: pieces of quoted lines, and bold figures."""
    for part in parts:
        if part.language == "text":
            for line in part.text.splitlines():
                yield from (Claim(piece.strip(), line) for piece in line.split("…") if piece.strip())
        elif not part.language:
            for found in BOLD.finditer(part.text):
                yield Claim(found[1], part.text[max(found.start() - 120, 0) : found.end() + 120])


def find_difference(claim: Claim, printed: str) -> str | None:
    """Return what is printed in place of a claim, None if the claim is printed. Line ends and spaces do not count."""
    words = re.escape(" ".join(claim.text.split()))
    if re.search(rf"(?<![\d.,]){words}(?!\d|[.,]\d)", " ".join(printed.split())):
        return None
    around = set(re.findall(r"[^\W\d]{3,}", claim.context.lower()))

    def likeness(line: str) -> tuple[int, float]:
        common = around & set(re.findall(r"[^\W\d]{3,}", line.lower()))
        return len(common), difflib.SequenceMatcher(None, claim.context, line).ratio()

    lines = [" ".join(line.split()) for line in printed.splitlines() if line.strip()]
    return max(lines, key=likeness, default="nothing")


def find_unchecked(parts: list[Part]) -> list[str]:
    """Return the words of a text whose figures no command is asked for."""
    text = "\n".join(part.text for part in parts if not part.language)
    return re.findall(r"\S*\d\S*", FREE.sub("", text))


def describe_differences(heading: str, parts: list[Part], printed: str) -> list[str]:
    """Return a line for each claim of a section that its commands did not print, with what they did."""
    return [
        f"{heading}: the page says\n    {claim.text}\n  printed is\n    {found}"
        for claim in list_claims(parts)
        if (found := find_difference(claim, printed)) is not None
    ]
