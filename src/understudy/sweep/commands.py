"""Command lines that start the real engines and the router of a candidate, with flags of the chosen release only."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.engines.kinds.registry import kind_of
from understudy.router.kv import KvRouting
from understudy.run.disaggregation import Disaggregation
from understudy.run.fitted import describe_fitted_gpu
from understudy.run.fleet_size import list_sizes
from understudy.run.ranks import has_front
from understudy.sweep.engine_words import engine_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.engines.engine_config import EngineConfig
    from understudy.run.fleet_size import GroupSize
    from understudy.run.pools import WorkerPool
    from understudy.run.settings import ReplaySettings
    from understudy.sweep.candidate import Candidate

ENGINE_PORT, EVENTS_PORT, ROUTER_PORT = 8000, 5557, 8080
SIDE_CHANNEL_PORT = 5600
"""Port on which vLLM's NixlConnector answers handshakes (VLLM_NIXL_SIDE_CHANNEL_PORT)."""
PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
"""Router for prefill and decode engines in vLLM's repository; round robin, every prompt is handed off."""
_EVENTS = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{EVENTS_PORT}"}
BOOTSTRAP_PORT = 8998
"""Port on which SGLang's prefill servers answer decode servers (--disaggregation-bootstrap-port)."""
_PUSH_POLICIES = {"round_robin": "round_robin", "random": "random", "power_of_two": "power_of_two"}
"""Policies of SGLang's router, by routing."""
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """Words of the command that each of `size.engines` equal engines starts with, and the name of their group."""

    name: str
    size: GroupSize
    engine: EngineConfig
    words: list[str]

    @property
    def workers(self) -> int:
        """Number of engines, each started by the command once."""
        return self.size.engines

    def describe(self) -> str:
        """Return how many engines there are, such as `2 x engine of 8 ranks`."""
        ranks = "" if self.size.ranks == 1 else f" of {self.size.ranks:,} ranks"
        return f"{self.workers:,} x {self.name}{ranks}"


@dataclass(frozen=True, slots=True)
class Commands:
    """Commands of a fleet: one per group of equal engines, the router of several, settings that no flag expresses."""

    engines: list[EngineCommand]
    router: list[str] | None
    not_expressed: list[str]

    def lines(self) -> list[str]:
        """Return the commands for a shell."""
        router = [] if self.router is None else [self.router]
        return [shlex.join(words) for words in [*(each.words for each in self.engines), *router] if words]


def make_commands(candidate: Candidate) -> Commands:
    """Return the commands of a candidate's fleet: one engine per role or pool, and the router."""
    settings = candidate.settings
    missing: list[str] = []
    pools, listed = _list_pools(settings), list_sizes(settings)
    if not pools:
        (size,) = listed
        words = engine_words(candidate, missing)
        router = None
        if size.workers > 1 and not has_front(size.engines, settings.routing):
            router = _router_words(settings, {"engine": size.engines})
            words += _event_words(settings.routing) if words else []
        return Commands([EngineCommand("engine", size, settings.engine, words)], router, missing)
    split = settings.disaggregation
    engines = []
    for name, pool, size in zip(_name_groups(pools), pools, listed, strict=True):
        gpu = settings.gpu or describe_fitted_gpu(pool.engine)
        own = msgspec.structs.replace(settings, engine=pool.engine, tiers=pool.resolve_tiers(), gpu=gpu)
        words = engine_words(replace(candidate, settings=own), missing)
        if words:
            routing = settings.routing if split is None or pool.role == "prefill" else split.decode_routing
            words += _transfer_words(pool, split)
            words += _event_words(routing)
        engines.append(EngineCommand(name, size, pool.engine, words))
    missing = list(dict.fromkeys(missing))
    sizes = {each.name: each.workers for each in engines}
    if split is None:
        return Commands(engines, _router_words(settings, sizes) if sum(sizes.values()) > 1 else None, missing)
    roles: dict[str, str] = {each.name: pool.role for each, pool in zip(engines, pools, strict=True)}
    if not kind_of(pools[0].engine).pulls_blocks:
        words = _push_router_words(settings, split, sizes, roles)
        return Commands(engines, words, missing + _list_push_settings(settings, split))
    return Commands(engines, _proxy_words(sizes, roles), missing + _list_router_settings(settings, split))


def _name_groups(pools: Sequence[WorkerPool]) -> list[str]:
    """Return the names of the pools as host names: lower case, digits and dashes, all different."""
    names = [re.sub(r"[^a-z0-9]+", "-", pool.name.lower()).strip("-") for pool in pools]
    return [
        name if name and names.count(name) == 1 else f"pool-{number}" for number, name in enumerate(names)
    ]


