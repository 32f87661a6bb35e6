"""SGLang's event loops on a virtual clock, normal and overlapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.conformance.sglang_recording import SglangRun

if TYPE_CHECKING:
    from understudy.conformance.sglang_recording import SglangScenario


def run_sglang_clock(scenario: SglangScenario, *, check: bool = False) -> dict[str, Any]:
    """Run the scenario and return what a recording has: times of tokens, ends and batches."""
    return _Clock(scenario).run(check=check)


class _Clock:
    def __init__(self, scenario: SglangScenario) -> None:
        self._scenario = scenario
        self._run = SglangRun(scenario)
        events = [(one.t, 0, i) for i, one in enumerate(scenario.requests)]
        events += [(one.t, 1, i) for i, one in enumerate(scenario.aborts)]
        self._to_come = sorted(events)
        self._tokens: dict[int, list[int]] = {i: [] for i in range(len(scenario.requests))}
        self._cached: dict[int, int | None] = dict.fromkeys(self._tokens)
        self._ends: dict[int, tuple[int, str]] = {}

    def run(self, *, check: bool) -> dict[str, Any]:
        clock = self._scenario.clock
        loop = self._run.loop
        overlap = self._scenario.config.overlap
        now = device_free = turns = 0
        outstanding_end: int | None = None
        trace: list[list[Any]] = []
        rests = True
        while self._to_come or len(self._ends) < len(self._tokens):
            if rests:
                if not self._to_come:
                    break  # requests wait that can never run
                now = max(now, self._to_come[0][0])
            start = now
            turns += 1
            self._receive(now)
            batch = loop.schedule()
            self._note(now)
            end = None
            if batch is not None:
                now += clock["launch_ns"]
                begin = max(now, device_free)
                rows = batch[1]
                prefill = sum(tokens for _, tokens, decodes in rows if not decodes)
                decodes = sum(decodes for _, _, decodes in rows)
                end = begin + clock["base_ns"] + clock["prefill_token_ns"] * prefill
                end += clock["decode_row_ns"] * decodes
                device_free = end
                scheduled = {self._run.names[i]: tokens for i, tokens, _ in rows}
                trace.append([start, now, begin, end, scheduled])
            due = outstanding_end if overlap else end
            if due is not None:
                now = max(now, due) + clock["result_ns"]
            loop.process()
            outstanding_end = end if overlap else None
            self._note(now)
            rests = batch is None and outstanding_end is None
            if check:
                loop.check()
        return self._describe(turns, now, trace)

    def _receive(self, now: int) -> None:
        while self._to_come and self._to_come[0][0] <= now:
            _, is_abort, index = self._to_come.pop(0)
            if is_abort:
                self._run.abort(self._scenario.aborts[index].id)
            else:
                self._run.submit(index)

    def _note(self, now: int) -> None:
        log = self._run.loop.take_log()
        for index, resumed, cached, _ in log["admitted"]:
            if not resumed:
                self._cached[index] = cached
        for index in log["sampled"]:
            self._tokens[index].append(now)
        for index in log["finished"]:
            request = self._scenario.requests[index]
            stopped = request.eos_at == len(self._tokens[index]) and not self._scenario.config.ignore_eos
            reason = "abort" if index in log["aborted"] else "stop" if stopped else "length"
            self._ends[index] = (now, reason)
        for index in log["aborted"]:
            self._ends.setdefault(index, (now, "abort"))

    def _describe(self, turns: int, now: int, trace: list[list[Any]]) -> dict[str, Any]:
        requests = {}
        for index, request in enumerate(self._scenario.requests):
            end = self._ends.get(index)
            requests[request.id] = {
                "arrival": request.t,
                "cached": self._cached[index],
                "tokens": self._tokens[index],
                "end": None if end is None else list(end),
            }
        return {"requests": requests, "turns": turns, "batches": len(trace), "end": now, "trace": trace}
