"""`Deployment`: a model on GPUs, and the step coefficients of one rank."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING

import msgspec

from understudy.errors import ConfigError
from understudy.kv.counts import count
from understudy.timing.architecture import Architecture  # noqa: TC001  (msgspec reads the annotations)
from understudy.timing.attention import latent_bytes
from understudy.timing.coefficients import StepCoefficients
from understudy.timing.gpus import Gpu  # noqa: TC001  (the same)
from understudy.timing.stages import divide_layers
from understudy.timing.weight_types import KV_TYPES, kv_type, weight_type

if TYPE_CHECKING:
    from understudy.timing.efficiencies import Efficiencies


DRAFT_NOVELTY = 0.45
"""Share of a draft's experts that a step would not read without it: the tokens of one request share experts.

Fitted to the time that three drafts of an EAGLE3 head add to gpt-oss-120b on one H200 at 1 to 256 streams.
"""


def largest_of_normal(count: int) -> float:
    """Return the mean of the largest of `count` normal numbers, in standard deviations (Blom's approximation)."""
    return 0.0 if count < 2 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


class Parallelism(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parallel sizes of one model. Experts are sharded over all GPUs, or placed whole in `expert` groups."""

    tensor: int = 1
    data: int = 1
    expert: int = 1
    """Number of expert-parallel groups: 1, or a divisor of tensor · data."""
    pipeline: int = 1
    """Stages, each with a part of the layers on GPUs of its own."""
    stage_link_gbps: float | None = None
    """Bandwidth per direction of the link from a GPU to that of the next stage, GB/s; None: the GPU's link."""

    def __post_init__(self) -> None:
        for name in ("tensor", "data", "expert", "pipeline"):
            count(f"{name}_parallel_size", getattr(self, name), 1, ConfigError)
        if self.stage_link_gbps is not None and not 0 < self.stage_link_gbps < math.inf:
            raise ConfigError(f"stage_link_gbps must be a finite number above 0, got {self.stage_link_gbps}")
        if (self.tensor * self.data) % self.expert:
            raise ConfigError(
                f"expert_parallel_size={self.expert} does not divide the {self.tensor * self.data} GPUs of "
                f"tensor_parallel_size={self.tensor} and data_parallel_size={self.data}"
            )

    @property
    def rank_gpus(self) -> int:
        """GPUs of one data-parallel rank."""
        return self.tensor * self.pipeline

    @property
    def gpus(self) -> int:
        """GPUs of all ranks."""
        return self.rank_gpus * self.data

    def check(self, model: Architecture) -> None:
        """Raise ConfigError if the sizes do not divide the model."""
        if model.num_heads % self.tensor:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor} does not divide the {model.num_heads} heads of {model.name}"
            )
        if model.kv_heads % self.tensor and self.tensor % model.kv_heads:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor} does not fit the {model.kv_heads} KV heads of {model.name}"
            )
        if model.full_kv_heads and model.full_kv_heads % self.tensor and self.tensor % model.full_kv_heads:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor} does not fit the {model.full_kv_heads} KV heads of {model.name}'s "
                "layers with full attention"
            )
        if self.expert > 1 and not model.num_experts:
            raise ConfigError(
                f"expert_parallel_size={self.expert}: {model.name} has no experts; leave it out"
            )
        if model.num_experts and model.num_experts % self.expert:
            raise ConfigError(
                f"expert_parallel_size={self.expert} does not divide the {model.num_experts} experts of {model.name}"
            )


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model with its data types, its GPU and its parallel sizes."""

    model: Architecture
    gpu: Gpu
    weights: str
    """Type of the weights: bf16, fp8, int4, mxfp4, nvfp4."""
    kv: str = "bf16"
    parallel: Parallelism = Parallelism()

    def __post_init__(self) -> None:
        weight_type(self.weights)
        kv_type(self.kv)
        self.parallel.check(self.model)
        divide_layers(self.model.num_layers, self.parallel.pipeline)
        if self.parallel.pipeline > 1 and self.steps_together:
            raise ConfigError(
                f"pipeline_parallel_size={self.parallel.pipeline}: stages of data-parallel ranks that share "
                "experts are not simulated; leave data_parallel_size out, or the pipeline"
            )

    @property
    def steps_together(self) -> bool:
        """Whether data-parallel ranks wait for each other in every step, because they share experts."""
        return self.parallel.data > 1 and self.model.num_experts > 0

    @property
    def weight_bytes_per_gpu(self) -> int:
        """Weight bytes on one GPU, of the fullest stage of a pipeline; embedding and head are sharded too."""
        return max(self.stage_weight_bytes)

    @property
    def stage_weight_bytes(self) -> tuple[int, ...]:
        """Weight bytes on one GPU of each stage: the first has the embedding, the last the head, both if it is tied."""
        model, parallel = self.model, self.parallel
        experts = model.expert_bytes(self.weights)
        whole = model.whole_parameters * model.bytes_per_parameter(model.mixer_type(self.weights))
        rest = model.weight_bytes(self.weights) - experts - whole
        if parallel.pipeline == 1:
            return (int(rest / parallel.tensor + whole + experts / self._expert_shards),)
        ends = model.head_parameters * 2
        rest -= ends * (1 if model.tied_head else 2)
        layers = rest / parallel.tensor + whole + experts / self._expert_shards
        last = parallel.pipeline - 1
        return tuple(
            int(layers * share + (ends / parallel.tensor if place in (0, last) else 0))
            for place, share in enumerate(self.stage_shares)
        )

    @property
    def stage_shares(self) -> tuple[float, ...]:
        """Share of the layers of each stage."""
        layers = self.model.num_layers
        return tuple(part / layers for part in divide_layers(layers, self.parallel.pipeline))

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes per token on a GPU of every stage, over all layers with keys of their own; windows count as full."""
        model = self.model
        full = model.full_layers
        if not model.window_layers or not model.full_head_dim:
            full, windows = full + model.window_layers, 0
        else:
            windows = model.window_layers
        keys = 0 if model.indexer is None else model.indexer.layers * model.indexer.key_bytes
        whole = self._kv_bytes_per_layer(is_full=True) * (full - model.shared_layers)
        return whole + self._kv_bytes_per_layer(is_full=False) * windows + keys

    @property
    def window_bytes_per_token(self) -> float:
        """The part of `kv_bytes_per_token` in layers with windows."""
        model = self.model
        if model.full_head_dim:
            return self._kv_bytes_per_layer(is_full=False) * model.window_layers
        return self.kv_bytes_per_token * model.window_layers / model.num_layers

    @property
    def state_bytes(self) -> float:
        """Bytes of the recurrent states of one sequence on one GPU."""
        model = self.model
        return model.state_layers * (model.state_bytes or 2 * model.state_elements) / self.parallel.tensor

    def coefficients(self, efficiencies: Efficiencies) -> StepCoefficients:
        """Compute the step coefficients of a rank with these efficiencies.

        Ranks that share experts process the tokens of all ranks; a rank simulated alone assumes equally busy peers.
        """
        model, gpu, tp = self.model, self.gpu, self.parallel.tensor
        experts = weight_type(self.weights)
        read = 1e3 / (gpu.bandwidth_gbps * 1e9)  # ms per byte
        expert_flop = 1e3 / (gpu.tflops(experts.peak) * 1e12 * efficiencies.expert_compute)
        head_flop = 1e3 / (gpu.bf16_tflops * 1e12 * efficiencies.compute)
        pair_flop = 1e3 / (gpu.bf16_tflops * 1e12 * efficiencies.attention)
        linear_bytes, linear_flop_ms = self._linear(efficiencies)
        stored = model.stored_expert_parameters / self._expert_shards
        active = model.expert_layers * model.experts_per_token * model.expert_parameters / self._expert_shards
        kv = self._kv_bytes_per_layer(is_full=True) * read / efficiencies.kv
        window_kv = self._kv_bytes_per_layer(is_full=False) * read / efficiencies.kv
        heads = model.num_heads / tp
        pair = 4 * model.num_heads / tp * model.attention_sizes(is_full=True)[1] * pair_flop
        window_pair = 4 * model.num_heads / tp * model.head_dim * pair_flop
        absorbed = expansion = 0.0
        if model.latent is not None:
            pair = 2 * heads * model.latent.expanded * pair_flop
            absorbed = 2 * heads * model.latent.absorbed * pair_flop
            kv = math.hypot(kv, absorbed)  # decodes read the latent and compute with it for all heads
            expansion = self._expansion_ms(efficiencies)
        # A state is read and written for every sequence of a step; a token updates it with three products.
        elements = model.state_layers * model.state_elements / tp
        state = self.state_bytes * 2 * read / efficiencies.kv
        comm_step, comm_token, expert_comm = self._communication_ms(efficiencies)
        return StepCoefficients(
            weights_ms=linear_bytes * read / efficiencies.weights,
            token_ms=linear_flop_ms + 6 * elements * pair_flop,
            expert_ms=stored
            * model.bytes_per_parameter(experts.name)
            * read
            / efficiencies.experts
            / self._local_experts
            if stored
            else 0.0,
            local_experts=self._local_experts,
            expert_share=model.experts_per_token / model.num_experts if model.num_experts else 0.0,
            expert_spread=efficiencies.expert_imbalance * largest_of_normal(self.parallel.expert),
            softness=efficiencies.softness,
            draft_novelty=DRAFT_NOVELTY,
            expert_token_ms=2 * active * expert_flop,
            head_ms=model.head_parameters * 2 / tp * read / efficiencies.weights,
            head_sequence_ms=2 * model.head_parameters / tp * head_flop,
            context_ms=model.full_layers * kv,
            window_context_ms=model.window_layers * window_kv,
            window=model.window_tokens,
            mix=efficiencies.mixed_kv_factor,
            attention_ms=model.full_layers * pair,
            window_attention_ms=model.window_layers * window_pair,
            draft_attention_ms=model.full_layers * absorbed,
            history_ms=model.full_layers * expansion,
            comm_ms=comm_step,
            comm_token_ms=comm_token,
            comm_rank_token_ms=expert_comm,
            ranks=self.parallel.data,
            step_ms=efficiencies.step_ms + efficiencies.layer_us * self._whole_layers / 1e3,
            sequence_ms=efficiencies.sequence_us / 1e3 + state,
            prefill_ms=efficiencies.prefill_ms,
            floor_ms=efficiencies.floor_ms_per_layer * self._whole_layers,
        )

    @property
    def _expert_shards(self) -> int:
        """Number of parts of the experts, sharded or placed whole: one per GPU of all ranks."""
        return self.parallel.tensor * self.parallel.data

    @property
    def _local_experts(self) -> float:
        return self.model.num_experts / self.parallel.expert

    @property
    def _whole_layers(self) -> float:
        """Number of layers, each of attention (or a state) and an MLP."""
        return (self.model.num_layers + self.model.mixed_layers) / 2

    def _linear(self, efficiencies: Efficiencies) -> tuple[float, float]:
        """Return the bytes of linear weights on a rank, and the time to compute a token with them, in ms."""
        model, tp = self.model, self.parallel.tensor
        linear, mixer = model.linear_type(self.weights), model.mixer_type(self.weights)
        whole = model.whole_parameters
        parts = {mixer: whole + (model.mixer_parameters - whole) / tp}
        rest = (model.linear_parameters - model.mixer_parameters) / tp
        if linear == mixer:
            parts[linear] = whole + (model.linear_parameters - whole) / tp
        else:
            parts[linear] = rest
        peaks = {
            kind: self.gpu.tflops(weight_type(kind).peak) * 1e12 * efficiencies.compute for kind in parts
        }
        held = sum(count * model.bytes_per_parameter(kind) for kind, count in parts.items())
        return held, sum(2 * count * (1e3 / peaks[kind]) for kind, count in parts.items())

    def _expansion_ms(self, efficiencies: Efficiencies) -> float:
        """Return the time in which a layer makes keys and values of one cached latent, for a chunk of a prompt."""
        latent = self.model.latent
        assert latent is not None
        heads = self.model.num_heads / self.parallel.tensor
        kind = weight_type(self.model.mixer_type(self.weights))
        peak = self.gpu.tflops(kind.peak) * 1e12 * efficiencies.compute
        computed = 2 * latent.rank * heads * (latent.key + latent.value) * 1e3 / peak
        moved = 2 * heads * latent.expanded * 2  # written once and read once, in 16 bits
        return math.hypot(computed, moved * 1e3 / (self.gpu.bandwidth_gbps * 1e9 * efficiencies.kv))

    def _kv_bytes_per_layer(self, *, is_full: bool) -> int:
        model, width = self.model, KV_TYPES[kv_type(self.kv)]
        if model.latent is not None:  # a latent has no heads to divide
            return latent_bytes(model.latent, width, is_sparse=model.indexer is not None)
        kv_heads, size = model.attention_sizes(is_full=is_full)
        return 2 * max(kv_heads // self.parallel.tensor, 1) * size * width

    def _communication_ms(self, efficiencies: Efficiencies) -> tuple[float, float, float]:
        """Return the communication per step, per token of this rank, and per token of all ranks, in ms.

        Tensor-parallel ranks all-reduce after attention (or a state) and after an MLP. Data-parallel ranks all-gather
        the tokens before the experts and reduce-scatter the results after them, each half of an all-reduce. Expert
        routing is included.
        """
        model, parallel = self.model, self.parallel
        tp = parallel.tensor
        moved = model.hidden_size * 2 * 1e3 / (self.gpu.link_gbps * 1e9 * efficiencies.link)
        reduced = model.num_layers + model.mixed_layers
        step = token = 0.0
        routed = model.expert_layers * efficiencies.routing_ns / 1e6
        if tp > 1:
            step += reduced * efficiencies.link_latency_us / 1e3 * (1 + 0.15 * (tp - 2))
            token += reduced * moved * 2 * (tp - 1) / tp
        if parallel.data > 1 and model.num_experts:
            step += (
                model.expert_layers * efficiencies.link_latency_us / 1e3 * (1 + 0.15 * (parallel.data - 2))
            )
            routed += 2 * model.expert_layers * moved * (parallel.data - 1) / parallel.data
        return step, token, routed
