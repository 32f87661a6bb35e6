"""`understudy cache`: tables, JSON, page and errors."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.cache.curves import CacheCurves
from understudy.cache.study import Scale, add_tiers, find_knee
from understudy.cli import main
from understudy.kv import BUILT_IN_POLICIES
from understudy.workload import Workload

TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"
LLAMA_8B = ["--model", "Llama-3.1-8B"]
SMALL_FLEET = ["--block-size", "64", "--num-gpu-blocks", "1024", "--kv-bytes-per-token", "131072"]


def study(*flags: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["cache", str(TRACE), *flags, "--quiet", "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_without_a_fleet_it_prints_the_curve_of_all_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", str(TRACE), "--block-size", "64"]) == 0
    out = capsys.readouterr().out
    assert "unlimited cache: 87.08 % of 1,278,640 prompt tokens hit" in out
    assert "blocks      lru  insertion  lineage  multi_lru  optimal  optimal, pinned" in out
    assert "Replayed" not in out


def test_a_model_gives_sizes_in_gib_and_the_knee(capsys: pytest.CaptureFixture[str]) -> None:
    found = study("--block-size", "64", *LLAMA_8B, "--sizes", "1,4", "--policies", "lru", capsys=capsys)
    assert found["kv_bytes_per_token"] == 131_072
    assert [(point["blocks"], point["gib"]) for point in found["sizes"]] == [(128, 1.0), (512, 4.0)]
    assert found["policies"] == ["lru"]
    knee = found["knee"]
    assert 0 < knee["blocks"] < found["distinct_blocks"]
    assert found["unlimited_hit_ratio"] - knee["hit_ratio"] < 0.01


def test_a_fleet_is_replayed_with_each_size_and_policy_that_an_engine_can_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = study(*SMALL_FLEET, "--sizes", "512blocks,1024blocks", "--host-gib", "8", capsys=capsys)
    assert [(one["policy"], one["blocks"]) for one in found["replays"]] == [
        (policy, blocks) for blocks in (512, 1024) for policy in ("lru", "lineage", "multi_lru")
    ]
    assert found["fleet"]["blocks"] == 1024
    assert found["lru_curve"][0]["blocks"] <= 512 <= 1024 <= found["lru_curve"][-1]["blocks"]
    assert found["order"] == "replay"
    same = next(one for one in found["replays"] if (one["policy"], one["blocks"]) == ("lru", 1024))
    assert same["hit_ratio"] == found["fleet"]["replayed_hit_ratio"]
    assert found["fleet"]["lru_hit_ratio"] == pytest.approx(same["hit_ratio"], abs=0.03)
    (host,) = found["tiers"]
    assert host["blocks"] == 1024
    assert host["hit_ratio"] == pytest.approx(found["fleet"]["lru_hit_ratio"] + host["added"])
    assert host["added_if_copies"] <= host["added"]
    assert host["hit_ratio_if_copies"] == pytest.approx(
        found["fleet"]["lru_hit_ratio"] + host["added_if_copies"]
    )


def test_the_plotted_curve_reaches_a_fleet_that_is_larger_than_all_sizes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--block-size", "64", "--num-gpu-blocks", "90000", "--no-replays", "--policies", "lru"]
    found = study(*flags, "--sizes", "512blocks", capsys=capsys)
    assert (found["lru_curve"][0]["blocks"], found["lru_curve"][-1]["blocks"]) == (512, 90_000)


def test_workers_have_caches_of_their_own_and_routing_decides_what_they_hit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*SMALL_FLEET, "--workers", "2", "--policies", "lru", "--no-replays"]
    spread = study(*flags, "--routing", "round_robin", capsys=capsys)
    routed = study(*flags, "--routing", "kv", capsys=capsys)
    assert spread["fleet"]["workers"] == routed["fleet"]["workers"] == 2
    assert spread["routed_hit_ratio"] < routed["routed_hit_ratio"] <= routed["unlimited_hit_ratio"]
    assert spread["replays"] == []


class Balance(HTMLParser):
    """Counts open elements."""

    VOID = frozenset({"meta", "link", "path", "circle", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:  # noqa: ARG002
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_policies_have_the_names_of_a_replays_eviction_policy(capsys: pytest.CaptureFixture[str]) -> None:
    names = ",".join(BUILT_IN_POLICIES)
    found = study(*SMALL_FLEET, "--policies", names, "--sizes", "512blocks", capsys=capsys)
    replays = {one["policy"]: one["hit_ratio"] for one in found["replays"]}
    assert set(replays) == set(BUILT_IN_POLICIES)
    for name in ("lineage", "multi_lru", "vllm_append"):
        flags = ["--block-size", "64", "--num-gpu-blocks", "512", "--eviction-policy", name, "--no-advice"]
        assert main(["replay", str(TRACE), *flags, "--quiet", "--json", "-"]) == 0
        replayed = json.loads(capsys.readouterr().out)["prefix_hit_ratio"]["first_admission"]
        assert replays[name] == replayed, name


def test_the_page_shows_the_curve_the_knee_and_the_fleets_point(tmp_path: Path) -> None:
    page = tmp_path / "cache.html"
    assert main(["cache", str(TRACE), *SMALL_FLEET, "--quiet", "--html", str(page)]) == 0
    text = page.read_text()
    Balance().feed(text)
    for part in (
        "Hit ratio by cache size",
        "this fleet:",
        "knee:",
        "optimal, pinned",
        "Replayed",
        "Unlimited cache",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--policies lru,multi_lfu", "--policies: 'multi_lfu' is not known; did you mean multi_lru?"),
        ("--policies clock", "--policies: 'clock' is not known; choose from lineage, lineage_fifo, lru"),
        ("--policies tinylfu", "--policies: 'tinylfu' is not known; choose from lineage"),
        (
            "--policies lru,mine.py:Mine",
            "--policies: curves have built-in policies only; replay mine.py:Mine with `understudy replay "
            "--eviction-policy`",
        ),
        ("--sizes 4", "--sizes: GiB need the KV bytes per token; give --model"),
        ("--sizes 4,x", "--sizes: 'x' is not a size; write GiB such as 16, or blocks such as 4096blocks"),
        ("--sizes 0.000001 --model Llama-3.1-8B", "--sizes: one size is smaller than a block; choose larger"),
        (
            "--sizes 5000000000blocks",
            "--sizes: 5,000,000,000 blocks exceed the limit of 2^32; choose smaller",
        ),
        ("--host-gib 4", "--host-gib: the size of the device's cache is not known; give --gpu"),
        (
            "--disk-gib 4 --num-gpu-blocks 512",
            "--disk-gib: the KV bytes per token are not known; give --model",
        ),
        ("--host-gib -1", "--host-gib must be above 0, got -1; leave it out"),
        ("--workers 2", "--workers: the blocks of a worker are not known; give --gpu, or --num-gpu-blocks"),
        ("--warm-up 1", "--warm-up must be a share from 0 and below 1, got 1; 0.5 skips the first half"),
        ("--knee-points 0", "--knee-points must be above 0 and at most 100, got 0; 0.1 is usual"),
        ("--block-size 0", "block-size must be at least 1"),
        ("--model Llama-3.1-8B --kv-bytes-per-token 8", "both set the KV bytes per token; give one"),
        (
            "--model gpt-oss-120b",
            "--model gpt-oss-120b has several KV cache groups, and a curve has one; replay the sizes: `understudy "
            "sweep TRACE --vary num-gpu-blocks=4096..65536*2 --slo-ttft-ms 500`, or leave --model out and give "
            "--kv-bytes-per-token",
        ),
        (
            '--num-gpu-blocks 512 --set engine.kv_cache_groups=[{"kind":"full","block_size":16},{"kind":"mamba",'
            '"block_size":16}]',
            "kv_cache_groups: a curve has one group; leave them out, or replay the sizes",
        ),
        ("--gpu H100", "--gpu needs --model; give a known name"),
        (
            "--block-size 16 --num-gpu-blocks 512 --set engine.block_size=32",
            "differs from --block-size 16; give one",
        ),
        (
            "--num-gpu-blocks 512 --set disaggregation.prefill_workers=1 --set disaggregation.decode_workers=1",
            "disaggregation: a cache study has equal workers without tiers; remove disaggregation",
        ),
        ("--kv-dtype fp8", "--kv-dtype needs --model; give a known name"),
    ],
)
def test_wrong_flags_are_rejected_by_name_with_a_remedy(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", str(TRACE), *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("understudy cache: ")
    assert message in err


def test_a_trace_without_requests_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert main(["cache", str(tmp_path / "empty.jsonl")]) == 2
    assert "contains no requests" in capsys.readouterr().err


def steps_of_reuse() -> CacheCurves:
    """Ten prompts of one block each, all read once more in the same order: an LRU cache needs ten blocks."""
    ids = np.tile(np.arange(10, dtype=np.uint32), 2)
    workload = Workload(
        arrival_ns=np.arange(20),
        prompt_tokens=np.full(20, 4),
        output_tokens=np.ones(20, np.int32),
        hash_offsets=np.arange(21),
        hash_ids=ids,
        trace_block_size=4,
    )
    return CacheCurves(workload, 4, prompts_only=True)


def test_the_knee_is_the_size_after_the_last_rise() -> None:
    curves = steps_of_reuse()
    assert curves.hit_ratio("lru", [9, 10]).tolist() == [0.0, 0.5]
    knee = find_knee(curves, Scale(4, 2**30 // 4))  # a block has 1 GiB
    assert knee is not None
    assert (knee.blocks, knee.gib, knee.hit_ratio) == (10, 10.0, 0.5)
    assert find_knee(curves, Scale(4, None)) is None
    flat = find_knee(curves, Scale(4, 2**30 // 4), points_per_gib=60)
    assert flat is not None
    assert flat.blocks == 0


def test_tiers_add_up_on_the_curve_unless_they_keep_copies() -> None:
    scale = Scale(4, 2**30 // 4)
    host, disk = add_tiers(steps_of_reuse(), scale, 4, [("host", 6.0), ("disk", 20.0)])
    assert (host.blocks, host.hit_ratio, host.added, host.added_if_copies) == (6, 0.5, 0.5, 0.0)
    assert (disk.blocks, disk.hit_ratio, disk.added) == (20, 0.5, 0.0)
