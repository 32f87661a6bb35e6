"""One instance of a prefill/decode pair: vLLM's scheduler and the worker side of its connector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from exact.pd_worker import SIDE, Worker, transfer_config
from exact.play import Play
from exact.real import complete

if TYPE_CHECKING:
    from pathlib import Path

    from exact.pd_network import Line, Network
    from exact.play import Batch

ALWAYS = ("i", "tick", "step", "free_after_schedule", "free_blocks", "deferred")
KEYS = (
    *("i", "tick", "step", "aborted", "free_after_schedule", "recv", "to_send", "heartbeat", "in_batch"),
    *("not_processed", "notified", "expired", "leases", "scheduled", "new", "preempted", "resumed", "cached"),
    *("reads", "registered", "notify_only", "lookups", "finished", "handoff", "recved", "failed", "sent"),
    *("invalid", "running", "holding", "waiting", "loading", "held", "free_blocks", "free_head", "deferred"),
    "kv_events",
)
"""Keys of a line, in order; those without a value are left out, except the ones above."""


class Instance:
    """One scheduler with its worker, its queue of batches, and the lines that it writes."""

    keys: tuple[str, ...] = (*KEYS, "reset")
    always: tuple[str, ...] = (*ALWAYS, "reset")

    def __init__(self, name: str, scenario: Line, model: Path, network: Network) -> None:
        self.name = name
        self.side = self._complete(scenario[name]["side"])
        self._push = scenario.get("mode") == "push"
        config = scenario[name]["config"]
        self.play = Play(
            {"config": config, "requests": scenario["requests"]},
            model,
            self._transfer(complete({"config": config})),
        )
        self.scheduler = self.play.scheduler
        self.worker = self._make_worker(network)
        self.steps = 0
        self._resets = sorted(r["tick"] for r in scenario.get("resets") or () if r["side"] == name)
        self._aborts = [abort for abort in scenario.get("aborts") or () if abort["side"] == name]
        self._order = {spec["id"]: place for place, spec in enumerate(scenario["requests"])}
        self._queue: list[tuple[Batch, Any]] = []
        self._lookups: list[list[Any]] = []
        self._observe()

    @property
    def has_work(self) -> bool:
        """Whether the engine's loop goes on."""
        return bool(self._queue or self.scheduler.has_requests())

    def iterates(self, tick: int) -> bool:
        """Whether the instance iterates in a tick."""
        stalled = any(first <= tick < last for first, last in self.side["stall"])
        due = any(reset <= tick for reset in self._resets)
        return tick % self.side["every"] == 0 and not stalled and (self.has_work or due)

    def iterate(self, tick: int) -> Line:
        """Run an iteration of the engine's loop and return its line."""
        line: Line = {"i": self.name, "tick": tick, "step": None}
        if any(reset <= tick for reset in self._resets):
            self._resets = [reset for reset in self._resets if reset > tick]
            line["reset"] = self.scheduler.reset_prefix_cache(reset_connector=True)
        line["aborted"] = self._abort(tick, "before")
        scheduled = False
        if self.scheduler.has_requests():
            line["step"] = self.steps
            self.steps += 1
            scheduled = self._schedule(line)
            full = len(self._queue) > 1 or not self.play.config["async_scheduling"]
        else:
            full = True
        line["aborted"] += self._abort(tick, "mid")
        if self._queue and (full or not (scheduled or self.scheduler.has_requests())):
            self._update(line)
        self._describe_state(line)
        return {key: line[key] for key in self.keys if key in line and (line[key] or key in self.always)}

    def _schedule(self, line: Line) -> bool:
        """Schedule, run the worker and queue the batch; return whether tokens were scheduled."""
        self._lookups = line["lookups"] = []
        batch = self.play.schedule()
        whole = batch.output.kv_connector_metadata
        meta = self._hand_offs(whole)
        line["free_after_schedule"] = batch.free_blocks
        line["scheduled"], line["cached"] = batch.scheduled, batch.cached
        line["new"], line["resumed"], line["preempted"] = batch.new, batch.resumed, batch.preempted
        line["recv"] = [
            {
                "req": name,
                "local": _flat(request.local_block_ids),
                "remote": _flat(request.remote.block_ids),
                "await": request.awaiting_kvs,
            }
            for name, request in meta.reqs_to_recv.items()
        ]
        line["to_send"] = dict(meta.reqs_to_send)
        line["in_batch"] = self._in_order(meta.reqs_in_batch)
        line["not_processed"] = self._in_order(meta.reqs_not_processed)
        beats = [name for info in meta.heartbeat_by_engine.values() for name in info.req_ids]
        line["heartbeat"] = self._in_order(beats)
        output = self._run(line, batch, whole)
        agent, real = self.worker.agent, self.worker.real
        line["reads"], line["notify_only"] = list(agent.posted), list(agent.notified)
        line["registered"], line["notified"] = list(agent.registered), list(agent.received)
        line["expired"] = self._in_order(self.worker.expired)
        line["leases"] = dict(real._reqs_to_send)
        self._queue.append((batch, output))
        return bool(batch.scheduled)

    def _run(self, _line: Line, _batch: Batch, whole: Any) -> Any:
        """Run the worker's part of an iteration and return its report."""
        results = self.worker.run(whole)
        return self._report(results, self.worker.real.get_block_ids_with_load_errors())

    def _report(self, results: Any, invalid: Any, meta: Any = None) -> Any:
        return KVConnectorOutput(
            finished_sending=self._in_order(results.finished_sending) or None,
            finished_recving=self._in_order(results.finished_recving) or None,
            failed_recving=self._in_order(results.failed_recving),
            invalid_block_ids=invalid,
            kv_connector_worker_meta=meta,
        )

    def _update(self, line: Line) -> None:
        batch, output = self._queue.pop(0)
        answers = self.play.update(batch, output)
        line["sent"], line["recved"] = output.finished_sending, output.finished_recving
        line["failed"], line["invalid"] = output.failed_recving, sorted(output.invalid_block_ids)
        ended = [answer for answer in answers if answer.finish_reason is not None]
        line["finished"] = [[answer.request_id, str(answer.finish_reason)] for answer in ended]
        self.handed = {a.request_id: a.kv_transfer_params for a in ended if a.kv_transfer_params}
        line["handoff"] = {
            name: {
                "blocks": _flat(params["remote_block_ids"]),
                "tokens": params["remote_num_tokens"],
                "cached": params["remote_prefill_cached_tokens"],
            }
            for name, params in self.handed.items()
        }

    def _describe_state(self, line: Line) -> None:
        scheduler, pool = self.scheduler, self.play.pool
        holding = list(scheduler.kv_holding_waiting)
        loading = [r for r in holding if r.status == RequestStatus.WAITING_FOR_REMOTE_KVS]
        line["running"] = self.play.running
        line["holding"] = [request.request_id for request in holding]
        line["waiting"] = [request.request_id for request in scheduler.waiting]
        line["loading"] = [request.request_id for request in loading]
        line["held"] = [name for name, request in scheduler.requests.items() if request.is_finished()]
        line["free_blocks"] = pool.get_num_free_blocks()
        line["free_head"] = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()[:4]]
        line["deferred"] = sum(len(blocks) for _, blocks in scheduler.deferred_frees)
        line["kv_events"] = self.play.take_events()

    def _abort(self, tick: int, when: str) -> list[list[str]]:
        """Apply the scenario's aborts of a moment; return the requests and their status before."""
        aborted = []
        for abort in self._aborts:
            request = self.play.requests.get(abort["id"])
            if (abort["tick"], abort["when"]) != (tick, when) or request is None or request.is_finished():
                continue
            aborted.append([abort["id"], request.status.name])
            self.play.abort(abort["id"])
        return aborted

    def _in_order(self, names: Any) -> list[str]:
        """Sort by the scenario's list; vLLM has sets, which have no order."""
        return sorted(names, key=self._order.__getitem__)

    def _complete(self, side: Line) -> Line:
        """Add the defaults of an instance's settings."""
        return {**SIDE[self.name], **side}

    def _transfer(self, _config: Line) -> Any:
        """Build vLLM's settings of the connector."""
        return transfer_config(self.name, self.side, push=self._push)

    def _make_worker(self, network: Network) -> Worker:
        """Build the worker side of the connector."""
        return Worker(self.name, self.scheduler, network, push=self._push)

    def _hand_offs(self, whole: Any) -> Any:
        """Return the part of a schedule's metadata that hand-offs read."""
        return whole

    def _observe(self) -> None:
        """Note every lookup, and end failed requests in the scenario's order."""
        side, scheduler = self.scheduler.connector.connector_scheduler, self.scheduler
        side._last_heartbeat_time = float("-inf")  # the clock starts at 0, unlike a machine's
        look, finish = side.get_num_new_matched_tokens, scheduler.finish_requests

        def looked(request: Any, computed: int) -> Any:
            answer = look(request, computed)
            self._lookups.append([request.request_id, computed, answer[0]])
            return answer

        def finished(names: Any, status: Any) -> list[Any]:
            ids = [names] if isinstance(names, str) else self._in_order(names)
            return [request for name in ids for request in finish(name, status)]

        side.get_num_new_matched_tokens = looked
        scheduler.finish_requests = finished


def _flat(groups: Any) -> list[int]:
    """Return the blocks of the only group, or none."""
    return list(groups[0]) if groups else []
