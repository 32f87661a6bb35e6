"""What `understudy replay` writes: requests as lines. Reports have means, and are refused."""

from __future__ import annotations

from typing import Any

from understudy.calibrate.benchmark import Benchmark, Fields
from understudy.calibrate.readers.single_requests import of_requests
from understudy.errors import InvalidArgument

_Row = tuple[float, float, float, float, float]


def is_report(content: dict[str, Any]) -> bool:
    """Whether these are the keys of a report."""
    return "ttft_ms" in content and "run" in content


def is_request(row: dict[str, Any]) -> bool:
    """Whether these are the keys of a line of `--requests-jsonl`."""
    return {"arrival_ms", "ttft_ms", "output_tokens"} <= row.keys()


def read_requests(
    source: tuple[str, str], where: str, rows: list[dict[str, Any]], data_parallel_size: int
) -> list[Benchmark]:
    """Requests that completed, by when they arrived: a benchmark of each worker, since they have nothing in common, or
    one of all where they are the ranks of a deployment.
    """
    workers: dict[int, list[_Row]] = {}
    for number, row in enumerate(rows, 1):
        fields = Fields(f"{where}:{number}", row)
        if row.get("status", "completed") != "completed":
            raise InvalidArgument(
                f"{where}:{number}: status is {row['status']!r}: only runs in which all requests complete can be fitted"
            )
        _refuse_hits(fields)
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
            f"{where}: worker has {len(workers)} values, and data_parallel_size is {data_parallel_size}; give the "
            "lines of one deployment"
        )
    if data_parallel_size > 1 or len(workers) == 1:
        workers = {0: [row for each in workers.values() for row in each]}
    name, sha256 = source
    return [
        of_requests(
            (name if len(workers) == 1 else f"{name} (worker {worker})", sha256),
            where,
            "understudy requests",
            "arrival_ms",
            workers[worker],
        )
        for worker in sorted(workers)
    ]


def _refuse_hits(fields: Fields) -> None:
    """Lines do not say whose prefix was found, and a fit plays prompts that have nothing in common."""
    row, said = fields.content, ""
    if row.get("cached_tokens_first") is not None and (hit := fields.count("cached_tokens_first", least=0)):
        said = f"cached_tokens_first is {hit}"
    elif row.get("prompt_computed") is not None:
        computed, prompt = fields.count("prompt_computed", least=0), fields.count("prompt_tokens")
        if computed < prompt:
            said = f"prompt_computed is {computed} of {prompt} prompt_tokens"
    if said:
        raise InvalidArgument(
            f"{fields.where}: {said}: the prompt was found in a cache in part, and a fit computes all of it; replay it "
            "with --no-enable-prefix-caching (and without tiers), and give those lines"
        )
