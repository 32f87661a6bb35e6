"""Step times from op tables: microseconds of kernels by shape, as a profiler wrote them, interpolated.

Reads the layout of LLMServingSim's profiles, one folder a size of tensor parallelism:

    dense.csv         layer, tokens, time_us                of a layer's linear and elementwise kernels
    attention.csv     prefill_chunk, kv_prefill, n_decode, kv_decode, time_us      of a layer
    per_sequence.csv  layer, sequences, time_us             of the head and of sampling, once a step
    moe.csv           tokens, activated_experts, time_us    of a layer's experts, where it has some

each plain or gzipped; `meta.yaml` in the folder above says how uneven contexts were found to cost. The tables hold
kernels alone, launched one by one; an engine that schedules ahead hides the rest behind them, so nothing is added.
"""

from __future__ import annotations

import csv
import gzip
import io
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import yaml

from understudy._core import OpTable, op_table_timing
from understudy.errors import ConfigError
from understudy.timing.coefficients import CAPTURES

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from understudy._core import StepTiming
    from understudy.timing.deployment import Deployment
    from understudy.timing.efficiencies import Efficiencies

_ONCE = ("embedding", "final_layernorm")
_TWICE = ("layernorm",)
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


class OpTables:
    """The tables of one folder. ConfigError names the file and the column that is missing."""

    def __init__(
        self,
        folder: Path,
        deployment: Deployment,
        reached: Efficiencies,
        *,
        extrapolate: bool = False,
    ) -> None:
        """Read them. Communication between GPUs is the physical model's, with `reached`."""
        model = deployment.model
        dense = _read(folder, "dense", ("layer", "tokens", "time_us"))
        sequences = _read(folder, "per_sequence", ("layer", "sequences", "time_us"))
        attention = _read(folder, "attention", (*_ATTENTION, "time_us"))
        points = {tuple(int(float(value)) for value in row[:4]): float(row[4]) for row in attention}
        powers = {at: us for at, us in points.items() if all(_is_power(number) for number in at)}
        experts = None
        if model.num_experts:
            moe = _read(folder, "moe", ("tokens", "activated_experts", "time_us"))
            table = {(int(row[0]), int(row[1])): float(row[2]) for row in moe}
            experts = _table("moe", ("tokens",), _experts_by_tokens(table, deployment), extrapolate)
        coefficients = deployment.coefficients(msgspec.structs.replace(reached, routing_ns=0.0))  # in moe.csv
        self._parts: dict[str, Any] = {
            "layer": _table("dense", ("tokens",), _summed(dense, _ONCE, inside=False), extrapolate),
            "once": _table("dense", ("tokens",), _summed(dense, _ONCE, inside=True), extrapolate),
            "head": _table("per_sequence", ("sequences",), _summed(sequences, (), inside=False), extrapolate),
            "prompts": _table(
                "attention",
                _ATTENTION[:2],
                {at[:2]: us for at, us in powers.items() if not at[2]},
                extrapolate,
            ),
            "decodes": _table(
                "attention",
                _ATTENTION[2:],
                {at[2:]: us for at, us in powers.items() if not at[0]},
                extrapolate,
            ),
            "mixed": _table(
                "attention", _ATTENTION, {at: us for at, us in powers.items() if at[0] and at[2]}, extrapolate
            ),
            "experts": experts,
            "layers": model.num_layers,
            "skew": _skew(folder),
            "ranks": deployment.parallel.data,
            "comm_ms": (coefficients.comm_ms, coefficients.comm_token_ms, coefficients.comm_rank_token_ms),
            "captures": CAPTURES,
        }

    def build(self, speedup_ratio: float = 1.0, decode_speedup_ratio: float = 1.0) -> StepTiming:
        """The native model."""
        return op_table_timing(
            **self._parts, speedup_ratio=speedup_ratio, decode_speedup_ratio=decode_speedup_ratio
        )


