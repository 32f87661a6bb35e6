"""Reader of CSVs of summaries, one closed loop per row, as InferenceX publishes them."""

from __future__ import annotations

import csv
import io

from understudy.calibrate.benchmark import DRAWS, Benchmark, Fields
from understudy.calibrate.load import random_lengths
from understudy.defaults import LEAST_LENGTH
from understudy.errors import InvalidArgument

_NAMES = {
    "isl": ("isl", "input_len", "input_tokens"),
    "osl": ("osl", "output_len", "output_tokens"),
    "conc": ("conc", "concurrency", "max_concurrency"),
    "ttft_ms": ("mean_ttft_ms", "ttft_ms"),
    "tpot_ms": ("mean_tpot_ms", "tpot_ms"),
}
_ENGINE = {
    "max_num_seqs": ("max_num_seqs",),
    "max_num_batched_tokens": ("max_num_batched_tokens",),
    "tensor_parallel_size": ("tensor_parallel_size", "tp_size", "tp"),
}
_PROMPTS_PER_SLOT = 10


def read(source: tuple[str, str], where: str, text: str, least_length: float | None) -> list[Benchmark]:
    """Read all rows; lengths are uniform from `least_length` (default: 0.8) of the nominal length on."""
    try:
        rows = list(csv.DictReader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise InvalidArgument(f"{where}: {error}") from error
    if not rows:
        raise InvalidArgument(f"{where} has no row below its header")
    return [
        _read_row(source, f"{where}:{number}", row, LEAST_LENGTH if least_length is None else least_length)
        for number, row in enumerate(rows, 2)
    ]


def _read_row(source: tuple[str, str], where: str, row: dict[str, str], least: float) -> Benchmark:
    fields = Fields(where, {})
    values = {name: _read_number(fields, row, names) for name, names in _NAMES.items()}
    missing = [name for name, value in values.items() if value is None]
    if missing:
        wanted = " or ".join(_NAMES[missing[0]])
        raise InvalidArgument(f"{where}: {wanted} is missing; lengths, concurrency and both times are needed")
    found = {name: value for name, value in values.items() if value is not None}
    for name in ("isl", "osl", "conc"):
        if found[name] < 1 or found[name] != int(found[name]):
            raise InvalidArgument(
                f"{where}: {name} must be a whole number of at least 1, got {found[name]:g}"
            )
    concurrency = int(found["conc"])
    load, *others = (
        random_lengths(
            int(found["isl"]),
            int(found["osl"]),
            least=least,
            concurrency=concurrency,
            prompts=_PROMPTS_PER_SLOT * concurrency,
            seed=seed,
        )
        for seed in range(DRAWS)
    )
    engine = {name: _read_number(fields, row, names) for name, names in _ENGINE.items()}
    return Benchmark(
        file=f"{source[0]}:{where.rpartition(':')[2]}",
        sha256=source[1],
        format="CSV of summaries",
        load=load,
        other_draws=tuple(others),
        means={"ttft_ms": found["ttft_ms"], "tpot_ms": found["tpot_ms"]},
        engine={name: int(value) for name, value in engine.items() if value is not None},
    )


def _read_number(fields: Fields, row: dict[str, str], names: tuple[str, ...]) -> float | None:
    for name in names:
        text = (row.get(name) or "").strip()
        if text:
            try:
                value = float(text)
            except ValueError:
                raise InvalidArgument(f"{fields.where}: {name} must be a number, got {text!r}") from None
            return fields.as_number(name, value, 1e-9)
    return None
