"""Audit a run by its steps: tokens are computed once, in steps that do not overlap, and times are those of steps."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from answers.definitions import distribution
from answers.evidence import run
from answers.requests_audit import gaps_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from answers.definitions import Difference
    from answers.evidence import Evidence


def steps_keep_the_limits(evidence: Evidence) -> Iterator[Difference]:
    """Steps of a worker do not overlap, and none has more requests, tokens or blocks than there are."""
    saved, flags = evidence.saved, evidence.case.flags
    ends: dict[int, int] = {}
    for worker, begin, end in zip(
        *(saved[f"step_{name}"] for name in ("worker", "begin_ns", "end_ns")), strict=True
    ):
        yield f"worker {worker}: step at {begin}", begin >= ends.get(worker, 0) and end >= begin, True
        ends[worker] = end
    yield "steps", evidence.report["steps"], len(saved["step_worker"])
    if "max-num-seqs" in flags:
        most = max(saved["step_running"], default=0)
        yield "requests in a batch", most <= int(flags["max-num-seqs"]), True
    if "max-num-batched-tokens" in flags:
        tokens = Counter[int]()
        for batch, count in zip(saved["entry_batch"], saved["entry_tokens"], strict=True):
            tokens[batch] += count
        most = max(tokens.values(), default=0)
        yield "tokens in a batch", most <= int(flags["max-num-batched-tokens"]), True
    yield from pools_keep_their_limits(evidence)
    if "num-gpu-blocks" in flags:
        blocks = max(saved["step_active_blocks"], default=0)
        yield "active blocks", blocks <= int(flags["num-gpu-blocks"]), True


def pools_keep_their_limits(evidence: Evidence) -> Iterator[Difference]:
    """The workers of each pool have the limits of their own engine."""
    saved = evidence.saved
    most: dict[tuple[int, str], int] = defaultdict(int)
    for worker, running, blocks in zip(
        *(saved[f"step_{name}"] for name in ("worker", "running", "active_blocks")), strict=True
    ):
        most[worker, "max_num_seqs"] = max(most[worker, "max_num_seqs"], running)
        most[worker, "num_gpu_blocks"] = max(most[worker, "num_gpu_blocks"], blocks)
    for worker, engine in enumerate(evidence.case.engines):
        for name in ("max_num_seqs", "num_gpu_blocks"):
            limit = engine.get(name, 1 << 40)
            yield f"worker {worker}: {name}", most[worker, name] <= limit or most[worker, name], True


def scheduled(evidence: Evidence) -> Iterator[tuple[int, int, int, int]]:
    """The tokens of each request in each step: step, request, tokens, and those that it had before, in order.

    Consecutive steps with equal batches share one: each begins where the step before it ended.
    """
    saved = evidence.saved
    batches: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    columns = (saved[f"entry_{name}"] for name in ("batch", "request", "tokens", "before"))
    for batch, request, tokens, before in zip(*columns, strict=True):
        batches[batch].append((request, tokens, before))
    played = Counter[int]()
    for step, batch in enumerate(saved["step_batch"]):
        for request, tokens, before in batches[batch]:
            yield step, request, tokens, before + played[batch] * tokens
        played[batch] += 1


def tokens_are_computed_once(evidence: Evidence) -> Iterator[Difference]:
    """A completed request computes its prompt less the cached part, and a token per output but the last."""
    if evidence.case.kind in ("speculation", "hand_offs"):  # drafts, and prompts on two workers
        return
    computed = Counter[int]()
    for _, request, tokens, _ in scheduled(evidence):
        computed[request] += tokens
    for line in evidence.lines:
        if line["status"] == "completed" and line["preemptions"] == 0 and line["output_tokens"]:
            expected = line["prompt_tokens"] - line["cached_tokens_first"] + line["output_tokens"] - 1
            surplus = computed[line["request"]] - expected
            # A batch that was scheduled before the end of the output was known computes one token more.
            most = line["finish_reason"] == "stop"
            yield f"{line['request']}: surplus of computed tokens", 0 <= surplus <= most, True


def token_times(evidence: Evidence) -> dict[int, list[int]]:
    """Times of each request's tokens, on the worker that decodes it: ends of the steps that extend what it has.

    A step verifies drafts; those that it accepted are before the request's next step.
    """
    worker_of = {line["request"]: line["worker"] for line in evidence.lines}
    mine: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for step, request, tokens, before in scheduled(evidence):
        if evidence.saved["step_worker"][step] == worker_of[request]:
            mine[request].append((evidence.saved["step_end_ns"][step], tokens, before))
    times: dict[int, list[int]] = defaultdict(list)
    for line in evidence.lines:
        request, entries = line["request"], mine[line["request"]]
        most = 0
        for index, (end, tokens, before) in enumerate(entries):
            known = before + tokens
            if evidence.case.kind == "sglang" and known == most:
                # SGLang drops the token of the batch in flight when it retracts a request, and computes it again.
                del times[request][max(known - line["prompt_tokens"], 0) :]
            most = max(most, known)
            last = index + 1 == len(entries)
            if evidence.case.kind == "speculation" and known >= line["prompt_tokens"]:
                known = line["prompt_tokens"] + line["output_tokens"] - 1 if last else entries[index + 1][2]
            new = known + 1 - line["prompt_tokens"] - len(times[request])
            times[request] += [end] * max(new, 0)
    return times


def times_are_those_of_steps(evidence: Evidence) -> Iterator[Difference]:
    """First, second and last tokens, and every gap, by the steps."""
    ahead = "no-async-scheduling" not in evidence.case.flags
    if evidence.case.kind == "speculation" and (ahead or evidence.report["preemptions"]):
        return  # which drafts were accepted is not in the steps
    client_ns = round(evidence.report["run"]["times"]["front_end_ms"] * 1e6)
    times, gaps = token_times(evidence), []
    for line in evidence.lines:
        if line["status"] != "completed":
            continue
        mine = times[line["request"]]
        if line["finish_reason"] == "stop" or evidence.case.kind == "speculation":
            mine = mine[: line["output_tokens"]]
        yield f"{line['request']}: tokens", len(mine), line["output_tokens"]
        for name, index in (("first", 0), ("second", 1), ("last", -1)):
            if len(mine) > max(index, 0):
                said = line[f"{name}_token_ms"]
                yield f"{line['request']}: {name} token", said, (mine[index] + client_ns) / 1e6
        gaps += [gap / 1e6 for gap in gaps_of(mine)]
    for key, value in distribution(gaps).items():
        yield f"itl_ms.{key}", evidence.report["itl_ms"][key], value


def waterfalls_add_up(evidence: Evidence) -> Iterator[Difference]:
    """`explain` splits each latency into consecutive spans and parts that add up to it."""
    explained: dict[str, Any] = json.loads(
        run("explain", str(evidence.folder / "run.npz"), "--slowest", "1000", "--json", "-")
    )
    lines = {line["request"]: line for line in evidence.lines}
    ended = [
        line
        for line in evidence.lines
        if line["first_admit_ms"] is not None and line["status"] == "completed"
    ]
    said = {request["row"] for request in explained["requests"]}
    yield "requests with a waterfall", {line["request"] for line in ended} <= said, True
    for request in explained["requests"]:
        line, name = lines[request["row"]], f"{request['row']}: "
        yield name + "parts", sum(request["parts"].values()), request["latency_ns"]
        yield name + "TTFT parts", sum(request["ttft_parts"].values()), request["ttft_ns"] or 0
        at = 0
        for span in request["spans"]:
            yield name + "span", (span["after_ns"], sum(span["parts"].values())), (at, span["duration_ns"])
            at += span["duration_ns"]
        if line["status"] == "completed":
            yield name + "latency", request["latency_ns"] / 1e6, line["e2e_ms"]
            if line["ttft_ms"] is not None:
                yield name + "TTFT", request["ttft_ns"] / 1e6, line["ttft_ms"]
            yield name + "cached", request["cached_tokens"], line["cached_tokens_first"]
    totals = Counter[str]()
    for request in explained["requests"]:
        totals.update(request["parts"])
    yield "sum of parts", explained.get("parts"), dict(totals)
