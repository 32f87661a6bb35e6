"""Check whole-number arguments: Python and numpy integers are accepted, bools and floats are not."""

from __future__ import annotations

import operator

from understudy.errors import InvalidArgument, UnderstudyError


def count(name: str, value: object, least: int = 0, error: type[UnderstudyError] = InvalidArgument) -> int:
    """Return `value` as an int of at least `least`, else raise `error`, naming the argument."""
    if not isinstance(value, bool):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
        else:
            if number >= least:
                return number
    raise error(f"{name} must be an int of at least {least}, got {value!r}")
