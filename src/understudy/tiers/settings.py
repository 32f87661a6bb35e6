"""Settings of the tiers below the GPU, as a configuration file has them."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import msgspec

from understudy.checks import read_as
from understudy.errors import ConfigError
from understudy.kv.policy import check_policy
from understudy.tiers.sizes import parse_bytes

TierName = Literal["g2", "g3", "g4"]
Gbps = float | Literal["inf"]
WEIGHTS = ("kv_bytes_per_token", "model", "kv_dtype")
"""Fields of `TiersConfig` that say what a token weighs."""


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How blocks get to a tier and back. Bandwidths are in 10^9 bytes per second; inf: no limit.

    `down_gbps` and `up_gbps` belong to each worker; left out they are 14 for g2 and unlimited for g3 and g4. Those of
    the backend belong to the run and all workers share them: 7 for g3, 4 for g4; g2 has none. A transfer moves at the
    lesser of its two fair shares. A duplex cap limits both directions together.
    """

    down_gbps: Gbps | None = None
    up_gbps: Gbps | None = None
    duplex_gbps: Gbps | None = None
    backend_down_gbps: Gbps | None = None
    backend_up_gbps: Gbps | None = None
    backend_duplex_gbps: Gbps | None = None
    fixed_us: float = 0.0
    """From a transfer's start until its bytes flow."""
    offload_concurrency: int | None = None
    """Transfers down to this tier that a worker has under way at a time; the rest wait. None: no limit."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            if field.endswith("_gbps") and (value := getattr(self, field)) is not None:
                msgspec.structs.force_setattr(self, field, check_gbps(field, value))
        if not (0 <= self.fixed_us <= 1e9):
            raise ConfigError(f"fixed_us must be from 0 to 1e9, got {self.fixed_us}")
        if self.offload_concurrency is not None and self.offload_concurrency < 1:
            raise ConfigError(f"offload_concurrency must be at least 1, got {self.offload_concurrency}")


class TierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier: g2 is host memory of each worker, g3 (disk) and g4 (object store) belong to the run.

    The capacity is given in `blocks` or in `bytes` ("512GiB", "64GB"), or is "unlimited".
    """

    tier: TierName
    blocks: int | Literal["unlimited"] | None = None
    bytes: int | str | None = None
    eviction: Any = "lru"
    """A policy by name, or a class (or another callable without arguments) that makes an `EvictionPolicy`."""
    latency_ms: float = 0.0
    """Of the tier itself: added to every transfer to or from it."""
    link: LinkSettings = LinkSettings()

    def __post_init__(self) -> None:
        if self.blocks is not None and self.bytes is not None:
            raise ConfigError(f"{self.tier}: blocks and bytes both say how large the tier is; give one")
        if self.blocks is None and self.bytes is None:
            raise ConfigError(
                f"{self.tier}: how large is it? Give blocks (--{self.tier}) or bytes (--{self.tier}-bytes), or "
                "blocks: unlimited"
            )
        if isinstance(self.blocks, int) and self.blocks < 1:
            raise ConfigError(f"{self.tier}: blocks must be at least 1, got {self.blocks}")
        if self.bytes is not None:
            msgspec.structs.force_setattr(self, "bytes", parse_bytes(f"{self.tier}: bytes", self.bytes))
        if self.eviction != "arc":  # vLLM's own: see TiersConfig
            check_policy(f"{self.tier}: eviction", self.eviction)
        if not (0 <= self.latency_ms <= 1e6):
            raise ConfigError(f"{self.tier}: latency_ms must be from 0 to 1e6, got {self.latency_ms}")
        if self.tier == "g2":
            for field in ("backend_down_gbps", "backend_up_gbps", "backend_duplex_gbps"):
                if getattr(self.link, field) is not None:
                    raise ConfigError(
                        f"g2: {field} belongs to a tier that workers share; g2 is each worker's own"
                    )


class OffloadSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When blocks go down and come back."""

    offload_batch_size: int = 32
    """Blocks of one transfer down, at most."""
    mode: Literal["evict", "write_through", "vllm"] = "write_through"
    """Copy a block down as soon as it is complete, as KVBM does, or only when the GPU evicts it; or all that vLLM's
    native offloading (its OffloadingConnector) does, step for step."""
    blocks_per_chunk: int = 1
    """Mode vllm: blocks of the GPU that go and come together; the host counts chunks of so many."""
    chunk_tokens: int | None = None
    """Mode vllm: the same in tokens, in place of `blocks_per_chunk`."""
    offload_prompt_only: bool = True
    """Mode vllm: blocks of outputs stay on the GPU."""
    placement: Literal["inclusive", "exclusive"] = "inclusive"
    """Whether a block that comes back to the GPU also stays where it was."""
    min_reuse: int = 0
    """Hits that a block must have had before it is worth copying down."""
    demand_first: bool = False
    """Loads that a request waits for go before copies down, wherever they share a link."""
    recompute_fallback: bool = True
    """Compute a prefix anew when that is estimated to be sooner than loading it."""
    onboard_preempted: bool = True
    """Preempted requests may load blocks too, not only new ones."""
    onboard_failure_rate: float = 0.0
    """Share of loads that fail, by chance (with the seed of the run), when their bytes have come; the request computes
    instead."""
    filter: Any = None
    """A class (or another callable without arguments) that makes an `OffloadPolicy`: what is worth a copy."""

    def __post_init__(self) -> None:
        if not (0 <= self.onboard_failure_rate <= 1):
            raise ConfigError(f"onboard_failure_rate must be in [0, 1], got {self.onboard_failure_rate}")
        if self.filter is not None and not callable(self.filter):
            raise ConfigError(
                "filter must be a class that makes an OffloadPolicy (every run gets one of its own), got "
                f"{self.filter!r}"
            )
        if self.offload_batch_size < 1:
            raise ConfigError(f"offload_batch_size must be at least 1, got {self.offload_batch_size}")
        if self.blocks_per_chunk < 1:
            raise ConfigError(f"blocks_per_chunk must be at least 1, got {self.blocks_per_chunk}")
        if self.chunk_tokens is not None and self.blocks_per_chunk != 1:
            raise ConfigError(
                "offload: blocks_per_chunk and chunk_tokens both say how large a chunk is; give one"
            )
        self._check_mode()
        if self.min_reuse < 0:
            raise ConfigError(f"min_reuse must not be negative, got {self.min_reuse}")
        if self.mode == "write_through" and self.placement == "exclusive":
            raise ConfigError(
                "placement=exclusive contradicts mode=write_through, which keeps a copy below from the start: give "
                "mode=evict with it"
            )

    def _check_mode(self) -> None:
        """What vLLM does not have, and what only it has."""
        defaults = {field.name: field.default for field in msgspec.structs.fields(self)}
        vllm_only = ("blocks_per_chunk", "chunk_tokens", "offload_prompt_only")
        for name in self.__struct_fields__:
            if name == "mode" or getattr(self, name) == defaults[name]:
                continue
            if self.mode == "vllm" and name not in vllm_only:
                raise ConfigError(
                    f"offload: {name} contradicts mode=vllm, whose offloading has no such setting; leave it out"
                )
            if self.mode != "vllm" and name in vllm_only:
                raise ConfigError(f"offload: {name} belongs to mode=vllm; leave it out, or give that mode")


class TiersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tiers of a run, and what a token weighs. Without tiers nothing is offloaded.

    Bytes per token are given, or follow from `model`: a name that `understudy.tiers.model_shape` knows, or the path of
    a Hugging Face `config.json`. They count the whole worker, over all its GPUs, and so do the links' bandwidths.
    """

    tiers: tuple[TierSettings, ...] = ()
    offload: OffloadSettings = OffloadSettings()
    kv_bytes_per_token: int | None = None
    model: str | None = None
    kv_dtype: str | None = None
    """Of the KV cache, for example fp8; by default the model's own."""

    def __post_init__(self) -> None:
        if not isinstance(self.tiers, list | tuple) or not all(
            isinstance(tier, TierSettings) for tier in self.tiers
        ):
            raise ConfigError(
                f"tiers must be a list of TierSettings (from_dict reads settings by name), got {self.tiers!r}"
            )
        names = [tier.tier for tier in self.tiers]
        for name in get_args(TierName):
            if names.count(name) > 1:
                raise ConfigError(f"tiers: {name} is given {names.count(name)} times")
        if names and "g2" not in names:
            raise ConfigError(
                f"tiers: {names[0]} needs g2, because blocks pass through host memory; add a g2 tier (--g2)"
            )
        self._check_policies()
        if self.kv_bytes_per_token is not None:
            if self.kv_bytes_per_token < 1:
                raise ConfigError(f"kv_bytes_per_token must be at least 1, got {self.kv_bytes_per_token}")
            for field in ("model", "kv_dtype"):
                if getattr(self, field) is not None:
                    raise ConfigError(
                        f"{field} and kv_bytes_per_token both say what a token weighs; give one"
                    )
        if self.model is None and self.kv_dtype is not None:
            raise ConfigError("kv_dtype needs model, or give kv_bytes_per_token instead")

    def _check_policies(self) -> None:
        vllm = self.offload.mode == "vllm"
        for tier in self.tiers:
            if vllm and tier.tier != "g2":
                raise ConfigError(
                    f"tiers: {tier.tier} contradicts offload mode vllm, which knows host memory only; leave it out"
                )
            if vllm and tier.eviction not in ("lru", "arc"):
                raise ConfigError(
                    f"g2: eviction under offload mode vllm is lru or arc, got {tier.eviction!r}"
                )
            if vllm and tier.link.offload_concurrency is not None:
                raise ConfigError(
                    "g2: offload_concurrency contradicts offload mode vllm, which has one stream each way"
                )
            if not vllm and tier.eviction == "arc":
                raise ConfigError(f"{tier.tier}: eviction arc is vLLM's; it needs offload mode vllm")

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> TiersConfig:
        """Read settings by name. ConfigError names an unknown or wrong field and where it stands."""
        return read_as(cls, settings)

    def without_idle_weight(self) -> TiersConfig:
        """The same, but without tiers nothing has a weight: a GPU may have asked for it, or tiers were taken away."""
        return self if self.tiers else msgspec.structs.replace(self, **dict.fromkeys(WEIGHTS))

    def described(self) -> dict[str, Any]:
        """The settings as JSON can hold them: classes by name, and inf as text."""
        described: dict[str, Any] = _plain(msgspec.to_builtins(self, enc_hook=name_of))
        return described


def name_of(value: Any) -> str:
    """How JSON names a class, or an object of one."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return "inf" if value == math.inf else value


def check_gbps(name: str, value: float | str) -> float:
    """A bandwidth in 10^9 bytes per second, or ConfigError."""
    gbps = math.inf if value == "inf" else float(value)
    if gbps == 0:
        raise ConfigError(
            f"{name} must be positive, got 0; for no limit say inf (Dynamo reads 0 as unlimited)"
        )
    if not (1e-9 <= gbps <= 1e6 or gbps == math.inf):
        raise ConfigError(f"{name} must be from 1e-9 to 1e6 (10^9 bytes per second) or inf, got {gbps}")
    return gbps
