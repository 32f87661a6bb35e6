"""The public names of the package: few, completed by an editor, and each works on its own."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import understudy as us
from understudy.cli import main
from understudy.errors import ConfigError, InvalidArgument
from understudy.tiers.gpu import GpuSettings

TRACE = Path(__file__).parents[1] / "examples" / "demo_trace.jsonl"
NAMES = [
    "Disaggregation",
    "Execution",
    "KvCacheGroup",
    "KvRouting",
    "Outputs",
    "Report",
    "SglangConfig",
    "TiersConfig",
    "TrtllmConfig",
    "VllmConfig",
    "cache",
    "calibrate",
    "capacity",
    "compare",
    "convert",
    "explain",
    "fleet",
    "plan",
    "predict",
    "read_trace",
    "replay",
    "serve",
    "sweep",
]


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def test_dir_lists_exactly_the_public_names_and_each_exists() -> None:
    assert dir(us) == sorted(NAMES)
    assert all(getattr(us, name).__doc__ for name in NAMES)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'replya'"):
        us.replya  # type: ignore[attr-defined]  # noqa: B018


def test_replay_and_configs_import_no_server() -> None:
    code = "import understudy as us, sys; us.replay, us.VllmConfig, us.Report; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "understudy.server", "pandas"} & set(loaded.split())


def test_model_and_gpu_give_the_run_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    report = us.replay(TRACE, model="Llama-3.1-8B", gpu="H100", workers=2)
    main(["replay", str(TRACE), "--model", "Llama-3.1-8B", "--gpu", "H100", "--workers", "2", "--digest"])
    assert report.run.digest == capsys.readouterr().out.strip()
    assert any(note.startswith("estimated ") for note in report.run.notes)


def test_blocks_of_the_engine_are_kept_on_a_gpu() -> None:
    report = us.replay(TRACE, us.VllmConfig(num_gpu_blocks=900), model="Llama-3.1-8B", gpu="H100")
    assert report.run.engine["num_gpu_blocks"] == 900
    assert report.run.times is not None
    assert "H100" in report.run.times.source


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"model": "Llama-3.1-8B"}, "model: step times need a GPU too; give gpu"),
        ({"gpu": "H100"}, "gpu: step times need a model; give model"),
        ({"gpu": 5, "model": "Llama-3.1-8B"}, "gpu must be the name of a GPU or GpuSettings, got 5"),
        (
            {"gpu": "H100", "model": "a", "tiers": us.TiersConfig(model="b")},
            "model: a contradicts tiers.model=b; give one",
        ),
        (
            {
                "gpu": GpuSettings(name="H100", data_parallel_size=2),
                "model": "Qwen3-30B-A3B",
                "engine": us.VllmConfig(data_parallel_size=4),
            },
            "engine.data_parallel_size=4 contradicts gpu.data_parallel_size=2",
        ),
    ],
)
def test_half_a_deployment_is_rejected_with_the_missing_part(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        us.replay(TRACE, **how)


def test_reports_and_saved_reports_compare_alike(tmp_path: Path) -> None:
    one, two = us.replay(TRACE), us.replay(TRACE, workers=2)
    one.to_json(tmp_path / "one.json")
    live, saved = us.compare(one, two), us.compare(tmp_path / "one.json", two, names=("one", "two"))
    assert live.rows() == saved.rows()
    assert (live.names, saved.names) == (("report 1", "report 2"), ("one", "two"))
    assert dict(live.settings())["workers"] == [1, 2]


def test_compare_needs_two_reports_and_a_name_for_each() -> None:
    report = us.replay(TRACE)
    with pytest.raises(InvalidArgument, match="compare needs at least two reports"):
        us.compare(report)
    with pytest.raises(InvalidArgument, match="names: 2 reports need as many names"):
        us.compare(report, report, names=["one"])
    with pytest.raises(InvalidArgument, match="reports must be Reports or paths of saved ones, got 3"):
        us.compare(report, 3)  # type: ignore[arg-type]


def test_a_report_refuses_what_is_no_path_and_no_baseline() -> None:
    report = us.replay(TRACE)
    with pytest.raises(InvalidArgument, match="path must be the path of a file to write, got 3"):
        report.to_json(3)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match="baseline must be a Report, got 3"):
        report.to_html(baseline=3)  # type: ignore[call-overload]


def test_predict_gives_the_times_of_the_command_line(tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    rows = [
        {"request_id": f"r{n}", "arrival_s": n / 9, "input_tokens": 99, "output_tokens": 9} for n in range(5)
    ]
    run.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = us.predict(run, model="Llama-3.1-8B", gpu="H100")
    out = tmp_path / "out.csv"
    assert main(["predict", str(run), "--model", "Llama-3.1-8B", "--gpu", "H100", "-o", str(out)]) == 0
    header, *lines = csv.reader(out.read_text().splitlines())
    assert tuple(header) == found.columns
    assert lines == [[name, *(f"{value:.4f}" for value in times)] for name, *times in found.rows]
    assert sum(found.sources.values()) == 5
    with pytest.raises(ConfigError, match=r"model, gpu: the recorded run run\.jsonl needs both"):
        us.predict(run)


def test_a_server_answers_at_its_url_until_it_is_stopped() -> None:
    with us.serve("stub", clock_speed=100, flags=["--max-num-seqs", "8"]) as server:
        assert ask(server.url, "/v1/models")["data"][0]["id"] == "stub"
        reply = ask(server.url, "/v1/completions", {"prompt": "hello", "max_tokens": 3})
        assert reply["usage"]["completion_tokens"] == 3
    with pytest.raises(OSError):
        ask(server.url, "/v1/models")
    server.stop()
    assert "stopped" in repr(server)


def test_a_fleet_answers_at_the_url_of_its_front_end() -> None:
    with us.fleet("stub", workers=2, routing=us.KvRouting(), clock_speed=100) as fleet:
        reply = ask(fleet.url, "/v1/completions", {"prompt": "hello", "max_tokens": 3})
        assert reply["usage"]["completion_tokens"] == 3


def test_a_taken_port_and_a_wrong_flag_are_configuration_errors() -> None:
    with us.serve("stub") as server, pytest.raises(ConfigError, match="port: cannot listen"):
        us.serve("stub", port=int(server.url.rpartition(":")[2]))
    with pytest.raises(ConfigError, match="max-num-sqs"):
        us.serve("stub", flags=["--max-num-sqs", "8"])
    with pytest.raises(ConfigError, match="flags must be a list of words"):
        us.fleet("stub", flags="--max-num-seqs 8")


def test_a_server_that_is_not_stopped_ends_with_the_process() -> None:
    code = "import understudy as us; print(us.serve('stub').url)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("http://127.0.0.1:")
