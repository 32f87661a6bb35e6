"""Cells of a result's table, for the page and the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.result import BenchmarkResult, Column, Goal, Number, ResultRow

SIGNIFICANT_DIGITS = 4
"""Of a measured number in a column that does not say its decimals."""


def format_number(number: Number, decimals: int | None) -> str:
    """Return a number, or a range, with separators of thousands."""
    if isinstance(number, tuple):
        return " to ".join(format_number(one, decimals) for one in number)
    if number < 0:
        return f"−{format_number(-number, decimals)}"
    if isinstance(number, int):
        return f"{number:,}"
    if decimals is not None:
        return f"{number:,.{decimals}f}"
    whole, point, rest = f"{number:.12f}".rstrip("0").rstrip(".").partition(".")
    return f"{int(whole):,}{point}{rest}"


def round_number(number: Number, decimals: int | None) -> Number:
    """Return a measured number with the digits that its column keeps."""
    if isinstance(number, tuple):
        low, high = (round_number(one, decimals) for one in number)
        assert not isinstance(low, tuple)
        assert not isinstance(high, tuple)
        return low, high
    if isinstance(number, int):
        return number
    return round(number, decimals) if decimals is not None else float(f"{number:.{SIGNIFICANT_DIGITS}g}")


def format_goal(goal: Goal) -> str:
    """Return the bound of a goal."""
    sign = "≥" if goal.at_most is None else "≤"
    return f"{sign} {format_number(goal.limit, 0 if goal.limit == int(goal.limit) else None)}"


def format_cell(row: ResultRow, column: Column) -> str:
    """Return a number with its goal in brackets; bold if it misses the goal, empty if the row has none."""
    number = row.numbers.get(column.name)
    if number is None:
        return ""
    text, goal = format_number(number, column.decimals), row.goals.get(column.name)
    if goal is None:
        return text
    text = text if goal.is_met(number) else f"**{text}**"
    return f"{text} ({format_goal(goal)})"


def format_heads(result: BenchmarkResult) -> list[str]:
    """Return the heads of all columns: names, units, and which numbers were recorded elsewhere."""
    heads = [result.rows_are, *(["unit"] if has_units(result) else [])]
    for column in shown_columns(result):
        head = f"{column.name}, {column.unit}" if column.unit else column.name
        heads.append(f"{head} (recorded elsewhere)" if column.recorded_elsewhere else head)
    return heads


def format_row(result: BenchmarkResult, row: ResultRow) -> list[str]:
    """Return all cells of a row."""
    units = [row.unit] if has_units(result) else []
    return [row.name, *units, *(format_cell(row, column) for column in shown_columns(result))]


def shown_columns(result: BenchmarkResult) -> list[Column]:
    """Return the columns that have a number."""
    return [column for column in result.columns if any(column.name in row.numbers for row in result.rows)]


def has_units(result: BenchmarkResult) -> bool:
    """Return whether rows have units of their own."""
    return any(row.unit for row in result.rows)
