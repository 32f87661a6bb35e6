"""Settings of prefill and decode pools: rules, routing and links."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from understudy._core import Disaggregation as CoreDisaggregation
from understudy._core import HandOffLinks, VllmTransfer, uncached_rule, user_decider
from understudy.checks import share, whole_number
from understudy.engines.kinds.registry import kind_of
from understudy.errors import ConfigError
from understudy.router.kv import KvRouting
from understudy.router.load import load_router
from understudy.run.pools import WorkerPool
from understudy.tiers.model_shape import ModelShape
from understudy.user_code import names_file_and_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy._core import Decider as CoreDecider
    from understudy._core import EngineConfig as CoreConfig
    from understudy._core import NativeRouter
    from understudy.engines.engine_config import EngineConfig
    from understudy.router import Router
    from understudy.tiers.settings import TiersConfig

ROUTINGS = ("round_robin", "random", "least_loaded", "power_of_two", "session_affinity", "session_tree")
"""Names of the decode workers' routing, besides `kv`."""
RULES = "always, uncached:TOKENS, ratio:SHARE, llm-d:TOKENS or isl_bounding"
_RULE = re.compile(r"(always|isl_bounding)|(uncached|llm-d):(\d+)|ratio:(0?\.\d+|[01](?:\.0*)?)")
MAX_RULE_TOKENS = 1 << 30
DEFAULT_LEASE_S = 30
ISL_BOUNDING_TOKENS = 2048
ISL_BOUNDING_SHARE = 0.7


class Decider(Protocol):
    """A rule of your own: whether a prefill worker computes the prompt of a request."""

    def remote(self, prompt_tokens: int, cached_tokens: int, session: int) -> bool:
        """Decide, given the prompt tokens that the chosen decode worker has cached. `session`: its first row."""
        ...