def _list_pools(settings: ReplaySettings) -> Sequence[WorkerPool]:
    """Return the pools of a fleet whose workers differ; none for equal workers."""
    if settings.pools or settings.disaggregation is None:
        return settings.pools
    return settings.disaggregation.make_pools(settings.engine, None)


def _transfer_words(pool: WorkerPool, split: Disaggregation | None) -> list[str]:
    """Return the flag of a role; empty for workers that serve whole requests."""
    role = pool.role
    if role not in _KV_ROLES or split is None:
        return []
    if not kind_of(pool.engine).pulls_blocks:
        return ["--disaggregation-mode", role]
    given: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[role]}
    if split.lease_s != Disaggregation().lease_s:
        given["kv_connector_extra_config"] = {"kv_lease_duration": split.lease_s}
    return ["--kv-transfer-config", json.dumps(given)]


def _event_words(routing: object) -> list[str]:
    return ["--kv-events-config", json.dumps(_EVENTS)] if routing == "kv" else []


def _list_router_settings(settings: ReplaySettings, split: Disaggregation) -> list[str]:
    """Return what vLLM's proxy lacks of the simulated router, and what engines on several machines need."""
    simulated = {
        "disaggregation": (split.rule, "always"),
        "disaggregation-order": (split.order, "prefill_first"),
        "routing": (settings.routing, "round_robin"),
        "decode-routing": (split.decode_routing, "round_robin"),
    }
    lacking = [f"{name}={value}" for name, (value, of_proxy) in simulated.items() if value != of_proxy]
    listed = (
        [f"vLLM's proxy hands off every prompt, round robin; not {', '.join(lacking)}"] if lacking else []
    )
    return [*listed, "VLLM_NIXL_SIDE_CHANNEL_HOST: set it to the address of each engine's own machine"]


def _proxy_words(sizes: dict[str, int], roles: dict[str, str]) -> list[str]:
    """Return the command of vLLM's proxy in front of prefill and decode engines."""
    words = ["python", PROXY, "--port", str(ROUTER_PORT)]
    for role, kind in (("prefill", "prefiller"), ("decode", "decoder")):
        hosts = [host for name in sizes if roles[name] == role for host in _list_hosts(name, sizes[name])]
        words += [f"--{kind}-hosts", *hosts, f"--{kind}-ports", *[str(ENGINE_PORT)] * len(hosts)]
    return words


def _push_router_words(
    settings: ReplaySettings, split: Disaggregation, sizes: dict[str, int], roles: dict[str, str]
) -> list[str]:
    """Return the command of SGLang's router in front of prefill and decode engines."""
    words = ["python", "-m", "sglang_router.launch_router", "--pd-disaggregation", "--port", str(ROUTER_PORT)]
    for name, workers in sizes.items():
        for host in _list_hosts(name, workers):
            url = f"http://{host}:{ENGINE_PORT}"
            words += [f"--{roles[name]}", url, *([str(BOOTSTRAP_PORT)] if roles[name] == "prefill" else [])]
    for role, routing in (("prefill", settings.routing), ("decode", split.decode_routing)):
        if routing in _PUSH_POLICIES:
            words += [f"--{role}-policy", _PUSH_POLICIES[routing]]
    return words


def _list_push_settings(settings: ReplaySettings, split: Disaggregation) -> list[str]:
    """Return what SGLang's router lacks of the simulated ones."""
    simulated = {"routing": settings.routing, "decode-routing": split.decode_routing}
    lacking = [f"{name}={value}" for name, value in simulated.items() if value not in _PUSH_POLICIES]
    if not lacking:
        return []
    return [f"SGLang's router chooses by {', '.join(_PUSH_POLICIES.values())}; not {', '.join(lacking)}"]


def _list_hosts(name: str, workers: int) -> list[str]:
    return [f"{name}-{number}" for number in range(workers)]


def _router_words(settings: ReplaySettings, sizes: dict[str, int]) -> list[str]:
    hosts = [host for name, workers in sizes.items() for host in _list_hosts(name, workers)]
    urls = ",".join(f"http://{host}:{ENGINE_PORT}" for host in hosts)
    words = [
        "understudy",
        "router",
        "--workers",
        urls,
        "--routing",
        settings.routing,
        "--port",
        str(ROUTER_PORT),
    ]
    if settings.router is not None:
        defaults = msgspec.to_builtins(KvRouting())
        given = {
            key: value
            for key, value in msgspec.to_builtins(settings.router).items()
            if value != defaults[key]
        }
        if given:
            words += ["--router", json.dumps(given)]
    return words
