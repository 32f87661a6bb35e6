"""`--eviction-policy FILE.py:CLASS`: a user's policy from the command line."""

from __future__ import annotations

import json
import pickle
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import understudy as us
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.kv.policy import PolicyFile

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "examples" / "demo_trace.jsonl"
EXAMPLE = ROOT / "examples" / "python_policy.py"
FLAGS = ["--block-size", "64", "--num-gpu-blocks", "512", "--no-advice"]
MRU = """
class Mru:
    def __init__(self):
        self.order = {}
    def on_freed(self, blocks, lineage_hashes):
        self.order.update(dict.fromkeys(blocks.tolist()))
    def on_taken(self, blocks):
        for block in blocks.tolist():
            self.order.pop(block, None)
    def select(self, count):
        return list(reversed(self.order))[:count]
"""


def replay(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["replay", str(TRACE), *FLAGS, *flags, "--quiet", "--json", "-"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_a_policy_of_a_file_orders_the_blocks_of_every_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MRU)
    place = f"{file}:Mru"
    report = replay(capsys, "--workers", "2", "--eviction-policy", place)
    assert report["run"]["engine"]["eviction_policy"] == place
    assert f"eviction_policy={place} is not the order of native blocks" in " ".join(report["run"]["notes"])
    namespace: dict[str, Any] = {}
    exec(MRU, namespace)
    engine = VllmConfig(block_size=64, num_gpu_blocks=512, eviction_policy=namespace["Mru"])
    assert us.replay(TRACE, engine, workers=2).run.digest == report["run"]["digest"]
    assert replay(capsys, "--workers", "2")["run"]["digest"] != report["run"]["digest"]


def test_the_policy_of_the_examples_runs_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with_example = replay(capsys, "--eviction-policy", f"{EXAMPLE}:ProtectedLru")
    assert with_example["requests"]["completed"] == 384


def test_a_settings_file_names_the_policies_of_pools_and_tiers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MRU)
    place = f"{tmp_path / 'mine.py'}:Mru"
    config = tmp_path / "fleet.yaml"
    config.write_text(
        "pools:\n"
        f"  - {{workers: 1, engine: {{num_gpu_blocks: 512, block_size: 64, eviction_policy: '{place}'}}}}\n"
        "  - {name: other, workers: 1, engine: {num_gpu_blocks: 512, block_size: 64}, "
        f"tiers: [{{tier: g2, blocks: 64, eviction: '{place}'}}], kv_bytes_per_token: 1024}}\n"
    )
    assert main(["replay", str(TRACE), "--config", str(config), "--no-advice", "--quiet", "--json", "-"]) == 0
    text = capsys.readouterr().out
    assert text.count(place) >= 2


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (None, "Mine", "--eviction-policy {file}:Mine: there is no file {file}"),
        (
            MRU,
            "Mine",
            "--eviction-policy {file}:Mine: {file} has no class Mine with on_freed(blocks, lineage_hashes), "
            "on_taken(blocks), select(count)",
        ),
        (
            "class Mine: pass",
            "Mine",
            "{file} has no class Mine with on_freed(blocks, lineage_hashes), on_taken(blocks), select(count)",
        ),
        ("import nothing_here", "Mine", "{file}:1: <module>: ModuleNotFoundError"),
        (
            MRU.replace("self.order = {}", "raise ValueError('no')"),
            "Mru",
            "{file}:4: __init__: ValueError: no",
        ),
        (MRU.replace("[:count]", "[:count // 0]"), "Mru", "{file}:11: select: ZeroDivisionError"),
    ],
)
def test_a_policy_that_fails_is_one_message_with_its_place(
    source: str | None, name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    if source is not None:
        file.write_text(source)
    assert main(["replay", str(TRACE), *FLAGS, "--eviction-policy", f"{file}:{name}", "--quiet"]) != 0
    assert message.format(file=file) in capsys.readouterr().err


def test_processes_and_copies_load_the_policy_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "carried.py"
    file.write_text(MRU)
    policy = VllmConfig(eviction_policy=f"{file}:Mru").eviction_policy
    assert isinstance(policy, PolicyFile)
    for copied in (pickle.loads(pickle.dumps(policy)), deepcopy(policy)):
        assert copied == policy
        assert type(copied()).__name__ == "Mru"
    sys.modules.pop("carried", None)


def test_a_sweep_carries_the_policy_to_its_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MRU)
    out = tmp_path / "sweep.json"
    policies = ("lineage", f"{file}:Mru")
    flags = [
        "--vary",
        f"eviction-policy={','.join(policies)}",
        "--block-size",
        "64",
        "--num-gpu-blocks",
        "512",
    ]
    goal = ["--slo-ttft-ms", "500", "--json", str(out), "--quiet"]
    assert main(["sweep", str(TRACE), *flags, *goal]) == 0, capsys.readouterr().err
    digests = {one["digest"] for one in json.loads(out.read_text())["trials"]}
    engines = [VllmConfig(block_size=64, num_gpu_blocks=512, eviction_policy=one) for one in policies]
    assert digests == {us.replay(TRACE, engine).run.digest for engine in engines}


def test_a_policy_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MRU)
    flags = ["--eviction-policy", f"{file}:Mru", "--json", str(file)]
    assert main(["replay", str(TRACE), *FLAGS, *flags]) == 2
    assert "--json" in capsys.readouterr().err
    assert file.read_text() == MRU


def test_a_file_that_exits_is_an_error_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "leaves.py"
    file.write_text("import sys\nsys.exit(3)\n")
    assert main(["replay", str(TRACE), *FLAGS, "--eviction-policy", f"{file}:Mru"]) == 2
    assert f"{file}:2: <module>: SystemExit: 3" in capsys.readouterr().err


def test_a_method_with_other_parameters_is_refused_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MRU.replace("on_freed(self, blocks, lineage_hashes)", "on_freed(self)"))
    assert main(["replay", str(TRACE), *FLAGS, "--eviction-policy", f"{file}:Mru"]) == 2
    assert f"{file}:Mru: on_freed must take (blocks, lineage_hashes)" in capsys.readouterr().err
