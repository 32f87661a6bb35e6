from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from understudy.errors import ConfigError
from understudy.workload import Workload, formats, read_trace, register_format, trace_formats
from workload.building import row, trace_file, workload

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_readers", dict(formats._readers))


def test_mooncake_is_the_default_format(tmp_path: Path) -> None:
    path = trace_file(tmp_path, row())
    assert (
        read_trace(path).prompt_tokens.tolist()
        == read_trace(str(path), "mooncake").prompt_tokens.tolist()
        == [600]
    )


def test_options_reach_the_reader(tmp_path: Path) -> None:
    path = trace_file(tmp_path, row(input_length=5, hash_ids=[1, 2]))
    assert read_trace(path, trace_block_size=4).trace_block_size == 4


def test_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"format 'moonshine' is unknown; known are agentic-mooncake, .*azure, .*mooncake"
    ):
        read_trace(tmp_path, "moonshine")


def test_an_unknown_option_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="block_size is not an option of format mooncake; known are trace_block"
    ):
        read_trace(trace_file(tmp_path), block_size=4)  # type: ignore[call-arg]


def test_a_user_can_add_a_format(tmp_path: Path) -> None:
    def lengths(path: Path, *, tokens: int = 4) -> Workload:
        return workload([tokens] * int(path.read_text()))

    register_format("ours", lengths)
    (tmp_path / "n").write_text("3")
    assert {"ours", "mooncake", "openai", "vllm-scenario"} <= set(trace_formats())
    assert len(read_trace(tmp_path / "n", "ours")) == 3
    options: Any = {"tokens": 8}
    assert read_trace(tmp_path / "n", "ours", **options).prompt_tokens.tolist() == [8, 8, 8]


def test_a_reader_with_free_options_gets_them_all(tmp_path: Path) -> None:
    def free(path: Path, **options: Any) -> Workload:
        return workload([options["tokens"]])

    register_format("free", free)
    options: Any = {"tokens": 8}
    assert read_trace(tmp_path, "free", **options).prompt_tokens.tolist() == [8]


def test_a_known_name_is_replaced_only_on_request() -> None:
    def other(path: Path) -> Workload:
        return workload([4])

    with pytest.raises(ConfigError, match="'mooncake' is already registered"):
        register_format("mooncake", other)
    register_format("mooncake", other, replace=True)
    assert len(read_trace("anything")) == 1
    with pytest.raises(ConfigError, match="the name is empty"):
        register_format("", other)


def test_a_reader_that_returns_something_else_is_named() -> None:
    register_format("odd", lambda path: [path])  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="format 'odd': the reader must return a Workload, got list"):
        read_trace("anything", "odd")
