"""Reader of `understudy replay --requests-jsonl`. Reports of `--json` have only means and are rejected."""

from __future__ import annotations

from typing import Any

from understudy.calibrate.benchmark import Benchmark, Fields
from understudy.calibrate.readers.single_requests import build_benchmark
from understudy.errors import InvalidArgument

_Row = tuple[float, float, float, float, float]


def is_report(content: dict[str, Any]) -> bool:
    """Whether `content` has the keys of a report."""
    return "ttft_ms" in content and "run" in content


def is_request(row: dict[str, Any]) -> bool:
    """Whether `row` has the keys of a line of `--requests-jsonl`."""
    return {"arrival_ms", "ttft_ms", "output_tokens"} <= row.keys()


def read_requests(
    source: tuple[str, str], where: str, rows: list[dict[str, Any]], data_parallel_size: int
) -> list[Benchmark]:
    """Read completed requests in arrival order: one benchmark per worker, or one for all ranks of a deployment."""
    workers: dict[int, list[_Row]] = {}
    for number, row in enumerate(rows, 1):
        fields = Fields(f"{where}:{number}", row)
        if row.get("status", "completed") != "completed":
            raise InvalidArgument(
                f"{where}:{number}: status is {row['status']!r}; give a run in which all requests complete"
            )
        _reject_hits(fields)
        worker = 0 if row.get("worker") is None else fields.count("worker", least=0)
        workers.setdefault(worker, []).append(
            (
                fields.number("arrival_ms", least=0) / 1e3,
                fields.count("prompt_tokens"),
                fields.count("output_tokens"),
                fields.number("ttft_ms", least=0),
                fields.number("e2e_ms", least=0),
            )
        )
    if data_parallel_size > 1 and len(workers) not in (1, data_parallel_size):
        raise InvalidArgument(
            f"{where}: worker has {len(workers)} values, but data_parallel_size is {data_parallel_size}; give the "
            "lines of one deployment"
        )
    if data_parallel_size > 1 or len(workers) == 1:
        workers = {0: [row for each in workers.values() for row in each]}
    name, sha256 = source
    return [
        build_benchmark(
            (name if len(workers) == 1 else f"{name} (worker {worker})", sha256),
            where,
            "understudy requests",
            "arrival_ms",
            workers[worker],
        )
        for worker in sorted(workers)
    ]


def _reject_hits(fields: Fields) -> None:
    """Raise InvalidArgument for a prompt with cache hits: lines do not say which prefixes prompts share."""
    row, hits = fields.content, ""
    if row.get("cached_tokens_first") is not None and (hit := fields.count("cached_tokens_first", least=0)):
        hits = f"cached_tokens_first is {hit}"
    elif row.get("prompt_computed") is not None:
        computed, prompt = fields.count("prompt_computed", least=0), fields.count("prompt_tokens")
        if computed < prompt:
            hits = f"prompt_computed is {computed} of {prompt} prompt_tokens"
    if hits:
        raise InvalidArgument(
            f"{fields.where}: {hits}: part of the prompt was cached, and a fit computes all of it; replay with "
            "--no-enable-prefix-caching (and without tiers), and give those lines"
        )
