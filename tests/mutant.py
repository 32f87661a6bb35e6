"""`Mutant`: a fault of one line in the core."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """In place of the only `was` of `file` stands `becomes`, whose FAULT is true while the mutant is on: one
    of `tests` must fail then."""

    name: str
    file: str
    was: str
    becomes: str
    tests: str
