"""Read rows of constant rates by stage (BLIS)."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from understudy.calibrate.experiment import Experiment, build_engine_config
from understudy.calibrate.load import constant_stages
from understudy.calibrate.row_settings import check_requests, read_limits, read_weight_type
from understudy.errors import InvalidArgument
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import find_gpu

if TYPE_CHECKING:
    from understudy.calibrate.table_row import TableRow

_MAX_STAGE_S = 600.0
COLUMNS = (
    *(
        "exp_id",
        "model",
        "hardware",
        "tp",
        "dtype",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_model_len",
    ),
    *("prompt_tokens", "max_tokens", "stage_rates_per_s", "stage_seconds", "distinct_prompts"),
    *("client_output_tokens", "ttft_ms", "itl_ms", "e2e_ms"),
)
"""Columns that are read."""


def read_stages(row: TableRow) -> Experiment:
    """Build the experiment of a row. Errors: ConfigError or InvalidArgument."""
    model = find_architecture(row.text("model"))
    deployment = Deployment(
        model=model,
        gpu=find_gpu(row.text("hardware")),
        weights=read_weight_type(row, model, "dtype"),
        parallel=Parallelism(tensor=row.count("tp", 1)),
    )
    rates, seconds = row.numbers("stage_rates_per_s"), row.numbers("stage_seconds")
    if len(rates) != len(seconds):
        raise InvalidArgument(
            f"{row.where}: stage_rates_per_s has {len(rates)} stages, but stage_seconds has {len(seconds)}"
        )
    max_tokens = row.count("max_tokens")
    counted = row.text("client_output_tokens", default="")
    # A few minutes of a steady load are enough: shorten all stages by one factor.
    longest = max(seconds)
    seconds = [one * min(1.0, _MAX_STAGE_S / longest) for one in seconds]
    check_requests(row, "stage_rates_per_s", sum(map(operator.mul, rates, seconds)))
    load = constant_stages(
        row.count("prompt_tokens"),
        max_tokens,
        rates_per_s=rates,
        stage_seconds=seconds,
        distinct_prompts=row.count("distinct_prompts"),
    )
    return Experiment(
        name=row.text("exp_id"),
        deployment=deployment,
        engine=build_engine_config(
            deployment,
            **read_limits(row),
            max_model_len=row.count("max_model_len") if row.text("max_model_len", default="") else None,
            enable_prefix_caching=True,
        ),
        loads=(load,),
        measured=row.measured("ttft_ms", "itl_ms", "e2e_ms"),
        where=row.where,
        client_output_tokens=row.number("client_output_tokens") if counted else float(max_tokens),
    )
