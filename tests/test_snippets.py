"""Every shell line of the documents runs as it stands; the few that cannot are named here, each with its reason.

The shell itself says what a block runs, as the programs are out of its reach: whatever it does not find is noted. Then
each command of ours runs in this process, in a folder that has the files that the pages name.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from understudy.cli import build_parser, events, main, subscription
from understudy.errors import UnderstudyError
from understudy.events.capture import read_messages
from understudy.server.api.errors import ApiError
from understudy.server.faults import FaultOrder
from understudy.server.flags.serving import read_serve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.events.publisher import Publisher

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
SHELL = ("sh", "console")
OTHER_LANGUAGES = ("", "text", "python", "py", "json", "yaml", "cpp")

OTHER_PROGRAMS = {
    "pip": "installs",
    "aiperf": "a client, run by `make clients`",
    "vllm": "a client, run by `make clients`; or an engine, which needs a GPU",
    "guidellm": "a client, run by `make clients`",
}
READ_ONLY = {
    ("qwen3", "generate"): "weights of a real model, on disk or of its size",
    ("qwen3", "bench"): "a GPU",
    ("agents", "run"): "an endpoint",
    ("load",): "an endpoint",
    ("replay", "trace.jsonl", "--engine", "qwen3"): "PyTorch, and steps recorded on a GPU",
}
"""Commands of ours whose arguments are read and no more, by how they begin: what they need."""
RUN_ELSEWHERE = ("docs/sizing.md",)
"""Pages whose commands run once, where their outputs are read: tests/answers/test_sizing_page.py."""

CONFIG_JSON = {
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
NOTE = r"""
PATH=/nowhere
command_not_found_handle() { printf '%s\0' "$#" "$@" >>told; }
"""


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and content of what is fenced."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(language: str, block: str, folder: Path) -> list[list[str]]:
    """The commands that a shell would run, word by word."""
    if language == "console":
        block = "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.MULTILINE))
    told = folder / "told"
    told.write_bytes(b"")
    subprocess.run(["bash", "-c", f"{NOTE}{block}\nwait"], cwd=folder, env={"HOME": str(folder)}, check=True)
    words = iter(told.read_text(encoding="utf-8").split("\0")[:-1])
    told.unlink()
    return [[next(words) for _ in range(int(count))] for count in words]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that the pages name."""
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    logs = ROOT / "examples" / "logs"
    for source, name in (
        (logs / "mooncake.jsonl", "trace.jsonl"),
        (logs / "requests.jsonl", "requests.jsonl"),
        (ROOT / "examples" / "fleet.yaml", "fleet.yaml"),
        (ROOT / "tests" / "golden" / "agents" / "weka.jsonl", "agents.jsonl"),
    ):
        (tmp_path / name).write_bytes(source.read_bytes())
    plays = (ROOT / "tests" / "golden" / "agents" / "weka.jsonl").read_text().splitlines()
    copies = [line.replace('"id": "', f'"id": "{copy}-', 1) for copy in range(7) for line in plays]
    (tmp_path / "agents-20.jsonl").write_text("\n".join(copies[:20]))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_JSON))
    (tmp_path / "recordings").symlink_to(ROOT / "tests" / "golden" / "vllm-clock")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if page not in RUN_ELSEWHERE])
