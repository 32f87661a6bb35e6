"""`TableRow`: one row of a table of experiments, whose cells are read by column."""

from __future__ import annotations

import math
import re

from understudy.errors import InvalidArgument

_MAX_COUNT = 10_000_000
_EMPTY = ("nan", "none", "null", "na", "n/a", "<na>", "-")
"""Texts that mean an empty cell."""


class TableRow:
    """One row, and where it is: cells by column, read as what they should be."""

    def __init__(self, where: str, cells: dict[str, str]) -> None:
        self.where = where
        self.cells = cells

    def text(self, name: str, *others: str, default: str | None = None) -> str:
        """Return the first non-empty cell of these columns."""
        for column in (name, *others):
            if value := self._cell(column):
                return value
        if default is None:
            written = (self.cells.get(name) or "").strip()
            what = f"{written!r}, which means empty" if written else "empty"
            raise InvalidArgument(f"{self.where}: {name} is {what}; fill the cell")
        return default

    def number(self, name: str) -> float:
        """Return a number above 0."""
        return self._number(name, self.text(name))

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number; the default for an empty cell."""
        if default is not None and not self._cell(name):
            return default
        value = self.number(name)
        if value != int(value) or value > _MAX_COUNT:
            raise InvalidArgument(
                f"{self.where}: {name} must be a whole number up to {_MAX_COUNT:,}, got {value:g}; "
                "correct the cell"
            )
        return int(value)

    def share(self, name: str, default: float) -> float:
        """Return a share in (0, 1]; the default for an empty cell."""
        if not self._cell(name):
            return default
        value = self.number(name)
        if value > 1:
            raise InvalidArgument(
                f"{self.where}: {name} must be a share of at most 1, got {value:g}; for {value:g} % write "
                f"{value / 100:g}"
            )
        return value

    def numbers(self, name: str, *, or_zero: bool = False) -> list[float]:
        """Return the numbers of a cell, above 0, separated by spaces, commas, semicolons or bars; at least one."""
        parts = [part for part in re.split(r"[\s,;|\[\]]+", self.text(name)) if part]
        if not parts:
            raise InvalidArgument(f"{self.where}: {name} has no number; write some, separated by spaces")
        return [self._number(name, part, or_zero=or_zero) for part in parts]

    def counts(self, name: str) -> list[int]:
        """Return the whole numbers of a cell, written like `numbers`."""
        values = self.numbers(name)
        if any(value != int(value) or value > _MAX_COUNT for value in values):
            raise InvalidArgument(
                f"{self.where}: {name} must be whole numbers up to {_MAX_COUNT:,}, got {self.text(name)}; correct the "
                "cell"
            )
        return [int(value) for value in values]

    def measured(self, *names: str) -> dict[str, str]:
        """Return the non-empty cells of measurements, unparsed, because predictions do not depend on them."""
        return {name: self._cell(name) for name in names if self._cell(name)}

    def _cell(self, name: str) -> str:
        """Return the text of a cell; empty for spreadsheet words such as nan."""
        text = (self.cells.get(name) or "").strip()
        return "" if text.lower() in _EMPTY else text

    def _number(self, name: str, text: str, *, or_zero: bool = False) -> float:
        try:
            value = float(text)
        except ValueError:
            raise InvalidArgument(
                f"{self.where}: {name} must be a number, got {text!r}; correct the cell"
            ) from None
        if not (math.isfinite(value) and (value > 0 or (or_zero and value == 0))):
            least = "at least" if or_zero else "above"
            raise InvalidArgument(
                f"{self.where}: {name} must be finite and {least} 0, got {text}; correct the cell"
            )
        return value
