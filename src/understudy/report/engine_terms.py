"""The kinds of a run's engines, so that a report names what its reader can set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.engines.kinds.registry import default_kind, kind_of_saved, list_kinds
from understudy.report.verdict import list_pools

if TYPE_CHECKING:
    from understudy.engines.kinds.kind import EngineKind
    from understudy.engines.kinds.terms import EngineTerms
    from understudy.report.data import ReportData


def kind_of_run(report: ReportData) -> EngineKind:
    """Return the kind of all engines of a run; the default kind if they differ."""
    kinds = _list_kinds_of(report)
    return kinds[0] if len(kinds) == 1 else default_kind()


def terms_of(report: ReportData) -> EngineTerms:
    """Return the terms of a run's engines; those of the default kind if the kinds differ."""
    return kind_of_run(report).terms


def flags_of(report: ReportData, what: str) -> str:
    """Return the flags for `memory`, `requests` or `step`; with several kinds of engine, the flags of each."""
    kinds = _list_kinds_of(report)
    if len(kinds) > 1:
        return " and ".join(f"{getattr(kind.terms, what)} ({kind.title})" for kind in kinds)
    return str(getattr(terms_of(report), what))


def _list_kinds_of(report: ReportData) -> list[EngineKind]:
    names = {kind_of_saved(pool.engine).name for pool in list_pools(report)}
    return [kind for kind in list_kinds() if kind.name in names]
