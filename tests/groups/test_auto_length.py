"""`--max-model-len auto`: the longest request that the blocks of all KV cache groups hold."""

from __future__ import annotations

from typing import Any

import pytest

import understudy as us
from understudy.engines.group_layouts import count_request_blocks, fit_model_len
from understudy.errors import ConfigError
from understudy.run.settings import ReplaySettings
from understudy.server.flags.serving import read_serve

WINDOW = us.KvCacheGroup(kind="sliding_window", block_size=16, window=128)
FULL = us.KvCacheGroup(kind="full", block_size=16)
STATE = us.KvCacheGroup(kind="mamba", block_size=16)


@pytest.mark.parametrize("groups", [(WINDOW, FULL), (FULL,), (STATE, FULL, STATE)])
@pytest.mark.parametrize("blocks", [8, 100, 1500])
def test_the_length_fits_and_the_next_one_does_not(groups: tuple[us.KvCacheGroup, ...], blocks: int) -> None:
    engine = us.VllmConfig(kv_cache_groups=groups, num_gpu_blocks=blocks)
    length = fit_model_len(engine, 10**6)
    assert count_request_blocks(engine, length) <= blocks < count_request_blocks(engine, length + 1)
    assert fit_model_len(engine, length // 2) == length // 2


def test_blocks_that_hold_no_token_are_an_error() -> None:
    with pytest.raises(ConfigError, match="max_model_len: 2 blocks do not hold one token"):
        fit_model_len(us.VllmConfig(kv_cache_groups=(WINDOW, FULL), num_gpu_blocks=2), 1000)


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_serve_shortens_the_context_of_a_model_with_groups(text: str) -> None:
    flags = ["gpt-oss-20b", "--gpu", "H100", "--num-gpu-blocks-override", "1500", "--max-model-len", text]
    settings = read_serve(flags).settings
    assert settings.max_model_len == settings.engine.max_model_len
    assert count_request_blocks(settings.engine, settings.max_model_len) <= 1500
    assert count_request_blocks(settings.engine, settings.max_model_len + 1) > 1500


def read(**engine: Any) -> ReplaySettings:
    return ReplaySettings.read(None, {"engine": engine, "model": "gpt-oss-120b", "gpu": {"name": "H200"}}, [])


@pytest.mark.parametrize("text", ["auto", -1])
def test_replay_takes_the_context_of_the_model_or_what_fits_of_it(text: str | int) -> None:
    assert read(max_model_len=text).engine.max_model_len == 131072
    short = read(max_model_len=text, block_size=16, num_gpu_blocks=2000).engine
    assert short.max_model_len is not None
    assert count_request_blocks(short, short.max_model_len) <= 2000
    assert count_request_blocks(short, short.max_model_len + 1) > 2000


def test_auto_needs_a_model_and_a_gpu() -> None:
    with pytest.raises(ConfigError, match="max_model_len: auto needs a model and a GPU"):
        ReplaySettings.read(None, {"engine": {"max_model_len": "auto"}}, [])
