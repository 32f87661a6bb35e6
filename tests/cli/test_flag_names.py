"""A refusal calls a setting by the flag that was typed."""

from __future__ import annotations

import pytest

from understudy.cli.flag_names import replace_settings_by_flags


@pytest.mark.parametrize(
    ("message", "words", "said"),
    [
        ("block_size must be at least 1", ["--block-size", "0"], "--block-size must be at least 1"),
        (
            "block_size must be at least 1",
            ["--block-size", "16", "--set", "engine.block_size=0"],
            "block_size must be at least 1",
        ),
        ("engine.kv_manager must be", ["--kv-manager", "x"], "--kv-manager must be"),
        ("temperature must be", ["--router-temperature", "-1"], "--router-temperature must be"),
        ("temperature must be", ["--router-temperature=-1"], "--router-temperature must be"),
        ("block_size must be", ["--block-size=16", "--set=engine.block_size=0"], "block_size must be"),
        ("g2: bytes: '3x'", ["--g2-bytes", "3x"], "--g2-bytes: '3x'"),
        ("block_size must be at least 1", ["--config", "f.yaml"], "block_size must be at least 1"),
        (
            "event_loss, temperature, queue_policy are for",
            ["--router-temperature", "1", "--event-loss=0.5"],
            "--event-loss, --router-temperature, queue_policy are for",
        ),
        ("a_b and c_d differ", ["--a-b", "1", "--config", "f.yaml"], "--a-b and c_d differ"),
        ("a_b and c_d differ", ["--c-d=1"], "a_b and --c-d differ"),
        ("a_b and c_d differ", ["--a-b", "1", "--set", "x.c_d=2"], "--a-b and c_d differ"),
        ("a_b needs model x", ["--a-b", "1"], "--a-b needs --model x"),
        ("t.jsonl: row 3: c_d is missing", ["--c-d=1"], "t.jsonl: row 3: c_d is missing"),
        ("--a-b: c_d is missing", ["--c-d=1"], "--a-b: c_d is missing"),
        (
            "blok_size is not a setting; known are block_size, c_d",
            ["--trace-block-size", "512", "--set", "engine.blok_size=1"],
            "blok_size is not a setting; known are block_size, c_d",
        ),
        ("workers must be", ["--max-workers", "1", "--least-workers", "2"], "workers must be"),
        ("t.jsonl:3: timestamp is given twice", ["--timestamp"], "t.jsonl:3: timestamp is given twice"),
    ],
)
def test_a_setting_is_called_by_the_flag_that_was_typed(message: str, words: list[str], said: str) -> None:
    assert replace_settings_by_flags(message, words, ["--a-b", "--block-size", "--c-d", "--model"]) == said
