"""One deployment, asked of every verb: the same blocks, block size and limits, and times that agree.

What `vllm serve` chooses on a GPU is written down here from vLLM's `get_batch_defaults`; the trace is drawn here.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import understudy as us
from understudy.cli import main
from understudy.tiers.gpu import GpuSettings

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = {  # memory as the driver shows it, in GiB; tokens of a step, requests
    "H100": (79, 8192, 1024),
    "H200": (139, 8192, 1024),
    "B200": (178, 16384, 1024),
    "A100": (79, 2048, 256),
    "L40S": (44, 2048, 256),
    "RTX PRO 6000": (94, 8192, 1024),
}
LEAST = 0.8
"""Shortest random length of a benchmark, as a share of the longest."""


class Deployment(NamedTuple):
    """A model on GPUs."""

    model: str
    gpu: str
    tensor_parallel: int

    @property
    def flags(self) -> list[str]:
        """Name it on a command line."""
        size = ["--tensor-parallel-size", str(self.tensor_parallel)]
        return ["--model", self.model, "--gpu", self.gpu, *size]


class Answer(NamedTuple):
    """What a verb says that it ran."""

    num_gpu_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int


DEPLOYMENTS = [
    Deployment("Llama-3.1-8B", "H100", 1),
    Deployment("Llama-3.1-8B", "L40S", 1),
    Deployment("Llama-3.1-8B", "RTX PRO 6000", 1),
    Deployment("Llama-3.1-70B", "H200", 2),
    Deployment("Qwen3-32B", "A100", 2),
    Deployment("Llama-3.1-70B", "B200", 2),
]


def write_trace(
    path: Path, count: int, isl: int, osl: int, *, seed: int, gap_ms: float, shared: int = 0
) -> None:
    """Write requests of random lengths; the first `shared` blocks of 16 tokens are the same in all of them."""
    draw = random.Random(seed)
    fresh = shared
    with path.open("w") as out:
        for number in range(count):
            prompt, output = (draw.randint(max(int(size * LEAST), 1), size) for size in (isl, osl))
            blocks = -(-prompt // 16)
            own = max(blocks - shared, 0)
            ids = [*range(min(shared, blocks)), *range(fresh, fresh + own)]
            fresh += own
            row = {
                "timestamp": number * gap_ms,
                "input_length": prompt,
                "output_length": output,
                "hash_ids": ids,
            }
            out.write(json.dumps(row) + "\n")


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Run a command; return what it printed and what it said on standard error."""
    capsys.readouterr()
    assert main(argv) == 0, shlex.join(argv)
    said = capsys.readouterr()
    return said.out, said.err


def report_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run([*argv, "--json", "-", "--quiet"], capsys)[0])
    return found


def answer_of(engine: dict[str, Any]) -> Answer:
    return Answer(*(engine[name] for name in Answer._fields))


def predict(
    where: list[str], isl: int, osl: int, concurrency: int, capsys: pytest.CaptureFixture[str]
) -> Any:
    load = ["--isl", str(isl), "--osl", str(osl), "--concurrency", str(concurrency)]
    out, err = run(["predict", *where, *load], capsys)
    said = re.search(
        r"^engine: max_num_seqs ([\d,]+), max_num_batched_tokens ([\d,]+), ([\d,]+) KV blocks of ([\d,]+) tokens",
        err,
        re.MULTILINE,
    )
    assert said is not None, err
    seqs, tokens, blocks, size = (int(text.replace(",", "")) for text in said.groups())
    ttft_ms, tpot_ms, _ = map(float, out.splitlines()[1].rpartition('",')[2].split(","))
    return Answer(blocks, size, tokens, seqs), ttft_ms, tpot_ms, out


def test_the_table_of_limits_is_that_of_vllm() -> None:
    for memory, tokens, seqs in LIMITS.values():
        large = memory >= 70 and (memory, tokens) != (79, 2048)  # an A100 has the limits of a small one
        assert (tokens, seqs) == ((16384 if memory >= 160 else 8192, 1024) if large else (2048, 256))


