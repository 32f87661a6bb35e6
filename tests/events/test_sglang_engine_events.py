"""KV events of the SGLang engine on a clock: the pages and the times at which SGLang 0.5.23 published them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from understudy import _core
from understudy.cli import main
from understudy.engines.sglang_config import SglangConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "sglang-events"
MS = 1_000_000
FOREVER = 10**15
NORMAL = ("publish_plain", "publish_page_1", "publish_more_15_03_priority")
"""Recordings of the normal loop without a host tier: step s lasts from s ms to s + 1 ms."""
KEPT = (
    *("max_prefill_tokens", "chunked_prefill_size", "schedule_policy", "radix_eviction_policy"),
    *("enable_mixed_chunk", "schedule_conservativeness", "enable_priority_scheduling"),
)

Page = tuple[str, str, tuple[int, ...]]  # kind, tier, all tokens to its end


class OneMs:
    """One millisecond a step."""

    def step_ms(self, step: _core.StepLoad, /) -> float:  # noqa: ARG002
        return 1.0


def expand(items: list[Any]) -> list[int]:
    runs = [(item, 1) if isinstance(item, int) else item for item in items]
    return [token for first, count in runs for token in range(first, first + count)]


def read_recorded(name: str, size: int) -> tuple[dict[str, Any], list[tuple[int, list[Page]]]]:
    """The recorded settings, and each published batch with its time in ms."""
    lines = gzip.decompress((GOLDEN / "golden" / f"{name}.jsonl.gz").read_bytes()).decode().splitlines()
    header, *steps = map(json.loads, lines)
    prefixes: dict[int, tuple[int, ...]] = {}
    batches = []
    for line in steps[:-1]:
        for batch in line["published"]:
            pages: list[Page] = []
            for event in batch["events"]:
                if event["type"] == "BlockStored":
                    before = prefixes.get(event["parent_block_hash"], ())
                    tokens = expand(event["token_ids"])
                    for index, value in enumerate(event["block_hashes"]):
                        before += tuple(tokens[index * size : (index + 1) * size])
                        prefixes[value] = before
                kind = event["type"].removeprefix("Block").lower()
                pages += [(kind, event["medium"], prefixes[value]) for value in event.get("block_hashes", [])]
            if pages:
                batches.append((line["step"] + (batch["at"] != "idle"), pages))
    return header["header"]["config"], batches


@pytest.mark.parametrize("name", NORMAL)
def test_the_engine_publishes_the_recorded_pages_when_sglang_did(name: str) -> None:
    scenario = json.loads((GOLDEN / "scenarios" / f"{name}.json").read_text())
    size = scenario["config"]["page_size"]
    config, recorded = read_recorded(name, size)
    engine = SglangConfig(
        block_size=size,
        num_gpu_blocks=config["max_total_num_tokens"] // size,
        max_num_seqs=config["max_running_requests"],
        max_model_len=config["context_len"],
        disable_overlap_schedule=True,
        **{field: config[field] for field in KEPT},
    )
    core = engine.core_config(None, 0, events=True).make_engine(_core.python_timing(OneMs()))
    prefixes: dict[int, tuple[int, ...]] = {}
    published: dict[int, list[Page]] = {}

    def take() -> None:
        events, times = core.take_events()
        for kind, tier, value, time_ns in zip(
            events.kinds, events.tiers, events.sequence_hashes, times, strict=True
        ):
            medium = "GPU" if tier == int(_core.Tier.G1) else "CPU_PINNED"
            page = ("removed" if kind else "stored", medium, prefixes[int(value)])
            published.setdefault(int(time_ns) // MS, []).append(page)

    requests = sorted(enumerate(scenario["requests"]), key=lambda pair: pair[1]["arrival_step"])
    for index, request in requests:
        tokens = expand(request["prompt"])
        outputs = range(1_000_000 + 100_000 * index, 1_000_000 + 100_000 * index + request["max_tokens"])
        tokens += [2 if request.get("eos_at") == number else token for number, token in enumerate(outputs, 1)]
        pages = [tuple(tokens[: end + size]) for end in range(0, len(tokens) - size + 1, size)]
        names = _core.Identities.from_local_hashes([hash(page[-size:]) % 2**63 + 1 for page in pages])
        prefixes |= dict(zip((one.sequence_hash for one in names), pages, strict=True))
        now_ns = request["arrival_step"] * MS
        core.advance(now_ns)
        core.submit(
            _core.RequestSpec(
                index,
                request["id"],
                len(tokens) - request["max_tokens"],
                request["max_tokens"],
                names,
                eos_at=request.get("eos_at"),
                priority=request.get("priority"),
            ),
            now_ns,
        )
        take()
    core.advance(FOREVER)
    take()
    assert sorted(published.items())[: len(recorded)] == recorded
    assert len(published) <= len(recorded) + 1  # a recording ends with its last request, before the idle loop


SETTINGS = "engine: {engine_type: sglang, page_size: 16, max_total_tokens: 16000, hicache_write_policy: %s}\n"
HOST = "kv_bytes_per_token: 1024\ntiers: [{tier: g2, blocks: 2000}]\n"


@pytest.mark.parametrize("stream", ["raw", "consolidated"])
@pytest.mark.parametrize(
    "settings",
    [SETTINGS % "write_through", SETTINGS % "write_through" + HOST, SETTINGS % "write_back" + HOST],
    ids=["device", "write_through", "write_back"],
)
def test_emitted_events_follow_the_rules(
    stream: str, settings: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "run.yaml", tmp_path / "events.jsonl"
    config.write_text(settings)
    trace = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"
    rules = ["--dialect", "sglang-0.5.23", "--stream", stream]
    assert main(["events", "emit", str(trace), "--config", str(config), "--out", str(out), *rules]) == 0
    assert main(["events", "verify", str(out), *rules]) == 0
    assert ": 0 breaches" in capsys.readouterr().out
