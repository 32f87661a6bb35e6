"""`workload synthetic` writes what its flags or its file say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from understudy.cli import main
from understudy.workload import Workload, read_trace

if TYPE_CHECKING:
    from pathlib import Path


def write(words: str, folder: Path) -> Workload:
    path = folder / "made.jsonl"
    assert main(["workload", "synthetic", *words.split(), "-o", str(path)]) == 0
    return read_trace(path, trace_block_size=16)


def test_lengths_and_the_rate_are_those_of_the_flags(tmp_path: Path) -> None:
    made = write("--isl 400 --osl 50 --rate 4 --count 400 --seed 3", tmp_path)
    assert len(made) == 400
    assert made.prompt_tokens.mean() == pytest.approx(400, rel=0.1)
    assert made.output_tokens.mean() == pytest.approx(50, rel=0.1)
    assert made.arrival_ns.max() / 1e9 == pytest.approx(100, rel=0.2)
    again = write("--isl 400 --osl 50 --rate 4 --count 400 --seed 3", tmp_path)
    assert again.digest == made.digest


def test_turns_think_and_share_system_prompts(tmp_path: Path) -> None:
    made = write(
        "--isl 100 --osl 10 --spread 0 --turns 3 --followup 20 --think-time-ms 500 --system-prompts 2x64 --count 30",
        tmp_path,
    )
    assert len(made) == 90
    assert np.unique(made.prompt_tokens).tolist() == [164, 194, 224]
    assert np.unique(made.delay_ns).tolist() == [0, 500_000_000]
    heads = made.hash_ids[made.hash_offsets[:-1][made.turn == 0]]
    assert len(np.unique(heads)) == 2


def test_a_file_has_the_fields_of_the_specification(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "sessions: 7\nprompt_tokens: {kind: fixed, value: 40}\noutput_tokens: {kind: fixed, value: 3}\n"
        "trace_block_size: 16\n"
    )
    assert write(f"--spec {spec}", tmp_path).prompt_tokens.tolist() == [40] * 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("synthetic --isl 5", "--osl: missing; give mean lengths"),
        ("synthetic --isl 0 --osl 5", "--isl must be from 1"),
        ("synthetic --isl 5 --osl 5 --followup 3", "--followup is for several turns"),
        ("synthetic --isl 5 --osl 5 --system-prompts many", "'many' is not GROUPSxTOKENS"),
        ("synthetic --isl 5 --osl 5 --system-prompts 2x5", "prefixes.tokens must be a multiple"),
        ("synthetic --isl 5 --spec x.yaml", "--isl: --spec describes the whole workload"),
        ("fanout --isl 5", "--isl is for `workload synthetic`, not fanout"),
    ],
)
def test_a_wrong_flag_is_named(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["workload", *words.split(), "-o", str(tmp_path / "x.jsonl")]) == 2
    assert message in capsys.readouterr().err
