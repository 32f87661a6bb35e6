"""Settings of the tiers below the GPU, as in a configuration file."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import msgspec

from understudy.checks import read_as, share, whole_number
from understudy.errors import ConfigError
from understudy.kv.policy import read_policy
from understudy.tiers.sizes import parse_bytes

TierName = Literal["g2", "g3", "g4"]
Gbps = float | Literal["inf"]
KV_SIZE_FIELDS = ("kv_bytes_per_token", "model", "kv_dtype")
"""Fields of `TiersConfig` that set the KV bytes per token."""


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Links to a tier and back. Bandwidths are in GB/s (10^9 bytes per second); inf: no limit.

    Each worker has its own `down_gbps` and `up_gbps` (default: 14 for g2, unlimited for g3 and g4). All workers share
    the backend bandwidths (default: 7 for g3, 4 for g4; g2 has none). A transfer runs at the lesser of its fair shares
    of both. A duplex bandwidth limits both directions together.
    """

    down_gbps: Gbps | None = None
    up_gbps: Gbps | None = None
    duplex_gbps: Gbps | None = None
    backend_down_gbps: Gbps | None = None
    backend_up_gbps: Gbps | None = None
    backend_duplex_gbps: Gbps | None = None
    fixed_us: float = 0.0
    """Delay from a transfer's start until its first byte moves."""
    offload_concurrency: int | None = None
    """Concurrent transfers of a worker down to this tier; others wait. None: no limit."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            if field.endswith("_gbps") and (value := getattr(self, field)) is not None:
                msgspec.structs.force_setattr(self, field, check_gbps(field, value))
        if not (0 <= self.fixed_us <= 1e9):
            raise ConfigError(f"fixed_us must be from 0 to 1e9, got {self.fixed_us}")
        if self.offload_concurrency is not None and self.offload_concurrency < 1:
            raise ConfigError(f"offload_concurrency must be at least 1, got {self.offload_concurrency}")


class TierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier: g2 is the host memory of each worker; all workers share g3 (disk) and g4 (object store).

    The capacity is `blocks` (or "unlimited") or `bytes` ("512GiB", "64GB").
    """

    tier: TierName
    blocks: int | Literal["unlimited"] | None = None
    bytes: int | str | None = None
    eviction: Any = "lru"
    """A policy name, or a class (or another callable without arguments) that returns an `EvictionPolicy`."""
    latency_ms: float = 0.0
    """Latency added to every transfer to or from the tier."""
    link: LinkSettings = LinkSettings()

    def __post_init__(self) -> None:
        if self.blocks is not None and self.bytes is not None:
            raise ConfigError(f"{self.tier}: blocks and bytes both set the capacity; give one")
        if self.blocks is None and self.bytes is None:
            raise ConfigError(
                f"{self.tier}: the capacity is missing; give blocks (--{self.tier}) or bytes (--{self.tier}-bytes), "
                "or blocks: unlimited"
            )
        if isinstance(self.blocks, int) and self.blocks < 1:
            raise ConfigError(f"{self.tier}: blocks must be at least 1, got {self.blocks}")
        if self.bytes is not None:
            msgspec.structs.force_setattr(self, "bytes", parse_bytes(f"{self.tier}: bytes", self.bytes))
        if self.eviction != "arc":  # TiersConfig checks vLLM's arc
            policy = read_policy(f"{self.tier}: eviction", self.eviction)
            msgspec.structs.force_setattr(self, "eviction", policy)
        if not (0 <= self.latency_ms <= 1e6):
            raise ConfigError(f"{self.tier}: latency_ms must be from 0 to 1e6, got {self.latency_ms}")
        if self.tier == "g2":
            for field in ("backend_down_gbps", "backend_up_gbps", "backend_duplex_gbps"):
                if getattr(self.link, field) is not None:
                    raise ConfigError(
                        f"g2: {field} is for tiers that workers share, and each worker has its own g2; leave it out"
                    )


class OffloadSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules for offloading blocks and loading them back (onboarding)."""

    offload_batch_size: int = 32
    """Most blocks per offload transfer."""
    mode: Literal["evict", "write_through", "vllm"] = "write_through"
    """write_through offloads a block once it is complete, as KVBM does; evict when the GPU evicts it; vllm follows
    vLLM's native offloading (its OffloadingConnector) step for step."""
    blocks_per_chunk: int = 1
    """Mode vllm: GPU blocks per chunk, the unit of transfer and of the host's capacity."""
    chunk_tokens: int | None = None
    """Mode vllm: tokens per chunk, instead of `blocks_per_chunk`."""
    offload_prompt_only: bool = True
    """Mode vllm: do not offload blocks of outputs."""
    placement: Literal["inclusive", "exclusive"] = "inclusive"
    """Whether a lower tier keeps a block that is loaded to the GPU (inclusive) or drops it (exclusive)."""
    min_reuse: int = 0
    """Hits that a block must have had before it is offloaded."""
    demand_first: bool = False
    """Prioritise loads that a request waits for over offloads on every shared link."""
    recompute_fallback: bool = True
    """Recompute a prefix if that is estimated to be faster than loading it."""
    onboard_preempted: bool = True
    """Let preempted requests load blocks too, not only new ones."""
    onboard_failure_rate: float = 0.0
    """Share of loads that fail at random, by the run's seed, when their transfer ends; the request then recomputes."""
    filter: Any = None
    """A class (or another callable without arguments) that returns an `OffloadPolicy`; None: offload all blocks."""

    def __post_init__(self) -> None:
        share("onboard_failure_rate", self.onboard_failure_rate, or_zero=True)
        if self.filter is not None and not callable(self.filter):
            raise ConfigError(
                "filter must be a class that implements OffloadPolicy (every run creates its own object), got "
                f"{self.filter!r}"
            )
        if self.offload_batch_size < 1:
            raise ConfigError(f"offload_batch_size must be at least 1, got {self.offload_batch_size}")
        if self.blocks_per_chunk < 1:
            raise ConfigError(f"blocks_per_chunk must be at least 1, got {self.blocks_per_chunk}")
        if self.chunk_tokens is not None and self.blocks_per_chunk != 1:
            raise ConfigError("offload: blocks_per_chunk and chunk_tokens both set the chunk size; give one")
        self._check_mode()
        if self.min_reuse < 0:
            raise ConfigError(f"min_reuse must be at least 0, got {self.min_reuse}")
        if self.mode == "write_through" and self.placement == "exclusive":
            raise ConfigError(
                "placement=exclusive contradicts mode=write_through, which always keeps a copy in the lower tier; "
                "give mode=evict"
            )

    def _check_mode(self) -> None:
        """Raise ConfigError for settings that the mode does not support."""
        vllm_only = ("blocks_per_chunk", "chunk_tokens", "offload_prompt_only")
        for name, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
            if name == "mode" or getattr(self, name) == default:
                continue
            if self.mode == "vllm" and name not in vllm_only:
                raise ConfigError(
                    f"offload: {name} contradicts mode=vllm, which has no such setting; leave it out"
                )
            if self.mode != "vllm" and name in vllm_only:
                raise ConfigError(f"offload: {name} needs mode=vllm; leave it out, or give that mode")


class TiersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tiers of a run and the KV bytes per token. Without tiers no block is offloaded.

    Bytes per token are given, or computed from `model`: a name in `understudy.tiers.model_shape`, or the path of a
    Hugging Face `config.json`. Bytes per token and bandwidths are those of a whole worker, over all its GPUs.

    Errors: ConfigError names the wrong field; `from_dict` its path.

    Example:
        tiers = us.TiersConfig.from_dict({"tiers": [{"tier": "g2", "blocks": 4096}], "model": "Llama-3.1-8B"})
        report = us.replay("trace.jsonl", us.VllmConfig(num_gpu_blocks=512), tiers=tiers)
    """

    tiers: tuple[TierSettings, ...] = ()
    """Tiers with their capacities (blocks or bytes), eviction and links: g2 (host memory), g3 (disk), g4 (object
    store)."""
    offload: OffloadSettings = OffloadSettings()
    """Rules for offloading blocks and loading them back."""
    kv_bytes_per_token: int | None = None
    """KV bytes per token of a worker, instead of `model`."""
    model: str | None = None
    """Name of a known model, or path of a Hugging Face config.json."""
    kv_dtype: str | None = None
    """Data type of the KV cache, for example fp8 (default: the model's own)."""

    def __post_init__(self) -> None:
        if not isinstance(self.tiers, list | tuple) or not all(
            isinstance(tier, TierSettings) for tier in self.tiers
        ):
            raise ConfigError(
                f"tiers must be a list of TierSettings (from_dict reads a mapping), got {self.tiers!r}"
            )
        names = [tier.tier for tier in self.tiers]
        for name in get_args(TierName):
            if names.count(name) > 1:
                raise ConfigError(f"tiers: {name} is given {names.count(name)} times; give it once")
        if names and "g2" not in names:
            raise ConfigError(
                f"tiers: {names[0]} needs g2, because blocks pass through host memory; add a g2 tier (--g2)"
            )
        self._check_policies()
        for field in ("model", "kv_dtype"):
            if not isinstance(value := getattr(self, field), str | None):
                raise ConfigError(f"{field} must be text, got {value!r}")
        if self.kv_bytes_per_token is not None:
            size = whole_number("kv_bytes_per_token", self.kv_bytes_per_token, 1)
            msgspec.structs.force_setattr(self, "kv_bytes_per_token", size)
            for field in ("model", "kv_dtype"):
                if getattr(self, field) is not None:
                    raise ConfigError(
                        f"{field} and kv_bytes_per_token both set the KV bytes per token; give one"
                    )
        if self.model is None and self.kv_dtype is not None:
            raise ConfigError("kv_dtype needs model, or give kv_bytes_per_token instead")

    def _check_policies(self) -> None:
        vllm = self.offload.mode == "vllm"
        for tier in self.tiers:
            if vllm and tier.tier != "g2":
                raise ConfigError(
                    f"tiers: {tier.tier} contradicts offload mode vllm, which supports host memory only; leave it out"
                )
            if vllm and tier.eviction not in ("lru", "arc"):
                raise ConfigError(
                    f"g2: eviction must be lru or arc in offload mode vllm, got {tier.eviction!r}"
                )
            if vllm and tier.link.offload_concurrency is not None:
                raise ConfigError(
                    "g2: offload_concurrency contradicts offload mode vllm, which has one stream per direction; leave "
                    "it out"
                )
            if not vllm and tier.eviction == "arc":
                raise ConfigError(f"{tier.tier}: eviction arc needs offload mode vllm")

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> TiersConfig:
        """Read a mapping of settings. ConfigError names the path of an unknown or invalid field."""
        return read_as(cls, settings)

    def drop_unused_kv_size(self) -> TiersConfig:
        """Return the settings without the KV size if there are no tiers (it was given for the GPU only)."""
        return self if self.tiers else msgspec.structs.replace(self, **dict.fromkeys(KV_SIZE_FIELDS))

    def describe(self) -> dict[str, Any]:
        """Return the settings as JSON values: classes by name, and inf as text."""
        described: dict[str, Any] = _convert_to_json(msgspec.to_builtins(self, enc_hook=name_of))
        return described


def name_of(value: Any) -> str:
    """Return the name of a class, or of an object's class, for JSON."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _convert_to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _convert_to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_to_json(item) for item in value]
    return "inf" if value == math.inf else value


def check_gbps(name: str, value: float | str) -> float:
    """Return a bandwidth in GB/s (10^9 bytes per second), else raise ConfigError."""
    gbps = math.inf if value == "inf" else float(value)
    if gbps == 0:
        raise ConfigError(
            f"{name} must be positive, got 0; for no limit give inf (Dynamo reads 0 as unlimited)"
        )
    if not (1e-9 <= gbps <= 1e6 or gbps == math.inf):
        raise ConfigError(f"{name} must be from 1e-9 to 1e6 (10^9 bytes per second) or inf, got {gbps}")
    return gbps
