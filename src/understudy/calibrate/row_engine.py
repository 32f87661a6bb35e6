"""Read the engine that a row of a closed loop ran with: vLLM, SGLang or TensorRT-LLM, and its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.calibrate.experiment import build_engine_config
from understudy.calibrate.row_settings import read_limits
from understudy.defaults import STATIC_SHARE
from understudy.engines.kinds.registry import default_kind, find_kind
from understudy.errors import InvalidArgument
from understudy.kind_names import KIND_MODULES
from understudy.timing.coefficients import captures_up_to
from understudy.timing.engine_names import find_engine_name

if TYPE_CHECKING:
    from understudy.calibrate.table_row import TableRow
    from understudy.engines.engine_config import EngineConfig
    from understudy.engines.speculation import SpeculativeConfig
    from understudy.timing.deployment import Deployment

_CAPTURES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
ENGINE_COLUMNS = (
    *("backend", "backend_version", "max_num_batched_tokens", "max_num_seqs", "block_size", "num_gpu_blocks"),
    *("gpu_memory_utilization", "speculation", "acceptance_per_position", *_CAPTURES),
)
"""Columns of an engine that are read."""


def read_backend(row: TableRow) -> str:
    """Return the engine that a row names: vllm (the default), sglang or trtllm."""
    return find_engine_name(row.text("backend", default="vllm"))


def build_row_engine(
    row: TableRow, deployment: Deployment, speculation: SpeculativeConfig | None
) -> EngineConfig:
    """Configure the engine of a row; its prefix cache is off, because no two prompts share a prefix.

    An engine whose times were not fitted with its own rules, or whose speculation is not simulated, gets those of the
    default kind.
    """
    backend, release = read_backend(row), row.text("backend_version", default="")
    settings = read_limits(row)
    settings |= {
        name: row.count(name) for name in ("block_size", "num_gpu_blocks") if row.text(name, default="")
    }
    own = find_kind(backend) if backend in KIND_MODULES else None
    own = own if own is not None and own.runs_measured_rows else None
    kind = default_kind() if own is None or (speculation is not None and not own.speculates) else own
    usual = STATIC_SHARE if own is None else own.config_class.find_memory_share(release)
    share = row.share("gpu_memory_utilization", usual)
    if (step_tokens := settings.pop("max_num_batched_tokens", None)) is not None:
        settings[kind.terms.step_setting] = step_tokens
    if speculation is not None:
        settings["speculative_config"] = speculation
    settings |= kind.without_cache
    return build_engine_config(deployment, gpu_memory_utilization=share, engine=kind.name, **settings)


def read_captures(row: TableRow) -> tuple[int, ...] | None:
    """Return the sizes of captured graphs that a row gives, as a list or by the largest; None: the usual ones."""
    listed, largest = (row.text(name, default="") for name in _CAPTURES)
    if listed and largest:
        raise InvalidArgument(
            f"{row.where}: {' and '.join(_CAPTURES)} both give the captured sizes; fill one"
        )
    if listed:
        return tuple(sorted(set(row.counts(_CAPTURES[0]))))
    return captures_up_to(row.count(_CAPTURES[1])) if largest else None
