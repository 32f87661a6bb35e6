"""Read the engine that a row of a closed loop ran with: vLLM, SGLang or TensorRT-LLM, and its settings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from understudy.calibrate.experiment import build_engine_config
from understudy.calibrate.row_settings import read_limits
from understudy.defaults import STATIC_SHARE
from understudy.engines.kinds.registry import default_kind, find_kind
from understudy.engines.speculation import SpeculativeConfig
from understudy.errors import InvalidArgument
from understudy.kind_names import KIND_MODULES
from understudy.timing.coefficients import captures_up_to
from understudy.timing.engine_names import find_engine_name

if TYPE_CHECKING:
    from understudy.calibrate.table_row import TableRow
    from understudy.engines.engine_config import EngineConfig
    from understudy.engines.kinds.kind import EngineKind
    from understudy.timing.deployment import Deployment

_CAPTURES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
ENGINE_COLUMNS = (
    *("backend", "backend_version", "max_num_batched_tokens", "max_num_seqs", "block_size", "num_gpu_blocks"),
    *("gpu_memory_utilization", "speculation", "acceptance_per_position", *_CAPTURES),
)
"""Columns of an engine that are read."""
_METHODS = ("eagle3", "eagle", "mtp", "draft_model", "ngram")


def read_backend(row: TableRow) -> str:
    """Return the engine that a row names: vllm (the default), sglang or trtllm."""
    return find_engine_name(row.text("backend", default="vllm"))


def build_row_engine(row: TableRow, deployment: Deployment) -> EngineConfig:
    """Configure the engine of a row; its prefix cache is off, because no two prompts share a prefix.

    An engine whose times were not fitted with its own rules gets those of the default kind.
    """
    backend, release = read_backend(row), row.text("backend_version", default="")
    settings = read_limits(row)
    settings |= {
        name: row.count(name) for name in ("block_size", "num_gpu_blocks") if row.text(name, default="")
    }
    own = find_kind(backend) if backend in KIND_MODULES else None
    own = own if own is not None and own.runs_measured_rows else None
    kind = default_kind() if own is None else own
    usual = STATIC_SHARE if own is None else own.config_class.find_memory_share(release)
    share = row.share("gpu_memory_utilization", usual)
    speculation = _read_speculation(row, backend, own)
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


def list_assumptions(row: TableRow) -> tuple[str, ...]:
    """List what a prediction assumes where the row does not say it."""
    if row.text("speculation", default="").lower() == "unknown":
        return ("without speculation, because the table does not know whether the engine speculated",)
    return ()


def _read_speculation(row: TableRow, backend: str, kind: EngineKind | None) -> SpeculativeConfig | None:
    """Return the speculation of a row; None without one, or if the source does not know whether there was one."""
    text = row.text("speculation", default="")
    shares = row.text("acceptance_per_position", default="")
    if not text or text.lower() in ("no", "off", "unknown"):
        return None
    method = next((name for name in _METHODS if re.match(rf"{name}\b", text.lower())), None)
    drafts = re.search(r"num_speculative_tokens\D{0,3}(\d+)", text)
    if method is None or drafts is None or not shares:
        raise InvalidArgument(
            f"{row.where}: speculation {text!r} needs a method ({', '.join(_METHODS)}), the number of drafts "
            "(num_speculative_tokens=N) and the column acceptance_per_position, a share for each draft; fill them, or "
            "leave the row out"
        )
    if kind is None or not kind.speculates:
        raise InvalidArgument(f"{row.where}: speculation of {backend} is not simulated; leave the row out")
    return SpeculativeConfig(
        method=method,  # type: ignore[arg-type]
        num_speculative_tokens=int(drafts[1]),
        acceptance_per_position=tuple(row.numbers("acceptance_per_position", or_zero=True)),
    )
