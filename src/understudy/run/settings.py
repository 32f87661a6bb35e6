"""Settings of a replay from a YAML file, flags and assignments; later ones override earlier ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import msgspec

from understudy.checks import read_as
from understudy.defaults import is_default
from understudy.engines.engine_config import EngineConfig
from understudy.engines.group_layouts import fit_model_len
from understudy.engines.kinds.registry import DEFAULT_ENGINE, kind_of, read_engine
from understudy.errors import ConfigError
from understudy.outputs import files_named
from understudy.router.delayed import DELIVERY_FIELDS, DelayedEvents
from understudy.router.kv import KvRouting  # noqa: TC001  (msgspec reads the annotation)
from understudy.router.load import load_router
from understudy.run.disaggregation import Disaggregation  # noqa: TC001  (msgspec reads the annotation)
from understudy.run.fitted import (
    apply_fitted_blocks,
    steps_together,
    take_fitted,
    use_fitted_block_size,
)
from understudy.run.fitted_times import fitted_deployment
from understudy.run.layers import TIER_FIELDS, drop_superseded, index_tiers_by_name, reject_unused_kv_size
from understudy.run.model_groups import (
    apply_model_groups,
    find_engine_drafter,
    has_uniform_layers,
    note_on_dtype,
    size_group_tiers,
)
from understudy.run.own_pools import find_own_pools
from understudy.run.pools import WorkerPool  # noqa: TC001  (msgspec reads the annotation)
from understudy.run.ranks import (
    check_stepping_together,
    join_ranks,
    refuse_ranks_of_stages,
)
from understudy.run.read_pools import read_pools, take_route_rejected
from understudy.run.routing_choice import Routing
from understudy.run.stages import join_stages
from understudy.tiers.gpu import GpuSettings  # noqa: TC001  (msgspec reads the annotation)
from understudy.tiers.settings import KV_SIZE_FIELDS, TiersConfig
from understudy.timing.contexts import known_context
from understudy.timing.engine_names import find_timed_engine
from understudy.user_code import names_file_and_class
from understudy.workload import ClosedLoop, Lockstep, OpenLoop, Plays
from understudy.workload.users import check_load, check_users

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.router.router import Router

_Engine = TypeVar("_Engine", bound=EngineConfig)

_ROUTINGS = get_args(Routing)
_FIELDS = (
    "workers",
    "pools",
    "routing",
    "router",
    "route_rejected",
    "seed",
    "users",
    "load",
    "engine",
    "disaggregation",
    "gpu",
    *TIER_FIELDS,
)


class ReplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a replay except its workload."""

    workers: int = 1
    """Engines; each has as many data-parallel ranks as its settings say."""
    routing: str = "round_robin"
    """The name of a policy, or `FILE.py:CLASS` for a user-defined router."""
    router: KvRouting | None = None
    """Settings of routing `kv`."""
    event_delivery: dict[str, float] | None = None
    """Settings of `DelayedEvents` for a user-defined router. In a file: under `router`, as for kv."""
    seed: int = 0
    users: float = 1.0
    """Users relative to those of the trace; `understudy.workload.scale_users` applies it, with the same seed."""
    load: OpenLoop | ClosedLoop | Lockstep | Plays = OpenLoop()
    engine: EngineConfig = DEFAULT_ENGINE
    tiers: TiersConfig = TiersConfig()
    """In a file: the top-level keys `tiers` (a list), `offload`, `kv_bytes_per_token`, `model` and `kv_dtype`."""

    pools: tuple[WorkerPool, ...] = ()
    """Pools instead of `workers`, `engine` and tiers; each has `name`, `workers`, `engine` and its tiers."""

    gpu: GpuSettings | None = None
    """Model and GPUs, which determine step times and blocks per worker unless the engine's settings do."""

    disaggregation: Disaggregation | None = None
    """Prefill and decode workers: `prefill_workers` and `decode_workers`, or pools with roles."""

    model: str | None = None
    """Model of the engines, as given or as the timing file names it; None if neither does. Derived."""

    kv_dtype: str | None = None
    """Type of its KV cache; None for the model's own. Derived."""

    ranks: bool = False
    """Whether data-parallel ranks share experts and so step together. Derived from `gpu`."""

    notes: tuple[str, ...] = ()
    """Notes on derived settings, for the report."""

    @property
    def policy(self) -> Routing | KvRouting | DelayedEvents | Router:
        """Routing argument for a replay; a user-defined router is created anew by each access."""
        if self.router is not None:
            return self.router
        if not names_file_and_class(self.routing):
            return cast("Routing", self.routing)
        router = load_router(self.routing)
        return DelayedEvents(router, **self.event_delivery) if self.event_delivery else router

    @classmethod
    def read(
        cls,
        path: Path | None,
        flags: dict[str, Any],
        assignments: list[str],
        *,
        base: dict[str, Any] | None = None,
    ) -> ReplaySettings:
        """Merge `base`, the file, the flags and `a.b=value` assignments. ConfigError names the wrong field."""
        merged: dict[str, Any] = {}
        layers = (
            base or {},
            _read_settings(path) if path else {},
            flags,
            *map(_parse_assignment, assignments),
        )
        for layer in layers:
            merged = _merge(drop_superseded(merged, layer), index_tiers_by_name(layer))
        for name in merged:
            if name not in _FIELDS:
                raise ConfigError(f"{name} is not a setting of a replay; known are {', '.join(_FIELDS)}")
        _check_routing(merged.get("routing", "round_robin"))
        if (listed := merged.pop("pools", None)) is not None:
            if "gpu" in merged:
                raise ConfigError(
                    "gpu: a fleet of pools takes no times from a GPU; leave gpu out, and give the engine of each "
                    "pool its timing and num_gpu_blocks"
                )
            alone = [name for name in ("workers", "engine", *TIER_FIELDS) if name in merged]
            if alone:
                raise ConfigError(f"pools have their own {alone[0]}; give it to each of them")
            rejected = take_route_rejected(merged)
            return msgspec.structs.replace(cls._read_routed(merged), pools=read_pools(listed, rejected))
        settings = merged.pop("engine", {})
        if not isinstance(settings, dict):
            raise ConfigError(f"engine must be settings by name, got {settings!r}")
        is_auto = settings.get("max_model_len") in ("auto", -1)
        if is_auto:
            settings = {name: value for name, value in settings.items() if name != "max_model_len"}
        engine = read_engine({**settings, **take_route_rejected(merged)})
        engine = use_fitted_block_size(engine)
        has_blocks = not is_default(engine.num_gpu_blocks)
        below = {name: merged.pop(name) for name in TIER_FIELDS if name in merged}
        fitted = take_fitted(engine, merged.get("gpu") or {}, has_blocks=has_blocks)
        if fitted is not None:
            merged["gpu"] = fitted.gpu
            if engine.tiers == TiersConfig() and not any(name in below for name in KV_SIZE_FIELDS):
                below |= fitted.kv_size
        engine, tiers = _merge_tiers(engine, below)
        read = cls._read_routed(merged)
        engine, gpu = join_ranks(engine, read.gpu)
        model = tiers.model or (None if fitted is None else fitted.model)
        kv_dtype = tiers.kv_dtype or (None if fitted is None else fitted.kv_dtype)
        read = msgspec.structs.replace(
            read, engine=engine, tiers=tiers, gpu=gpu, model=model, kv_dtype=kv_dtype
        )
        if read.disaggregation is not None:
            read, tiers = read._split(merged, tiers)
        if read.gpu is None:
            if is_auto:
                raise ConfigError(
                    "max_model_len: auto needs a model and a GPU; give both, or a number of tokens"
                )
            if not tiers.tiers:
                reject_unused_kv_size(
                    tiers, settings, removed_on_purpose=any("tiers" in layer for layer in layers)
                )
            return msgspec.structs.replace(read, tiers=tiers.drop_unused_kv_size())
        has_timing = any(settings.get(name) is not None for name in ("timing", "planner_profile_data"))
        if read.gpu.is_known:
            read.gpu.reject_unused_settings(engine.timing, has_blocks=has_blocks, has_timing=has_timing)
        without_groups = engine
        engine, notes = apply_gpus(
            read.gpu, engine, model, kv_dtype, has_blocks=has_blocks, has_timing=has_timing
        )
        if is_auto:
            engine = _fit_length(engine, model)
        together = steps_together(read.gpu, engine, model, kv_dtype)
        check_stepping_together(engine, together=together)
        tiers = size_group_tiers(tiers.drop_unused_kv_size(), read.gpu, without_groups, engine, model)
        return msgspec.structs.replace(read, engine=engine, tiers=tiers, notes=notes, ranks=together)

    def _split(self, merged: dict[str, Any], tiers: TiersConfig) -> tuple[ReplaySettings, TiersConfig]:
        """Size hand-offs for the model, or for the KV bytes per token, which are then used."""
        assert self.disaggregation is not None
        refuse_ranks_of_stages(self.engine)
        if "workers" in merged:
            raise ConfigError("workers contradicts disaggregation; give prefill_workers and decode_workers")
        if self.engine.kv_cache_groups:
            raise ConfigError(
                "kv_cache_groups: several groups do not work with prefill and decode workers yet; leave them out, or "
                "leave out disaggregation (--prefill-workers, --decode-workers)"
            )
        if tiers.model is not None and not has_uniform_layers(tiers.model):
            raise ConfigError(
                f"model {tiers.model!r} has several KV cache groups, which do not work with prefill and decode workers "
                "yet; leave out disaggregation"
            )
        sized = self.disaggregation.sized_for(tiers.model, tiers.kv_dtype)
        if sized.kv_bytes_per_token is None and tiers.kv_bytes_per_token is not None:
            sized = msgspec.structs.replace(sized, kv_bytes_per_token=tiers.kv_bytes_per_token)
        if not tiers.tiers and tiers.kv_bytes_per_token is not None:
            tiers = msgspec.structs.replace(tiers, kv_bytes_per_token=None)
        return msgspec.structs.replace(self, disaggregation=sized, tiers=tiers), tiers

    @classmethod
    def _read_routed(cls, merged: dict[str, Any]) -> ReplaySettings:
        """Read the settings except engine, tiers and pools. ConfigError for `router` without routing kv."""
        if names_file_and_class(merged.get("routing", "")) and isinstance(merged.get("router"), dict):
            delivery = {name: value for name, value in merged["router"].items() if name in DELIVERY_FIELDS}
            if len(delivery) == len(merged["router"]):  # else the message below names the others
                merged = {name: value for name, value in merged.items() if name != "router"}
                merged["event_delivery"] = delivery
        read = read_as(cls, merged)
        check_users(read.users)
        check_load(read.users, read.load)
        if read.router is not None and read.routing != "kv":
            is_own = names_file_and_class(read.routing)
            named = [name for name in merged["router"] if not is_own or name not in DELIVERY_FIELDS]
            subject = f"{', '.join(named or ['router'])} {'are' if len(named) > 1 else 'is'}"
            raise ConfigError(
                f"{subject} for routing kv, but routing is {read.routing}; give routing kv, or leave it out"
            )
        return read


