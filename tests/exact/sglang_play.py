"""Drive SGLang's own scheduler, one iteration of its event loop at a time."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.managers.utils import GenerationBatchResult, validate_input_length
from sglang.srt.sampling.sampling_params import SamplingParams

from exact.sglang_host import Transfers
from exact.sglang_real import VOCAB, real_scheduler

EOS = 2
DEFAULTS: dict[str, Any] = {
    "page_size": 1,
    "max_total_num_tokens": 16384,
    "max_running_requests": 128,
    "max_prefill_tokens": 16384,
    "chunked_prefill_size": 8192,
    "prefill_max_requests": None,
    "schedule_policy": "fcfs",
    "schedule_conservativeness": 1.0,
    "enable_mixed_chunk": False,
    "disable_radix_cache": False,
    "radix_eviction_policy": "lru",
    "tree": "unified",
    "context_len": 131072,
    "overlap": False,
    "ignore_eos": False,
    "clip_max_new_tokens": 4096,
    "in_batch_check_threshold": 32,
    "in_batch_deprioritize_threshold": 32,
    "init_new_token_ratio": 0.7,
    "min_new_token_ratio_factor": 0.14,
    "new_token_ratio_decay_steps": 600,
    "retract_decode_steps": 20,
    "kv_events": True,
    "enable_priority_scheduling": False,
    "priority_scheduling_preemption_threshold": 10,
    "schedule_low_priority_values_first": False,
    "disable_priority_preemption": False,
    "retraction_policy": "length",
    "max_queued_requests": None,
    "prefill_decode_interval": 0,
    "prefill_decode_interval_min_bs": 0,
    "hicache_write_policy": None,
    "hicache_ratio": 2.0,
    "load_back_threshold": 10,
    "write_steps": 1,
    "write_tokens_per_step": None,
    "load_steps": 1,
    "publish_events": False,
    "decode_log_interval": 40,
}


def expand(prompt: list[Any]) -> list[int]:
    """Return the tokens of a prompt: an item is a token, or the run [start, length]."""
    return [
        token
        for item in prompt
        for token in ((item,) if isinstance(item, int) else range(item[0], item[0] + item[1]))
    ]


class Play:
    """One scenario on a new scheduler. After `schedule` and `process` the lists say what happened since."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        self.scenario = scenario
        self.config = {**DEFAULTS, **scenario["config"]}
        self.finished: list[str] = []
        self.aborted: list[str] = []
        self.tokens: list[str] = []
        self.retracted: list[str] = []
        self.preempted: list[str] = []
        self.published: list[tuple[str, list[Any]]] = []
        self.admitted: list[tuple[Req, bool]] = []
        self.loaded: dict[str, int] = {}
        self.requests: dict[str, Req] = {}
        self._index = {spec["id"]: place for place, spec in enumerate(scenario["requests"])}
        self._ran: set[str] = set()
        self._ended: set[str] = set()
        self.transfers = Transfers(self.config) if self.config["hicache_write_policy"] else None
        self.real = real_scheduler(
            self.config, transfers=self.transfers, on_abort=self._on_abort, publish=self._publish
        )
        self.tree = self.real.tree_cache
        self._watch_admissions()

    def begin(self, step: int) -> None:
        """Begin an iteration: forget what the one before did."""
        lists = (self.finished, self.aborted, self.tokens, self.retracted, self.preempted, self.published)
        for one in (*lists, self.admitted):
            one.clear()
        if self.transfers is not None:
            self.transfers.step = step
            self.transfers.writes.clear()
            self.transfers.loads.clear()

    # --- what a server receives -------------------------------------------------------------------

    def add(self, spec: dict[str, Any]) -> None:
        """Receive a request as `Scheduler._handle_generate_request` does."""
        sampling = SamplingParams(
            max_new_tokens=spec["max_tokens"], temperature=0, ignore_eos=self.config["ignore_eos"]
        )
        sampling.normalize(None)
        req = Req(
            spec["id"],
            "",
            array("q", expand(spec["prompt"])),
            sampling,
            eos_token_ids={EOS},
            vocab_size=VOCAB,
            priority=spec.get("priority"),
        )
        self.requests[spec["id"]] = req
        real = self.real
        real.init_req_max_new_tokens(req)
        error = validate_input_length(req, real.max_req_input_len, False)
        if error:
            req.set_finish_with_abort(error)
        real._add_request_to_queue(req)

    def abort(self, prefix: str) -> None:
        """Abort all requests whose id begins with `prefix`; `*` aborts all."""
        self.real.abort_request(AbortReq(rid="" if prefix == "*" else prefix, abort_all=prefix == "*"))

    # --- the event loop ---------------------------------------------------------------------------

    def schedule(self) -> Any:
        """Get the next batch to run, as both event loops do; None if there is none."""
        real = self.real
        plan = real.get_next_batch_to_run(running_batch=real.running_batch, last_batch=real.last_batch)
        real.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch is not None:
            real.forward_ct += 1
            batch.forward_iter = real.forward_ct
            if batch.extend_num_tokens:
                real.processed_tokens_counter += batch.extend_num_tokens
        return batch

    def process(self, batch: Any) -> str | None:
        """Process a result, or be idle, then end the iteration; return the kind of what was processed."""
        real, kind = self.real, None
        if self.config["overlap"]:
            if batch is not None:
                real.result_queue.append((batch.copy(), None))
            if real.last_batch:
                kind = self._result(real.result_queue.popleft()[0])
            elif batch is None:
                self._idle()
        elif batch is not None:
            kind = self._result(batch)
        else:
            self._idle()
        real.last_batch = batch
        return kind

    def _result(self, batch: Any) -> str:
        """Give a batch its tokens, as `Scheduler.process_batch_result` does."""
        rows = list(batch.reqs)
        before = [len(req.output_ids) for req in rows]
        answer = GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=torch.tensor([self._token(req) for req in rows], dtype=torch.int64),
            can_run_cuda_graph=False,
        )
        processor = self.real.batch_result_processor
        kind = "decode" if batch.forward_mode.is_decode() else "prefill"
        if kind == "decode":
            processor.process_batch_result_decode(batch, answer)
        else:
            processor.process_batch_result_prefill(batch, answer)
        self.tree.flush_pending_backups()
        for req, count in zip(rows, before, strict=True):
            if len(req.output_ids) > count:
                self.tokens.append(req.rid)
            if req.finished() and req.rid not in self._ended:
                self._ended.add(req.rid)
                self.finished.append(req.rid)
                if isinstance(req.finished_reason, FINISH_ABORT):
                    self.aborted.append(req.rid)
        return kind

    def _token(self, req: Req) -> int:
        place, index = len(req.output_ids), self._index[req.rid]
        ends = self.scenario["requests"][index].get("eos_at") == place + 1
        return EOS if ends else 1_000_000 + index * 100_000 + place

    def _idle(self) -> None:
        """Do what `Scheduler.on_idle` does to the state."""
        if self.real.is_fully_idle():
            self._publish("idle")
            self.real.new_token_ratio_tracker.reset()

    def take_events(self) -> list[Any]:
        """Take the KV events since the last call; none if the scenario wants none."""
        return list(self.tree.take_events()) if self.config["kv_events"] else []

    def end_reason(self, name: str) -> str:
        """Return length, stop, or abort for a request that has ended."""
        return str(self.requests[name].finished_reason.to_json()["type"])

    # --- observers --------------------------------------------------------------------------------

    def _on_abort(self, req: Req) -> None:
        self._ended.add(req.rid)
        self.aborted.append(req.rid)

    def _publish(self, kind: str) -> None:
        if self.config["publish_events"]:
            events = self.tree.take_events()
            if events:
                self.published.append((kind, events))

    def _watch_admissions(self) -> None:
        """Note admissions, retractions and preemptions; SGLang keeps no record of them."""
        play = self
        sign = 1 if self.config["schedule_low_priority_values_first"] else -1

        class Adder(PrefillAdder):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.preempt_list = _Ordered(-sign)

            def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> Any:
                device = req.prefix_len
                result = super().add_one_req(req, *args, **kwargs)
                if self.can_run_list and self.can_run_list[-1] is req:
                    play.admitted.append((req, req.rid in play._ran))
                    play.loaded[req.rid] = req.prefix_len - device
                    play._ran.add(req.rid)
                return result

        self.real.get_prefill_adder_class = lambda: Adder
        enqueue = self.real._add_request_to_queue

        def watched(req: Req, is_retracted: bool = False) -> None:
            if req.rid in self._ran:
                (self.retracted if is_retracted else self.preempted).append(req.rid)
            enqueue(req, is_retracted)

        self.real._add_request_to_queue = watched


class _Ordered(list[Req]):
    """Preempted requests in the order in which they were taken.

    SGLang extends its list with a set of requests, whose order differs from run to run.
    """

    def __init__(self, sign: int) -> None:
        super().__init__()
        self._sign = sign

    def extend(self, taken: Any) -> None:
        def order(req: Req) -> tuple[int, float]:
            return req.priority * self._sign, -req.time_stats.wait_queue_entry_time

        super().extend(sorted(taken, key=order))