class Disaggregation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a fleet with prefill and decode pools, by the rules of vLLM's NixlConnector (pull) or of SGLang.

    SGLang's workers get a request at once and push KV: `rule`, `hop_ms`, `lease_s` and `kv_load_failure_policy` are
    vLLM's.

    Errors: ConfigError names a wrong field.

    Example:
        us.replay("trace.jsonl", disaggregation=us.Disaggregation(prefill_workers=2, decode_workers=2, link_gbps=25.0,
                                                                  kv_bytes_per_token=131072))
    """

    prefill_workers: int | None = None
    """Number of prefill workers; None: the pools with a role say it."""
    decode_workers: int | None = None
    """Number of decode workers."""
    rule: Any = "always"
    """always; uncached:N (the decode worker lacks at least N tokens); ratio:X (or this share of the prompt); llm-d:N
    (llm-d's decider with nonCachedTokens N); isl_bounding (Dynamo's); or an object with `remote`."""
    order: Literal["prefill_first", "decode_first"] = "prefill_first"
    """When the decode worker is chosen: after the prompt is computed, or on arrival. Rules that read the decode
    worker's cache choose it on arrival."""
    decode_routing: Any = "round_robin"
    """Routing of decode workers, as `routing` is of prefill workers; by default that of vLLM's proxy."""
    link_gbps: float = math.inf
    """Bandwidth of each prefill worker's way out and of each decode worker's way in, in 10^9 bytes per second."""
    backend_gbps: float = math.inf
    """Bandwidth that all hand-offs of the fleet share."""
    link_latency_ms: float = 0.0
    """Fixed time of a transfer, before its bytes flow."""
    hop_ms: float = 0.0
    """From the end of a prompt to the arrival of the request at its decode worker."""
    lease_s: int = DEFAULT_LEASE_S
    """`kv_lease_duration`: how long a prefill worker keeps blocks that no decode worker reads."""
    kv_bytes_per_token: int | None = None
    """KV bytes of a token; needed unless the links have no limit."""
    transfer_failure_rate: float = 0.0
    """Probability that the read of a request's blocks fails when it ends; `seed` and the request decide which ones."""
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    """After a failed read the request fails, or its decode worker computes the prompt."""

    def __post_init__(self) -> None:
        for name in ("prefill_workers", "decode_workers"):
            if getattr(self, name) is not None:
                msgspec.structs.force_setattr(self, name, whole_number(name, getattr(self, name), 1))
        if (self.prefill_workers is None) != (self.decode_workers is None):
            missing = "decode_workers" if self.decode_workers is None else "prefill_workers"
            raise ConfigError(f"{missing}: give the numbers of both prefill_workers and decode_workers")
        for name in ("link_gbps", "backend_gbps"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value!r}; inf is no limit")
        for name in ("link_latency_ms", "hop_ms"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= 3_600_000:
                raise ConfigError(f"{name} must be 0 to 3,600,000 ms, got {value!r}")
        whole_number("lease_s", self.lease_s, 1, 1_000_000)
        share("transfer_failure_rate", self.transfer_failure_rate, or_zero=True)
        if self.kv_load_failure_policy not in ("fail", "recompute"):
            raise ConfigError(
                f"kv_load_failure_policy must be fail or recompute, got {self.kv_load_failure_policy!r}"
            )
        if self.order not in ("prefill_first", "decode_first"):
            raise ConfigError(f"order must be prefill_first or decode_first, got {self.order!r}")
        is_users = callable(getattr(self.rule, "remote", None)) and not isinstance(self.rule, type)
        if not is_users and (not isinstance(self.rule, str) or _RULE.fullmatch(self.rule) is None):
            raise ConfigError(f"rule must be {RULES}, or an object with remote(), got {self.rule!r}")
        tokens = None if is_users else _RULE.fullmatch(self.rule)[3]  # type: ignore[index]
        if tokens is not None and int(tokens) > MAX_RULE_TOKENS:
            raise ConfigError(f"rule: at most {MAX_RULE_TOKENS:,} tokens, got {self.rule!r}")
        if self.kv_bytes_per_token is not None:
            whole_number("kv_bytes_per_token", self.kv_bytes_per_token, 1)

    def make_pools(self, engine: EngineConfig, tiers: TiersConfig | None) -> tuple[WorkerPool, ...]:
        """Return the two pools of equal engines and tiers. ConfigError: their numbers are not given."""
        if self.prefill_workers is None or self.decode_workers is None:
            raise ConfigError(
                "prefill_workers: give prefill_workers and decode_workers (--prefill-workers, --decode-workers), or "
                "pools with roles"
            )
        return (
            WorkerPool(
                name="prefill", role="prefill", workers=self.prefill_workers, engine=engine, tiers=tiers
            ),
            WorkerPool(name="decode", role="decode", workers=self.decode_workers, engine=engine, tiers=tiers),
        )

    def sized_for(self, model: str | None, kv_dtype: str | None = None) -> Disaggregation:
        """Return the settings with the KV bytes per token of a model, unless they are given."""
        if model is None or self.kv_bytes_per_token is not None:
            return self
        size = ModelShape.find(model).bytes_per_token(kv_dtype=kv_dtype)
        return msgspec.structs.replace(self, kv_bytes_per_token=size)

    def check_pools(self, pools: Sequence[WorkerPool]) -> None:
        """Raise ConfigError for pools that cannot hand blocks to each other."""
        for pool in pools:
            if pool.role == "both":
                raise ConfigError(f"pools: {pool.name} needs a role, prefill or decode")
            kind = kind_of(pool.engine)
            if not kind.hands_off:
                raise ConfigError(
                    f"pools: {pool.name} has a role, and hand-offs of {kind.title} are not simulated; use an engine of "
                    "vLLM or SGLang"
                )
            if kind.name == "sglang":
                self._check_pushes(pool, pools)
            elif pool.engine.profile.name not in ("v0.33",):
                raise ConfigError(
                    f"vllm_version: hand-offs are known of 0.33 only, and {pool.name} has {pool.engine.profile.name}"
                )

    def _check_pushes(self, pool: WorkerPool, pools: Sequence[WorkerPool]) -> None:
        """Raise ConfigError for what SGLang's prefill and decode servers do not have."""
        for other in pools:
            if kind_of(other.engine).name != "sglang" or other.engine.block_size != pool.engine.block_size:
                raise ConfigError(
                    f"pools: {other.name} and {pool.name} hand over KV, and need one kind of engine and one page size"
                )
        if self.rule != "always":
            raise ConfigError(
                "rule: SGLang's decode servers compute no prompts, so that every prompt is handed over; leave it out"
            )
        if self.hop_ms:
            raise ConfigError(
                "hop_ms: SGLang's router sends a request to both workers at once; leave it out (--hand-off-hop-ms)"
            )
        if self.lease_s != DEFAULT_LEASE_S:
            raise ConfigError(
                "lease_s: SGLang's prefill servers have no leases: they keep pages until these have arrived; leave it "
                "out (--kv-lease-duration)"
            )
        if self.kv_load_failure_policy != "fail":
            raise ConfigError(
                "kv_load_failure_policy: SGLang's decode servers compute no prompt again; leave it out"
            )
        if pool.resolve_tiers().tiers:
            raise ConfigError(
                f"tiers: HiCache with prefill and decode workers is not simulated; leave it out of {pool.name}"
            )

    def transfer(self, role: str) -> VllmTransfer:
        """The connector's settings of a pool."""
        return VllmTransfer(
            produces=role == "prefill",
            consumes=role == "decode",
            recomputes=self.kv_load_failure_policy == "recompute",
            lease_s=self.lease_s,
        )

    def _build_decode_router(self, seed: int) -> str | Router | NativeRouter:
        """Return the router of decode workers, made anew. ConfigError names a wrong one."""
        routing = KvRouting() if self.decode_routing == "kv" else self.decode_routing
        if isinstance(routing, KvRouting):
            return routing.build(seed)
        if isinstance(routing, str) and names_file_and_class(routing):
            return load_router(routing, "decode_routing")
        if isinstance(routing, str) and routing not in ROUTINGS:
            raise ConfigError(
                f"decode_routing must be one of {', '.join(ROUTINGS)}, kv or FILE.py:CLASS, got {routing!r}"
            )
        if not isinstance(routing, str) and not callable(getattr(routing, "choose", None)):
            raise ConfigError(f"decode_routing must be a name, FILE.py:CLASS or a Router, got {routing!r}")
        router: str | Router = routing
        return router

    def native(self, block_size: int, seed: int) -> CoreDisaggregation:
        """Build the core's settings. ConfigError: a limited link without the KV bytes per token."""
        if self.kv_bytes_per_token is None and math.isfinite(min(self.link_gbps, self.backend_gbps)):
            raise ConfigError(
                "kv_bytes_per_token: a link with a limit needs it; give kv_bytes_per_token (--kv-bytes-per-token), or "
                "a model (--model)"
            )
        return CoreDisaggregation(
            decode_routing=self._build_decode_router(seed),
            seed=seed,
            decider=self.decider(),
            decode_first=self.order == "decode_first",
            hop_ns=round(self.hop_ms * 1e6),
            links=HandOffLinks(
                out_gbps=float(self.link_gbps),
                in_gbps=float(self.link_gbps),
                backend_gbps=float(self.backend_gbps),
                fixed_ns=round(self.link_latency_ms * 1e6),
                bytes_per_block=(self.kv_bytes_per_token or 0) * block_size,
            ),
            transfer_failure_rate=float(self.transfer_failure_rate),
        )

    def decider(self) -> CoreDecider:
        """Build the core's form of the rule."""
        if not isinstance(self.rule, str):
            return user_decider(self.rule)
        name, _, value = self.rule.partition(":")
        if name == "isl_bounding":
            return uncached_rule(
                uncached_tokens=ISL_BOUNDING_TOKENS, uncached_share=ISL_BOUNDING_SHARE, either=True
            )
        if name == "ratio":
            return uncached_rule(uncached_share=float(value))
        if name == "always":
            return uncached_rule()
        # llm-d: 0 tokens mean never.
        tokens = int(value) if name == "uncached" or int(value) > 0 else 2**31
        return uncached_rule(uncached_tokens=tokens)

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain JSON values; limits that are infinite are left out."""
        described = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is None or value == math.inf:
                continue
            described[name] = value if isinstance(value, str | int | float) else type(value).__qualname__
        return described


def add_transfer(config: CoreConfig, pool: WorkerPool, disaggregation: Disaggregation) -> CoreConfig:
    """Return the core's engine settings of a pool with a role."""
    return pool.engine.core_side(config, pool.role, disaggregation.transfer(pool.role))
