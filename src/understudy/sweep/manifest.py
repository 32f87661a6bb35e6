"""The Kubernetes manifest of a fleet: a StatefulSet per group of equal engines, and the router in front of them."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

from understudy.sweep.candidate import format_flags
from understudy.sweep.commands import (
    BOOTSTRAP_PORT,
    ENGINE_PORT,
    EVENTS_PORT,
    ROUTER_PORT,
    SIDE_CHANNEL_PORT,
    make_commands,
)
from understudy.sweep.engine_words import engine_image
from understudy.text import plural
from understudy.version import __version__

if TYPE_CHECKING:
    from understudy.sweep.candidate import Candidate
    from understudy.sweep.commands import Commands, EngineCommand


def write_manifest(candidate: Candidate, verb: str = "understudy sweep") -> str:
    """Return the manifest of a candidate's fleet as YAML, which names `verb`; split engines get no router."""
    import yaml

    commands = make_commands(candidate)
    is_split = candidate.settings.disaggregation is not None
    documents = []
    for engine in commands.engines:
        documents += _describe_engines(engine)
    head = f"# {verb}: {format_flags(candidate.flags)}; {plural(candidate.gpus, 'GPU')}\n"
    if is_split and commands.router is not None:
        source = "of SGLang" if "sglang_router.launch_router" in commands.router else "from vLLM's repository"
        head += f"# In front of the engines, {source}: {shlex.join(_qualify(commands))}\n"
    elif commands.router is not None:
        router = {
            "name": "router",
            "image": f"understudy:{__version__}",
            "command": [*_qualify(commands), "--host", "0.0.0.0"],
            "ports": [{"containerPort": ROUTER_PORT}],
        }
        documents += [_service("router", [ROUTER_PORT]), _workload("Deployment", "router", 1, router)]
    return head + yaml.safe_dump_all(documents, sort_keys=False, width=110)


def _qualify(commands: Commands) -> list[str]:
    """Return the router's words with the engines' names in the cluster, such as `engine-0.engine`."""
    names = "|".join(each.name for each in commands.engines)
    host = re.compile(rf"(?<![\w-])({names})-\d+(?![\w-])")
    return [host.sub(r"\g<0>.\1", word) for word in commands.router or ()]


def _describe_engines(engine: EngineCommand) -> list[dict[str, Any]]:
    """Return the service and the StatefulSet of equal engines."""
    ports = [ENGINE_PORT]
    ports += [EVENTS_PORT] if "--kv-events-config" in engine.words else []
    has_side_channel = "--kv-transfer-config" in engine.words
    ports += [SIDE_CHANNEL_PORT] if has_side_channel else []
    ports += [BOOTSTRAP_PORT] if engine.words[-2:] == ["--disaggregation-mode", "prefill"] else []
    address = {
        "name": "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
    }
    container = {
        "name": engine.name,
        "image": engine_image(engine.engine),
        "command": [*engine.words, "--port", str(ENGINE_PORT), "--host", "0.0.0.0"],
        **({"env": [address]} if has_side_channel else {}),
        "ports": [{"containerPort": port} for port in ports],
        "resources": {"limits": {"nvidia.com/gpu": engine.size.engine_gpus}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": ENGINE_PORT}, "periodSeconds": 5},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    shared = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    return [
        _service(engine.name, ports, is_headless=True),
        _workload(
            "StatefulSet", engine.name, engine.workers, container, {"serviceName": engine.name}, [shared]
        ),
    ]


def _service(name: str, ports: list[int], *, is_headless: bool = False) -> dict[str, Any]:
    spec: dict[str, Any] = {"clusterIP": "None"} if is_headless else {}
    spec |= {"selector": {"app": name}, "ports": [{"name": f"port-{port}", "port": port} for port in ports]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def _workload(
    kind: str,
    name: str,
    replicas: int,
    container: dict[str, Any],
    more: dict[str, Any] | None = None,
    volumes: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    pod: dict[str, Any] = {"containers": [container], **({"volumes": volumes} if volumes else {})}
    template = {"metadata": {"labels": {"app": name}}, "spec": pod}
    selector = {"matchLabels": {"app": name}}
    spec = {**(more or {}), "replicas": replicas, "selector": selector, "template": template}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