def list_given_files(path: Path | None, assignments: list[str]) -> dict[str, Path]:
    """List all files that a settings file and assignments name, including those that are only read."""
    found = files_named(_read_settings(path) if path else {})
    for assignment in assignments:
        found |= files_named(_parse_assignment(assignment))
    return found


def apply_gpus(
    gpu: GpuSettings,
    engine: _Engine,
    model: str | None,
    kv_dtype: str | None,
    *,
    has_blocks: bool,
    has_timing: bool,
) -> tuple[_Engine, tuple[str, ...]]:
    """Set limits, step times, KV cache groups and blocks unless given; return the engine and notes for the report."""
    engine, gpu = join_stages(engine, gpu)
    engine = engine.choose_defaults(gpu, model)
    if engine.kv_cache_groups and not has_blocks:
        raise ConfigError(
            "kv_cache_groups: the blocks of given groups do not follow from a GPU's memory; give --num-gpu-blocks, or "
            "leave --kv-cache-groups out, so that the model's own groups are used"
        )
    if has_blocks and not gpu.is_known:
        raise ConfigError(
            "engine.num_gpu_blocks contradicts gpu, which determines the blocks of a worker; give one"
        )
    engine, notes, has_blocks = apply_fitted_blocks(gpu, engine, model, has_blocks=has_blocks)
    if model is None and has_blocks and fitted_deployment(engine) is not None:
        return engine, notes
    if has_timing:
        gpu.check_timing(engine.timing, model, kv_dtype)
    elif gpu.is_known:
        timing = gpu.timing(model, kv_dtype, engine=find_timed_engine(kind_of(engine).name))
        engine = msgspec.structs.replace(engine, timing=timing)
    if model is not None and (size_pools := find_own_pools(engine, model)) is not None:
        pooled, more = size_pools(gpu, engine, model, kv_dtype, has_blocks=has_blocks)
        return cast("_Engine", pooled), (*notes, *more, *note_on_dtype(model))
    if model is not None and not has_uniform_layers(model) and not engine.kv_cache_groups:
        engine, more = apply_model_groups(gpu, engine, model, kv_dtype, has_blocks=has_blocks)
        return engine, (*notes, *more, *note_on_dtype(model))
    if has_blocks:
        return engine, notes
    found = gpu.with_share(engine.memory_share).num_blocks(
        model,
        kv_dtype,
        engine.block_size,
        step_tokens=engine.max_num_batched_tokens,
        sequences=engine.max_num_seqs,
        drafter=find_engine_drafter(gpu, engine, model, kv_dtype),
    )
    note = (
        f"estimated {found.blocks:,} KV blocks of {engine.block_size} token{'s'[: engine.block_size - 1]} per worker "
        f"(± {found.plus_minus:,}); for "
        f"the exact number pass {engine.exact_pool_flags} start-up log"
    )
    engine = msgspec.structs.replace(engine, num_gpu_blocks=found.blocks)
    estimate = (note,) if found.plus_minus else ()
    return engine, (*notes, *estimate, *(() if model is None else note_on_dtype(model)))


