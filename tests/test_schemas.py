"""Outputs of real runs follow the schemas in docs/schema."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import understudy
from server.fleet_scene import C, fleet_of
from server.router_scene import Scene, play
from understudy.cli import main
from understudy.events.publisher import Publisher
from understudy.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, WireEvent
from understudy.timing.recorded.load import LinkTimes
from understudy.timing.recorded.record import Record

ROOT = Path(__file__).parent.parent
TRACE = ROOT / "examples" / "demo_trace.jsonl"
NAMES = (
    *(
        "cache",
        "capacity",
        "decision",
        "diff",
        "event",
        "explain",
        "fleet-state",
        "fleet-worker",
        "kv-trace",
        "load",
        "message",
        "plan",
        "report",
        "request",
    ),
    *("router-dump", "router-query", "step", "step-times", "sweep", "trace-row", "wire-event"),
)


def check(name: str, *documents: Any) -> None:
    schema = json.loads((ROOT / "docs" / "schema" / f"{name}.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    assert documents
    for document in documents:
        validator.validate(document)


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with every JSON output of one replay with tiers and a KV-aware router."""
    folder = tmp_path_factory.mktemp("outputs")
    files = {"json": "report.json", "requests-jsonl": "request", "events": "event", "raw-events": "raw"}
    files |= {"kv-trace": "kv-trace", "decisions": "decision", "record-steps": "step"}
    flags = "--quiet --workers 2 --routing kv --num-gpu-blocks 256 --g2 512 --g3 4096 --model Llama-3.1-8B"
    named = [word for flag, name in files.items() for word in (f"--{flag}", str(folder / name))]
    assert (
        main(["replay", str(TRACE), *flags.split(), "--compare-without-tiers", "--slo-ttft-ms=500", *named])
        == 0
    )
    return folder


def test_a_sweep_follows_its_schema(tmp_path: Path) -> None:
    flags = [
        "--quiet",
        "--vary",
        "workers=0..2",
        "engine=vllm,sglang",
        "--slo-ttft-ms=500",
        "--jobs",
        "1",
        "--gpu-hour",
        "2",
    ]
    assert main(["sweep", str(TRACE), *flags, "--json", str(tmp_path / "sweep.json")]) == 0
    check("sweep", json.loads((tmp_path / "sweep.json").read_text()))


def test_a_plan_follows_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--model",
        "Llama-3.1-8B",
        "--gpu",
        "H100",
        "--most-gpus",
        "1",
        "--no-splits",
        "--jobs",
        "1",
        "--slo-tpot-ms",
        "25",
        "--json",
        "-",
    ]
    for limit in ("500", "1"):
        assert main(["plan", str(TRACE), *flags, "--slo-ttft-ms", limit]) == 0
        check("plan", json.loads(capsys.readouterr().out))


