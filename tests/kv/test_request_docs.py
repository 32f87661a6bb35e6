"""The page for people who embed the manager says what is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import understudy.errors
from understudy.kv import KvCacheManager, KvLayout, KvView, RequestKv

PAGE = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text()


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_example_prints_what_the_page_says() -> None:
    (example,) = fenced("python")
    (expected,) = fenced("text")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == (expected, "")


def test_every_call_that_the_page_names_exists() -> None:
    names = set(re.findall(r"`(?:layout\.|view\.)?(\w+)\(", PAGE))
    known = {name for kind in (KvCacheManager, KvLayout, KvView, RequestKv) for name in dir(kind)}
    assert len(names) > 10
    assert names - known == set()


def test_every_error_that_the_page_names_exists() -> None:
    names = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert len(names) == 5
    assert all(
        issubclass(getattr(understudy.errors, name), understudy.errors.UnderstudyError) for name in names
    )
