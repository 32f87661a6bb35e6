"""Every metric by its definition: computed once more, the slow way, from the recorded steps and events of a run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

from replay.building import conversations
from understudy._core import Tier
from understudy.engines.vllm_config import VllmConfig
from understudy.events import Stored
from understudy.report import Report, Slo
from understudy.report.metrics import DISTRIBUTIONS, SCALARS
from understudy.report.tier_metrics import TIER_METRICS
from understudy.report.tiers import LINK_WINDOWS
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig
from understudy.workload import Normal

if TYPE_CHECKING:
    from collections.abc import Callable

CAPACITY, BLOCK, WORKERS, BYTES = 80, 16, 2, 4096
SLO = Slo(ttft_ms=9000, itl_ms=40, e2e_ms=20000)
TIERS = TiersConfig.from_dict(
    {
        "kv_bytes_per_token": BYTES,
        "tiers": [
            {"tier": "g2", "blocks": 100, "link": {"down_gbps": 0.5, "up_gbps": 1}},
            {"tier": "g3", "blocks": 500, "link": {"backend_down_gbps": 0.3, "backend_up_gbps": 0.6}},
        ],
        "offload": {"mode": "evict", "onboard_failure_rate": 0.2},
    }
)


@dataclass
class Request:
    """What the recorded steps tell of one request."""

    arrival: int
    prompt: int
    wanted: int
    looked_up: list[int]
    found: list[int]
    tokens: list[int]
    preempted: int = 0
    computed: int = 0


@cache
def played() -> tuple[OfflineRun, Report, list[Request], list[dict[str, Any]]]:
    """A run that preempts, offloads, loads and fails to load; its report; its steps, and its requests from them."""
    workload = conversations(30, output_tokens=Normal(mean=120, std=40))
    # Synchronously a line of the recording is a whole step: its schedule, and the tokens of it.
    engine = VllmConfig(block_size=BLOCK, num_gpu_blocks=CAPACITY, async_scheduling=False)
    with TemporaryDirectory() as folder:
        steps = f"{folder}/steps.jsonl"
        run = run_offline(
            RunPlan(workload, engine, workers=WORKERS, tiers=TIERS, events=True, record_steps=steps)
        )
        with open(steps, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file][1:-1]
    t = run.timeline
    requests = [
        Request(int(arrival), int(length), int(wanted), [], [], [])
        for arrival, length, wanted in zip(t.arrival_ns, t.prompt_tokens, workload.output_tokens, strict=True)
    ]
    for line in lines:
        for name in (*line["new"], *line["resumed"]):
            request = requests[int(name)]
            request.computed = line["cached"].get(name, 0)
            request.looked_up.append(request.prompt + len(request.tokens))
            request.found.append(request.computed)
        for name in line["preempted"]:
            requests[int(name)].preempted += 1
        for name, tokens in line["scheduled"].items():
            request = requests[int(name)]
            request.computed += tokens
            if request.computed == request.prompt + len(request.tokens):
                request.tokens.append(line["end_ns"])
    assert all(len(request.tokens) == request.wanted for request in requests)
    return run, Report.build(t, slo=SLO), requests, lines


def requests() -> list[Request]:
    return played()[2]


def ms(values: list[int]) -> list[float]:
    return [value / 1e6 for value in values]


def gaps(request: Request) -> list[int]:
    return [b - a for a, b in zip(request.tokens, request.tokens[1:], strict=False)]


def duration() -> float:
    first = min(request.arrival for request in requests())
    return (max(token for request in requests() for token in request.tokens) - first) / 1e9


VALUES: dict[str, Callable[[], list[float]]] = {
    "ttft_ms": lambda: ms([r.tokens[0] - r.arrival for r in requests()]),
    "ttst_ms": lambda: ms([r.tokens[1] - r.tokens[0] for r in requests() if len(r.tokens) > 1]),
    "itl_ms": lambda: ms([gap for r in requests() for gap in gaps(r)]),
    "tpot_ms": lambda: [fmean(gaps(r)) / 1e6 for r in requests() if len(r.tokens) > 1],
    "e2e_ms": lambda: ms([r.tokens[-1] - r.arrival for r in requests()]),
    "output_tokens_per_s_per_user": lambda: [1e9 / fmean(gaps(r)) for r in requests() if sum(gaps(r))],
    "prompt_tokens": lambda: [r.prompt for r in requests()],
    "output_tokens": lambda: [len(r.tokens) for r in requests()],
    "tiers.parked_ms": lambda: [v for v in ms(tier_columns().parked_ns.tolist()) if v],
    "tiers.room_wait_ms": lambda: [v for v in ms(tier_columns().room_wait_ns.tolist()) if v],
    "tiers.onboard_ms": lambda: ms(tier_columns().onboard_ns.tolist()),
}


def tier_columns() -> Any:
    return played()[0].timeline.tiers


def good() -> list[Request]:
    assert SLO.ttft_ms is not None
    assert SLO.itl_ms is not None
    assert SLO.e2e_ms is not None
    return [
        r
        for r in requests()
        if r.tokens[0] - r.arrival <= SLO.ttft_ms * 1e6
        and r.tokens[-1] - r.arrival <= SLO.e2e_ms * 1e6
        and (len(r.tokens) == 1 or fmean(gaps(r)) <= SLO.itl_ms * 1e6)
    ]


def area(name: str) -> float:
    """Of a sample column: its mean over time and workers."""
    t = played()[0].timeline
    total = 0.0
    for worker in range(WORKERS):
        samples = [
            (at, value)
            for at, of, value in zip(
                t.sample_time_ns.tolist(), t.sample_worker.tolist(), getattr(t, name).tolist(), strict=True
            )
            if of == worker
        ]
        ends = [at for at, _ in samples[1:]] + [t.end_ns]
        total += sum(
            value * (min(end, t.end_ns) - min(at, t.end_ns))
            for (at, value), end in zip(samples, ends, strict=True)
        )
    return total / WORKERS / (t.end_ns - t.start_ns)


def events(tier: Tier, stored: bool) -> int:
    """Blocks that the raw events of all publishers say were stored on (or removed from) a tier."""
    log = played()[0].kv
    assert log is not None
    streams = (
        [log.shared_events(tier, "raw")]
        if tier == Tier.G3
        else [log.events(worker, "raw") for worker in range(WORKERS)]
    )
    return sum(
        len(event.blocks)
        for stream in streams
        for _, event in stream
        if event.tier == tier and isinstance(event, Stored) == stored
    )


def prompt() -> int:
    return sum(r.prompt for r in requests())


def output() -> int:
    return sum(len(r.tokens) for r in requests())


NUMBERS: dict[str, Callable[[], float]] = {
    "duration_s": duration,
    "requests.total": lambda: len(requests()),
    "requests.completed": lambda: sum(len(r.tokens) == r.wanted for r in requests()),
    "requests.stopped": lambda: 0,
    "requests.length_capped": lambda: sum(len(r.tokens) == r.wanted for r in requests()),
    "requests.rejected": lambda: 0,
    "requests.cancelled": lambda: 0,
    "requests.failed": lambda: 0,
    "requests.unfinished": lambda: 0,
    "tokens.input": prompt,
    "tokens.output": output,
    "throughput.requests_per_s": lambda: len(requests()) / duration(),
    "throughput.input_tokens_per_s": lambda: prompt() / duration(),
    "throughput.output_tokens_per_s": lambda: output() / duration(),
    "throughput.total_tokens_per_s": lambda: (prompt() + output()) / duration(),
    "goodput.requests": lambda: len(good()),
    "goodput.ratio": lambda: len(good()) / len(requests()),
    "goodput.requests_per_s": lambda: len(good()) / duration(),
    "goodput.output_tokens_per_s": lambda: sum(len(r.tokens) for r in good()) / duration(),
    "prefix_hit_ratio.first_admission": lambda: sum(r.found[0] for r in requests()) / prompt(),
    "prefix_hit_ratio.total": lambda: sum(sum(r.found) for r in requests()) / looked_up(),
    "kv.usage_mean": lambda: area("sample_used_blocks") / CAPACITY,
    "kv.usage_max": lambda: max(played()[0].timeline.sample_used_blocks.tolist()) / CAPACITY,
    "kv.cached_mean": lambda: area("sample_cached_blocks") / CAPACITY,
    "kv.stored_blocks": lambda: events(Tier.G1, stored=True),
    "kv.evictions": lambda: events(Tier.G1, stored=False),
    "kv.phantom_hit_blocks": lambda: 0,
    "preemptions": lambda: sum(r.preempted for r in requests()),
    "accept_length": lambda: math.nan,
    "drafted_tokens": lambda: 0,
    "wasted_drafts": lambda: 0,
    "steps": lambda: len(played()[3]),
    "tiers.parked_s": lambda: sum(VALUES["tiers.parked_ms"]()) / 1e3,
    "tiers.room_wait_s": lambda: sum(VALUES["tiers.room_wait_ms"]()) / 1e3,
}


def looked_up() -> int:
    return sum(sum(r.looked_up) for r in requests())


TIER_NAMES = (Tier.G1, Tier.G2, Tier.G3)


def hits(tier: Tier, *, first: bool) -> int:
    """Of the tokens that admissions found, those of one tier; the device has what no tier below had."""
    columns = tier_columns()
    below = columns.below_tokens_first if first else columns.below_tokens_total
    sums: dict[Tier, int] = {Tier.G2: sum(below[0].tolist()), Tier.G3: sum(below[1].tolist())}
    found = sum(r.found[0] if first else sum(r.found) for r in requests())
    return sums.get(tier, found - sum(sums.values()))


BY_TIER: dict[str, Callable[[Tier], float]] = {
    "hit_tokens_first": lambda tier: hits(tier, first=True),
    "hit_ratio_first": lambda tier: hits(tier, first=True) / prompt(),
    "hit_tokens_total": lambda tier: hits(tier, first=False),
    "hit_ratio_total": lambda tier: hits(tier, first=False) / looked_up(),
    "capacity_blocks": lambda tier: {Tier.G1: CAPACITY * 2, Tier.G2: 200, Tier.G3: 500}[tier],
    "stored_blocks": lambda tier: events(tier, stored=True),
    "evicted_blocks": lambda tier: events(tier, stored=False),
}
ELSEWHERE = {
    # By numbers made by hand, in test_metrics.py and test_tiers.py; what the core counts, in tests/tiers.
    "queue_ms",
    "ttft_queued_ms",  # test_queued.py
    "tiers.held_mean",
    "tiers.held_max",
    *(metric.key for metric in TIER_METRICS if metric.key.startswith(("tiers.links[]", "tiers.counts."))),
    *(f"tiers.tiers[].resident_{which}" for which in ("mean", "max", "end")),
}


def value_of(report: Report, key: str) -> Any:
    value: Any = report
    for name in key.split("."):
        value = getattr(value, name)
    return value


def test_every_metric_is_computed_here_or_said_to_be_elsewhere() -> None:
    keys = {metric.key for metric in DISTRIBUTIONS + SCALARS + TIER_METRICS}
    here = {*VALUES, *NUMBERS, *(f"tiers.tiers[].{name}" for name in BY_TIER)}
    assert here | ELSEWHERE == keys
    assert not here & ELSEWHERE


@pytest.mark.parametrize("key", VALUES)
def test_a_distribution_is_what_its_definition_says(key: str) -> None:
    values = sorted(VALUES[key]())
    found = value_of(played()[1], key)
    assert len(values) > 1
    assert found.count == len(values)
    assert (found.min, found.max) == pytest.approx((values[0], values[-1]))
    assert found.mean == pytest.approx(fmean(values))
    for p in (50, 75, 90, 95, 99):
        assert getattr(found, f"p{p}") == pytest.approx(values[math.ceil(p / 100 * len(values)) - 1])


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_is_what_its_definition_says(key: str) -> None:
    assert value_of(played()[1], key) == pytest.approx(NUMBERS[key](), nan_ok=True)


@pytest.mark.parametrize("key", BY_TIER)
@pytest.mark.parametrize("at", range(3))
def test_a_number_of_a_tier_is_what_its_definition_says(key: str, at: int) -> None:
    tiers = played()[1].tiers
    assert tiers is not None
    assert getattr(tiers.tiers[at], key) == pytest.approx(BY_TIER[key](TIER_NAMES[at]))


def test_the_run_shows_what_it_should_tell_apart() -> None:
    report = played()[1]
    assert report.preemptions > 0
    assert report.tiers is not None
    assert report.tiers.counts.failed_loads > 0
    assert report.goodput is not None
    assert 0 < report.goodput.requests < len(requests())
    # Resumed requests bring output of their own: the two denominators differ.
    assert looked_up() != sum(r.prompt * len(r.looked_up) for r in requests())
    assert all(len(link.window_bytes) == LINK_WINDOWS for link in report.tiers.links)
