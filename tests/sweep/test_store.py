"""The store of finished candidates."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest

from understudy.errors import ConfigError, InvalidArgument
from understudy.sweep.candidate import Outcome
from understudy.sweep.store import Store

if TYPE_CHECKING:
    from pathlib import Path


def outcome(key: str) -> Outcome:
    return Outcome(key=key, flags={"workers": 1}, error="too small")


def test_a_second_store_finds_what_the_first_wrote(tmp_path: Path) -> None:
    with Store(tmp_path / "sweep.jsonl") as store:
        store.add(outcome("a"))
    with Store(tmp_path / "sweep.jsonl") as store:
        assert store.outcomes == {"a": outcome("a")}
        store.add(outcome("b"))
    with Store(tmp_path / "sweep.jsonl") as store:
        assert list(store.outcomes) == ["a", "b"]


def test_a_torn_last_line_is_ignored_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    with Store(path) as store:
        store.add(outcome("a"))
        store.add(outcome("b"))
    path.write_bytes(path.read_bytes()[:-9])
    with Store(path) as store:
        assert list(store.outcomes) == ["a"]
        store.add(outcome("c"))
    with Store(path) as store:
        assert list(store.outcomes) == ["a", "c"]


def test_a_file_of_something_else_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0}\n')
    with pytest.raises(InvalidArgument, match="line 1: not a finished candidate"):
        Store(path)
    assert path.read_text() == '{"timestamp": 0}\n'


def test_two_sweeps_do_not_write_one_store(tmp_path: Path) -> None:
    with Store(tmp_path / "sweep.jsonl"), pytest.raises(ConfigError, match="another sweep writes it"):
        Store(tmp_path / "sweep.jsonl")


def test_a_full_disk_is_an_error_that_names_the_store(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = Store(tmp_path / "sweep.jsonl")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(InvalidArgument, match=r"--store .*sweep\.jsonl: cannot be written"):
            store.add(outcome("a"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        store.close()