def test_the_schemas_are_those_that_the_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("write_schemas", ROOT / "tools" / "write_schemas.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folder = ROOT / "docs" / "schema"
    assert {path.stem for path in folder.glob("*.json")} == set(script.SCHEMAS) == set(NAMES)
    stale = [name for name in NAMES if (folder / f"{name}.json").read_text() != script.render(name)]
    assert stale == [], "run python tools/write_schemas.py"


def test_the_report_of_a_replay_follows_its_schema(outputs: Path) -> None:
    check("report", json.loads((outputs / "report.json").read_text()))


def test_the_report_of_several_kv_cache_groups_follows_its_schema() -> None:
    groups = (
        understudy.KvCacheGroup(kind="sliding_window", block_size=16, window=64),
        understudy.KvCacheGroup(kind="full", block_size=16),
    )
    engine = understudy.VllmConfig(kv_cache_groups=groups, num_gpu_blocks=2000)
    document = understudy.replay(TRACE, engine).to_dict()
    check("report", document)
    document["run"]["kv_groups"]["groups"][0]["surprise"] = 1
    with pytest.raises(jsonschema.ValidationError):
        check("report", document)


def test_the_report_of_a_run_without_requests_follows_its_schema(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    files = ["--json", str(tmp_path / "report.json")]
    assert main(["replay", str(tmp_path / "empty.jsonl"), "--quiet", "--allow-empty", *files]) == 0
    check("report", json.loads((tmp_path / "report.json").read_text()))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("request", "request"),
        ("event", "event"),
        ("raw", "event"),
        ("kv-trace", "kv-trace"),
        ("decision", "decision"),
        ("step", "step"),
    ],
)
def test_lines_of_a_replay_follow_their_schema(outputs: Path, file: str, name: str) -> None:
    lines = (outputs / file).read_text().splitlines()
    assert (file == "event") <= any('"publisher"' in line for line in lines)  # of the shared tier
    check(name, *map(json.loads, [*lines[:: max(1, len(lines) // 200)], lines[-1]]))


def test_a_key_that_the_schema_does_not_know_is_an_error(outputs: Path) -> None:
    report = json.loads((outputs / "report.json").read_text())
    with pytest.raises(jsonschema.ValidationError):
        check("report", report | {"surprise": 1})


@pytest.mark.parametrize("routing", ["round_robin", "kv"])
def test_the_state_of_a_fleet_follows_its_schema(routing: str) -> None:
    async def ask() -> Any:
        async with fleet_of(2, routing) as (client, _):
            await client.post(C, {"prompt": "x", "max_tokens": 2})
            return (await client.get("/fleet/state")).json

    state = asyncio.run(ask())
    assert state["decisions"]
    check("fleet-state", state)


LOGS = {
    "azure": "azure.csv",
    "burstgpt": "burstgpt.csv",
    "mooncake": "mooncake.jsonl",
    "aiperf": "profile_export.jsonl",
    "openai": "requests.jsonl",
    "sharegpt": "sharegpt.json",
    "vllm-bench": "vllm_bench.json",
}


@pytest.mark.parametrize("name", LOGS)
def test_converted_logs_follow_the_schema_of_traces(name: str, tmp_path: Path) -> None:
    log, trace = ROOT / "examples" / "logs" / LOGS[name], tmp_path / "trace.jsonl"
    assert main(["convert", str(log), str(trace), "--format", name]) == 0
    check("trace-row", *read_lines(trace))


@pytest.mark.parametrize("kind", ["fanout", "turns"])
def test_synthetic_workloads_follow_the_schema_of_traces(kind: str, tmp_path: Path) -> None:
    assert main(["workload", kind, "--count", "5", "-o", str(tmp_path / "trace.jsonl")]) == 0
    check("trace-row", *read_lines(tmp_path / "trace.jsonl"))


def test_steps_of_one_worker_follow_their_schema(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert main(["replay", str(TRACE), "--quiet", "--record-steps", str(path)]) == 0
    lines = read_lines(path)
    assert (list(lines[0]), list(lines[-1])) == (["header"], ["end"])
    check("step", *lines[:50], lines[-1])


def test_recorded_step_times_follow_their_schema(tmp_path: Path) -> None:
    step = {"at_ms": 0.0, "ms": 3.5, "launch_ms": 0.1, "shared": 0, "ahead": False, "until_ms": 3.5}
    work: dict[str, Any] = {"chunks": [["a", 16, 0]], "decodes": [["b", 40]]}
    sizes = {"num_blocks": 400, "block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    for link in (None, LinkTimes(0.1, 0.2, 0.3, 0.4)):
        Record.of([{**step, **work}], link, model="Qwen3-0.6B", **sizes).write(tmp_path / "steps.jsonl")
        check("step-times", *read_lines(tmp_path / "steps.jsonl"))


@pytest.mark.parametrize("dialect", ["vllm-0.33.0", "vllm-0.11.0"])
def test_messages_and_events_of_a_publisher_follow_their_schemas(
    dialect: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "messages.jsonl"
    how = ["--dialect", dialect, "--num-gpu-blocks", "256", "--synthesize-tokens", "--out", str(path)]
    assert main(["events", "emit", str(TRACE), *how]) == 0
    check("message", *read_lines(path)[:100])
    events: list[WireEvent] = [BlockStored([1, 2], 7, [5] * 32, 16), BlockRemoved([1]), AllBlocksCleared()]
    with Publisher("tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*", dialect=dialect) as publisher:
        stop = threading.Event()

        def publish() -> None:
            while not stop.wait(0.01):
                publisher.publish(events)

        thread = threading.Thread(target=publish)
        thread.start()
        capsys.readouterr()
        try:
            listen = [
                publisher.endpoint,
                "--replay",
                str(publisher.replay),
                "--count",
                "2",
                "--seconds",
                "20",
            ]
            assert main(["events", "tap", *listen, "--json"]) == 0
        finally:
            stop.set()
            thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["type"] for line in lines[:3]] == [
        "BlockStored",
        "BlockRemoved",
        "AllBlocksCleared",
    ]
    check("wire-event", *map(json.loads, lines))


@pytest.mark.parametrize("fleet", [[], ["--num-gpu-blocks", "4096", "--kv-bytes-per-token", "131072"]])
def test_a_cache_study_follows_its_schema(fleet: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", str(TRACE), "--block-size", "64", *fleet, "--quiet", "--json", "-"]) == 0
    check("cache", json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "gpt-oss-20b", "Qwen3-Next-80B-A3B"])
def test_the_capacity_of_a_gpu_follows_its_schema(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--kv-memory", "20GiB", "--max-model-len", "8192"]
    assert main(["capacity", "--model", model, *sizes, "--json"]) == 0
    check("capacity", json.loads(capsys.readouterr().out))


def test_a_worker_of_a_fleet_follows_its_schema() -> None:
    async def ask() -> Any:
        async with fleet_of(1) as (client, _):
            slow = asyncio.create_task(client.post(C, {"prompt": "x", "max_tokens": 300}))
            state: Any = {"requests": []}
            while not state["requests"] and not slow.done():
                await asyncio.sleep(0.01)
                state = (await client.get("/fleet/workers/0")).json
            await slow
            return state

    state = asyncio.run(ask())
    assert state["requests"]
    check("fleet-worker", state)


@pytest.mark.parametrize("routing", ["round_robin", "kv"])
def test_answers_of_a_router_follow_their_schemas(routing: str) -> None:
    async def test(told: Scene) -> None:
        prompt = list(range(160))
        await told.client.post(C, {"prompt": prompt, "max_tokens": 1})
        check("router-dump", await told.dump(), (await told.client.get("/dump")).json)
        if routing == "kv":
            check("router-query", (await told.client.post("/query", {"token_ids": prompt})).json)

    play(test, 2, routing)


def test_explanations_and_differences_follow_their_schemas(tmp_path: Path) -> None:
    runs = [str(tmp_path / name) for name in ("a.npz", "b.npz")]
    flags = [
        "--quiet",
        "--num-gpu-blocks",
        "256",
        "--g2",
        "512",
        "--model",
        "Llama-3.1-8B",
        "--routing",
        "kv",
    ]
    for workers, saved in zip(("1", "2"), runs, strict=True):
        assert main(["replay", str(TRACE), "--workers", workers, "--save-run", saved, *flags]) == 0
    assert main(["explain", runs[0], "--slowest", "30", "--json", str(tmp_path / "explain")]) == 0
    assert main(["diff", *runs, "--json", str(tmp_path / "diff")]) == 0
    for name in ("explain", "diff"):
        document = json.loads((tmp_path / name).read_text())
        assert document["requests"]
        check(name, document)
