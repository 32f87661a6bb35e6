"""Match names of GPUs and models: equal up to case and separators, never by a part of them."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_SEPARATORS = re.compile(r"[-_\s]+")
_BETWEEN_DIGITS = re.compile(r"(?<=\d)-(?=\d)")


def name_key(name: str) -> str:
    """Return what two spellings of one name share: lower case, and hyphens between digits only.

    RTX4090, rtx_4090 and RTX-4090 are equal; Qwen2.5-7B and Qwen2-57B, or Llama-2-7B and Llama-27B, are not.
    """
    hyphens = _SEPARATORS.sub("-", name.strip().lower())
    return _BETWEEN_DIGITS.sub("\0", hyphens).replace("-", "").replace("\0", "-")


def nearest_names(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` of `names` that resemble `name`, best first."""
    key = name_key(name)
    likeness = [(SequenceMatcher(None, key, name_key(one)).ratio(), one) for one in names]
    return [one for ratio, one in sorted(likeness, key=lambda pair: -pair[0])[:count] if ratio >= 0.6]


def unknown_name(what: str, known: Iterable[str], name: str) -> str:
    """Return "`what`; nearest are …", or "`what`; known are …" where no known name resembles `name`."""
    names = list(dict.fromkeys(known))
    near = nearest_names(name, names)
    return f"{what}; nearest are {', '.join(near)}" if near else f"{what}; known are {', '.join(names)}"
