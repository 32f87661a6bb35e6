"""`understudy replay` with tiers: its flags, what wins over what, and what is refused by the flag's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from understudy.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable

TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"
SMALL = ("--num-gpu-blocks", "300", "--kv-bytes-per-token", "131072")
FAST = ("--g2-bandwidth-gbps", "50")


@pytest.fixture
def report_of(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(*flags: str) -> dict[str, Any]:
        path = tmp_path / "report.json"
        assert main(["replay", str(TRACE), "--quiet", "--json", str(path), *flags]) == 0
        report: dict[str, Any] = json.loads(path.read_text())
        return report

    return run


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    capsys.readouterr()
    assert main(["replay", str(TRACE), *flags]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err


def test_a_host_tier_needs_two_flags_and_is_reported(report_of: Callable[..., dict[str, Any]]) -> None:
    report = report_of(*SMALL, *FAST, "--g2", "4000")
    host = report["tiers"]["tiers"][1]
    assert (host["tier"], host["capacity_blocks"]) == ("g2", 4000)
    assert host["hit_tokens_first"] > 0
    assert report["run"]["tiers"]["tiers"][0]["link"]["down_gbps"] == 50
    bare = report_of("--num-gpu-blocks", "300")
    assert "tiers" not in bare
    assert "tiers" not in bare["run"]
    assert report["prefix_hit_ratio"]["total"] > bare["prefix_hit_ratio"]["total"]


@pytest.mark.parametrize(
    "flags", ["--g2 0", "--g2-bytes 0", "--g2-bytes none", "--g2-bytes 0GiB", "--kv-offloading-size 0"]
)
def test_a_host_of_no_size_is_a_run_without_tiers(
    flags: str, tmp_path: Path, report_of: Callable[..., dict[str, Any]]
) -> None:
    bare = report_of("--num-gpu-blocks", "300")
    file = tmp_path / "tiers.yaml"
    file.write_text("tiers: [{tier: g2, blocks: 4000}, {tier: g3, blocks: 9000}]\n")
    without = report_of(*SMALL, "--config", str(file), *flags.split())
    assert without["run"]["digest"] == bare["run"]["digest"]
    assert "tiers" not in without
    assert report_of(*SMALL, "--g2-latency-ms", "1", *flags.split())["run"]["digest"] == bare["run"]["digest"]


def test_no_host_contradicts_a_disk_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    disk = ("--g3", "9000", "--kv-bytes-per-token", "9")
    assert "g3 needs g2" in refused(capsys, "--g2", "0", *disk)
    assert "--g2 and --g2-bytes both set" in refused(capsys, "--g2", "0", "--g2-bytes", "1GiB")


def test_every_flag_lands_in_its_setting(report_of: Callable[..., dict[str, Any]]) -> None:
    flags = """
        --num-gpu-blocks 300 --model Llama-3.1-8B --kv-dtype fp8
        --g2-bytes 4GiB --g2-d2h-gbps 20 --g2-h2d-gbps inf --g2-latency-ms 0.5 --g2-eviction lineage
        --g3 9000 --g3-bandwidth-gbps 9 --g3-latency-ms 1
        --g4 unlimited --g4-bandwidth-gbps 3 --g4-eviction fifo
        --offload-mode write_through --offload-batch-size 7
    """
    run = report_of(*flags.split())["run"]["tiers"]
    host, disk, store = run["tiers"]
    assert (run["model"], run["kv_dtype"], run["kv_bytes_per_token"]) == ("Llama-3.1-8B", "fp8", None)
    assert (host["bytes"], host["latency_ms"], host["eviction"]) == (4 * 2**30, 0.5, "lineage")
    assert (host["link"]["down_gbps"], host["link"]["up_gbps"]) == (20, "inf")
    assert (disk["blocks"], disk["latency_ms"]) == (9000, 1)
    assert (disk["link"]["backend_down_gbps"], disk["link"]["backend_up_gbps"]) == (9, 9)
    assert (store["blocks"], store["eviction"], store["link"]["backend_up_gbps"]) == ("unlimited", "fifo", 3)
    assert (run["offload"]["mode"], run["offload"]["offload_batch_size"]) == ("write_through", 7)


def test_the_blocks_of_the_device_follow_from_memory_and_model(
    report_of: Callable[..., dict[str, Any]],
) -> None:
    # (80 GiB * 0.92 - 16 GB) / (16 tokens * 131072 bytes)
    gpu = ("--model", "Llama-3.1-8B", "--gpu-memory", "80GiB", "--gpu-weights", "16GB")
    assert report_of(*gpu)["run"]["engine"]["num_gpu_blocks"] == 30053
    # A quarter of the heads and of the weights on each GPU.
    four = report_of(*gpu, "--tensor-parallel-size", "4", "--gpu-memory-utilization", "0.5")
    assert four["run"]["engine"]["num_gpu_blocks"] == (80 * 2**30 // 2 - 4 * 10**9) // (16 * 131072 // 4)


def test_flags_win_over_the_file_and_assignments_over_both(
    report_of: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text(
        "kv_bytes_per_token: 131072\n"
        "engine: {num_gpu_blocks: 300}\n"
        "offload: {mode: write_through}\n"
        "tiers:\n  - {tier: g2, bytes: 8GiB, link: {down_gbps: 10, up_gbps: 10}}\n"
    )
    run = report_of("--config", str(config))["run"]["tiers"]
    assert (run["tiers"][0]["bytes"], run["offload"]["mode"]) == (8 * 2**30, "write_through")
    flags = ("--config", str(config), "--g2", "100", "--g2-h2d-gbps", "30", "--model", "Qwen3-8B")
    run = report_of(*flags, "--set", "tiers.g2.blocks=200", "--set", "offload.mode=evict")["run"]["tiers"]
    assert (run["tiers"][0]["blocks"], run["tiers"][0]["bytes"]) == (200, None)
    assert (run["tiers"][0]["link"]["down_gbps"], run["tiers"][0]["link"]["up_gbps"]) == (10, 30)
    assert (run["model"], run["kv_bytes_per_token"], run["offload"]["mode"]) == ("Qwen3-8B", None, "evict")


def test_a_file_with_dynamos_names_plays_tiers(
    report_of: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config = tmp_path / "dynamo.yaml"
    config.write_text(
        json.dumps(
            {
                "engine": {
                    "num_gpu_blocks": 300,
                    "kv_cache_bytes_per_token": 131072,
                    "native_host_offload": {
                        "num_host_blocks": 4000,
                        "d2h_bandwidth_gbps": 50,
                        "h2d_bandwidth_gbps": 50,
                    },
                }
            }
        )
    )
    theirs = report_of("--config", str(config))
    ours = report_of(*SMALL, *FAST, "--g2", "4000", "--offload-mode", "write_through")
    assert theirs["run"]["digest"] == ours["run"]["digest"]
    assert theirs["tiers"] == ours["tiers"]


def test_threads_change_nothing_with_a_host_tier(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "single.jsonl"
    lines = [
        json.dumps(
            {"timestamp": i * 40, "input_length": 1024, "output_length": 9, "hash_ids": [i % 7, i % 9]}
        )
        for i in range(60)
    ]
    trace.write_text("\n".join(lines) + "\n")
    digests = []
    for threads in ("1", "3"):
        argv = ["replay", str(trace), "--workers", "3", "--num-gpu-blocks", "160", "--g2", "1600", "--digest"]
        assert main([*argv, "--kv-bytes-per-token", "1000", "--threads", threads]) == 0
        digests.append(capsys.readouterr().out)
    assert digests[0] == digests[1]


def test_a_comparison_prints_two_columns_and_writes_both(
    report_of: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*SMALL, *FAST, "--g2", "4000", "--compare-without-tiers")
    report = report_of(*flags)
    bare = report_of("--num-gpu-blocks", "300")
    assert report["without_tiers"]["run"]["digest"] == bare["run"]["digest"]
    assert report["without_tiers"]["ttft_ms"] == bare["ttft_ms"]
    capsys.readouterr()
    assert main(["replay", str(TRACE), *flags]) == 0
    out = capsys.readouterr().out
    for words in ("KV tier", "G1 → G2", "with tiers", "without", "difference", "points"):
        assert words in out, words


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--g2 9 --g2-bytes 1GiB", "--g2 and --g2-bytes both set the capacity"),
        ("--g3 9 --g3-bytes 1GiB", "--g3 and --g3-bytes both set the capacity"),
        ("--g2 9 --g2-bandwidth-gbps 9 --g2-d2h-gbps 9", "--g2-bandwidth-gbps and --g2-d2h-gbps both"),
        ("--g2 9 --g2-bandwidth-gbps 9 --g2-h2d-gbps 9", "--g2-bandwidth-gbps and --g2-h2d-gbps both"),
        ("--g2 9 --model Qwen3-8B --kv-bytes-per-token 9", "--kv-bytes-per-token and --model both"),
        ("--g2 9 --kv-dtype fp8 --kv-bytes-per-token 9", "--kv-bytes-per-token and --kv-dtype both"),
        ("--g2 9 --kv-dtype fp8", "--kv-dtype needs --model, or give --kv-bytes-per-token instead"),
        ("--model Qwen3-8B", "--model needs a GPU or a tier"),
        ("--model no-such-model", "--model needs a GPU or a tier"),
        ("--set model=Qwen3-8B", "model needs a GPU or a tier: give gpu (--gpu, or --gpu-memory) or tiers"),
        ("--set kv_bytes_per_token=5", "kv_bytes_per_token needs a tier: give tiers (--g2"),
        ("--kv-cache-bytes-per-token 4", "--kv-cache-bytes-per-token needs a tier: give tiers (--g2"),
        ("--set engine.kv_bytes_per_token=4", "kv_bytes_per_token needs a tier: give tiers (--g2"),
        ("--set tiers=[] --set model=nonsense", "model 'nonsense' is neither a known name nor the path"),
        ("--set tiers=[] --model Qwen3-8B --kv-dtype rubbish", "dtype 'rubbish' is not known"),
        ("--gpu-memory 80GiB", "--gpu-memory needs a GPU; give --gpu"),
        ("--gpu-memory 80GiB --gpu-weights 1GB", "gpu needs model"),
        (
            "--gpu-memory 80GiB --gpu-weights 1GB --model Qwen3-8B --num-gpu-blocks 9",
            "--num-gpu-blocks and --gpu-memory",
        ),
        ("--gpu-memory 8GiB --gpu-weights 16GB --model Qwen3-8B", "does not fit; use more memory"),
        (
            "--gpu-memory 8GiB --gpu-weights 1GB --model Qwen3-8B --tensor-parallel-size 3",
            "--tensor-parallel-size=3",
        ),
        ("--g2 9", "g2 needs the KV bytes per token; give --kv-bytes-per-token, or --model: a known name"),
        ("--g2 many --kv-bytes-per-token 9", "--g2 must be a whole number, got 'many'"),
        ("--g2 9 --g3 0 --kv-bytes-per-token 9", "g3: blocks must be at least 1"),
        ("--g2-bytes 64G --kv-bytes-per-token 9", "--g2-bytes: '64G' has an unknown unit"),
        ("--g2-bandwidth-gbps 9 --kv-bytes-per-token 9", "g2: the capacity is missing; give blocks (--g2)"),
        (
            "--g2 9 --g2-bandwidth-gbps 0",
            "--g2-bandwidth-gbps must be positive, got 0; for no limit give inf",
        ),
        ("--g2 9 --g2-h2d-gbps fast", "--g2-h2d-gbps must be a number"),
        ("--g2 9 --g2-latency-ms slow", "--g2-latency-ms must be a number"),
        ("--g2 9 --g2-eviction magic --kv-bytes-per-token 9", "--g2-eviction 'magic' is not known"),
        ("--g3 9 --kv-bytes-per-token 9", "g3 needs g2"),
        ("--g4 unlimited --kv-bytes-per-token 9", "g4 needs g2"),
        ("--offload-mode write_through", "--offload-mode needs a tier; give --g2"),
        ("--offload-batch-size 4", "--offload-batch-size needs a tier"),
        ("--compare-without-tiers", "--compare-without-tiers needs a tier"),
        ("--g2 9 --kv-bytes-per-token 9 --offload-mode lazily", "lazily"),
        ("--g2 9 --kv-bytes-per-token 9 --offload-batch-size 0", "--offload-batch-size must be at least 1"),
        ("--g2 9 --kv-bytes-per-token many", "--kv-bytes-per-token must be a whole number"),
        ("--g2 9 --model nonsense", "model 'nonsense' is neither a known name nor the path"),
        ("--g2 9 --g3 9 --kv-bytes-per-token 9 --threads 2", "threads > 1 needs independent workers"),
        ("--set tiers.g2.colour=red --g2 9 --kv-bytes-per-token 9", "colour"),
        ("--set engine.num_g2_blocks=3", "g2 needs the KV bytes per token"),
        ("--set engine.num_g2_blocks=3 --g2 4 --kv-bytes-per-token 9", "tiers are given twice"),
        (
            "--set engine.enable_prefix_caching=false --g2 9 --kv-bytes-per-token 9",
            "enable_prefix_caching",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    assert message in refused(capsys, *flags.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: no-such-model\nkv_dtype: rubbish\n", "model needs a GPU or a tier"),
        ("kv_bytes_per_token: 5\n", "kv_bytes_per_token needs a tier: give tiers (--g2"),
        (
            "engine: {kv_cache_bytes_per_token: 5}\n",
            "kv_cache_bytes_per_token needs a tier: give tiers (--g2",
        ),
        ("pools: [{model: no-such-model}]\n", "model needs a tier: give tiers"),
        ("pools: [{engine: {kv_bytes_per_token: 5}}]\n", "kv_bytes_per_token needs a tier: give tiers"),
    ],
)
def test_a_file_is_refused_where_the_flag_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(text)
    assert message in refused(capsys, "--config", str(config))


@pytest.mark.parametrize("text", ["gpu: {name: H100}\n", "engine: {num_g2_blocks: 0}\n", "tiers: []\n"])
def test_a_model_may_be_a_flag_where_a_file_has_the_gpu_or_takes_tiers_away(
    report_of: Callable[..., dict[str, Any]], tmp_path: Path, text: str
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(text)
    assert report_of("--config", str(config), "--model", "Llama-3.1-8B")["requests"]["completed"]


def test_help_has_a_group_for_tiers_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--help-all"])
    out = capsys.readouterr().out
    assert "KV tiers below the GPU" in out
    assert "--g2 65536 --model Llama-3.1-8B --compare-without-tiers" in out
