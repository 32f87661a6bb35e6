"""Recordings of prefill/decode pairs, made again where vLLM is installed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-pd"


@pytest.mark.parametrize("name", ["10_aborts", "35_handshake_fail_recompute", "81_push_parallel_async"])
def test_a_recording_is_made_again_line_for_line(name: str, tmp_path: Path) -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    from exact.pd_record import record_pair

    init_none_hash(sha256)
    with gzip.open(GOLDEN / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        first, *lines = map(json.loads, file)
    assert record_pair(first["scenario"], tmp_path)["recorded"] == lines
