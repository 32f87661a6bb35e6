"""Step times interpolated from op tables: measured microseconds of kernels by size.

Reads the layout of LLMServingSim's profiles, one folder per tensor-parallel size (tp1, tp2; or their parent folder):

    dense.csv         layer, tokens, time_us                linear and elementwise kernels of a layer
    attention.csv     prefill_chunk, kv_prefill, n_decode, kv_decode, time_us      attention of a layer
    per_sequence.csv  layer, sequences, time_us             head and sampling, once per step
    moe.csv           tokens, activated_experts, time_us    experts of a layer, for models with experts

Files are plain or gzipped. `meta.yaml` in the parent folder names the model and has the measured cost of uneven
contexts. The tables contain kernel times only; an engine that schedules ahead hides its other work behind the kernels,
so no overhead is added.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import yaml

from understudy._core import OpTable, op_table_timing
from understudy.errors import ConfigError
from understudy.timing.coefficients import CAPTURES
from understudy.timing.known_models import known_model

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from understudy._core import StepTiming
    from understudy.timing.architecture import Architecture
    from understudy.timing.deployment import Deployment
    from understudy.timing.efficiencies import Efficiencies

_ONCE = ("embedding", "final_layernorm")
_TWICE = ("layernorm",)
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


class OpTables:
    """The op tables of one folder. ConfigError names the file and the missing column."""

    def __init__(
        self,
        folder: Path,
        deployment: Deployment,
        efficiencies: Efficiencies,
        *,
        extrapolate: bool = False,
    ) -> None:
        """Read the tables; communication between GPUs comes from the physical model with `efficiencies`."""
        model = deployment.model
        folder = _find_folder(folder, deployment.parallel.tensor)
        meta = _read_meta(folder)
        _check_model(folder, meta, model)
        dense = _read_csv(folder, "dense", ("layer", "tokens", "time_us"))
        sequences = _read_csv(folder, "per_sequence", ("layer", "sequences", "time_us"))
        attention = _read_csv(folder, "attention", (*_ATTENTION, "time_us"))
        points = {tuple(map(int, row[:4])): row[4] for row in attention}
        powers = {at: us for at, us in points.items() if all(_is_power(number) for number in at)}
        experts = None
        if model.num_experts:
            moe = _read_csv(folder, "moe", ("tokens", "activated_experts", "time_us"))
            table = {(int(row[0]), int(row[1])): row[2] for row in moe}
            experts = _build_table("moe", ("tokens",), _experts_by_tokens(table, deployment), extrapolate)
        # moe.csv includes the routing time.
        coefficients = deployment.coefficients(msgspec.structs.replace(efficiencies, routing_ns=0.0))
        self._parts: dict[str, Any] = {
            "layer": _build_table(
                "dense", ("tokens",), _sum_by_size(dense, _ONCE, inside=False), extrapolate
            ),
            "once": _build_table("dense", ("tokens",), _sum_by_size(dense, _ONCE, inside=True), extrapolate),
            "head": _build_table(
                "per_sequence", ("sequences",), _sum_by_size(sequences, (), inside=False), extrapolate
            ),
            "prompts": _build_table(
                "attention",
                _ATTENTION[:2],
                {at[:2]: us for at, us in powers.items() if not at[2]},
                extrapolate,
            ),
            "decodes": _build_table(
                "attention",
                _ATTENTION[2:],
                {at[2:]: us for at, us in powers.items() if not at[0]},
                extrapolate,
            ),
            "mixed": _build_table(
                "attention", _ATTENTION, {at: us for at, us in powers.items() if at[0] and at[2]}, extrapolate
            ),
            "experts": experts,
            "layers": model.num_layers,
            "skew": _read_skew(folder, meta),
            "ranks": deployment.parallel.data,
            "comm_ms": (coefficients.comm_ms, coefficients.comm_token_ms, coefficients.comm_rank_token_ms),
            "captures": CAPTURES,
        }

    def build(self) -> StepTiming:
        """Build the native timing model."""
        return op_table_timing(**self._parts)


def _build_table(
    name: str, axes: tuple[str, ...], points: dict[tuple[int, ...], float], extrapolate: bool
) -> OpTable:
    """Arrange the points of a table as a grid; unmeasured points are NaN."""
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
    """Return the time of a layer's experts by tokens of all ranks, at the expected number of activated experts."""
    model, parallel = deployment.model, deployment.parallel
    grid = _build_table("moe", ("tokens", "activated_experts"), dict(_fill_holes(table).items()), True)
    local = model.num_experts / parallel.expert
    share = model.experts_per_token / model.num_experts
    points = {}
    for tokens in sorted({at[0] for at in table}):
        activated = max(local * (1 - (1 - share) ** tokens), 1.0)
        points[tokens] = grid.us([max(tokens / parallel.expert, 1.0), activated])
    if len(points) < 2:
        raise ConfigError("op tables: moe has rows for one number of tokens; at least two are needed")
    *_, before, last = sorted(points)
    # Add a point at twice the tokens: all experts are active by then, so the slope stays constant.
    points[2 * last] = points[last] + (points[last] - points[before]) / (last - before) * last
    return {(tokens,): us for tokens, us in points.items()}