def _table(
    name: str, axes: tuple[str, ...], points: dict[tuple[int, ...], float], extrapolate: bool
) -> OpTable:
    """Points of a table as a grid; where none was measured there is a hole."""
    if not points:
        raise ConfigError(f"op tables: {name} has no row for {', '.join(axes)}")
    at = [sorted({point[axis] for point in points}) for axis in range(len(axes))]
    us: NDArray[np.float64] = np.full([len(axis) for axis in at], np.nan)
    for point, value in points.items():
        us[tuple(axis.index(one) for axis, one in zip(at, point, strict=True))] = value
    return OpTable(name, (list(zip(axes, at, strict=True)), us.ravel().tolist()), extrapolate)


def _experts_by_tokens(
    table: dict[tuple[int, int], float], deployment: Deployment
) -> dict[tuple[int, ...], float]:
    """Time of a layer's experts by tokens of all ranks: so many of the experts of this GPU are met."""
    model, parallel = deployment.model, deployment.parallel
    grid = _table("moe", ("tokens", "activated_experts"), dict(_filled(table).items()), True)
    local = model.num_experts / parallel.expert
    share = model.experts_per_token / model.num_experts
    points = {}
    for tokens in sorted({at[0] for at in table}):
        met = max(local * (1 - (1 - share) ** tokens), 1.0)
        points[tokens] = grid.us([max(tokens / parallel.expert, 1.0), met])
    *_, before, last = sorted(points)
    # Twice as many tokens still meet experts that are all there is to meet: they go on as before.
    points[2 * last] = points[last] + (points[last] - points[before]) / (last - before) * last
    return {(tokens,): us for tokens, us in points.items()}


def _filled(table: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Few tokens cannot meet many experts: such points take what the next larger batch takes."""
    tokens, experts = (sorted({at[axis] for at in table}) for axis in (0, 1))
    full = dict(table)
    for count in experts:
        known = [(at, table[at, count]) for at in tokens if (at, count) in table]
        for at in tokens:
            full.setdefault((at, count), next(value for size, value in known if size >= at))
    return full


def _summed(rows: list[list[str]], once: tuple[str, ...], *, inside: bool) -> dict[tuple[int, ...], float]:
    """Time by size over all kinds of rows that are (or are not) in `once`; some run twice a layer."""
    points: dict[tuple[int, ...], float] = {}
    for name, size, value in rows:
        if (name in once) == inside:
            at = (int(size),)
            points[at] = points.get(at, 0.0) + float(value) * (2 if name in _TWICE else 1)
    return points or {(1,): 0.0}


def _skew(folder: Path) -> float:
    """Of decodes with uneven contexts: how far to go from the time at the mean context to that at the longest."""
    path = folder.parent / "meta.yaml"
    if not path.exists():
        return 0.0
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))["skew_fit"]
        if not found.get("enabled"):
            return 0.0
        return float(found["per_tp"][int(folder.name.removeprefix("tp"))]["alpha_default"])
    except (
        OSError,
        UnicodeDecodeError,
        yaml.YAMLError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        raise ConfigError(f"op tables: {path}: skew_fit: {error!r}") from error


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def _read(folder: Path, name: str, columns: tuple[str, ...]) -> list[list[str]]:
    found = next(
        (path for path in (folder / f"{name}.csv", folder / f"{name}.csv.gz") if path.exists()), None
    )
    if found is None:
        raise ConfigError(f"op tables: {folder} has no {name}.csv (or .csv.gz)")
    try:
        raw = found.read_bytes()
        text = (gzip.decompress(raw) if found.suffix == ".gz" else raw).decode("utf-8")
        reader = csv.reader(io.StringIO(text))
        header = next(reader, [])
        missing = [column for column in columns if column not in header]
        if missing:
            raise ConfigError(f"op tables: {found}: column {missing[0]} is missing")
        order = [header.index(column) for column in columns]
        rows = [[row[at] for at in order] for row in reader if row]
        for number, row in enumerate(rows, 2):
            if not (float(row[-1]) >= 0):
                raise ConfigError(f"op tables: {found}:{number}: time_us must not be negative, got {row[-1]}")
    except (OSError, EOFError, UnicodeDecodeError, ValueError, IndexError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"op tables: {found}: {error}") from error
    if not rows:
        raise ConfigError(f"op tables: {found} has no row below its header")
    return rows