def _fit_length(engine: _Engine, model: str | None) -> _Engine:
    """Set the longest context of the model that the engine's blocks hold, as vLLM's `--max-model-len auto`."""
    context = None if model is None else known_context(model)
    if context is None:
        raise ConfigError(f"max_model_len: the context of {model} is not known; give a number of tokens")
    return msgspec.structs.replace(engine, max_model_len=fit_model_len(engine, context))


def _merge_tiers(engine: EngineConfig, below: dict[str, Any]) -> tuple[EngineConfig, TiersConfig]:
    """Return the given tiers, or those in the engine's settings under the mocker's names.

    The latter may be combined with given KV bytes per token and offload settings.
    """
    given = {**below, "tiers": list(below.get("tiers", {}).values())}
    if engine.tiers == TiersConfig() or given["tiers"]:
        return engine, TiersConfig.from_dict(given)
    mocker = engine.tiers.describe()
    kv_sizes = [name for name in ("kv_bytes_per_token", "model") if below.get(name) is not None]
    if kv_sizes and mocker["kv_bytes_per_token"] not in (None, below.get("kv_bytes_per_token")):
        raise ConfigError(f"{kv_sizes[0]} contradicts the engine's kv_bytes_per_token; give one")
    given_here = {name: value for name, value in below.items() if value is not None and name != "tiers"}
    merged = _merge(mocker, given_here)
    return msgspec.structs.replace(engine, tiers=TiersConfig()), TiersConfig.from_dict(merged)


