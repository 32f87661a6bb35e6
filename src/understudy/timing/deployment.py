"""`Deployment`: a model on GPUs, and the step coefficients of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from understudy.errors import ConfigError
from understudy.kv.counts import count
from understudy.timing.architecture import Architecture  # noqa: TC001  (msgspec reads the annotations)
from understudy.timing.coefficients import StepCoefficients
from understudy.timing.gpus import Gpu  # noqa: TC001  (the same)
from understudy.timing.weight_types import KV_TYPES, kv_type, weight_type

if TYPE_CHECKING:
    from understudy.timing.efficiencies import Efficiencies


DRAFT_NOVELTY = 0.45
"""Share of a draft's experts that a step would not read without it: the tokens of one request share experts.

Fitted to the time that three drafts of an EAGLE3 head add to gpt-oss-120b on one H200 at 1 to 256 streams.
"""


class Parallelism(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parallel sizes of one model. Experts are sharded over all GPUs, or placed whole in `expert` groups."""

    tensor: int = 1
    data: int = 1
    expert: int = 1
    """Number of expert-parallel groups: 1, or a divisor of tensor · data."""

    def __post_init__(self) -> None:
        for name in ("tensor", "data", "expert"):
            count(f"{name}_parallel_size", getattr(self, name), 1, ConfigError)
        if (self.tensor * self.data) % self.expert:
            raise ConfigError(
                f"expert_parallel_size={self.expert} does not divide the {self.tensor * self.data} GPUs of "
                f"tensor_parallel_size={self.tensor} and data_parallel_size={self.data}"
            )

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

    @property
    def steps_together(self) -> bool:
        """Whether data-parallel ranks wait for each other in every step, because they share experts."""
        return self.parallel.data > 1 and self.model.num_experts > 0

    @property
    def weight_bytes_per_gpu(self) -> int:
        """Weight bytes on one GPU; embedding and head are sharded too."""
        model, parallel = self.model, self.parallel
        experts = (
            model.expert_layers
            * model.num_experts
            * model.expert_parameters
            * weight_type(self.weights).bytes
        )
        rest = model.weight_bytes(self.weights) - experts
        return int(rest / parallel.tensor + experts / self._expert_shards)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes per token on one GPU over all layers with keys of their own; windows count as full attention."""
        model = self.model
        return self._kv_bytes_per_layer * (model.num_layers - model.state_layers - model.shared_layers)

    def coefficients(self, efficiencies: Efficiencies) -> StepCoefficients:
        """Compute the step coefficients of a rank with these efficiencies.

        Ranks that share experts process the tokens of all ranks; a rank simulated alone assumes equally busy peers.
        """
        model, gpu, tp = self.model, self.gpu, self.parallel.tensor
        linear, experts = weight_type(model.linear_type(self.weights)), weight_type(self.weights)
        read = 1e3 / (gpu.bandwidth_gbps * 1e9)  # ms per byte
        linear_flop = 1e3 / (gpu.tflops(linear.peak) * 1e12 * efficiencies.compute)
        expert_flop = 1e3 / (gpu.tflops(experts.peak) * 1e12 * efficiencies.expert_compute)
        head_flop = 1e3 / (gpu.bf16_tflops * 1e12 * efficiencies.compute)
        pair_flop = 1e3 / (gpu.bf16_tflops * 1e12 * efficiencies.attention)
        linear_parameters = model.linear_parameters / tp
        stored = model.expert_layers * model.num_experts * model.expert_parameters / self._expert_shards
        active = model.expert_layers * model.experts_per_token * model.expert_parameters / self._expert_shards
        kv = self._kv_bytes_per_layer * read / efficiencies.kv
        pair = 4 * model.num_heads / tp * model.head_dim * pair_flop
        full_layers = model.num_layers - model.window_layers - model.state_layers
        # A state is read and written for every sequence of a step; a token updates it with three products.
        elements = model.state_layers * model.state_elements / tp
        state_bytes = model.state_layers * (model.state_bytes or 2 * model.state_elements) / tp
        state = state_bytes * 2 * read / efficiencies.kv
        comm_step, comm_token, expert_comm = self._communication_ms(efficiencies)
        return StepCoefficients(
            weights_ms=linear_parameters * linear.bytes * read / efficiencies.weights,
            token_ms=2 * linear_parameters * linear_flop + 6 * elements * pair_flop,
            expert_ms=stored * experts.bytes * read / efficiencies.experts / self._local_experts
            if stored
            else 0.0,
            local_experts=self._local_experts,
            expert_share=model.experts_per_token / model.num_experts if model.num_experts else 0.0,
            draft_novelty=DRAFT_NOVELTY,
            expert_token_ms=2 * active * expert_flop,
            head_ms=model.head_parameters * 2 / tp * read / efficiencies.weights,
            head_sequence_ms=2 * model.head_parameters / tp * head_flop,
            context_ms=full_layers * kv,
            window_context_ms=model.window_layers * kv,
            window=model.window_tokens,
            mix=efficiencies.mixed_kv_factor,
            attention_ms=full_layers * pair,
            window_attention_ms=model.window_layers * pair,
            comm_ms=comm_step,
            comm_token_ms=comm_token,
            comm_rank_token_ms=expert_comm,
            ranks=self.parallel.data,
            step_ms=efficiencies.step_ms + efficiencies.layer_us * model.num_layers / 1e3,
            sequence_ms=efficiencies.sequence_us / 1e3 + state,
            prefill_ms=efficiencies.prefill_ms,
            floor_ms=efficiencies.floor_ms_per_layer * model.num_layers,
        )

    @property
    def _expert_shards(self) -> int:
        """Number of parts of the experts, sharded or placed whole: one per GPU of all ranks."""
        return self.parallel.tensor * self.parallel.data

    @property
    def _local_experts(self) -> float:
        return self.model.num_experts / self.parallel.expert

    @property
    def _kv_bytes_per_layer(self) -> int:
        heads = max(self.model.kv_heads // self.parallel.tensor, 1)
        return 2 * heads * self.model.head_dim * KV_TYPES[kv_type(self.kv)]

    def _communication_ms(self, efficiencies: Efficiencies) -> tuple[float, float, float]:
        """Return the communication per step, per token of this rank, and per token of all ranks, in ms.

        Tensor-parallel ranks all-reduce twice per layer. Data-parallel ranks all-gather the tokens before the experts
        and reduce-scatter the results after them, each half of an all-reduce. Expert routing is included.
        """
        model, parallel = self.model, self.parallel
        tp = parallel.tensor
        moved = model.hidden_size * 2 * 1e3 / (self.gpu.link_gbps * 1e9 * efficiencies.link)
        step = token = 0.0
        routed = model.expert_layers * efficiencies.routing_ns / 1e6
        if tp > 1:
            step += 2 * model.num_layers * efficiencies.link_latency_us / 1e3 * (1 + 0.15 * (tp - 2))
            token += 2 * model.num_layers * moved * 2 * (tp - 1) / tp
        if parallel.data > 1 and model.num_experts:
            step += (
                model.expert_layers * efficiencies.link_latency_us / 1e3 * (1 + 0.15 * (parallel.data - 2))
            )
            routed += 2 * model.expert_layers * moved * (parallel.data - 1) / parallel.data
        return step, token, routed