@pytest.mark.parametrize("deployed", DEPLOYMENTS, ids=lambda one: f"{one.model} on {one.gpu}")
def test_every_verb_runs_the_same_engine(
    deployed: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, 20, 300, 10, seed=1, gap_ms=400.0, shared=8)
    where = [str(trace), "--trace-block-size", "16", *deployed.flags]
    open_loop = report_of(["replay", *where], capsys)
    expected = answer_of(open_loop["run"]["engine"])
    _, tokens, seqs = LIMITS[deployed.gpu]
    assert expected[1:] == (16, tokens, seqs)
    found = {
        "closed loop": answer_of(
            report_of(["replay", *where, "--concurrency", "4"], capsys)["run"]["engine"]
        ),
        "predict": predict(deployed.flags, 300, 10, 4, capsys)[0],
    }
    live = report_of(["replay", *where, "--online", "--clock-speed", "10"], capsys)
    found["live"] = answer_of(live["run"]["engine"])
    study = report_of(
        ["cache", *where, "--policies", "lru", "--sizes", f"{expected.num_gpu_blocks}blocks"], capsys
    )
    assert study["block_size"] == expected.block_size
    assert study["fleet"]["blocks"] == expected.num_gpu_blocks
    plan = json.loads(run(["capacity", *deployed.flags, "--max-model-len", "8192", "--json"], capsys)[0])
    assert plan["num_blocks"] - 1 == expected.num_gpu_blocks, "vLLM's null block is counted by capacity alone"
    in_python = us.replay(
        str(trace),
        model=deployed.model,
        gpu=GpuSettings(name=deployed.gpu, tensor_parallel_size=deployed.tensor_parallel),
        trace_options={"trace_block_size": 16},
    )
    assert in_python.run.digest == open_loop["run"]["digest"]
    found["us.replay"] = answer_of(in_python.run.engine)
    assert found == dict.fromkeys(found, expected)
    ratio = open_loop["prefix_hit_ratio"]["total"]
    assert live["prefix_hit_ratio"]["total"] == pytest.approx(ratio, abs=1e-9)
    for replayed in study["replays"]:
        if replayed["blocks"] == expected.num_gpu_blocks:
            assert replayed["hit_ratio"] == pytest.approx(ratio, abs=1e-9)


def test_a_sweep_of_one_is_its_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, 60, 2000, 60, seed=2, gap_ms=60.0, shared=40)
    where = [str(trace), "--trace-block-size", "16", *DEPLOYMENTS[0].flags]
    alone = report_of(["replay", *where], capsys)
    swept = report_of(
        ["sweep", *where, "--vary", "workers=1", "--slo-ttft-ms", "5000", "--jobs", "1"], capsys
    )
    [trial] = swept["trials"]
    for name in ("ttft_ms", "e2e_ms"):
        for quantile in ("p50", "p90", "p99"):
            assert trial[name][quantile] == alone[name][quantile]
    assert trial["digest"] == alone["run"]["digest"]
    assert trial["prefix_hit_ratio"] == alone["prefix_hit_ratio"]["first_admission"]


