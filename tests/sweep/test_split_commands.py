"""Commands and manifests of prefill and decode pools."""

from __future__ import annotations

import pytest
import yaml

from sweep.commanded import GPU, SPLIT, candidate
from understudy.server.flags.grammar import read_command_line, sglang_flags, vllm_flags
from understudy.sweep.commands import make_commands
from understudy.sweep.manifest import write_manifest


@pytest.mark.parametrize("name", SPLIT)
def test_prefill_and_decode_engines_have_their_own_commands(name: str) -> None:
    commands = make_commands(candidate(SPLIT[name]))
    assert [(each.name, each.workers) for each in commands.engines] == [("prefill", 2), ("decode", 3)]
    read = [read_command_line(each.words[2:], vllm_flags()).values for each in commands.engines]
    transfers = [each["kv-transfer-config"] for each in read]
    assert [each["kv_connector"] for each in transfers] == ["NixlConnector"] * 2
    assert [each["kv_role"] for each in transfers] == ["kv_producer", "kv_consumer"]
    leases = [each.get("kv_connector_extra_config") for each in transfers]
    assert leases == ([{"kv_lease_duration": 60}] * 2 if name == "kv" else [None, None])
    assert ["kv-events-config" in each for each in read] == [name == "kv", False]
    assert len(commands.lines()) == 3


def test_a_split_fleet_is_served_by_vllms_proxy_whose_limits_are_named() -> None:
    commands = make_commands(candidate(SPLIT["kv"]))
    assert commands.router is not None
    words = " ".join(commands.router)
    assert "--prefiller-hosts prefill-0 prefill-1 --prefiller-ports 8000 8000" in words
    assert "--decoder-hosts decode-0 decode-1 decode-2 --decoder-ports 8000 8000 8000" in words
    (lacking, address) = commands.not_expressed
    assert "disaggregation=uncached:2048, routing=kv" in lacking
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in address


@pytest.mark.parametrize("name", ["plain", "gpu", "pools"])
def test_a_split_fleet_is_routed_by_default_as_vllms_proxy_routes_it(name: str) -> None:
    (address,) = make_commands(candidate(SPLIT[name])).not_expressed
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in address


def test_the_manifest_of_a_split_fleet_has_a_set_of_engines_per_role() -> None:
    fleet = candidate(SPLIT["gpu"])
    text = write_manifest(fleet)
    documents = list(yaml.safe_load_all(text))
    sets = [each for each in documents if each["kind"] == "StatefulSet"]
    assert [(each["metadata"]["name"], each["spec"]["replicas"]) for each in sets] == [
        ("prefill", 2),
        ("decode", 3),
    ]
    containers = [each["spec"]["template"]["spec"]["containers"][0] for each in sets]
    for container, engine in zip(containers, make_commands(fleet).engines, strict=True):
        assert container["command"][: len(engine.words)] == engine.words
        assert container["env"][0]["name"] == "VLLM_NIXL_SIDE_CHANNEL_HOST"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert sum(each["spec"]["replicas"] for each in sets) * 2 == fleet.gpus
    assert not [each for each in documents if each["kind"] == "Deployment"]
    assert "toy_proxy_server.py" in text.splitlines()[1]
    assert "--decoder-hosts decode-0.decode decode-1.decode decode-2.decode" in text.splitlines()[1]


def test_sglangs_prefill_and_decode_engines_stand_behind_its_router() -> None:
    engine = {"engine_type": "sglang", "page_size": 64, "num_reserved_decode_tokens": 128}
    split = {"prefill_workers": 1, "decode_workers": 2, "decode_routing": "kv"}
    fleet = candidate({**GPU, "engine": engine, "disaggregation": split})
    commands = make_commands(fleet)
    for each in commands.engines:
        values = read_command_line(each.words[3:], sglang_flags()).values
        assert values["disaggregation-mode"] == each.name
        assert values["num-reserved-decode-tokens"] == 128
    router = " ".join(commands.router or ())
    assert "sglang_router.launch_router --pd-disaggregation" in router
    assert (
        "--prefill http://prefill-0:8000 8998 --decode http://decode-0:8000 --decode http://decode-1:8000"
        in router
    )
    assert "--prefill-policy round_robin" in router
    assert commands.not_expressed == [
        "SGLang's router chooses by round_robin, random, power_of_two; not decode-routing=kv"
    ]
    documents = list(yaml.safe_load_all(write_manifest(fleet)))
    ports = [each["spec"]["ports"] for each in documents if each["kind"] == "Service"]
    assert [8998 in [port["port"] for port in one] for one in ports] == [True, False]
