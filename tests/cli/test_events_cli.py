"""The kit from the command line: emit, tap, verify."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from understudy.cli import main, subscription
from understudy.events.capture import read_messages
from understudy.events.publisher import Publisher
from understudy.events.wire import BlockStored, decode_batch, live_frames, parse_frames
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload.scenario import read_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.run.offline import OfflineRun
    from understudy.run.run_plan import RunPlan

TRACE = """{"timestamp": 0, "input_length": 64, "output_length": 2, "hash_ids": [1, 2]}
{"timestamp": 5, "input_length": 64, "output_length": 2, "hash_ids": [1, 3]}
{"timestamp": 900, "input_length": 96, "output_length": 2, "hash_ids": [4, 5, 6]}
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    return path


def emitted(trace: Path, *options: str) -> Path:
    out = trace.with_name("messages.jsonl")
    settings = ["--block-size", "16", "--num-gpu-blocks", "20", "--trace-block-size", "32"]
    assert main(["events", "emit", str(trace), "--out", str(out), *settings, *options]) == 0
    return out


@pytest.mark.parametrize("name", ["vllm-0.9.0", "vllm-0.24.0", "sglang-0.5.20"])
def test_what_is_emitted_verifies(trace: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = emitted(trace, "--dialect", name, "--workers", "2", "--synthesize-tokens")
    assert main(["events", "verify", str(out), "--stream", "raw", "--dialect", name]) == 0
    assert "0 breaches" in capsys.readouterr().out


def test_a_breach_has_a_line_and_an_exit_code(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = emitted(trace)
    lines = out.read_text().splitlines()
    assert len(lines) > 2
    out.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    assert main(["events", "verify", str(out), "--stream", "raw"]) == 1
    said = capsys.readouterr().out
    assert "gap: 1 messages before it are missing" in said
    assert main(["events", "verify", str(out), "--stream", "raw", "--dialect", "sglang-0.5.8"]) == 1
    assert "dialect: " in capsys.readouterr().out


def test_a_publisher_is_heard_recorded_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = tmp_path / "heard.jsonl"
    with Publisher("tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*") as source:
        source.publish([BlockStored([5], None, [1, 2], 2, medium="GPU", lora_name="a")])
        stop = threading.Event()

        def speak() -> None:
            while not stop.wait(0.01):
                source.publish([BlockStored([7], 5, [3, 4], 2, medium="CPU")])

        thread = threading.Thread(target=speak)
        thread.start()
        try:
            listen = [source.endpoint, "--replay", str(source.replay), "--count", "6"]
            assert main(["events", "tap", *listen, "--record", str(heard)]) == 0
            said = capsys.readouterr().out
            assert "stored  G1 lora a: root → 0000000000000005" in said
            assert "stored  G2: 0000000000000005 → 0000000000000007" in said
            assert main(["events", "tap", *listen, "--json"]) == 0
            assert '"block_hashes":[5]' in capsys.readouterr().out
            assert main(["events", "verify", *listen, "--stream", "raw", "--dialect", "vllm"]) == 0
            assert main(["events", "verify", *listen, "--stream", "consolidated"]) == 1
            assert "stored_twice" in capsys.readouterr().out
        finally:
            stop.set()
            thread.join()
    assert main(["events", "verify", str(heard), "--stream", "raw"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["emit", "TRACE"], "either --out PATH or --bind ADDRESS"),
        (["emit", "TRACE", "--out", "x", "--replay-bind", "tcp://*:0"], "--replay-bind needs --bind"),
        (["emit", "TRACE", "--out", "x", "--dialect", "nobody-1"], "give a producer and its version"),
        (
            ["emit", "TRACE", "--out", "x", "--clock-speed", "-1"],
            "--clock-speed must be a finite number from 0",
        ),
        (["verify", "nowhere.jsonl", "--stream", "raw"], "cannot read nowhere.jsonl"),
        (["verify", "TRACE", "--stream", "raw"], "line 1: not a captured message"),
        (["tap", "nonsense"], "endpoint: 'nonsense' is not known"),
        *(
            (["emit", "TRACE", "--out", "x", flag, "0"], f"{flag} needs --bind; --out writes")
            for flag in ("--clock-speed", "--wait-s", "--linger-s")
        ),
        (["emit", "TRACE", "--out", "x", "--set", "pools=[{}]"], "give engine and workers instead"),
        *(
            (
                ["verify", "TRACE", "--stream", "raw", flag, "1"],
                f"{flag} needs a publisher, and TRACE is a file",
            )
            for flag in ("--replay", "--topic", "--count", "--seconds")
        ),
        (["verify", "TRACE", "--stream", "raw", "--topic", "", "--count", "1"], "--topic, --count need a"),
    ],
)
def test_what_cannot_be_is_refused(
    trace: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["events", *(str(trace) if word == "TRACE" else word for word in arguments)]) == 2
    assert message.replace("TRACE", str(trace)) in capsys.readouterr().err


def test_what_is_buffered_counts_too(capsys: pytest.CaptureFixture[str]) -> None:
    with Publisher("tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*") as source:
        for block in range(9):
            source.publish([BlockStored([block], None, [1, 2], 2, medium="GPU")])
        listen = [source.endpoint, "--replay", str(source.replay), "--count", "4", "--seconds", "20"]
        assert main(["events", "tap", *listen]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_scenario_is_emitted_with_its_own_settings(tmp_path: Path) -> None:
    scenario = Path(__file__).parents[1] / "golden" / "vllm" / "scenarios" / "single.json"
    own = read_scenario(scenario).config.block_size
    out = tmp_path / "messages.jsonl"
    assert main(["events", "emit", str(scenario), "--format", "vllm-scenario", "--out", str(out)]) == 0
    batches = [decode_batch(parse_frames(message.frames)[2]) for message in read_messages(str(out))]
    sizes = {
        event.block_size for batch in batches for event in batch.events if isinstance(event, BlockStored)
    }
    assert sizes == {own}


def test_what_settings_say_of_the_run_holds_for_what_is_emitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: Path
) -> None:
    seen: list[RunPlan] = []

    def watched(plan: RunPlan) -> OfflineRun:
        seen.append(plan)
        return run_offline(plan)

    monkeypatch.setattr("understudy.run.offline.run_offline", watched)
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: Qwen3-30B-A3B\nroute_rejected: true\n"
        "gpu: {name: RTX PRO 6000, data_parallel_size: 2, expert_parallel_size: 2}\n"
    )
    emitted(trace, "--config", str(config))
    engine = seen[0].engine
    assert engine is not None
    assert (engine.data_parallel_size, seen[0].ranks) == (2, True)
    assert engine.mocker.route_rejected