def compare_with_closed_loop(
    where: list[str], isl: int, osl: int, concurrency: int, path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[float, float]:
    """Return predicted over replayed TTFT and TPOT; the replay's lengths are drawn here, with other seeds."""
    _, ttft_ms, tpot_ms, _ = predict(where, isl, osl, concurrency, capsys)
    replayed = []
    for seed in (11, 12, 13):
        write_trace(path, 10 * concurrency, isl, osl, seed=seed, gap_ms=0.0)
        load = [str(path), "--trace-block-size", "16", "--concurrency", str(concurrency)]
        latency = report_of(["replay", *load, *where], capsys)
        replayed.append((latency["ttft_ms"]["mean"], latency["tpot_ms"]["mean"]))
    ttfts, tpots = zip(*replayed, strict=True)
    return ttft_ms * len(ttfts) / sum(ttfts), tpot_ms * len(tpots) / sum(tpots)


def test_a_prediction_is_a_closed_loop_of_the_same_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = DEPLOYMENTS[0].flags
    ttft, tpot = compare_with_closed_loop(where, 2851, 146, 32, tmp_path / "trace.jsonl", capsys)
    assert ttft == pytest.approx(1, abs=0.1)
    assert tpot == pytest.approx(1, abs=0.02)


def test_a_prediction_of_one_at_a_time_is_an_open_loop_at_a_low_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where, trace = DEPLOYMENTS[3].flags, tmp_path / "trace.jsonl"
    _, ttft_ms, tpot_ms, _ = predict(where, 1500, 40, 1, capsys)
    write_trace(trace, 40, 1500, 40, seed=5, gap_ms=60_000.0)
    latency = report_of(["replay", str(trace), "--trace-block-size", "16", *where], capsys)
    assert ttft_ms == pytest.approx(latency["ttft_ms"]["mean"], rel=0.05)
    assert tpot_ms == pytest.approx(latency["tpot_ms"]["mean"], rel=0.01)


def test_a_prediction_says_how_its_lengths_vary(capsys: pytest.CaptureFixture[str]) -> None:
    *_, varied = predict(DEPLOYMENTS[0].flags, 100, 10, 2, capsys)
    assert "lengths from 0.8 of each" in varied
    load = ["--isl", "100", "--osl", "10", "--concurrency", "2", "--least-length", "1"]
    assert "lengths all equal" in run(["predict", *DEPLOYMENTS[0].flags, *load], capsys)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agreement")


@settings(
    max_examples=3,
    phases=(Phase.generate,),  # a replay is slow to shrink
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    deployed=st.sampled_from(DEPLOYMENTS),
    isl=st.integers(200, 4000),
    osl=st.integers(20, 120),
    concurrency=st.integers(2, 24),
)
def test_predictions_agree_with_replays_of_random_deployments(
    deployed: Deployment,
    isl: int,
    osl: int,
    concurrency: int,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ttft, tpot = compare_with_closed_loop(
        deployed.flags, isl, osl, concurrency, folder / "trace.jsonl", capsys
    )
    assert ttft == pytest.approx(1, abs=0.25)
    assert tpot == pytest.approx(1, abs=0.05)


class Times(NamedTuple):
    """Mean latencies of one deployment, as one verb gives them."""

    ttft_ms: float
    tpot_ms: float

    @classmethod
    def of(cls, report: dict[str, Any]) -> Times:
        return cls(report["ttft_ms"]["mean"], report["tpot_ms"]["mean"])


def test_five_verbs_give_one_table_of_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One request at a time: prediction, closed loop, open loop, sweep of one and live server are one experiment."""
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, 12, 1200, 12, seed=9, gap_ms=1500.0, shared=16)
    where = [str(trace), "--trace-block-size", "16", *DEPLOYMENTS[0].flags]
    found = {
        "open loop": report_of(["replay", *where], capsys),
        "closed loop": report_of(["replay", *where, "--concurrency", "1"], capsys),
    }
    sweep = ["sweep", *where, "--vary", "workers=1", "--slo-ttft-ms", "5000", "--jobs", "1"]
    [trial] = report_of(sweep, capsys)["trials"]
    times = {verb: Times.of(report) for verb, report in found.items()}
    load = ["--format", "mooncake", "--concurrency", "1"]
    rows = run(["predict", *where, *load], capsys)[0].splitlines()[1:]
    columns = zip(*(map(float, row.split(",")[1:3]) for row in rows), strict=True)
    times["predict"] = Times(*(sum(column) / len(rows) for column in columns))
    live = report_of(["replay", *where, "--online", "--clock-speed", "2"], capsys)
    for verb, said in times.items():
        assert said == pytest.approx(times["open loop"], rel=1e-4), verb
    # On the clock of the simulation a live run is not late, however slow the machine is; it has no front end.
    outside_ms = found["open loop"]["run"]["times"]["front_end_ms"]
    assert Times.of(live) == pytest.approx(
        (times["open loop"].ttft_ms - outside_ms, times["open loop"].tpot_ms), rel=1e-4
    )
    for quantile in ("p50", "p99"):
        assert trial["ttft_ms"][quantile] == found["open loop"]["ttft_ms"][quantile]
