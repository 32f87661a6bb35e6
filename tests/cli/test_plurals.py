"""Lines of the command line name one thing in the singular."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.cli import main
from understudy.cli.fleet import describe_ports
from understudy.text import plural

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_counts_agree_with_their_nouns() -> None:
    assert plural(1, "worker") == "1 worker"
    assert plural(1200, "worker") == "1,200 workers"
    assert plural(0, "row") == "0 rows"


def test_one_worker_of_a_fleet_has_one_port() -> None:
    assert describe_ports([8001]) == "1 worker on port 8001"
    assert describe_ports([8001, 8002, 8003]) == "3 workers on ports 8001 … 8003"


def test_a_converted_trace_of_one_request_is_counted_in_the_singular(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"timestamp": 0, "input_length": 9, "output_length": 3, "hash_ids": [1]}\n')
    assert main(["convert", str(log), str(tmp_path / "out.jsonl")]) == 0
    assert capsys.readouterr().err.startswith("format mooncake (guessed): 1 request, 9 prompt tokens")
