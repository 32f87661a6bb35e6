"""The example that embeds a KV manager runs, and docs/kv-manager.md shows its output."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "embed_kv_manager.py")


@pytest.fixture
def server() -> Iterator[Any]:
    example = runpy.run_path(EXAMPLE)
    served = example["Server"](num_gpu_blocks=16)
    served.waiting += [example["Request"](name, range(10), outputs=7) for name in "ab"]
    yield served
    served.kv.check()


def test_the_page_shows_what_the_example_prints(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(EXAMPLE, run_name="__main__")
    page = (ROOT / "docs" / "kv-manager.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert shown == [capsys.readouterr().out]


def test_requests_of_the_example_share_their_prefix_and_release_every_block(server: Any) -> None:
    server.admit()
    assert (server.kv.active_blocks, server.kv.active_references) == (4, 6)
    while server.running:
        server.step()
    assert (server.kv.active_blocks, server.kv.active_references) == (0, 0)
    assert server.kv.inactive_blocks == 6  # two shared, two of each request
