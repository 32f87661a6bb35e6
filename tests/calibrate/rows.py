"""Rows of tables of experiments, and files of them."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

from understudy.calibrate.predict import Prediction, predict_table

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.calibrate.tables import Table

ROW = {
    "key": "a",
    "stratum": "x",
    "system": "h100_sxm",
    "model_path": "meta-llama/Llama-3.1-8B",
    "quant": "bf16",
    "kv_cache_dtype": "bf16",
    "isl": "1024",
    "osl": "128",
    "conc": "4.0",
    "tp_size": "1.0",
    "moe_ep_size": "1.0",
    "max_num_batched_tokens": "8192",
    "max_num_seqs": "4",
}
STAGES = {
    "exp_id": "7",
    "stratum": "fit",
    "model": "llama8b",
    "hardware": "h100_sxm",
    "tp": "1",
    "max_num_batched_tokens": "2048",
    "max_num_seqs": "128",
    "max_model_len": "4096",
    "dtype": "fp16",
    "prompt_tokens": "575",
    "max_tokens": "48",
    "stage_rates_per_s": "4 8",
    "stage_seconds": "5 5",
    "distinct_prompts": "5",
    "client_output_tokens": "40",
}

SMALL_ROW = {**ROW, "isl": "32", "osl": "3", "conc": "1", "moe_tp_size": ""}
SMALL_STAGES = {
    **STAGES,
    "prompt_tokens": "32",
    "max_tokens": "3",
    "stage_rates_per_s": "2",
    "stage_seconds": "1",
}


def table(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def predicted(rows: Table) -> list[dict[str, float]]:
    return [result.means for result in predict_table(rows) if isinstance(result, Prediction)]
