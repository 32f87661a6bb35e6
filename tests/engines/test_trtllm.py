"""TensorRT-LLM's executor against recordings of the real one, a scenario of each family, and its own invariants."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from understudy._core import TrtSettings
from understudy.conformance.trtllm import TrtRecording, compare_trtllm, find_trtllm_recordings
from understudy.conformance.trtllm_recording import (
    TrtRequest,
    TrtScenario,
    TrtScenarioConfig,
    run_trtllm_scenario,
)
from understudy.engines.trtllm_salt import derive_salt
from understudy.errors import ConfigError, InvalidArgument

GOLDEN = Path(__file__).parents[1] / "golden" / "trtllm"
RECORDINGS = find_trtllm_recordings(GOLDEN)
FIRST = {one.name.rpartition("-")[0]: one for one in reversed(RECORDINGS)}
"""The first scenario of each family; `make conformance` compares all."""


def test_all_recordings_are_found() -> None:
    assert len(RECORDINGS) == 175
    assert len(FIRST) == 44


@pytest.mark.parametrize("recording", FIRST.values(), ids=FIRST.keys())
def test_every_pass_is_the_recorded_one(recording: TrtRecording) -> None:
    outcome = compare_trtllm(recording, check=True)
    assert outcome.difference is None, str(outcome.difference)


def test_a_difference_names_its_pass(tmp_path: Path) -> None:
    source = FIRST["plain"]
    for folder, path in {"scenarios": source.scenario, "golden": source.golden}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / path.name).write_bytes(path.read_bytes())
    golden = tmp_path / "golden" / source.golden.name
    lines = gzip.decompress(golden.read_bytes()).decode().splitlines()
    third = json.loads(lines[3])
    third["waiting"] += 1
    lines[3] = json.dumps(third)
    golden.write_bytes(gzip.compress("\n".join(lines).encode()))
    (recording,) = find_trtllm_recordings(tmp_path)
    difference = compare_trtllm(recording).difference
    assert difference is not None
    assert str(difference).startswith("step 2: waiting is")


def test_a_file_without_a_header_is_refused_by_name(tmp_path: Path) -> None:
    for folder, name, data in (
        ("scenarios", "a.json", b"{}"),
        ("golden", "a.jsonl.gz", gzip.compress(b"{}\n")),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(data)
    (recording,) = find_trtllm_recordings(tmp_path)
    with pytest.raises(InvalidArgument, match=r"a\.jsonl\.gz: has no header"):
        compare_trtllm(recording)


def random_scenario(seed: int) -> TrtScenario:
    """Shared prefixes, small pools, several levels and windows."""
    rng = Random(f"trtllm {seed}")
    block = rng.choice([16, 32, 64])
    config: dict[str, Any] = {
        "max_batch_size": rng.choice([2, 4, 12]),
        "max_num_tokens": rng.choice([96, 256, 512]),
        "max_seq_len": rng.choice([400, 600]),
        "tokens_per_block": block,
        "overlap": rng.random() < 0.6,
        "prefix_aware": rng.random() < 0.8,
        "enable_partial_reuse": rng.random() < 0.8,
        "enable_block_reuse": rng.random() < 0.9,
        "reuse_policy": rng.choice(["all_reusable", "all_reusable", "per_request"]),
        "max_tokens": rng.choice([704, 1024, 2048]),
        "host_cache_size": rng.choice([0, 0, 2 << 20, 16 << 20]),
        "layers": rng.choice([2, 3]),
        "windows": rng.choice([None, None, [64], [128, 4096], [64, 64, 4096]]),
        "waiting_policy": rng.choice(["fcfs", "priority"]),
        "recompute_pause": rng.random() < 0.8,
    }
    prefixes = [rng.randrange(1, 9) * 1000 for _ in range(4)]
    requests = []
    arrival = 0
    for index in range(24):
        arrival += rng.choice([0, 0, 1, 5])
        prompt = [
            (rng.choice(prefixes), rng.randrange(1, 300)),
            (50_000 + 1000 * index, rng.randrange(1, 60)),
        ]
        requests.append(
            TrtRequest(
                arrival=arrival,
                prompt=[*prompt],
                max_new=rng.choice([1, 2, 20, 60]),
                eos_at=rng.choice([None, None, 5]),
                cancel=rng.choice([None, None, None, arrival + 9]),
                salt=rng.choice([None, None, "a"]),
                priority=rng.choice([0.1, 0.5, 0.9]),
            )
        )
    return TrtScenario(TrtScenarioConfig(**config), requests, max_steps=1500)


@pytest.mark.parametrize("seed", range(30))
def test_random_scenarios_keep_every_invariant_and_end(seed: int) -> None:
    scenario = random_scenario(seed)
    *_, last, end = run_trtllm_scenario(scenario, check=True)
    if end["end"].startswith("error: V2 scheduler deadlock"):
        return
    if end["end"] == "max_steps":  # a prompt that neither pool nor budget can ever take
        assert last["ctx"] == last["gen"] == []
        return
    assert end["end"] == "done"
    assert last["caches"] == []
    assert last["active"] == []
    for level in last["pool"]:  # nothing is in use
        assert all(total == available for total, available, _ in level)


def test_levels_below_the_device_have_pages_of_the_same_size() -> None:
    settings = TrtSettings()
    settings.num_layers, settings.layer_bytes_per_token = 2, 4096
    settings.max_seq_len, settings.max_tokens = 1024, 4096
    settings.host_cache_size = 1 << 20
    settings.disk_cache_size = 3 << 20
    levels, longest, quota, page_bytes = settings.plan_memory()
    assert levels == [[136], [4], [16]]  # grains: 2 MiB on the device and on disk, 4 KiB on the host
    assert (longest, page_bytes) == (1024, [2 * 32 * 4096])
    assert quota == -(-4096 * 2 * 4096 * 100 // 95)


def test_a_host_level_is_as_large_as_the_device_unless_it_has_a_size() -> None:
    settings = TrtSettings()
    settings.max_tokens = 1 << 16
    (device,), (host,) = settings.plan_memory()[0]
    assert host == pytest.approx(device, rel=0.02)


def test_windows_of_unequal_size_have_pools_of_their_own() -> None:
    settings = TrtSettings()
    settings.num_layers, settings.max_attention_window = 3, [128, 128, 100_000]
    settings.max_tokens, settings.host_cache_size = 1 << 16, 0
    assert len(settings.plan_memory()[0][0]) == 2
    settings.pool_ratio = [1.0]
    with pytest.raises(ConfigError, match="pool_ratio: 1 shares for 2 groups"):
        settings.plan_memory()


@pytest.mark.parametrize("policy", ["per_conversation", "never"])
def test_a_policy_that_is_not_modelled_is_refused_by_name(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"policy: '{policy}'"):
        TrtSettings().set_names(reuse_policy=policy, waiting_queue_policy="fcfs")


def test_requests_of_an_adapter_are_together_in_a_batch() -> None:
    adapters = [3, 0, 1, 3, 0]
    requests = [
        TrtRequest(arrival=0, prompt=[(1000 * (place + 1), 20)], max_new=4, lora=adapter or None)
        for place, adapter in enumerate(adapters)
    ]
    _, first, second, *_ = run_trtllm_scenario(TrtScenario(TrtScenarioConfig(), requests))
    assert [index for index, *_ in first["ctx"]] == [1, 4, 2, 0, 3]  # without one first
    assert second["gen"] == [1, 4, 2, 0, 3]
    assert [index for index, *_ in second["active"]] == [0, 1, 2, 3, 4]


def test_adapters_and_salts_share_no_blocks_and_name_them_apart() -> None:
    scopes: list[dict[str, Any]] = [{}, {"lora": 1}, {"salt": "a"}, {"lora": 1, "salt": "a"}, {}]
    requests = [
        TrtRequest(arrival=40 * place, prompt=[(1000, 70)], max_new=2, **scope)
        for place, scope in enumerate(scopes)
    ]
    _, *passes, _ = run_trtllm_scenario(TrtScenario(TrtScenarioConfig(), requests))
    starts = [position for line in passes for _, position, _ in line["ctx"]]
    assert starts == [0, 0, 0, 0, 69]
    stored = [event for line in passes for event in line["events"] if event["kind"] == "stored"]
    names = {block[0] for event in stored for block in event["blocks"] if block[1][0][0] == 1000}
    assert len(names) == 4


def test_a_salt_is_kept_as_upstream_keeps_it() -> None:
    assert derive_salt("a") == int.from_bytes(bytes.fromhex("ca978112ca1bbdca"), "little")
