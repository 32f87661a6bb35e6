"""The result of a sweep, as text and as JSON."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.errors import ConfigError
from understudy.run.facts import TimeFacts
from understudy.run.times import format_times
from understudy.sweep.answer import Answer, find_answers, share_variance
from understudy.sweep.commands import make_commands
from understudy.sweep.cost import Cost
from understudy.sweep.manifest import write_manifest
from understudy.version import __version__

if TYPE_CHECKING:
    from understudy.report.goodput import Slo
    from understudy.sweep.space import Point, Space
    from understudy.sweep.trials import Trial, Trials

SCHEMA = "understudy.sweep/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """All trials of a sweep and what follows from them."""

    workload: str
    workload_digest: str
    requests: int
    slo: Slo
    goal: float
    """Share of requests that must meet the objectives."""
    goal_window_s: float | None = None
    """Length of the windows in each of which the goal must hold; None for the whole alone."""
    space: Space
    search: str
    has_prices: bool
    trials: tuple[Trial, ...]
    invalid: dict[Point, str]
    failed: dict[Point, str]
    answers: tuple[Answer, ...]
    variance: dict[str, float]
    found: int
    """Outcomes that the store had."""
    ran: int
    """Outcomes computed by this sweep."""
    cpu_s: float
    wall_s: float
    notes: tuple[str, ...] = ()

    @classmethod
    def build(cls, trials: Trials, *, goal: float, **facts: Any) -> Sweep:
        """Find answers, front and influence of the flags among the trials on the whole workload."""
        whole = tuple(trials.whole[point] for point in sorted(trials.whole))
        return cls(
            goal=goal,
            space=trials.space,
            requests=trials.requests,
            trials=whole,
            invalid=dict(sorted(trials.invalid.items())),
            failed=dict(sorted(trials.failed.items())),
            answers=tuple(find_answers(whole, goal)),
            variance=share_variance(trials.space, whole),
            found=trials.found,
            ran=trials.ran,
            cpu_s=trials.cpu_s,
            **facts,
        )

    @property
    def objectives(self) -> dict[str, float]:
        """Limits of the objectives that are set, ms, by name."""
        limits = {name: getattr(self.slo, name) for name in ("ttft_ms", "itl_ms", "e2e_ms")}
        return {name: limit for name, limit in limits.items() if limit is not None}

    @property
    def times(self) -> list[str]:
        """Sources of the step times of all trials, each once."""
        models: list[Any] = []
        for trial in self.trials:
            settings = trial.candidate.settings
            for each in settings.pools or (settings,):
                if each.engine.timing not in models:
                    models.append(each.engine.timing)
        facts = (TimeFacts(model.describe_origin(), 0.0, model.front_end_ms) for model in models)
        return list(dict.fromkeys(map(format_times, facts)))

    def count_reasons(self) -> list[tuple[str, int, Point]]:
        """Return the reasons of invalid combinations, how many have each, and the first that has it."""
        counts = Counter(self.invalid.values())
        first: dict[str, Point] = {}
        for point, reason in self.invalid.items():
            first.setdefault(reason, point)
        return [(reason, count, first[reason]) for reason, count in counts.most_common()]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON values; docs/schema/sweep.json is its schema."""
        return {
            "schema": SCHEMA,
            "understudy": __version__,
            "workload": self.workload,
            "workload_digest": self.workload_digest,
            "requests": self.requests,
            "objectives": self.objectives,
            "goal": self.goal,
            "goal_window_s": self.goal_window_s,
            "times": self.times,
            "space": self.space.to_dict(),
            "search": self.search,
            "answers": [self._describe_answer(answer) for answer in self.answers],
            "variance": self.variance,
            "notes": list(self.notes),
            "found": self.found,
            "ran": self.ran,
            "cpu_s": self.cpu_s,
            "wall_s": self.wall_s,
            "trials": [self._describe(trial) for trial in self.trials],
            "invalid": self._describe_errors(self.invalid),
            "failed": self._describe_errors(self.failed),
        }

    def to_json(self) -> bytes:
        """Return the result as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self.to_dict()), indent=2) + b"\n"

    def to_manifest(self) -> bytes:
        """Return the Kubernetes manifest of the first answer. ConfigError if no fleet meets the goal."""
        best = self.answers[0].best if self.answers else None
        if best is None:
            raise ConfigError(
                "--manifest: no fleet of the space meets the goal; widen --vary or lower the goal"
            )
        return write_manifest(best.candidate).encode()

    def _describe_answer(self, answer: Answer) -> dict[str, Any]:
        def describe(trial: Trial | None) -> dict[str, Any] | None:
            return None if trial is None else {**self._describe(trial), "margin": trial.judged - self.goal}

        return {
            "load": answer.load,
            "best": describe(answer.best),
            "smaller": describe(answer.smaller),
            "front": [self._describe(trial) for trial in answer.front],
        }

    def _describe(self, trial: Trial) -> dict[str, Any]:
        cost = Cost.of(trial) if self.has_prices else None
        commands = make_commands(trial.candidate)
        return {
            "flags": trial.flags,
            "gpus": trial.gpus,
            "cost_per_hour": None if cost is None else cost.per_hour,
            "cost_per_month": None if cost is None else cost.per_month,
            "cost_per_million_tokens": None if cost is None else cost.per_million_tokens,
            "cost_per_million_output_tokens": None if cost is None else cost.per_million_output_tokens,
            "cpu_s": trial.cpu_s,
            "engines": [
                {
                    "name": each.name,
                    "engines": each.size.engines,
                    "ranks": each.size.ranks,
                    "gpus": each.size.gpus,
                    "command": shlex.join(each.words),
                }
                for each in commands.engines
            ],
            "commands": commands.lines(),
            "not_in_commands": commands.not_expressed,
            **msgspec.to_builtins(trial.summary),
        }

    def _describe_errors(self, errors: dict[Point, str]) -> list[dict[str, Any]]:
        return [{"flags": self.space.values(point), "reason": reason} for point, reason in errors.items()]
