"""Reports that `--json` wrote, read back: what is compared is checked by name."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.errors import InvalidArgument
from understudy.report.report import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

_DEPTH = 100
"""Of settings inside settings; a report of ours has a tenth."""


def read_report(path: str | PathLike[str], metrics: Iterable[str]) -> dict[str, Any]:
    """The report that a file holds, whose `metrics` (dotted names) are numbers or null.

    InvalidArgument names the file, and the field that no report has so.
    """
    try:
        content: Any = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"cannot read report {path}: {error}") from error
    family = SCHEMA.rpartition("/")[0]
    report: dict[str, Any] = content if isinstance(content, dict) else {}
    schema = report.get("schema")
    if not isinstance(schema, str) or not schema.startswith(f"{family}/"):
        raise InvalidArgument(f"{path} is no report: write one with `understudy replay … --json {path}`")
    try:
        if schema != SCHEMA:
            raise InvalidArgument(
                f"schema must be {SCHEMA}, got {reprlib.repr(schema)}; write the report again"
            )
        _check_run(report)
        for number, verdict in enumerate(_list(report, "verdicts")):
            for name in ("finding", "remedy"):
                _text(verdict, f"verdicts[{number}]", name)
        for metric in metrics:
            _check_metric(report, metric)
    except InvalidArgument as error:
        raise InvalidArgument(f"report {path}: {error}") from None
    return report


def _check_run(report: dict[str, Any]) -> None:
    run = _object(report.get("run"), "run")
    _check_depth(run)
    times = run.get("times")
    if times is not None:
        _text(times, "run.times", "from")
        for name in ("outside_domain_share", "front_end_ms"):
            _number(times.get(name), f"run.times.{name}")


def _check_depth(run: dict[str, Any]) -> None:
    here: list[Any] = [run]
    for _ in range(_DEPTH):
        nested = (value.values() if isinstance(value, dict) else value for value in here)
        here = [one for values in nested for one in values if isinstance(one, dict | list)]
        if not here:
            return
    raise InvalidArgument(f"run has settings inside of settings, more than {_DEPTH} deep")


def _check_metric(report: dict[str, Any], metric: str) -> None:
    root, _, name = metric.partition(".")
    value = report.get(root)
    if root == "goodput" and value is None:
        return  # no goal was set
    if name:
        inside = _object(value, root)
        if name not in inside:
            raise InvalidArgument(f"{metric} is missing")
        value = inside[name]
        if value is None:
            return  # such as the mean of nothing
    _number(value, metric)


def _object(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise InvalidArgument(_wrong(value, name, "an object"))


def _list(report: dict[str, Any], name: str) -> list[Any]:
    value = report.get(name, [])
    if isinstance(value, list):
        return value
    raise InvalidArgument(_wrong(value, name, "a list"))


def _text(of: Any, place: str, name: str) -> None:
    value = _object(of, place).get(name)
    if not isinstance(value, str):
        raise InvalidArgument(_wrong(value, f"{place}.{name}", "text"))


def _number(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(_wrong(value, name, "a number"))
    if abs(value) > 1e300:
        raise InvalidArgument(f"{name} must be at most 1e300, got {reprlib.repr(value)}")


def _wrong(value: Any, name: str, wanted: str) -> str:
    return f"{name} is missing" if value is None else f"{name} must be {wanted}, got {reprlib.repr(value)}"