def _check_routing(name: object) -> None:
    if name == "kv_router":
        raise ConfigError("routing kv_router is Dynamo's name; write kv")
    if isinstance(name, str) and names_file_and_class(name):
        return
    if name not in _ROUTINGS:
        raise ConfigError(
            f"routing {name!r} is not known; choose one of {', '.join(_ROUTINGS)} or FILE.py:CLASS"
        )


def _read_settings(path: Path) -> dict[str, Any]:
    from understudy.yaml_text import read_yaml

    content = read_yaml(path)
    if content is None:  # only comments
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected settings by name at the top level")
    return content


def _parse_assignment(text: str) -> dict[str, Any]:
    import yaml

    from understudy.yaml_text import parse

    path, separator, value = text.partition("=")
    if not separator or not all(path.split(".")):
        raise ConfigError(f"--set {text!r}: write it as a.b=value")
    try:
        result: Any = parse(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text!r}: {getattr(error, 'problem', None) or error}") from error
    except RecursionError:
        raise ConfigError(f"--set {path}: lists or settings are nested too deeply") from None
    for name in reversed(path.split(".")):
        result = {name: result}
    return dict(result)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        known = merged.get(name)
        if known is not None and isinstance(known, dict) != isinstance(value, dict):
            raise ConfigError(f"{name} is given both as settings by name and as a single value")
        if not isinstance(known, dict) or value.get("kind", known.get("kind")) != known.get("kind"):
            merged[name] = value  # settings of another kind share no fields
        else:
            merged[name] = _merge(known, value)
    return merged
