"""`understudy.cache`: hit ratios by cache size and policy, from Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.cache.curves import DEFAULT_POLICIES, POLICIES
from understudy.cache.lab import StudyRequest, read_size, study_cache
from understudy.cache.study import CacheStudy
from understudy.cache.text import format_study, percent
from understudy.defaults import BLOCK_SIZE
from understudy.engines.chosen import choose_block_size
from understudy.errors import ConfigError, InvalidArgument
from understudy.run.model_groups import has_uniform_layers
from understudy.run.settings import ReplaySettings
from understudy.text import plural, visible
from understudy.tiers.model_shape import ModelShape
from understudy.workload import Workload, read_trace
from understudy.workload.users import scale_users

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from understudy.engines.engine_config import EngineConfig


class ReadableStudy(CacheStudy, frozen=True, kw_only=True):
    """A study that prints as the command prints it."""

    def __str__(self) -> str:
        return format_study(self)

    def __repr__(self) -> str:
        knee = "" if self.knee is None else f", knee at {self.knee.gib:.3g} GiB"
        return (
            f"<CacheStudy of {visible(self.workload)}: {plural(self.requests, 'request')}, an unlimited cache hits "
            f"{percent(self.unlimited_hit_ratio)}{knee}; print it for the tables>"
        )

    def to_json(self) -> bytes:
        """Return the study as indented JSON; docs/schema/cache.json is its schema."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def cache(
    workload: Workload | str | os.PathLike[str],
    *,
    model: str | None = None,
    gpu: str | None = None,
    engine: EngineConfig | None = None,
    num_gpu_blocks: int | None = None,
    workers: int = 1,
    routing: str = "round_robin",
    users: float = 1.0,
    policies: Sequence[str] = DEFAULT_POLICIES,
    sizes: Sequence[float | str] = (),
    host_gib: float | None = None,
    disk_gib: float | None = None,
    block_size: int | None = None,
    kv_dtype: str | None = None,
    kv_bytes_per_token: int | None = None,
    warm_up: float = 0.0,
    prompts_only: bool = False,
    knee_points: float = 0.1,
    replays: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> ReadableStudy:
    """Compute exact hit ratios by cache size and eviction policy; replay chosen sizes if the fleet is known.

    The fleet is known with `gpu`, `num_gpu_blocks` or `engine`; curves then follow the order of its replay.

    Parameters:
        workload: a workload, or the path of a trace in any known format.
        model: name of a known model, or path of a config.json: sizes in GiB, and step times with `gpu`.
        gpu: GPU of the workers, which sets their blocks and step times.
        engine: vLLM's engine of the workers, instead of `gpu`.
        num_gpu_blocks: KV blocks of a worker.
        workers: equal workers.
        routing: name of their routing.
        users: users relative to those of the trace.
        policies: names of replay's eviction policies, `insertion` and `optimal`.
        sizes: cache sizes of a worker, each a number of GiB or text such as "4096blocks"; default: doubling sizes.
        host_gib: host tier of each worker.
        disk_gib: disk tier that all workers share.
        block_size: tokens per block; default: the engine's, or vLLM's for the model.
        kv_dtype: data type of the KV cache; default: the model's own.
        kv_bytes_per_token: KV bytes per token of a worker, instead of `model`.
        warm_up: share of requests, from the first, that fill the cache without being counted.
        prompts_only: count prompts with their partly filled last block, and no outputs.
        knee_points: percentage points that one GiB more must add below the knee.
        replays: whether other sizes than the fleet's own are replayed.
        settings: further settings of the fleet, nested as in a settings file of `replay --config`.

    Errors: ConfigError names the wrong argument; InvalidArgument a bad row of the trace, or an empty one.

    Example:
        study = us.cache("trace.jsonl", sizes=["1000blocks", "4000blocks"])
        print(study)
    """
    rows = workload if isinstance(workload, Workload) else read_trace(workload)
    name = "workload" if isinstance(workload, Workload) else Path(workload).name
    if not len(rows):
        raise InvalidArgument(f"{name} contains no requests; give another trace")
    if unknown := [policy for policy in policies if policy not in POLICIES]:
        raise ConfigError(f"policies: {unknown[0]!r} is not known; choose from {', '.join(POLICIES)}")
    if model is not None and kv_bytes_per_token is not None:
        raise ConfigError("kv_bytes_per_token: model sets the KV bytes per token too; give one")
    fleet = _read_fleet(
        {"model": model, "gpu": gpu, "num_gpu_blocks": num_gpu_blocks, "block_size": block_size},
        {"workers": workers, "routing": routing, "users": users, "kv_dtype": kv_dtype, **(settings or {})},
        engine,
    )
    request = StudyRequest(
        block_size=_choose_block_size(block_size, fleet, model),
        policies=tuple(dict.fromkeys(policies)),
        sizes=tuple(read_size(size if isinstance(size, str) else f"{size:g}") for size in sizes),
        tiers=tuple((tier, gib) for tier, gib in (("host", host_gib), ("disk", disk_gib)) if gib is not None),
        kv_bytes_per_token=_find_bytes(model, kv_dtype, kv_bytes_per_token),
        prompts_only=prompts_only,
        warm_up=warm_up,
        knee_points=knee_points,
        replays=replays,
    )
    rows = scale_users(rows, users, seed=fleet.seed if fleet is not None else 0)
    study = study_cache(rows, name, request, fleet)
    return ReadableStudy(**{field: getattr(study, field) for field in CacheStudy.__struct_fields__})


def _read_fleet(
    given: dict[str, Any], shared: dict[str, Any], engine: EngineConfig | None
) -> ReplaySettings | None:
    """Return the fleet's settings; None if neither its blocks nor its GPU are known. ConfigError as for `replay`."""
    known = {name: value for name, value in given.items() if value is not None}
    if engine is not None:
        if both := sorted({"gpu", "num_gpu_blocks", "block_size"} & known.keys()):
            raise ConfigError(f"{both[0]}: engine sets it too; give one")
        return ReplaySettings(
            engine=engine, workers=shared["workers"], routing=shared["routing"], users=shared["users"]
        )
    if not {"gpu", "num_gpu_blocks"} & known.keys() and "engine" not in shared:
        return None
    nested = dict(shared)
    if "gpu" in known:
        nested["gpu"] = {"name": known["gpu"]}
        if "model" in known:
            nested["model"] = known["model"]
    else:
        nested["kv_dtype"] = None
    nested["engine"] = {
        **nested.get("engine", {}),
        **{name: known[name] for name in ("num_gpu_blocks", "block_size") if name in known},
    }
    return ReplaySettings.read(None, {name: value for name, value in nested.items() if value is not None}, [])


def _choose_block_size(given: int | None, fleet: ReplaySettings | None, model: str | None) -> int:
    if fleet is not None:
        return int(fleet.engine.block_size)
    if given is not None:
        return given
    return BLOCK_SIZE if model is None else choose_block_size(model)


def _find_bytes(model: str | None, kv_dtype: str | None, given: int | None) -> int | None:
    if model is None:
        return given
    if not has_uniform_layers(model):
        raise ConfigError(
            f"model: {model} has several KV cache groups, and a curve has one; replay the sizes with us.sweep, or give "
            "kv_bytes_per_token instead"
        )
    return ModelShape.find(model).bytes_per_token(kv_dtype=kv_dtype)
