"""Read rows of closed loops with random lengths (InferenceX)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from understudy.calibrate.experiment import THROUGHPUT, Experiment, count_draws
from understudy.calibrate.load import random_lengths
from understudy.calibrate.row_engine import (
    ENGINE_COLUMNS,
    build_row_engine,
    read_backend,
    read_captures,
)
from understudy.calibrate.row_settings import check_requests, read_weight_type
from understudy.calibrate.row_speculation import read_speculation
from understudy.context_parallel import refuse_context_parallel
from understudy.defaults import LEAST_LENGTH
from understudy.errors import InvalidArgument
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import find_gpu

if TYPE_CHECKING:
    from understudy.calibrate.table_row import TableRow
    from understudy.timing.architecture import Architecture

_PROMPTS_PER_SLOT = 10
_CONTEXT = ("dcp_size", "cp_size")
COLUMNS = (
    *(
        "key",
        "system",
        "model_path",
        "quant",
        "precision",
        "kv_cache_dtype",
        "isl",
        "osl",
        "conc",
        "num_prompts",
    ),
    *("least_length", "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "pp_size"),
    *_CONTEXT,
    *ENGINE_COLUMNS,
    *("ttft_ms", "tpot_ms", *THROUGHPUT),
)
"""Columns that are read."""


def read_closed_loop(row: TableRow) -> Experiment:
    """Build the experiment of a row. Errors: ConfigError or InvalidArgument."""
    model = find_architecture(row.text("model_path"))
    deployment = Deployment(
        model=model,
        gpu=find_gpu(row.text("system")),
        weights=read_weight_type(row, model, "quant", "precision"),
        kv=row.text("kv_cache_dtype", default="auto"),
        parallel=_read_parallelism(row, model),
    )
    backend = read_backend(row)
    speculation = read_speculation(row, backend, deployment)
    concurrency, prompts = _read_concurrency(row)
    check_requests(row, "conc", prompts)
    loads = tuple(
        random_lengths(
            row.count("isl"),
            row.count("osl"),
            least=row.share("least_length", LEAST_LENGTH),
            concurrency=concurrency,
            prompts=prompts,
            seed=seed,
        )
        for seed in range(count_draws(concurrency, prompts))
    )
    return Experiment(
        name=row.text("key"),
        deployment=deployment,
        engine=build_row_engine(row, deployment, speculation.config),
        loads=loads,
        measured=row.measured("ttft_ms", "tpot_ms", *THROUGHPUT),
        release=row.text("backend_version", default=""),
        backend=backend,
        captures=read_captures(row),
        notes=speculation.notes,
        where=row.where,
    )


def _read_parallelism(row: TableRow, model: Architecture) -> Parallelism:
    """Read the parallel sizes; experts on more GPUs than a rank has mean several ranks."""
    refuse_context_parallel({name: row.count(name, 1) for name in _CONTEXT})
    tensor, ranks, stages = (
        row.count("tp_size", 1),
        row.count("attention_dp_size", 0),
        row.count("pp_size", 1),
    )
    if not model.num_experts:
        if ranks > 1:
            raise InvalidArgument(
                f"{row.where}: attention_dp_size={ranks} is for experts that ranks share, and {model.name} has none; "
                "give the load of one rank, and leave it out"
            )
        return Parallelism(tensor=tensor, pipeline=stages)
    expert = row.count("moe_ep_size", 1)
    sharded = max(tensor * max(ranks, 1) // expert, 1)
    gpus = row.count("moe_tp_size", sharded) * expert
    if gpus % tensor:
        raise InvalidArgument(
            f"{row.where}: moe_tp_size · moe_ep_size = {gpus} is not a multiple of tp_size={tensor}"
        )
    if ranks > 1 and gpus != tensor * ranks:
        raise InvalidArgument(
            f"{row.where}: attention_dp_size={ranks} ranks of tp_size={tensor} have {ranks * tensor} GPUs, but "
            f"moe_tp_size · moe_ep_size = {gpus}; correct one of them"
        )
    return Parallelism(tensor=tensor, data=gpus // tensor, expert=expert, pipeline=stages)


def _read_concurrency(row: TableRow) -> tuple[int, int]:
    """Return slots and prompts: of the columns, else the concurrency in the key (..._c64_...) and ten per slot.

    A row with prompts and without a concurrency sends all at once.
    """
    named = re.search(r"_c(\d+)(?:_|#|$)", row.text("key"))
    prompts = row.count("num_prompts", 0)
    slots = row.count("conc", int(named[1]) if named else prompts or None)
    return slots, prompts or _PROMPTS_PER_SLOT * slots
