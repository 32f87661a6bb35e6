"""Op tables: interpolated between their points, refused beyond them, whatever a step has in it."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import pytest

from understudy._core import StepLoad, StepTiming
from understudy.cli import main
from understudy.errors import ConfigError
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import find_gpu
from understudy.timing.op_tables import OpTables
from understudy.timing.presets import preset

if TYPE_CHECKING:
    from pathlib import Path

DENSE = [
    "layernorm,1,1",
    "layernorm,512,2",
    "qkv_proj,1,10",
    "qkv_proj,512,100",
    "embedding,1,5",
    "embedding,512,5",
]
SEQUENCES = ["lm_head,1,100", "lm_head,8,200", "sampler,1,10", "sampler,8,10"]
POINTS = [
    *(f"0,0,{n},{kv},{n * kv / 10}" for n in (1, 2, 8) for kv in (16, 128, 1024)),
    *(f"{c},{h},0,0,{c + h / 10}" for c in (16, 512) for h in (0, 1024)),
    *(
        f"{c},{h},{n},{kv},{c + h / 10 + 2 * n * kv / 10}"
        for c in (16, 512)
        for h in (0, 1024)
        for n in (1, 2, 8)
        for kv in (16, 128, 1024)
    ),
]


def folder(path: Path, skew: str = "enabled: false") -> Path:
    tables = path / "tp1"
    tables.mkdir()
    (tables / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *DENSE]))
    (tables / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *SEQUENCES]))
    text = "\n".join(["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", *POINTS])
    (tables / "attention.csv.gz").write_bytes(gzip.compress(text.encode()))
    (path / "meta.yaml").write_text(f"skew_fit:\n  {skew}\n")
    return tables


def tables(path: Path, model: str = "Llama-3.1-8B", *, extrapolate: bool = False) -> StepTiming:
    shape, gpu = find_architecture(model), find_gpu("RTX 4090")
    deployment = Deployment(model=shape, gpu=gpu, weights="bf16", parallel=Parallelism())
    reached = preset(shape, gpu, "bf16", "bf16").efficiencies
    return OpTables(path, deployment, reached, extrapolate=extrapolate).build()


def test_decodes_take_what_the_tables_say(tmp_path: Path) -> None:
    found = tables(folder(tmp_path))
    # One layer: twice the norm, once the projection, attention; then what runs once a step.
    assert found.step_ms(StepLoad(decodes=1, context_tokens=128)) == pytest.approx(
        (32 * (2 + 10 + 12.8) + 5 + 110) / 1e3
    )
    near = found.step_ms(StepLoad(decodes=8, context_tokens=8 * 128))
    far = found.step_ms(StepLoad(decodes=8, context_tokens=8 * 228))
    assert far - near == pytest.approx(32 * 8 * 100 / 10 / 1e3)


def test_prompts_are_added_each_by_itself_and_decodes_as_the_mixture_has_them(tmp_path: Path) -> None:
    found = tables(folder(tmp_path))
    both = found.step_ms(StepLoad(chunks=[(256, 0), (256, 0)]))
    one = found.step_ms(StepLoad(chunks=[(512, 0)]))
    assert both - one == pytest.approx(100 / 7 / 1e3)  # attention is alike; the head sees one more
    mixed = found.step_ms(StepLoad(chunks=[(510, 0)], decodes=2, context_tokens=256))
    alone = found.step_ms(StepLoad(chunks=[(512, 0)]))
    assert mixed - alone == pytest.approx((32 * (2 * 2 * 12.8 - 2) + 100 * 2 / 7) / 1e3, rel=0.01)


def test_uneven_contexts_cost_what_the_profile_found(tmp_path: Path) -> None:
    found = tables(folder(tmp_path, "enabled: true\n  per_tp: {1: {alpha_default: 0.5}}"))
    even = found.step_ms(StepLoad(decodes=2, context_tokens=256, longest_context=128))
    uneven = found.step_ms(StepLoad(decodes=2, context_tokens=256, longest_context=228))
    assert uneven - even == pytest.approx(32 * 0.5 * 2 * 100 / 10 / 1e3)
    # Beside a prompt, contexts cost twice as much in these tables, and so does their being uneven.
    even = found.step_ms(StepLoad(chunks=[(256, 0)], decodes=2, context_tokens=256, longest_context=128))
    uneven = found.step_ms(StepLoad(chunks=[(256, 0)], decodes=2, context_tokens=256, longest_context=228))
    assert uneven - even == pytest.approx(32 * 0.5 * 2 * 2 * 100 / 10 / 1e3)


def test_a_step_outside_the_tables_is_refused_unless_told_to_extrapolate(tmp_path: Path) -> None:
    path = folder(tmp_path)
    for step, what in (
        (StepLoad(decodes=1, context_tokens=5000), "kv_decode=1024"),
        (StepLoad(decodes=9, context_tokens=900), "n_decode=8"),
        (StepLoad(chunks=[(600, 0)]), "prefill_chunk=512"),
    ):
        with pytest.raises(ConfigError, match=f"{what}.*extrapolate"):
            tables(path).step_ms(step)
        assert tables(path, extrapolate=True).step_ms(step) > 0


@pytest.mark.parametrize("name", ["dense", "per_sequence"])
def test_a_table_that_is_missing_or_broken_is_named(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path)
    (path / f"{name}.csv").write_text("layer,time_us\nx,1\n")
    with pytest.raises(ConfigError, match=rf"{name}\.csv: column (tokens|sequences) is missing"):
        tables(path)
    size = "tokens" if name == "dense" else "sequences"
    (path / f"{name}.csv").write_text(f"layer,{size},time_us\nx,1,-4\n")
    with pytest.raises(ConfigError, match=r":2: time_us must be a finite number from 0, got -4"):
        tables(path)
    (path / f"{name}.csv").write_text(f"layer,{size},time_us\nx,1,3\nx,many,4\n")
    with pytest.raises(ConfigError, match=rf"{name}\.csv:3: {size} must be a finite number .*got many"):
        tables(path)
    (path / f"{name}.csv").write_text(f"layer,{size},time_us\nx,1,3\nx,2")
    with pytest.raises(ConfigError, match=rf"{name}\.csv:3: time_us is missing; the file may be truncated"):
        tables(path)
    (path / f"{name}.csv").unlink()
    with pytest.raises(ConfigError, match=f"has no {name}.csv"):
        tables(path)


@pytest.mark.parametrize("keep", [10, 60])
def test_a_table_that_is_cut_off_is_named(tmp_path: Path, keep: int) -> None:
    path = folder(tmp_path) / "attention.csv.gz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"attention\.csv\.gz: .*may be truncated"):
        tables(path.parent)


def test_a_folder_of_several_sizes_gives_the_one_that_is_asked_for(tmp_path: Path) -> None:
    path = folder(tmp_path)
    step = StepLoad(decodes=2, context_tokens=32)
    assert tables(tmp_path).step_ms(step) == tables(path).step_ms(step)
    path.rename(tmp_path / "tp2")
    with pytest.raises(ConfigError, match="has tp2, but no tp1"):
        tables(tmp_path)
    with pytest.raises(ConfigError, match="is for tensor_parallel_size=2, not 1"):
        tables(tmp_path / "tp2")


def test_tables_of_another_model_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (tmp_path / "meta.yaml").write_text("model: meta-llama/Llama-3.1-8B-Instruct\n")
    assert tables(path).step_ms(StepLoad(decodes=1, context_tokens=16)) > 0
    (tmp_path / "meta.yaml").write_text("model: Qwen/Qwen3-32B\n")
    with pytest.raises(
        ConfigError, match=r"meta\.yaml: model is Qwen/Qwen3-32B, but Llama-3.1-8B has another"
    ):
        tables(path)
    (tmp_path / "meta.yaml").write_text("model: {")
    with pytest.raises(ConfigError, match=r"op tables: .*meta\.yaml"):
        tables(path)


def test_experts_that_were_measured_at_one_size_or_with_holes_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "moe.csv").write_text("tokens,activated_experts,time_us\n16,8,3\n")
    with pytest.raises(ConfigError, match="moe has rows for one number of tokens"):
        tables(path, "Qwen3-30B-A3B")
    (path / "moe.csv").write_text("tokens,activated_experts,time_us\n16,8,3\n16,64,9\n512,64,20\n")
    with pytest.raises(ConfigError, match="no row with activated_experts=8 for tokens=512"):
        tables(path, "Qwen3-30B-A3B")


def test_a_model_with_experts_needs_their_table(tmp_path: Path) -> None:
    path = folder(tmp_path)
    with pytest.raises(ConfigError, match=r"has no moe\.csv"):
        tables(path, "Qwen3-30B-A3B")
    rows = [f"{t},{e},{max(e * 6, t / 4)}" for t in (1, 16, 512) for e in (8, 64, 128) if e <= 8 * t]
    (path / "moe.csv").write_text("\n".join(["tokens,activated_experts,time_us", *rows]))
    found = tables(path, "Qwen3-30B-A3B")
    few = found.step_ms(StepLoad(decodes=1, context_tokens=16))
    many = found.step_ms(StepLoad(decodes=8, context_tokens=8 * 16))
    assert many - few > 48 * (40 - 8) * 6 / 1e3 * 0.5


def test_a_replay_takes_a_folder_of_tables_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = str(folder(tmp_path))
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 500, "output_length": 20, "hash_ids": [1]}\n')
    on_gpu = ["--model", "Llama-3.1-8B", "--gpu", "RTX 4090"]
    assert main(["replay", str(trace), *on_gpu, "--timing", measured]) == 0
    assert "Times from op tables:" in " ".join(capsys.readouterr().out.split())
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [1, 2]}\n')
    for flags, says in (
        ([*on_gpu, "--timing", measured], "op tables: attention ends at prefill_chunk=512, a step has 600"),
        (["--timing", measured], "needs --gpu and --model"),
        ([*on_gpu, "--extrapolate"], "--extrapolate is for op tables"),
    ):
        assert main(["replay", str(trace), *flags]) != 0
        assert says in " ".join(capsys.readouterr().err.split())
    assert main(["replay", str(trace), *on_gpu, "--timing", measured, "--extrapolate"]) == 0


def test_a_recorded_run_is_predicted_from_a_folder_of_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = folder(tmp_path)
    run = tmp_path / "run.jsonl"
    run.write_text('{"request_id": "a", "arrival_s": 0, "input_tokens": 256, "output_tokens": 1}\n')
    flags = ["--model", "Llama-3.1-8B", "--gpu", "RTX 4090", "--weights", "bf16"]
    assert main(["predict", str(run), *flags, "--timing", str(measured)]) == 0
    ttft = float(capsys.readouterr().out.splitlines()[1].split(",")[1])
    assert ttft == pytest.approx(tables(measured).step_ms(StepLoad(chunks=[(256, 0)])), rel=1e-4)
