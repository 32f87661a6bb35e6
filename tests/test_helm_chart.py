"""The Helm chart renders to valid resources, whose arguments our verbs accept, with and without its options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from understudy.cli import build_parser
from understudy.server.flags.serving import read_serve

CHART = Path(__file__).parents[1] / "deploy" / "helm" / "understudy"
HELM = Path(sys.executable).with_name("helm")
OPTIONS = {
    "default": [],
    "everything": [
        *(
            "--set",
            "autoscaling.enabled=true",
            "--set",
            "serviceMonitor.enabled=true",
            "--set",
            "apiKeySecret=keys",
        ),
        *("--set", "router.discover=endpointslices", "--set", "networkPolicy.clients.app=gateway"),
    ],
    "prefill-decode": ["-f", str(CHART / "examples" / "prefill-decode.yaml")],
}


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    if not HELM.exists():
        pytest.skip("helm is not installed (make deploy-tools)")
    return subprocess.run([HELM, *words], capture_output=True, text=True, timeout=60, check=False)


def render(*options: str) -> list[Any]:
    done = helm("template", "fleet", str(CHART), "--namespace", "serving", *options)
    assert (done.returncode, done.stderr) == (0, "")
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def find(resources: list[Any], kind: str, name: str) -> Any:
    (found,) = (one for one in resources if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def arguments(resources: list[Any], kind: str, name: str) -> list[str]:
    (container,) = find(resources, kind, name)["spec"]["template"]["spec"]["containers"]
    listed: list[str] = container["args"]
    return listed


def test_the_values_follow_their_schema() -> None:
    """Runs without helm too."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values, schema)
    jsonschema.validate(
        {**values, **yaml.safe_load((CHART / "examples" / "prefill-decode.yaml").read_text())}, schema
    )
    wrong_values: list[dict[str, Any]] = [
        {"engines": {}},
        {"engines": {"Big_Name": values["engines"]["worker"]}},
        {"image": {}},
    ]
    for wrong in wrong_values:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**values, **wrong}, schema)


def test_helm_accepts_the_chart() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("options", OPTIONS)
def test_kubernetes_accepts_what_it_renders(options: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    resources = render(*OPTIONS[options])
    names = [(one["kind"], one["metadata"]["name"]) for one in resources]
    assert len(set(names)) == len(names)
    for one in resources:
        if one["kind"] == "ServiceMonitor":  # a custom resource: checked below
            continue
        validator.validate(one, validator.latest_version(), strict=True)


@pytest.mark.parametrize("options", OPTIONS)
def test_pods_run_without_privileges_and_with_valid_arguments(options: str) -> None:
    for one in render(*OPTIONS[options]):
        if one["kind"] not in ("StatefulSet", "Deployment"):
            continue
        pod = one["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        selector = one["spec"]["selector"]["matchLabels"]
        assert selector.items() <= one["spec"]["template"]["metadata"]["labels"].items()
        verb, *words = container["args"]
        if verb == "serve":
            assert read_serve(words).settings.port == 8000
        else:
            assert build_parser().parse_args([verb, *words]).port == 8000


def test_the_router_discovers_the_service_of_every_group() -> None:
    resources = render("--set", "engines.big.replicas=1", "--set-json", 'engines.big.args=["m"]')
    flags = [
        word for word in arguments(resources, "Deployment", "fleet-router") if word.startswith("--discover")
    ]
    assert flags == [
        f"--discover=srv:_http._tcp.fleet-{name}.serving.svc.cluster.local" for name in ("big", "worker")
    ]
    for name in ("big", "worker"):
        service = find(resources, "Service", f"fleet-{name}")["spec"]
        assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
        assert find(resources, "StatefulSet", f"fleet-{name}")["spec"]["serviceName"] == f"fleet-{name}"


def test_reading_endpoint_slices_is_all_that_the_router_may_do() -> None:
    resources = render(*OPTIONS["everything"])
    assert "--discover=endpointslices:serving/fleet-worker:http" in arguments(
        resources, "Deployment", "fleet-router"
    )
    assert find(resources, "Role", "fleet-router")["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list"]}
    ]
    pod = find(resources, "Deployment", "fleet-router")["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("fleet-router", True)
    engine = find(resources, "StatefulSet", "fleet-worker")["spec"]["template"]["spec"]
    assert engine["automountServiceAccountToken"] is False
    assert engine["containers"][0]["env"][0]["valueFrom"]["secretKeyRef"] == {
        "name": "keys",
        "key": "api-key",
    }


def test_the_monitor_selects_services_with_metrics_and_the_policy_names_the_clients() -> None:
    resources = render(*OPTIONS["everything"])
    monitor = find(resources, "ServiceMonitor", "fleet")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    services = [one for one in resources if one["kind"] == "Service"]
    assert services
    for one in services:
        assert wanted.items() <= one["metadata"]["labels"].items()
        assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in one["spec"]["ports"]}
    policy = find(resources, "NetworkPolicy", "fleet-router")["spec"]
    assert policy["ingress"][0]["from"][0] == {"podSelector": {"matchLabels": {"app": "gateway"}}}
    engines = find(resources, "NetworkPolicy", "fleet-engines")["spec"]
    assert engines["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "engine"


def test_prefill_and_decode_engines_hand_over_at_the_address_of_their_pod() -> None:
    resources = render(*OPTIONS["prefill-decode"])
    for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        words = arguments(resources, "StatefulSet", f"fleet-{name}")
        config = next(word for word in words if word.startswith("--kv-transfer-config="))
        assert json.loads(config.partition("=")[2]) == {"kv_connector": "NixlConnector", "kv_role": role}
        env = find(resources, "StatefulSet", f"fleet-{name}")["spec"]["template"]["spec"]["containers"][0][
            "env"
        ]
        assert env[0]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert not [one for one in resources if one["kind"] == "Deployment"]


def test_a_wrong_value_is_refused() -> None:
    done = helm("template", "fleet", str(CHART), "--set", "router.discover=magic")
    assert done.returncode != 0
    assert "discover" in done.stderr
