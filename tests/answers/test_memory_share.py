"""The share of memory that every verb takes by default: 0.92 since vLLM 0.20, 0.9 before, and 0.9 of SGLang."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import understudy as us
from answers.engine_commands import read_engine
from timing.test_hardware import CALIBRATED
from understudy.calibrate.engine_flags import EngineFlags
from understudy.calibrate.experiment import build_engine_config
from understudy.calibrate.predict import build_engine_on_gpu
from understudy.calibrate.tables import Table
from understudy.cli import main
from understudy.engines.profiles import RELEASES
from understudy.report import Slo
from understudy.run.on_gpu import place_on_gpu
from understudy.run.settings import ReplaySettings
from understudy.server.flags.serving import read_serve
from understudy.server.metrics.cache_info import add_cache_info
from understudy.server.metrics.families import Registry
from understudy.sweep.candidate import Candidate
from understudy.sweep.commands import make_commands
from understudy.tiers.gpu import GpuSettings
from understudy.timing.fitted_engine import FittedEngine
from understudy.timing.gpus import GPUS

if TYPE_CHECKING:
    from pathlib import Path

SHARES = {
    "0.18": 0.9,
    "0.18.1": 0.9,
    "v0.19": 0.9,
    "0.20.0": 0.92,
    "0.27": 0.92,
    "recorded": 0.92,
    "0.33": 0.92,
}
"""Defaults of `gpu_memory_utilization`, as those releases of vLLM have them."""
MODEL = "Llama-3.1-8B"
BYTES_PER_BLOCK = 2 * 32 * 8 * 128 * 2 * 16  # keys and values, layers, heads, their width, bf16, tokens
TWO_PERCENT = 0.02 * GPUS["H100"].memory_gb * 1e9 / BYTES_PER_BLOCK


def replayed(version: str | None, share: float | None = None) -> int:
    """KV blocks of a replay on an H100 with these settings; None: not given."""
    gpu: dict[str, Any] = {"name": "H100"} | ({} if share is None else {"gpu_memory_utilization": share})
    engine = {} if version is None else {"vllm_version": version}
    return ReplaySettings.read(None, {"model": MODEL, "gpu": gpu, "engine": engine}, []).engine.num_gpu_blocks


def words_of(given: dict[str, Any]) -> list[str]:
    """Words of the command that a sweep prints for an engine on an H100."""
    gpu = {"name": "H100", **given.get("gpu", {})}
    read = ReplaySettings.read(None, {"model": MODEL, **given, "gpu": gpu}, [])
    fleet = Candidate(flags={}, settings=read, slo=Slo(ttft_ms=1), model=MODEL)
    (engine,) = make_commands(fleet).engines
    return engine.words


@pytest.mark.parametrize(("version", "share"), SHARES.items())
def test_every_verb_takes_the_share_of_the_release(version: str, share: float) -> None:
    blocks = replayed(version, share)
    other = replayed(version, 0.9 if share == 0.92 else 0.92)
    assert abs(blocks - other) == pytest.approx(TWO_PERCENT, abs=1)
    gpu = GpuSettings(name="H100")
    engine = us.VllmConfig(vllm_version=version)
    flags = ["--gpu", "H100", "--vllm-version", version]
    assert replayed(version) == blocks
    assert place_on_gpu(MODEL, gpu, engine, None).engine.num_gpu_blocks == blocks
    assert build_engine_on_gpu(gpu, MODEL, None, vllm_version=version).num_gpu_blocks == blocks
    assert build_engine_config(gpu.deployment(MODEL, None), vllm_version=version).num_gpu_blocks == blocks
    assert read_serve([MODEL, *flags]).settings.engine.num_gpu_blocks == blocks
    assert EngineFlags(vllm_version=version).memory_share == share


def test_all_known_releases_have_the_share_of_their_time() -> None:
    assert {minor: profile.memory_share for minor, profile in RELEASES.items()} == {
        minor: 0.9 if minor < 20 else 0.92 for minor in RELEASES
    }


def test_the_newest_release_is_the_default() -> None:
    assert replayed(None) == replayed("0.33", 0.92)


@pytest.mark.parametrize("flags", [[], ["--gpu-memory-utilization", "0.92"]])
def test_capacity_takes_the_share_of_the_newest_release(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["capacity", "--model", MODEL, "--gpu", "H100", "--max-model-len", "8192", "--json", *flags])
        == 0
    )
    blocks = json.loads(capsys.readouterr().out)["num_blocks"]
    assert blocks == replayed("0.33", 0.92) + 1  # with vLLM's null block


def test_models_of_several_groups_take_it_too() -> None:
    given = {"model": "gpt-oss-20b", "gpu": {"name": "H100"}}
    newest = ReplaySettings.read(None, given, []).engine.num_gpu_blocks
    given["gpu"] = {"name": "H100", "gpu_memory_utilization": 0.92}
    assert ReplaySettings.read(None, given, []).engine.num_gpu_blocks == newest


def test_sglang_has_a_share_of_its_own() -> None:
    given = {"model": MODEL, "gpu": {"name": "H100"}, "engine": {"engine_type": "sglang"}}
    blocks = ReplaySettings.read(None, given, []).engine.num_gpu_blocks
    given["gpu"] = {"name": "H100", "gpu_memory_utilization": 0.9}
    assert ReplaySettings.read(None, given, []).engine.num_gpu_blocks == blocks
    served = read_serve([MODEL, "--engine", "sglang", "--gpu", "H100"]).settings.engine
    assert served.num_gpu_blocks == blocks
    assert EngineFlags(engine="sglang").memory_share == 0.9
    assert read_engine(words_of({"engine": {"engine_type": "sglang"}})).given["memory"] == "0.9"


# ── Printed commands ──


@pytest.mark.parametrize(("version", "share"), SHARES.items())
@pytest.mark.parametrize("given", [None, 0.85, 0.9, 0.92])
def test_a_command_names_only_a_share_that_its_release_would_not_take(
    version: str, share: float, given: float | None
) -> None:
    gpu = {} if given is None else {"gpu_memory_utilization": given}
    words = words_of({"gpu": gpu, "engine": {"vllm_version": version}})
    started = read_engine(words).given.get("memory")
    assert "--num-gpu-blocks-override" not in words
    assert (started is None) == (given in (None, share))
    assert float(started or share) == (given or share)


# ── Timing files and tables ──


@pytest.mark.parametrize("blocks", [None, 9000])
@pytest.mark.parametrize("share", [0.8, 0.9, 0.92])
def test_a_timing_file_keeps_the_share_that_was_measured(blocks: int | None, share: float) -> None:
    engine = FittedEngine(
        version="0.33.0",
        model=MODEL,
        block_size=16,
        num_gpu_blocks=blocks or 7000,
        blocks_estimated=blocks is None,
        gpu_memory_utilization=share,
    )
    file = msgspec.structs.replace(CALIBRATED, engine=engine)
    found = ReplaySettings.read(None, {"engine": {"timing": file.setting()}}, [])
    assert found.engine.num_gpu_blocks == (blocks or replayed("0.33", share))
    fleet = Candidate(flags={}, settings=found, slo=Slo(ttft_ms=1), model=found.model)
    (command,) = make_commands(fleet).engines
    started = read_engine(command.words).given.get("memory")
    assert float(started or 0.92) == share
    assert (started is None) == (share == 0.92)
    assert "--num-gpu-blocks-override" not in command.words


@pytest.mark.parametrize(
    ("release", "share"),
    [("0.14.1", 0.9), ("v0.19.0", 0.9), ("0.20.0", 0.92), ("nightly-5b8c", 0.92), ("", 0.92)],
)
def test_a_row_of_measurements_has_the_share_of_its_release(
    release: str, share: float, tmp_path: Path
) -> None:
    row = {
        "key": "one",
        "system": "h100_sxm",
        "model_path": MODEL,
        "backend_version": release,
        "isl": "500",
        "osl": "20",
        "conc": "4",
        "ttft_ms": "60",
        "tpot_ms": "9",
    }
    path = tmp_path / "measured.csv"
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, row)
        table.writeheader()
        table.writerow(row)
    read = Table.read(path).experiment(0)
    assert read.engine.num_gpu_blocks == replayed("0.33", share)


# ── Servers ──


@pytest.mark.parametrize(
    ("flags", "share"),
    [
        ([], "0.92"),
        (["--vllm-version", "0.19.0"], "0.9"),
        (["--vllm-version", "0.19.0", "--gpu", "H100"], "0.9"),
        (["--gpu", "H100", "--gpu-memory-utilization", "0.7"], "0.7"),
    ],
)
def test_servers_report_the_share_that_they_have(flags: list[str], share: str) -> None:
    settings = read_serve([MODEL, *flags]).settings
    registry = Registry()
    add_cache_info(registry, settings, 1)
    assert f'gpu_memory_utilization="{share}"' in registry.render().decode()
