"""An answer of a form, and the refusal of one."""

from __future__ import annotations

from typing import NamedTuple

from understudy.errors import InvalidArgument

MAX_CHARACTERS = 1 << 17
"""No answer is longer."""


class FormError(InvalidArgument):
    """A form that the library refuses, or for which no answer was found."""


class Formed(NamedTuple):
    """An answer of a form. `has_ended` is False if only its beginning was made."""

    text: str
    has_ended: bool = True
    steps: int = 0
    """Steps that it took to make, of about 10 microseconds."""
