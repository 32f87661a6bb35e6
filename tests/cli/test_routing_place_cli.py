"""`understudy replay --routing FILE.py:CLASS`: a router of the user's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from understudy.cli import main
from workload.building import row, trace_file

if TYPE_CHECKING:
    from pathlib import Path

ROUTERS = """
from __future__ import annotations

from dataclasses import dataclass

from understudy.router import Router


@dataclass
class Turn:
    next: int = 0


class Last(Router):
    def choose(self, request, view):
        return len(view) - 1


class InTurn:
    def __init__(self):
        self.turn = Turn()

    def choose(self, request, view):
        self.turn.next += 1
        return (self.turn.next - 1) % len(view)


class Broken:
    def __init__(self):
        raise ValueError("no table")

    def choose(self, request, view):
        return 0


class Raises:
    def choose(self, request, view):
        return self.table[request.row]


class Deaf:
    def observe(self, batch):
        open("no-such-table")

    def choose(self, request, view):
        return 0


class Lines(Last):
    def choose(self, request, view):
        raise ValueError("no\\ntable")
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = (row(timestamp=i * 10, input_length=1000, hash_ids=[2 * i, 2 * i + 1]) for i in range(9))
    return trace_file(tmp_path, *rows)


@pytest.fixture
def routers(tmp_path: Path) -> Path:
    path = tmp_path / "my_routers.py"
    path.write_text(ROUTERS, encoding="utf-8")
    return path


def workers_of(trace: Path, *more: str) -> list[int]:
    path = trace.parent / "requests.jsonl"
    argv = ["replay", str(trace), "--workers", "3", "--quiet"]
    assert main([*argv, "--requests-jsonl", str(path), *more]) == 0
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return [each["worker"] for each in rows]


def test_the_class_of_a_file_chooses(trace: Path, routers: Path) -> None:
    assert workers_of(trace, "--routing", f"{routers}:Last") == [2] * 9
    assert workers_of(trace, "--routing", f"{routers}:InTurn") == [0, 1, 2] * 3
    assert workers_of(trace, "--routing", f"{routers}:InTurn") == workers_of(
        trace, "--routing", "round_robin"
    )


def test_a_comparison_without_tiers_has_one_of_its_own(trace: Path, routers: Path) -> None:
    path = trace.parent / "report.json"
    argv = ["replay", str(trace), "--workers", "2", "--routing", f"{routers}:InTurn", "--quiet"]
    tiers = ["--g2", "9", "--kv-bytes-per-token", "8", "--compare-without-tiers"]
    assert main([*argv, *tiers, "--json", str(path)]) == 0
    second = json.loads(path.read_text())["without_tiers"]["run"]["digest"]
    assert main([*argv, "--json", str(path)]) == 0
    assert json.loads(path.read_text())["run"]["digest"] == second


def test_a_configuration_file_names_it_too(trace: Path, routers: Path) -> None:
    config = trace.parent / "settings.yaml"
    config.write_text(f"routing: '{routers}:Last'\n", encoding="utf-8")
    assert workers_of(trace, "--config", str(config)) == [2] * 9


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:Last", "there is no file nowhere.py"),
        ("FILE:Nobody", "has no class Nobody with choose(request, view)"),
        ("FILE:Turn", "has no class Turn with choose(request, view)"),
        ("FILE:Broken", "FILE:30: __init__: ValueError: no table"),
    ],
)
def test_what_is_wrong_with_it_is_said_in_a_line(
    trace: Path, routers: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    place = name.replace("FILE", str(routers))
    assert main(["replay", str(trace), "--routing", place]) == 2
    said = capsys.readouterr().err
    assert message.replace("FILE", str(routers)) in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "38: choose: AttributeError: 'Raises' object has no attribute 'table'"),
        ("Deaf", "43: observe: FileNotFoundError: [Errno 2] No such file or directory: 'no-such-table'"),
        ("Lines", "51: choose: ValueError: no table"),
    ],
)
def test_a_router_that_raises_is_told_by_file_and_line(
    trace: Path,
    routers: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    message: str,
) -> None:
    monkeypatch.delenv("UNDERSTUDY_TRACEBACK", raising=False)
    argv = ["replay", str(trace), "--workers", "2", "--quiet", "--routing", f"{routers}:{name}"]
    assert main(argv) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert (
        told.err == f"understudy replay: {routers}:{message} (UNDERSTUDY_TRACEBACK=1 shows the traceback)\n"
    )
    monkeypatch.setenv("UNDERSTUDY_TRACEBACK", "1")
    with pytest.raises((AttributeError, OSError, ValueError)):
        main(argv)


def test_online_too_it_ends_the_run(trace: Path, routers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, message in (
        ("Lines", "51: choose: ValueError: no table"),
        ("Deaf", "43: observe: FileNotFound"),
    ):
        argv = ["replay", str(trace), "--workers", "2", "--quiet", "--online", "--clock-speed", "100"]
        assert main([*argv, "--routing", f"{routers}:{name}"]) == 2
        assert f"understudy replay: {routers}:{message}" in capsys.readouterr().err


def test_it_does_not_take_settings_of_the_kv_router(
    trace: Path, routers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["replay", str(trace), "--routing", f"{routers}:Last"]
    assert main([*argv, "--router-temperature", "0.5"]) == 2
    assert "is for routing kv" in capsys.readouterr().err


def test_late_events_need_a_router_that_observes_them(
    trace: Path, routers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["replay", str(trace), "--routing", f"{routers}:Last"]
    assert main([*argv, "--event-delay-ms", "5"]) == 2
    assert "Last receives no events; give it observe(batch)" in capsys.readouterr().err
