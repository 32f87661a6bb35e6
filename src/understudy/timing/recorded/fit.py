"""Fit a timing model to recorded steps of the real engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.errors import InvalidArgument
from understudy.timing.recorded.shapes import Shape, is_short, is_uneven, parts_of, shape_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from understudy._core import StepLoad

KINDS = ("decode", "mixed", "eager")
"""Kinds of steps: graphs without prompts, graphs with prompts, and kernels launched one by one."""
_NAMES = {"decode": "that only decode", "mixed": "with prompts"}
_MIN_STEPS = 8


@dataclass(frozen=True, slots=True)
class FittedStepTime:
    """Step times, linear per kind of step in the tokens read and computed and in the padded rows."""

    terms: dict[str, tuple[float, ...]]
    launches: dict[str, float]
    """Host milliseconds to launch a step, by kind; then the host publishes the outputs of the previous step."""
    most: tuple[int, int, int] = (0, 0, 0)
    """Largest prompt tokens, decodes and context tokens of the fitted steps."""

    @classmethod
    def fit(
        cls, steps: Sequence[tuple[StepLoad, float]], launches: Iterable[tuple[StepLoad, float]] = ()
    ) -> FittedStepTime:
        """Fit by least squares of relative errors with non-negative terms; outliers are left out.

        Eager steps may be missing: the fit of mixed steps is used for them. InvalidArgument if there are too few steps
        of a kind.
        """
        kinds: dict[str, list[tuple[StepLoad, float]]] = {kind: [] for kind in KINDS}
        for step, ms in steps:
            kinds[kind_of(step)].append((step, ms))
        for kind, name in _NAMES.items():
            if len(kinds[kind]) < _MIN_STEPS:
                raise InvalidArgument(
                    f"a fit needs at least {_MIN_STEPS} steps {name}, got {len(kinds[kind])}; record a longer run"
                )
        terms = {
            kind: _fit_robustly([_TERMS[kind](step) for step, _ in rows], [ms for _, ms in rows])
            for kind, rows in kinds.items()
            if len(rows) >= _MIN_STEPS
        }
        terms.setdefault("eager", terms["mixed"])
        began: dict[str, list[float]] = {}
        for step, ms in launches:
            began.setdefault(kind_of(step), []).append(ms)
        sizes = zip(*(_sizes(step) for step, _ in steps), strict=True)
        prompts, decodes, contexts = (max(size) for size in sizes)
        means = {kind: float(np.mean(times)) for kind, times in began.items()}
        return cls(terms, means, (prompts, decodes, contexts))

    def step_ms(self, step: StepLoad, /) -> float:
        """Return the time of a step in milliseconds."""
        kind = kind_of(step)
        return float(np.dot(self.terms[kind], _TERMS[kind](step)))

    def covers(self, step: StepLoad, /) -> bool:
        """Whether the step is no larger than the fitted ones."""
        return all(size <= most for size, most in zip(_sizes(step), self.most, strict=True))

    def launch_ms(self, step: StepLoad, /) -> float:
        """Return the host's time to launch a step, in milliseconds."""
        return min(self.launches.get(kind_of(step), 0.0), self.step_ms(step))


def kind_of(step: StepLoad) -> str:
    """Return the kind of a step, one of `KINDS`."""
    prompts = sum(tokens for tokens, _ in step.chunks)
    if not step.chunks or is_short(prompts, step.decodes):
        return "decode" if shape_of(0, 0, step.tokens) is not None else "eager"
    return "mixed" if shape_of(prompts, len(step.chunks), step.decodes) is not None else "eager"


def _decode_terms(step: StepLoad) -> list[float]:
    # In a short step each token of a chunk is computed as a decode of the tokens before it.
    rows = sum(tokens * history + tokens * (tokens + 1) / 2 for tokens, history in step.chunks)
    longest = max(step.longest_context, max((sum(chunk) for chunk in step.chunks), default=0))
    uneven = is_uneven(step.tokens, step.context_tokens + int(rows), longest)
    size = (shape_of(0, 0, step.tokens) or Shape(0, step.tokens)).decode_rows
    return [
        *(1.0, float(size > 1), float(min(size, 16)), float(min(max(size - 16, 0), 48)), float(max(size - 64, 0))),
        *(float(step.decodes), float(step.context_tokens - _shared(step)), float(_shared(step))),
        *(float(rows), longest / parts_of(size, uneven=uneven).most, float(uneven * size)),
        *(float(len(step.chunks)), float(not getattr(step, "ahead", True))),
    ]  # fmt: skip


def _mixed_terms(step: StepLoad) -> list[float]:
    prompts = sum(tokens for tokens, _ in step.chunks)
    shape = shape_of(prompts, len(step.chunks), step.decodes)
    rows = step.tokens if shape is None else shape.tokens
    behind = sum(chunk * history for chunk, history in step.chunks)
    own = sum(chunk * chunk for chunk, _ in step.chunks) / 2
    longest = max((sum(chunk) for chunk in step.chunks), default=0)
    if shape is None:
        uneven = is_uneven(step.decodes, step.context_tokens, step.longest_context)
        parts = parts_of(max(step.decodes, 1), uneven=uneven)
    else:
        parts = parts_of(max(shape.decode_rows, 1), uneven=shape.in_parts)
    return [
        *(1.0, float(min(rows, 256)), float(max(rows - 256, 0)), float(behind), float(own), float(longest)),
        *(float(len(step.chunks)), float(step.decodes), float(step.context_tokens - _shared(step))),
        float(_shared(step)),
        step.longest_context / parts.most,
    ]  # fmt: skip


def _sizes(step: StepLoad) -> tuple[int, int, int]:
    return step.tokens - step.decodes, step.decodes, step.context_tokens


def _shared(step: StepLoad) -> int:
    """Return the shared context tokens; 0 for steps of a simulated engine, which has only lengths."""
    return getattr(step, "shared_tokens", 0)


_TERMS = {"decode": _decode_terms, "mixed": _mixed_terms, "eager": _mixed_terms}


def _fit_robustly(rows: list[list[float]], times: list[float]) -> tuple[float, ...]:
    terms, wanted = np.array(rows), np.array(times)
    keep = np.ones(len(wanted), bool)
    for _ in range(3):
        solution = _least_squares(terms[keep], wanted[keep])
        off = wanted / np.maximum(terms @ solution, 1e-6) - 1
        spread = float(np.median(np.abs(off[keep]))) or 1e-6
        keep = np.abs(off) < max(0.05, 6 * spread)
        if keep.sum() < _MIN_STEPS:
            break
    # Outliers will occur again: scale the fit so that the total time is kept.
    share = float(wanted.sum() / max((terms @ solution).sum(), 1e-9))
    return tuple(float(value * share) for value in solution)


def _least_squares(
    terms: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    weight = 1.0 / np.maximum(wanted, 1e-3)
    keep = np.ones(terms.shape[1], bool)
    solution: npt.NDArray[np.float64] = np.zeros(terms.shape[1])
    while keep.any():
        scale = np.abs(terms[:, keep]).max(axis=0).clip(min=1e-12)
        found = (
            np.linalg.lstsq(terms[:, keep] / scale * weight[:, None], wanted * weight, rcond=None)[0] / scale
        )
        solution = np.zeros(terms.shape[1])
        solution[keep] = found
        if (found >= 0).all():
            break
        keep[np.flatnonzero(keep)[(found * scale).argmin()]] = False
    return solution
