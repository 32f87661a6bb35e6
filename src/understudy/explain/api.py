"""`understudy.explain`: why requests of a run were slow, from Python."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from understudy.checks import whole_number
from understudy.errors import InvalidArgument, WrongState
from understudy.explain.describe import explain_requests
from understudy.explain.saved_run import SavedRun, read_run
from understudy.explain.text import print_explanation
from understudy.explain.waterfall import Waterfalls
from understudy.text import plural

if TYPE_CHECKING:
    import os

_LINE_WIDTH = 120


class HasSavedRun(Protocol):
    """A report; reports are of a later room."""

    @property
    def saved(self) -> SavedRun | None:
        """The run with every step; None if its steps were not kept."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Latencies of requests, split into parts that add up to them; times are in ns."""

    content: dict[str, Any]
    """Plain JSON values; docs/schema/explain.json is their schema."""

    @property
    def requests(self) -> list[dict[str, Any]]:
        """One entry per request: its times, the router's choice, parts and spans."""
        found: list[dict[str, Any]] = self.content["requests"]
        return found

    @property
    def parts_ns(self) -> dict[str, int]:
        """Parts of all these latencies together, by name."""
        found: dict[str, int] = self.content["parts"]
        return found

    @property
    def misses(self) -> dict[str, Any] | None:
        """Causes of missed prompt tokens in the whole run; None if they were not asked for."""
        return self.content.get("misses")

    def to_json(self) -> bytes:
        """Return the explanation as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self.content), indent=2) + b"\n"

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        print_explanation(self.content, Console(file=text, width=_LINE_WIDTH, highlight=False, markup=False))
        return text.getvalue().rstrip("\n")

    def __repr__(self) -> str:
        total = max(self.content["latency_ns"], 1)
        parts = sorted(self.parts_ns.items(), key=lambda part: -part[1])[:3]
        shares = ", ".join(f"{name} {value / total:.0%}" for name, value in parts)
        return f"<Explanation of {plural(len(self.requests), 'request')}: {shares}; print it for all>"


def explain(
    run: SavedRun | HasSavedRun | str | os.PathLike[str],
    *,
    request: str | int | None = None,
    slowest: int = 20,
    misses: bool = False,
) -> Explanation:
    """Split latencies of a run into parts that add up to them: waits, chunks, preemptions, loads and steps.

    Parameters:
        run: path of the file that a replay saved (`Outputs.save_run`), or the report of a replay that kept its steps
            (`Execution(keep_steps=True)`).
        request: one request, by its id in the trace or its row; default: the slowest ones.
        slowest: number of slowest requests.
        misses: also say why prompt tokens were not in the cache, by cause.

    Errors: InvalidArgument for a file that is no saved run, or a request that did not end; WrongState for a report
    without its steps.

    Example:
        report = us.replay("trace.jsonl", execution=us.Execution(keep_steps=True))
        print(us.explain(report, slowest=3))
    """
    whole_number("slowest", slowest, 1)
    saved = _find_run(run)
    rows = [saved.find(str(request))] if request is not None else Waterfalls(saved).slowest(slowest)
    explained = explain_requests(saved, rows, misses=misses)
    if not explained["requests"]:
        which = "no request" if request is None else f"request {request} did not arrive, and so"
        raise InvalidArgument(f"{which} ended; there is no latency to explain")
    return Explanation(explained)


def _find_run(run: SavedRun | HasSavedRun | str | os.PathLike[str]) -> SavedRun:
    if isinstance(run, SavedRun):
        return run
    if hasattr(run, "saved"):
        if run.saved is None:
            raise WrongState(
                "run: this report has no steps; replay with execution=us.Execution(keep_steps=True)"
            )
        return run.saved
    return read_run(run)