def test_emitting_live_says_where(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--bind", "tcp://127.0.0.1:*", "--replay-bind", "tcp://127.0.0.1:*"]
    quick = ["--wait-s", "0", "--linger-s", "0", "--clock-speed", "1000"]
    assert main(["events", "emit", str(trace), *where, *quick, "--trace-block-size", "32"]) == 0
    said = capsys.readouterr().out
    assert "rank 0: tcp://127.0.0.1:" in said
    assert "messages of 1 publisher, vllm-0.33.0, raw" in said


def test_emitting_binds_the_one_address_that_it_is_given(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        taken.listen()
        for bad in (address, "tcp://no-such-host:5557"):
            assert main(["events", "emit", str(trace), "--bind", bad, "--trace-block-size", "32"]) == 2
            told = capsys.readouterr()
            assert told.out == ""
            assert told.err.startswith(f"understudy events: cannot bind {bad}: ")
            assert told.err.count("\n") == 1
    heard: list[int] = []
    reader = threading.Thread(
        target=lambda: heard.append(
            main(["events", "tap", address, "--wait", "--count", "1", "--seconds", "20"])
        )
    )
    reader.start()
    listening = ["--wait-s", "2", "--linger-s", "1", "--trace-block-size", "32"]
    assert main(["events", "emit", str(trace), "--bind", address, *listening]) == 0
    reader.join()
    assert heard == [0]
    assert "stored  G1" in capsys.readouterr().out


def test_a_message_is_in_the_record_before_the_next_one_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record.jsonl"
    sizes: list[int] = []

    def receive(*_: object) -> Iterator[list[bytes]]:
        for sequence in range(2):
            yield live_frames(b"", sequence, msgspec.msgpack.encode([0.0, []]))
            sizes.append(record.stat().st_size)

    monkeypatch.setattr(subscription, "receive_messages", receive)
    assert main(["events", "tap", "tcp://127.0.0.1:1", "--record", str(record)]) == 0
    assert 0 < sizes[0] < sizes[1]


def test_a_killed_tap_leaves_a_record_that_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.jsonl"
    with Publisher("tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*") as source:
        for block in range(1, 10):
            source.publish([BlockStored([block], None, [1, 2], 2, medium="GPU")])
        listen = [source.endpoint, "--replay", str(source.replay), "--record", str(record)]
        tap = subprocess.Popen(
            [sys.executable, "-m", "understudy", "events", "tap", *listen], stdout=subprocess.PIPE, text=True
        )
        try:
            assert tap.stdout is not None
            for _ in range(9):  # the tap prints a message after it has written it
                assert "stored" in tap.stdout.readline()
        finally:
            tap.kill()
            tap.communicate()
    assert tap.returncode == -signal.SIGKILL
    assert [message.sequence for message in read_messages(record)] == list(range(9))
    assert main(["events", "verify", str(record), "--stream", "raw"]) == 0
    assert "0 breaches" in capsys.readouterr().out