def test_every_shell_line_of_a_page_runs(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hear_what_is_emitted(monkeypatch, folder)
    for language, block in blocks(page):
        if language in SHELL:
            found = commands(language, block, folder)
            assert found, f"{page}: nothing to run in\n{block}"
            for program, *words in found:
                run_command(program, words, monkeypatch)


@pytest.mark.parametrize(
    ("page", "count"), [("docs/replay.md", 2), ("docs/tiers.md", 1), ("docs/eviction.md", 1)]
)
def test_the_first_python_of_a_page_runs(page: str, count: int, folder: Path) -> None:
    names: dict[str, Any] = {}
    for code in [block for language, block in blocks(page) if language in ("python", "py")][:count]:
        exec(code, names)
    if page != "docs/eviction.md":
        assert names["report"].requests.completed > 0
    assert (folder / "report.html").exists() == (page == "docs/replay.md")


@pytest.mark.parametrize("page", PAGES)
def test_no_shell_line_hides_in_a_block_of_another_kind(page: str) -> None:
    programs = "|".join(["understudy", "curl", "make", "python3?", r"\$", *OTHER_PROGRAMS])
    for language, block in blocks(page):
        assert language in (*SHELL, *OTHER_LANGUAGES), f"{page}: {language} is known to no test"
        if language in ("", "text"):
            assert not re.search(rf"^(?:{programs}) ", block, re.MULTILINE), f"{page}: mark as sh\n{block}"


def test_a_command_that_is_wrong_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (
        "understudy replay trace.jsonl --no-such-flag",
        "understudy replay no_such_file.jsonl",
        "understudy serve my-model --max-num-seqs many",
        "understudy fleet --workers 2 --routing nobody",
        "understudy router --workers http://gpu1:8001 --port 99999",
        "understudy qwen3 bench",
        "make no_such_target",
        'curl localhost:8000/admin/fault --json \'{"kind": "faint"}\'',
        'curl localhost:8000/admin/fault -d \'{"kind": "none"}\'',
        "no-such-program",
    ):
        ((program, *words),) = commands("sh", block, folder)
        with pytest.raises((AssertionError, SystemExit)):
            run_command(program, words, monkeypatch)


def run_command(program: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one command, or as much of it as can be."""
    line = " ".join([program, *words])
    if program == "understudy":
        if any(words[: len(start)] == list(start) for start in READ_ONLY):
            build_parser().parse_args(words)
        elif words[0] == "serve":
            try:
                read_serve(words[1:])  # a server binds the sockets of its events as soon as it is there
            except UnderstudyError as error:
                raise AssertionError(line) from error
        elif words[0] in ("fleet", "router"):
            with monkeypatch.context() as patch:  # up to the moment at which it would listen
                patch.setattr("understudy.server.server.run_until_stopped", _never)
                assert main(words) == 0, line
        else:
            assert main(words) == 0, line
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert {word for word in words if "=" not in word} <= set(targets), line
    elif program == "curl":
        given = [words[place + 1] for place, word in enumerate(words) if word in ("-d", "--json")]
        body = json.loads(given[0]) if given else None
        if words[0].endswith("/admin/fault") and given:
            assert "--json" in words, line
            try:
                FaultOrder.read(body)
            except ApiError as error:
                raise AssertionError(line) from error
    elif program == "python" and words[0] == "-m":  # a client's own script, in an environment of its own
        assert words[1].startswith(("sglang.", "sglang_router.")), line
    elif program == "python":
        with monkeypatch.context() as patch:
            patch.setattr("sys.argv", words)
            runpy.run_path(words[0], run_name="__main__")
    elif program == "head":
        assert subprocess.run([program, *words], stdout=subprocess.DEVNULL, check=False).returncode == 0, line
    else:
        assert program in OTHER_PROGRAMS, line


async def _never(start: object, stop: object, address: object) -> None:
    """Neither start nor stop."""


def _hear_what_is_emitted(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A file in place of the sockets between `events emit --bind` and `events tap`."""
    sent = folder / "sent.jsonl"

    def to_file(_: Any, args: Any, *rest: Any) -> list[Publisher]:
        args.out = sent
        return []

    def from_file(args: Any, endpoint: str) -> Iterator[list[bytes]]:
        assert endpoint.startswith("tcp://")
        if sent.exists():
            yield from (said.frames for said in read_messages(sent) if said.publisher == "rank 0")

    monkeypatch.setattr(events, "_open_publishers", to_file)
    monkeypatch.setattr(subscription, "receive_messages", from_file)
