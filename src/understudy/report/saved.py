"""Read reports that `--json` wrote, and check the fields that are compared."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.errors import InvalidArgument
from understudy.report.groups import Groups
from understudy.report.report import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

_MAX_DEPTH = 100
"""Limit on nested settings, ten times the depth of real reports."""


def read_report(path: str | PathLike[str], metrics: Iterable[str]) -> dict[str, Any]:
    """Read a report and check that its `metrics` (dotted names) are numbers or null.

    InvalidArgument names the file and the invalid field.
    """
    try:
        content: Any = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"cannot read report {path}: {error}") from error
    family = SCHEMA.rpartition("/")[0]
    report: dict[str, Any] = content if isinstance(content, dict) else {}
    schema = report.get("schema")
    if not isinstance(schema, str) or not schema.startswith(f"{family}/"):
        raise InvalidArgument(f"{path} is not a report; write one with `understudy replay … --json {path}`")
    try:
        if schema != SCHEMA:
            raise InvalidArgument(
                f"schema must be {SCHEMA}, got {reprlib.repr(schema)}; write the report again"
            )
        _check_run(report)
        if report.get("groups") is not None:
            Groups.read(report["groups"])
        for number, verdict in enumerate(_require_list(report, "verdicts", "verdicts")):
            for name in ("finding", "remedy"):
                _check_text(verdict, f"verdicts[{number}]", name)
        for metric in metrics:
            _check_metric(report, metric)
        for name, value in report.items():
            if isinstance(value, dict) and "p50" in value:
                _check_distribution(value, name)
    except InvalidArgument as error:
        raise InvalidArgument(f"report {path}: {error}") from None
    return report


def _check_run(report: dict[str, Any]) -> None:
    run = _require_object(report.get("run"), "run")
    _check_depth(run)
    for name in ("digest", "workload_digest"):
        if not isinstance(run.get(name), str | None):
            raise InvalidArgument(_describe(run[name], f"run.{name}", "text"))
    for place, note in enumerate(_require_list(run, "notes", "run.notes")):
        if not isinstance(note, str):
            raise InvalidArgument(_describe(note, f"run.notes[{place}]", "text"))
    _check_engine(run, "run")
    for place, pool in enumerate(_require_list(run, "pools", "run.pools")):
        _check_engine(_require_object(pool, f"run.pools[{place}]"), f"run.pools[{place}]")
    times = run.get("times")
    if times is not None:
        _check_text(times, "run.times", "from")
        for name in ("outside_domain_share", "front_end_ms"):
            _check_number(times.get(name), f"run.times.{name}")


def _check_engine(holder: dict[str, Any], place: str) -> None:
    if holder.get("engine") is not None:
        _require_object(holder["engine"], f"{place}.engine")


def _check_distribution(values: dict[str, Any], name: str) -> None:
    for part, value in values.items():
        if value is not None:
            _check_number(value, f"{name}.{part}")


def _check_depth(run: dict[str, Any]) -> None:
    level: list[Any] = [run]
    for _ in range(_MAX_DEPTH):
        nested = (value.values() if isinstance(value, dict) else value for value in level)
        level = [one for values in nested for one in values if isinstance(one, dict | list)]
        if not level:
            return
    raise InvalidArgument(f"run has settings nested more than {_MAX_DEPTH} deep")


def _check_metric(report: dict[str, Any], metric: str) -> None:
    root, _, name = metric.partition(".")
    value = report.get(root)
    if root in ("goodput", "worst_hour") and value is None:
        return  # no objective was set; the arrivals span less than two hours
    if name:
        inside = _require_object(value, root)
        if name not in inside:
            raise InvalidArgument(f"{metric} is missing")
        value = inside[name]
        if value is None:
            return  # a mean of no values is null
    _check_number(value, metric)


def _require_object(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise InvalidArgument(_describe(value, name, "an object"))


def _require_list(holder: dict[str, Any], name: str, place: str) -> list[Any]:
    value = holder.get(name, [])
    if isinstance(value, list):
        return value
    raise InvalidArgument(_describe(value, place, "a list"))


def _check_text(holder: Any, place: str, name: str) -> None:
    value = _require_object(holder, place).get(name)
    if not isinstance(value, str):
        raise InvalidArgument(_describe(value, f"{place}.{name}", "text"))


def _check_number(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(_describe(value, name, "a number"))
    if abs(value) > 1e300:
        raise InvalidArgument(f"{name} must be at most 1e300, got {reprlib.repr(value)}")


def _describe(value: Any, name: str, expected: str) -> str:
    return f"{name} is missing" if value is None else f"{name} must be {expected}, got {reprlib.repr(value)}"