def _fill_holes(table: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Fill impossible points (few tokens, many experts) with the time of the next larger batch."""
    tokens, experts = (sorted({at[axis] for at in table}) for axis in (0, 1))
    full = dict(table)
    for count in experts:
        known = [(at, table[at, count]) for at in tokens if (at, count) in table]
        for at in tokens:
            larger = next((value for size, value in known if size >= at), None)
            if larger is None:
                raise ConfigError(
                    f"op tables: moe has no row with activated_experts={count} for tokens={at} or more"
                )
            full.setdefault((at, count), larger)
    return full


def _sum_by_size(rows: list[_Row], once: tuple[str, ...], *, inside: bool) -> dict[tuple[int, ...], float]:
    """Sum times by size over the kernels that are (or are not) in `once`; layernorm runs twice per layer."""
    points: dict[tuple[int, ...], float] = {}
    for name, size, value in rows:
        if (name in once) == inside:
            at = (int(size),)
            points[at] = points.get(at, 0.0) + value * (2 if name in _TWICE else 1)
    return points or {(1,): 0.0}


def _find_folder(folder: Path, tensor: int) -> Path:
    """Return the folder with the tables of a tensor-parallel size: `folder` or its subfolder (tp2)."""
    if (folder / f"tp{tensor}").is_dir():
        return folder / f"tp{tensor}"
    named = folder.name.removeprefix("tp")
    if named != folder.name and named.isdigit() and int(named) != tensor:
        raise ConfigError(
            f"op tables: {folder} is for tensor_parallel_size={named}, not {tensor}; give the folder tp{tensor} "
            "or its parent"
        )
    sizes = sorted(path.name for path in folder.glob("tp[0-9]*") if path.is_dir())
    if sizes and not (folder / "dense.csv").exists() and not (folder / "dense.csv.gz").exists():
        raise ConfigError(f"op tables: {folder} has {', '.join(sizes)}, but no tp{tensor}")
    return folder


def _read_meta(folder: Path) -> dict[str, Any]:
    """Read `meta.yaml` in the parent folder; empty if there is none."""
    path = folder.parent / "meta.yaml"
    if not path.exists():
        return {}
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"op tables: {path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"op tables: {path}: must be a mapping at the top level")
    return found


def _check_model(folder: Path, meta: dict[str, Any], model: Architecture) -> None:
    """Raise ConfigError if the tables name a known model with another architecture."""
    try:
        theirs = known_model(str(meta["model"]))
    except (KeyError, ConfigError):
        return
    names = (
        "num_layers",
        "hidden_size",
        "num_heads",
        "kv_heads",
        "head_dim",
        "num_experts",
        "intermediate_size",
    )
    if any(getattr(theirs, name) != getattr(model, name) for name in names):
        raise ConfigError(
            f"op tables: {folder.parent / 'meta.yaml'}: model is {meta['model']}, but {model.name} has another "
            "architecture; give that model, or the tables of this one"
        )


def _read_skew(folder: Path, meta: dict[str, Any]) -> float:
    """Return the weight of the longest context, against the mean, in the time of decodes with uneven contexts."""
    try:
        found = meta.get("skew_fit", {})
        if not found.get("enabled"):
            return 0.0
        return float(found["per_tp"][int(folder.name.removeprefix("tp"))]["alpha_default"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"op tables: {folder.parent / 'meta.yaml'}: skew_fit: {error!r}") from error


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


_Row = list[Any]
"""Cells in the requested order; `layer` is text, the others are numbers."""


def _read_csv(folder: Path, name: str, columns: tuple[str, ...]) -> list[_Row]:
    found = next(
        (path for path in (folder / f"{name}.csv", folder / f"{name}.csv.gz") if path.exists()), None
    )
    if found is None:
        raise ConfigError(f"op tables: {folder} has no {name}.csv (or .csv.gz)")
    try:
        raw = found.read_bytes()
        text = (gzip.decompress(raw) if found.suffix == ".gz" else raw).decode("utf-8-sig")
        lines = list(csv.reader(io.StringIO(text)))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"op tables: {found}: {error}; it may be truncated") from error
    header = lines[0] if lines else []
    missing = [column for column in columns if column not in header]
    if missing:
        raise ConfigError(f"op tables: {found}: column {missing[0]} is missing")
    order = [header.index(column) for column in columns]
    rows = [
        [_read_cell(f"{found}:{number}", column, row, at) for column, at in zip(columns, order, strict=True)]
        for number, row in enumerate(lines[1:], 2)
        if row
    ]
    if not rows:
        raise ConfigError(f"op tables: {found} has no row below its header")
    return rows


def _read_cell(where: str, column: str, row: list[str], at: int) -> str | float:
    if at >= len(row):
        raise ConfigError(f"op tables: {where}: {column} is missing; the file may be truncated")
    if column == "layer":
        return row[at]
    try:
        value = float(row[at])
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"op tables: {where}: {column} must be a finite number from 0, got {row[at]}")
    return value
