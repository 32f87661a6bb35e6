"""docs/add-an-engine.md as it stands adds an engine: its file, its line, its commands."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from server.client import Client
from understudy import _core
from understudy.cli import main
from understudy.engines.engine_config import EngineConfig
from understudy.engines.kinds.kind import EngineKind
from understudy.engines.kinds.registry import find_kind
from understudy.kind_names import KIND_MODULES
from understudy.server.engine_apis import APIS
from understudy.server.flags.serving import READERS, read_serve
from understudy.server.metrics.page import METRICS
from understudy.server.server import Server

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-an-engine.md").read_text(encoding="utf-8")
TOY = "engines.toy_kind"

needs_toy = pytest.mark.skipif(
    not hasattr(_core, "ToyEngineConfig"), reason="built without UNDERSTUDY_TEST_ENGINES"
)


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineKind:
    """Write the file of the page into a folder of its own, and add its line."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (line,) = re.findall(r"^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    named = re.fullmatch(r'    "(\w+)": "([\w.]+)",\n', line)
    assert named is not None
    assert named[2] == TOY
    (tmp_path / "kind_of_the_page.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(KIND_MODULES, named[1], "kind_of_the_page")
    (tmp_path / "trace.jsonl").write_bytes((ROOT / "examples" / "logs" / "mooncake.jsonl").read_bytes())
    monkeypatch.chdir(tmp_path)
    return find_kind(named[1])


def find_command(verb: str) -> list[str]:
    (command,) = re.findall(rf"`understudy ({verb} [^`]*)`", PAGE)
    return str(command).split()


def test_the_page_quotes_the_file() -> None:
    assert (ROOT / "tests" / "engines" / "toy_kind.py").read_text(encoding="utf-8") in PAGE


@needs_toy
def test_the_replay_of_the_page_reports_in_the_words_of_its_kind(
    added: EngineKind, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*find_command("replay"), "--no-advice"]) == 0
    said = capsys.readouterr().out
    assert added.terms.usage in said
    assert "Bricks per worker" in said
    assert "2 req" in said
    assert "Returns" in said
    assert "Preemptions" not in said


@needs_toy
def test_the_command_line_of_the_page_serves_the_engine(added: EngineKind) -> None:
    words = find_command("serve")[1:]
    assert words[-2:] == ["--port", "8000"]
    plan = read_serve([*words[:-1], "0"])
    assert plan.settings.kind is added
    assert not plan.idle

    async def serve() -> None:
        server = Server(plan.settings)
        await server.start()
        try:
            asked = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
            reply = await Client(server.port).post("/v1/completions", asked)
            assert reply.json["usage"]["completion_tokens"] == 4
        finally:
            await server.stop(0)
            server.runtime.driver.stop()

    asyncio.run(serve())


def test_the_page_names_the_calls_that_the_interface_requires() -> None:
    header = (ROOT / "core" / "engine" / "engine.hpp").read_text(encoding="utf-8")
    required = re.findall(r"(\w+)\([^()]*\)(?: const)? = 0;", header)
    (said,) = re.findall(r"the calls that it requires: (.*?)\. All", PAGE, re.DOTALL)
    assert re.findall(r"`(\w+)`", said) == required


def test_the_page_names_files_and_values_that_are_there() -> None:
    for file in re.findall(r"`((?:core|src|tests)/[\w/]+\.\w+)`", PAGE):
        assert (ROOT / file).is_file(), file
    table = PAGE[PAGE.index("| difference |") : PAGE.index("Three things")]
    for row in table.splitlines()[2:-1]:
        for name in re.findall(r"`(\w+)`", row.split("|")[2]):
            assert name in EngineKind.__dataclass_fields__ or hasattr(EngineConfig, name), name
    assert set(APIS) | set(METRICS) | set(READERS) <= set(KIND_MODULES)
