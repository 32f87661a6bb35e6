"""`Shape`: how every engine of a fleet is deployed; with a number of engines it is a candidate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from understudy.engines.kinds.registry import find_kind
from understudy.errors import ConfigError
from understudy.run.pools import make_pools
from understudy.run.settings import ReplaySettings
from understudy.sweep.candidate import Candidate
from understudy.sweep.checkpoints import refuse_unspoken

if TYPE_CHECKING:
    from understudy.planning.question import Question
    from understudy.report.goodput import Slo

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Engines of a fleet: with prefill workers, `engines` are those that decode."""

    engines: int
    prefill: int = 0

    @property
    def total(self) -> int:
        """Engines of all roles."""
        return self.engines + self.prefill


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The engine, its GPU and parallel sizes, and what is tried on top of the engine's defaults."""

    gpu: str
    tensor: int
    engine: str = "vllm"
    ranks: int = 1
    """Data-parallel ranks that share experts; 1 without them."""
    routing: str = "round_robin"
    """Routing of several engines."""
    chunk_tokens: int | None = None
    """Most tokens of a step; None: the engine's default."""
    host_gib: int | None = None
    """Host memory of one engine for KV blocks; None without."""
    is_split: bool = False
    """Whether engines have roles, prefill and decode."""

    @property
    def engine_gpus(self) -> int:
        """GPUs of one engine."""
        return self.tensor * self.ranks

    @property
    def kind(self) -> tuple[str, str, int, int, bool]:
        """Properties that make two fleets different to a buyer: GPU, engine, parallel sizes and roles."""
        return self.gpu, self.engine, self.tensor, self.ranks, self.is_split

    def flags(self, size: Size) -> dict[str, Any]:
        """Return the flags of `understudy replay` that differ among the fleets of a plan."""
        flags: dict[str, Any] = {"gpu": self.gpu, "tensor-parallel-size": self.tensor}
        if self.engine != "vllm":
            flags["engine"] = self.engine
        if self.ranks > 1:
            flags |= {"data-parallel-size": self.ranks, "enable-expert-parallel": True}
        if self.is_split:
            flags |= {"prefill-workers": size.prefill, "decode-workers": size.engines}
        else:
            flags["workers"] = size.engines
            if size.engines > 1 and self.routing != "round_robin":
                flags["routing"] = self.routing
        if self.chunk_tokens is not None:
            flags["max-num-batched-tokens"] = self.chunk_tokens
        if self.host_gib is not None:
            flags["kv-offloading-size"] = self.host_gib
        return flags

    def build(
        self,
        question: Question,
        size: Size,
        *,
        users: float = 1.0,
        slo: Slo | None = None,
        weights: str | None = None,
    ) -> Candidate:
        """Return the candidate of a fleet of this shape. ConfigError names what the engine or the GPU refuses."""
        gpu: dict[str, Any] = {"name": self.gpu, "tensor_parallel_size": self.tensor}
        if self.ranks > 1:
            gpu |= {"data_parallel_size": self.ranks, "enable_expert_parallel": True}
        if weights is not None:
            gpu["weight_dtype"] = weights
        engine: dict[str, Any] = {"engine_type": self.engine}
        if self.chunk_tokens is not None:
            engine["max_num_batched_tokens"] = self.chunk_tokens
        if self.host_gib is not None:
            engine["kv_offloading_size"] = self.host_gib
        given: dict[str, Any] = {"model": question.model, "gpu": gpu, "engine": engine, "seed": question.seed}
        if question.kv_dtype is not None:
            given["kv_dtype"] = question.kv_dtype
        if users != 1:
            given["users"] = users
        if self.is_split:
            given["disaggregation"] = {
                "prefill_workers": size.prefill,
                "decode_workers": size.engines,
                "link_gbps": question.link_gbps,
            }
        else:
            given["workers"] = size.engines
            given["routing"] = self.routing if size.engines > 1 else "round_robin"
        settings = ReplaySettings.read(None, given, list(question.assignments))
        if settings.gpu is None or settings.gpu.num_gpus != self.engine_gpus:
            raise ConfigError(
                "--set: a plan chooses GPUs and parallel sizes itself; leave these settings out"
            )
        candidate = Candidate(
            flags=self.flags(size),
            settings=settings,
            slo=slo or question.slo,
            model=question.model,
            kv_dtype=question.kv_dtype,
            goal_window_s=question.goal_window_s,
        )
        refuse_unspoken(candidate)
        if not settings.pools and settings.disaggregation is None:
            make_pools((), settings.engine, settings.workers, settings.tiers)
        return candidate

    def describe(self, size: Size) -> str:
        """Return the fleet in words, such as `3 engines of 2 x H200 (vLLM, TP 2)`."""
        title = find_kind(self.engine).title
        parallel = f"TP {self.tensor}" if self.ranks == 1 else f"DP {self.ranks} with expert parallelism"
        if self.ranks > 1 and self.tensor > 1:
            parallel = f"TP {self.tensor} x {parallel}"
        each = self.gpu if self.engine_gpus == 1 else f"{self.engine_gpus} x {self.gpu}"
        count = (
            f"{size.prefill} prefill + {size.engines} decode engines"
            if self.is_split
            else f"{size.engines} engine{'s' if size.engines > 1 else ''}"
        )
        words = [f"{count} of {each} ({title}, {parallel})"]
        if size.engines > 1 and not self.is_split:
            words.append(f"routing {self.routing}")
        if self.chunk_tokens is not None:
            words.append(f"chunks of {self.chunk_tokens:,} tokens")
        if self.host_gib is not None:
            words.append(f"{self.host_gib:,} GiB of host memory per engine")
        return ", ".join(words)
