"""Outputs of real runs follow the schemas in docs/schema."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from server.test_fleet import C, fleet_of
from understudy.cli import main

ROOT = Path(__file__).parent.parent
TRACE = ROOT / "examples" / "demo_trace.jsonl"
NAMES = ("decision", "event", "fleet-state", "kv-trace", "report", "request")


def check(name: str, *documents: Any) -> None:
    schema = json.loads((ROOT / "docs" / "schema" / f"{name}.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    assert documents
    for document in documents:
        validator.validate(document)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with every JSON output of one replay with tiers and a KV-aware router."""
    folder = tmp_path_factory.mktemp("outputs")
    files = {"json": "report.json", "requests-jsonl": "request", "events": "event", "raw-events": "raw"}
    files |= {"kv-trace": "kv-trace", "decisions": "decision"}
    flags = "--quiet --workers 2 --routing kv --num-gpu-blocks 256 --g2 512 --g3 4096 --model Llama-3.1-8B"
    named = [word for flag, name in files.items() for word in (f"--{flag}", str(folder / name))]
    assert (
        main(["replay", str(TRACE), *flags.split(), "--compare-without-tiers", "--slo-ttft-ms=500", *named])
        == 0
    )
    return folder


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
    ],
)
def test_lines_of_a_replay_follow_their_schema(outputs: Path, file: str, name: str) -> None:
    lines = (outputs / file).read_text().splitlines()
    assert (file == "event") <= any('"publisher"' in line for line in lines)  # of the shared tier
    check(name, *map(json.loads, lines[:: max(1, len(lines) // 200)]))


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
