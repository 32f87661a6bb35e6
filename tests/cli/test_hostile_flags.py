"""Values that Python's readers take or choke on are refused in one line: deep JSON, odd digits, NaN, huge numbers."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from understudy.cli import main
from understudy.server.flags.serving import find_engine_name, read_serve

if TYPE_CHECKING:
    from pathlib import Path

DEEP = "[" * 5000
HUGE_DRAFTS = '{"method":"mtp","num_speculative_tokens":100000000000}'


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": at, "input_length": 64, "output_length": 5, "hash_ids": [at]} for at in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kv-cache-groups", DEEP], "--kv-cache-groups: is not JSON"),
        (["--kv-transfer-config", DEEP], "--kv-transfer-config is not JSON"),
        (["--speculative-config", HUGE_DRAFTS], "num_speculative_tokens must be from 1 to 1,024"),
        (["--workers", "1_0"], "--workers must be a whole number, got '1_0'"),
        (["--workers", "１"], "--workers must be a whole number, got '１'"),
        (["--arrival-rate-scale", "1_0"], "--arrival-rate-scale must be a number, got '1_0'"),
        (["--slo-e2e-ms", "1e308"], "--slo-e2e-ms must be a positive number of milliseconds, at most 1e+12"),
    ],
)
def test_replay_refuses_it(
    trace: str, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    try:
        code = main(["replay", trace, "--trace-block-size", "64", *flags])
    except SystemExit as stopped:  # the parser's own refusals
        code = int(str(stopped.code))
    assert code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([""], "model: the name is empty"),
        (
            ["m", "--engine", "sglang", "--mem-fraction-static", "nan"],
            "--mem-fraction-static must be a number",
        ),
        (["m", "--max-num-seqs", "1_0"], "--max-num-seqs must be a whole number, got '1_0'"),
        (["m", "--kv-transfer-config", DEEP], "--kv-transfer-config"),
    ],
)
def test_serve_refuses_it(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert main(["serve", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_server_needs_no_argument() -> None:
    assert find_engine_name([]) == ""
    assert find_engine_name(["--engine", "sglang"]) == "sglang"
    assert read_serve([]).settings.model == "understudy/tok"


def test_a_router_that_exits_ends_in_an_error(
    tmp_path: Path, trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "leaving", raising=False)
    file = tmp_path / "leaving.py"
    file.write_text(
        "from understudy.router import Router\n"
        "class Leaving(Router):\n"
        "    def choose(self, request, view): raise SystemExit(0)\n"
    )
    assert (
        main(["replay", trace, "--trace-block-size", "64", "--workers", "2", "--routing", f"{file}:Leaving"])
        == 2
    )
    assert "leaving.py:3: choose: SystemExit: 0" in capsys.readouterr().err
