"""Read rows of offline throughput, as TensorRT-LLM publishes it: all requests at once, tokens per second and GPU."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from understudy.calibrate.closed_loop_rows import read_closed_loop
from understudy.calibrate.table_row import TableRow
from understudy.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from understudy.calibrate.experiment import Experiment

NEEDS = ("model", "gpu", "parallel", "isl", "osl", "num_prompts", "output_tok_s_per_gpu")
COLUMNS = (*NEEDS, "key", "weights", "kv_cache_dtype", "backend", "backend_version")
"""Columns that are read."""
_SIZES = re.compile(r"(DEP|TP|PP|EP)(\d+)", re.IGNORECASE)
_OWN_NAMES = {"RTX6000": "RTX PRO 6000"}
"""Names of GPUs in TensorRT-LLM's table that mean another GPU elsewhere."""


def name_row(cells: Mapping[str, str | None]) -> str:
    """Return the name of a row: its key, or what was measured."""
    names = ("model", "gpu", "parallel", "weights")
    lengths = "x".join((cells.get(name) or "").strip() for name in ("isl", "osl"))
    return (cells.get("key") or "").strip() or " ".join(
        [*((cells.get(name) or "").strip() for name in names), lengths]
    )


def read_offline(row: TableRow) -> Experiment:
    """Build the experiment of a row. Errors: ConfigError or InvalidArgument."""
    gpu = row.text("gpu")
    known = _OWN_NAMES.get(gpu, gpu)
    cells = {
        "key": row.text("key"),
        "model_path": row.text("model"),
        "system": known,
        "quant": row.text("weights", default=""),
        "kv_cache_dtype": row.text("kv_cache_dtype", default=""),
        "backend": row.text("backend", default="trtllm"),
        "backend_version": row.text("backend_version", default=""),
        "isl": row.text("isl"),
        "osl": row.text("osl"),
        "num_prompts": row.text("num_prompts"),
        "least_length": "1",
        **_read_sizes(row),
    }
    found = read_closed_loop(TableRow(row.where, cells))
    notes = found.notes if known == gpu else (*found.notes, f"{gpu} read as {known}")
    return msgspec.structs.replace(found, notes=notes, measured=row.measured("output_tok_s_per_gpu"))


def _read_sizes(row: TableRow) -> dict[str, str]:
    """Return the parallel sizes of `TP4`, `TP2PP2` or `DEP8`: attention data parallel, experts on all GPUs."""
    text = row.text("parallel")
    sizes = {name.upper(): size for name, size in _SIZES.findall(text)}
    if not sizes or re.sub(r"[\s,_x+-]", "", _SIZES.sub("", text)):
        raise InvalidArgument(
            f"{row.where}: parallel must be sizes such as TP4, TP2PP2, TP8EP8 or DEP8, got {text!r}; correct the cell"
        )
    if (every := sizes.get("DEP")) is not None:
        if set(sizes) & {"TP", "EP"}:
            raise InvalidArgument(
                f"{row.where}: parallel={text!r} gives the GPUs twice, because DEP spreads attention and experts over "
                "all of them; write DEP alone"
            )
        return {"tp_size": "1", "attention_dp_size": every, "moe_tp_size": "1", "moe_ep_size": every}
    found = {"tp_size": sizes.get("TP", "1"), "pp_size": sizes.get("PP", "1")}
    return found | ({"moe_ep_size": sizes["EP"]} if "EP" in sizes else {})
