"""The Kubernetes manifest of a fleet: a StatefulSet of engines, and the router in front of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy import __version__
from understudy.errors import ConfigError
from understudy.sweep.candidate import format_flags
from understudy.sweep.commands import ENGINE_PORT, EVENTS_PORT, ROUTER_PORT, engine_image, make_commands

if TYPE_CHECKING:
    from understudy.sweep.candidate import Candidate


def write_manifest(candidate: Candidate, name: str = "engine") -> str:
    """Return the manifest of a candidate's fleet as YAML."""
    import yaml

    settings = candidate.settings
    if settings.disaggregation is not None or settings.pools:
        raise ConfigError("--manifest: workers differ by role or pool; write it for equal workers only")
    commands = make_commands(candidate)
    gpus = candidate.gpus if settings.ranks else candidate.gpus // settings.workers
    replicas = 1 if settings.ranks else settings.workers
    ports = [ENGINE_PORT, EVENTS_PORT] if "--kv-events-config" in commands.engine else [ENGINE_PORT]
    engine = {
        "name": name,
        "image": engine_image(settings.engine),
        "command": [*commands.engine, "--port", str(ENGINE_PORT), "--host", "0.0.0.0"],
        "ports": [{"containerPort": port} for port in ports],
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": ENGINE_PORT}, "periodSeconds": 5},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    shared = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    documents = [
        _service(name, ports, is_headless=True),
        _workload("StatefulSet", name, replicas, engine, {"serviceName": name}, [shared]),
    ]
    if commands.router is not None:
        words = [word.replace("http://engine-", f"http://{name}-") for word in commands.router]
        place = words.index("--workers") + 1
        words[place] = words[place].replace(f":{ENGINE_PORT}", f".{name}:{ENGINE_PORT}")
        router = {
            "name": "router",
            "image": f"understudy:{__version__}",
            "command": [*words, "--host", "0.0.0.0"],
            "ports": [{"containerPort": ROUTER_PORT}],
        }
        documents += [_service("router", [ROUTER_PORT]), _workload("Deployment", "router", 1, router)]
    head = f"# understudy sweep: {format_flags(candidate.flags)}; {candidate.gpus} GPUs\n"
    return head + yaml.safe_dump_all(documents, sort_keys=False, width=110)


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
