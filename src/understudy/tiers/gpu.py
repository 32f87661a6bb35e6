"""`GpuSettings`: the GPUs of a worker, their step times and the number of KV blocks that fit on them."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from understudy.defaults import MEMORY_SHARE, BatchLimits, choose_limits
from understudy.errors import ConfigError
from understudy.groups import GroupPlan, groups_of_model, layers_of_model
from understudy.kv.counts import count
from understudy.tiers.model_shape import ModelShape
from understudy.tiers.sizes import parse_bytes
from understudy.tiers.timed_model import check_stages, find_timed_architecture, refuse_stages_of_groups
from understudy.timing.capacity import (
    BLOCKS_PLUS_MINUS,
    KvMemory,
    does_not_fit,
    kv_blocks,
    kv_memory,
    usable_bytes,
)
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.drafter import Drafter  # noqa: TC001  (annotations of a public class)
from understudy.timing.find_architecture import find_architecture
from understudy.timing.fitted_for import check_fitted_for, facts_of
from understudy.timing.gpus import Gpu, find_gpu, sheet_gpu
from understudy.timing.physical import Basis, Origin, Physical
from understudy.timing.pipeline import label_stages, stage_coefficients
from understudy.timing.presets import preset
from understudy.timing.sources import Aiconfigurator, MeasuredKernels


class Blocks(NamedTuple):
    """Estimated KV blocks of a worker, and the uncertainty of the estimate."""

    blocks: int
    plus_minus: int


class GpuSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GPUs of a worker: by name, by data sheet, or only memory and weights. Sizes in bytes or as text ("80GiB")."""

    name: str | None = None
    """H100, H200, B200, A100, L40S, RTX 4090, RTX PRO 6000; never measured: B300, GB200, MI300X, …"""
    memory: int | str | None = None
    weights: int | str | None = None
    """Weights of the whole model; each GPU has its share."""
    bandwidth_gbps: float | None = None
    """Memory bandwidth of a custom GPU, GB/s; needs `tflops`."""
    tflops: float | None = None
    """Peak of dense bf16 matrix products of a custom GPU, TFLOP/s."""
    link_gbps: float | None = None
    """Bandwidth per direction of the link to the worker's other GPUs, GB/s; overrides that of a known GPU."""
    weight_dtype: str | None = None
    """bf16, fp8, int4, mxfp4 or nvfp4 (default: the model's own)."""
    gpu_memory_utilization: float | None = None
    """Share of the memory to use (default: the engine's own; here, vLLM's)."""
    overhead: int | str | None = None
    """Memory of each GPU for activations and graphs."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    """Stages of a worker, each with a part of the layers on `tensor_parallel_size` GPUs."""
    stage_link_gbps: float | None = None
    """Bandwidth per direction of the link from a GPU to that of the next stage, GB/s (default: the GPU's link)."""
    data_parallel_size: int = 1
    """Ranks of an engine, which share the experts of a model; each rank is a worker."""
    expert_parallel_size: int | None = None
    """Number of expert-parallel groups (default: 1)."""
    enable_expert_parallel: bool = False
    """Place whole experts on the GPUs of all ranks instead of sharding each."""
    disable_hybrid_kv_cache_manager: bool | None = None
    """Plan windows as full attention, in one KV cache group (default: only for chunked local attention)."""
    front_end_ms: float | None = None
    """Time between client and engine (default: the preset's); 0 for times measured in the engine."""
    op_tables: str | None = None
    """Folder of measured kernel times to use instead of a preset."""
    extrapolate: bool = False
    """Extrapolate past the ends of op tables."""
    aiconfigurator: bool = False
    """Use the times of the aiconfigurator package instead of a preset."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"):
            count(name, getattr(self, name), 1, ConfigError)
        sheet = (self.bandwidth_gbps, self.tflops)
        if self.name is not None and any(value is not None for value in sheet):
            raise ConfigError(
                "gpu.name and a data sheet (gpu.bandwidth_gbps, gpu.tflops) both define the GPU; give one"
            )
        if (self.bandwidth_gbps is None) != (self.tflops is None):
            raise ConfigError("gpu.bandwidth_gbps and gpu.tflops need each other; give both")
        if self.bandwidth_gbps is not None and self.memory is None:
            raise ConfigError("gpu.bandwidth_gbps needs gpu.memory (--gpu-memory); give both")
        if not self.is_known:
            if self.memory is None or self.weights is None:
                raise ConfigError("gpu needs a name, a data sheet, or memory and weights; give one of them")
            if unused := [name for name in _STEP_TIME_SETTINGS if getattr(self, name) != _DEFAULTS[name]]:
                raise ConfigError(
                    f"{unused[0]} affects step times, and memory and weights alone give only the number of blocks; "
                    "give gpu.name (--gpu) or a data sheet too, or leave it out"
                )
        check_stages(
            self.pipeline_parallel_size,
            self.stage_link_gbps,
            has_kernels=self.op_tables is not None or self.aiconfigurator,
        )
        if self.extrapolate and self.op_tables is None:
            raise ConfigError("--extrapolate is for op tables; give their folder as --timing")
        if self.op_tables is not None and self.aiconfigurator:
            raise ConfigError("gpu.op_tables and gpu.aiconfigurator both set the source of times; give one")
        if self.aiconfigurator and self.link_gbps is not None:
            raise ConfigError(
                "gpu.link_gbps has no effect on aiconfigurator, which has its own link times; leave it out"
            )
        if self.enable_expert_parallel and self.expert_parallel_size not in (None, self.num_gpus):
            raise ConfigError(
                f"enable_expert_parallel makes {self.num_gpus} expert-parallel groups, and "
                f"expert_parallel_size={self.expert_parallel_size} another number; give one"
            )

    @property
    def is_known(self) -> bool:
        """Whether the GPU is known well enough to compute step times."""
        return self.name is not None or self.bandwidth_gbps is not None

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all ranks that share the experts of a layer: those of one stage."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def memory_share(self) -> float:
        """Share of the memory to use: as given, or that of the newest vLLM."""
        return MEMORY_SHARE if self.gpu_memory_utilization is None else self.gpu_memory_utilization

    def with_share(self, share: float) -> GpuSettings:
        """Return these settings with this share of the memory, unless they have one."""
        given = self.gpu_memory_utilization is not None
        return self if given else msgspec.structs.replace(self, gpu_memory_utilization=share)

    def batch_limits(self, *, has_largest: bool = True) -> BatchLimits:
        """Return the limits of a step that vLLM chooses on this GPU; `has_largest` as of `choose_limits`."""
        if self.is_known:
            gpu = self._find_gpu()
            return choose_limits(gpu.name, gpu.memory_gb * 1e9, has_largest=has_largest)
        assert self.memory is not None
        return choose_limits(None, parse_bytes("gpu.memory", self.memory), has_largest=has_largest)

    def timing(
        self, model: str | None, kv_dtype: str | None, *, engine: str = "vllm"
    ) -> Physical | MeasuredKernels | Aiconfigurator:
        """Build the step times of `model` on these GPUs with an engine's presets. ConfigError names the field."""
        deployed = self.deployment(model, kv_dtype)
        found = preset(deployed.model, deployed.gpu, deployed.weights, deployed.kv, engine=engine)
        found = label_stages(found, deployed.parallel.pipeline)
        front_end_ms = found.efficiencies.front_end_ms if self.front_end_ms is None else self.front_end_ms
        if self.op_tables is not None:
            return MeasuredKernels(
                folder=self.op_tables,
                deployment=deployed,
                efficiencies=found.efficiencies,
                extrapolate=self.extrapolate,
                front_end_ms=front_end_ms,
            )
        if self.aiconfigurator:
            return Aiconfigurator(deployment=deployed, front_end_ms=front_end_ms)
        gpus = deployed.parallel.gpus
        linked = "" if self.name is None or self.link_gbps is None else f" (links of {self.link_gbps:g} GB/s)"
        detail = (
            f"{deployed.model.name} in {deployed.weights} (KV {deployed.kv}) on {f'{gpus} x ' if gpus > 1 else ''}"
            f"{deployed.gpu.name}{linked}, {found.trust}: {found.origin}; {found.range_text}"
        )
        return Physical(
            coefficients=deployed.coefficients(found.efficiencies),
            stages=stage_coefficients(deployed, found.efficiencies),
            origin=Origin(source="preset" if self.name is not None else "data sheet", detail=detail),
            front_end_ms=front_end_ms,
            basis=Basis(deployment=deployed, efficiencies=found.efficiencies),
        )

    def check_timing(self, timing: object, model: str | None, kv_dtype: str | None) -> None:
        """Raise ConfigError, naming the difference, if `timing` was fitted to another deployment."""
        asked = {
            "model": model,
            "kv_dtype": kv_dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
        }
        check_fitted_for(timing, facts_of(self.deployment(model, kv_dtype)) if self.is_known else asked)

    def reject_unused_settings(self, timing: object, *, has_blocks: bool, has_timing: bool) -> None:
        """Raise ConfigError for settings without effect on an engine whose blocks or `timing` are given."""
        if has_blocks:
            for name in ("memory", "weights", "overhead", "gpu_memory_utilization"):
                is_on_data_sheet = name == "memory" and self.name is None
                if getattr(self, name) != _DEFAULTS[name] and not is_on_data_sheet:
                    raise ConfigError(
                        f"{name if name.startswith('gpu') else f'gpu.{name}'} and num_gpu_blocks (--num-gpu-blocks) "
                        "both set the number of blocks; give one"
                    )
        if has_timing:
            for name, field in (("front_end_ms", self.front_end_ms), ("gpu.link_gbps", self.link_gbps)):
                if field is not None and (self.name is not None or name == "front_end_ms"):
                    raise ConfigError(
                        f"{name} has no effect with engine.timing (--timing), which replaces the GPU's times; "
                        "leave it out"
                    )
        is_fitted = getattr(timing, "fitted_for", None) is not None  # then the GPU is compared with the file
        if has_blocks and has_timing and not is_fitted and self.data_parallel_size == 1:
            raise ConfigError(
                "gpu has no effect with engine.timing (--timing) and num_gpu_blocks (--num-gpu-blocks), which replace "
                "its times and its blocks; leave out one of the three"
            )

    def steps_together(self, model: str | None, kv_dtype: str | None) -> bool:
        """Whether data-parallel ranks wait for each other in every step, because they share experts."""
        return self.is_known and self.deployment(model, kv_dtype).steps_together

    def num_blocks(
        self,
        model: str | None,
        kv_dtype: str | None,
        block_size: int,
        *,
        step_tokens: int | None = None,
        sequences: int | None = None,
        drafter: Drafter | None = None,
    ) -> Blocks:
        """Estimate the KV blocks of a worker with `model`. ConfigError names the field."""
        if model is None:
            raise ConfigError("gpu needs model; give a known name or the path of a config.json")
        if not self.is_known:
            assert self.memory is not None
            assert self.weights is not None
            blocks = ModelShape.find(model).num_gpu_blocks(
                block_size=block_size,
                gpu_memory=self.memory,
                weights=self.weights,
                gpu_memory_utilization=self.memory_share,
                overhead=self.overhead,
                kv_dtype=kv_dtype,
                tensor_parallel=self.tensor_parallel_size,
            )
            return Blocks(blocks, 0)
        deployed = self.deployment(model, kv_dtype)
        blocks = kv_blocks(
            deployed,
            block_size=block_size,
            max_num_batched_tokens=step_tokens or self.batch_limits().max_num_batched_tokens,
            max_num_seqs=sequences or self.batch_limits().max_num_seqs,
            gpu_memory_utilization=self.memory_share,
            memory_bytes=None if self.memory is None else parse_bytes("gpu.memory", self.memory),
            weight_bytes=None if self.weights is None else parse_bytes("gpu.weights", self.weights),
            overhead_bytes=None if self.overhead is None else parse_bytes("gpu.overhead", self.overhead),
            drafter=drafter,
        )
        return Blocks(blocks, round(blocks * BLOCKS_PLUS_MINUS))

    def groups(
        self,
        model: str,
        kv_dtype: str | None,
        *,
        max_model_len: int,
        step_tokens: int | None = None,
        sequences: int | None = None,
        drafter: Drafter | None = None,
        **settings: Any,
    ) -> GroupPlan:
        """Plan the KV cache groups of `model` in the memory that its weights leave, as vLLM does.

        `settings` are those of `groups_of_model`. ConfigError names the field.
        """
        refuse_stages_of_groups(self.pipeline_parallel_size)
        return groups_of_model(
            model,
            memory_bytes=self.kv_memory(
                model, kv_dtype, step_tokens=step_tokens, sequences=sequences, drafter=drafter
            ),
            max_model_len=max_model_len,
            max_num_batched_tokens=step_tokens or self.batch_limits().max_num_batched_tokens,
            kv_dtype=kv_dtype,
            tensor_parallel=self.tensor_parallel_size,
            disable_hybrid=self.disable_hybrid_kv_cache_manager,
            **settings,
        )

    def kv_memory(
        self,
        model: str,
        kv_dtype: str | None,
        *,
        step_tokens: int | None = None,
        sequences: int | None = None,
        drafter: Drafter | None = None,
    ) -> int:
        """Estimate the bytes of one GPU that are left for the KV cache of the model; a drafter has its share.

        A model whose step times are not known (MLA, states) needs `weights`. ConfigError names the field.
        """
        sizes = {
            name: None if given is None else parse_bytes(f"gpu.{name}", given)
            for name, given in (
                ("memory", self.memory),
                ("weights", self.weights),
                ("overhead", self.overhead),
            )
        }
        deployed = self._known_deployment(model, kv_dtype)
        if deployed is None:
            memory = self._find_gpu().memory_gb * 1e9 if sizes["memory"] is None else sizes["memory"]
            weights = (sizes["weights"] or 0) / self.tensor_parallel_size
            found = KvMemory(usable_bytes(memory, self.memory_share), weights + (sizes["overhead"] or 0))
            if found.free < 1:
                raise ConfigError(
                    f"gpu.memory: {model} takes {found.spent / 1e9:.1f} of {found.usable / 1e9:.1f} usable GB, which "
                    "leaves no room for KV blocks; use more memory or more GPUs (tensor_parallel_size)"
                )
            return found.free
        found = kv_memory(
            deployed,
            max_num_batched_tokens=step_tokens or self.batch_limits().max_num_batched_tokens,
            max_num_seqs=sequences or self.batch_limits().max_num_seqs,
            gpu_memory_utilization=self.memory_share,
            memory_bytes=sizes["memory"],
            weight_bytes=sizes["weights"],
            overhead_bytes=sizes["overhead"],
            drafter=drafter,
        )
        if found.free < 1:
            raise does_not_fit(deployed, found)
        if drafter is None:
            return found.free
        own = deployed.kv_bytes_per_token
        return int(found.free * own / (own + drafter.kv_bytes_per_token(deployed)))

    def _known_deployment(self, model: str, kv_dtype: str | None) -> Deployment | None:
        """Return the deployment; None if only its weights and memory are known."""
        if not self.is_known:
            return None
        try:
            find_architecture(model)
        except ConfigError as error:
            layers_of_model(model)  # names an unknown model
            if self.weights is None:
                raise ConfigError(
                    f"gpu.weights (--gpu-weights): the weights of {model} are not known; give their size"
                ) from error
            return None
        return self.deployment(model, kv_dtype)

    def deployment(self, model: str | None, kv_dtype: str | None) -> Deployment:
        """Build the deployment of `model` on these GPUs. ConfigError names the field."""
        if model is None:
            raise ConfigError("gpu needs model; give a known name or the path of a config.json")
        shape = find_timed_architecture(model)
        return Deployment(
            model=shape,
            gpu=self._find_gpu(),
            weights=shape.weights if self.weight_dtype in (None, "auto") else str(self.weight_dtype),
            kv="bf16" if kv_dtype in (None, "auto") else str(kv_dtype),
            parallel=Parallelism(
                tensor=self.tensor_parallel_size,
                data=self.data_parallel_size,
                expert=self.num_gpus if self.enable_expert_parallel else self.expert_parallel_size or 1,
                pipeline=self.pipeline_parallel_size,
                stage_link_gbps=self.stage_link_gbps,
            ),
        )

    def _find_gpu(self) -> Gpu:
        if self.name is not None:
            found, overrides = find_gpu(self.name), {}
            if self.link_gbps is not None:
                overrides["link_gbps"] = self.link_gbps
            if self.memory is not None:
                overrides["memory_gb"] = parse_bytes("gpu.memory", self.memory) / 1e9
            return msgspec.structs.replace(found, **overrides) if overrides else found
        assert self.bandwidth_gbps is not None
        assert self.tflops is not None
        assert self.memory is not None
        return sheet_gpu(
            bandwidth_gbps=self.bandwidth_gbps,
            tflops=self.tflops,
            memory_gb=parse_bytes("gpu.memory", self.memory) / 1e9,
            link_gbps=self.link_gbps,
        )


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(GpuSettings)}
_STEP_TIME_SETTINGS = (
    *("link_gbps", "weight_dtype", "data_parallel_size", "expert_parallel_size", "enable_expert_parallel"),
    *("pipeline_parallel_size", "stage_link_gbps"),
    *("front_end_ms", "op_tables", "aiconfigurator"),
)
"""Settings that affect step times, but not the number of blocks."""
