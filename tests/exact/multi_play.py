"""One instance with vLLM's MultiConnector: hand-offs and a host cache, and the host's part of its lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_offload.base import get_offload_block_hash

from exact.multi_worker import HostedWorker
from exact.offload import ALIGNMENT, TOKEN_BYTES, new_blocks
from exact.pd_play import Instance

if TYPE_CHECKING:
    from collections.abc import Iterable

    from exact.pd_network import Line, Network
    from exact.pd_worker import Worker
    from exact.play import Batch

HOST: Line = {
    "host_chunks": 64,
    "blocks_per_chunk": 1,
    "eviction_policy": "lru",
    "offload_prompt_only": True,
    "store_ticks": 0,
    "load_ticks": 1,
    "blocks_per_tick": None,
}
"""Defaults of a host."""


class HostedInstance(Instance):
    """One scheduler with two connectors in one."""

    always = (*Instance.always, "host_chunks", "host_ready")
    keys = (
        *Instance.keys,
        *("told", "loads", "stores", "store_failed", "evicted", "flush", "blocks", "posted"),
        *("jobs_done", "host_events", "host_chunks", "host_ready", "host_lru"),
    )

    def name_content(self, lines: Iterable[Line]) -> None:
        """Number the content of the host: by the device's events, or below 0 if they do not have it."""
        numbers = dict(self.play.names.numbers)
        unnamed = 0

        def number(hashes: list[Any]) -> list[int]:
            nonlocal unnamed
            for one in hashes:
                if one not in numbers:
                    unnamed -= 1
                    numbers[one] = unnamed
            return [numbers[one] for one in hashes]

        for line in lines:
            for described in (*line.get("loads", ()), *line.get("stores", ()), *line.get("host_events", ())):
                described["h"] = number(described["h"])
            for key in ("evicted", "host_lru"):
                if key in line:
                    line[key] = number(line[key])

    def _complete(self, side: Line) -> Line:
        complete = super()._complete(side)
        complete.setdefault("connector", "multi")
        complete["host"] = {**HOST, **side.get("host", {})}
        complete.setdefault("nixl_role", complete["kv_role"])
        complete.setdefault("host_role", "kv_both")
        return complete

    @property
    def _host_first(self) -> bool:
        return bool(self.side["connector"] == "multi_rev")

    def _transfer(self, config: Line) -> Any:
        side, host = self.side, self.side["host"]
        chunk_bytes = host["blocks_per_chunk"] * config["block_size"] * TOKEN_BYTES
        hand_offs = {
            "kv_connector": "NixlConnector",
            "kv_role": side["nixl_role"],
            "kv_buffer_device": "cuda",
            "kv_connector_extra_config": {"kv_lease_duration": side["kv_lease_duration"]},
        }
        offload = {
            "kv_connector": "OffloadingConnector",
            "kv_role": side["host_role"],
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": host["host_chunks"] * (-(-chunk_bytes // ALIGNMENT) * ALIGNMENT),
                "blocks_per_chunk": host["blocks_per_chunk"],
                "eviction_policy": host["eviction_policy"],
                "offload_prompt_only": host["offload_prompt_only"],
            },
        }
        children = [offload, hand_offs] if self._host_first else [hand_offs, offload]
        return KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role=side["kv_role"],
            kv_buffer_device="cuda",
            engine_id=self.name,
            kv_load_failure_policy=side["kv_load_failure_policy"],
            kv_connector_extra_config={"connectors": children},
        )

    def _make_worker(self, network: Network) -> Worker:
        self._hosted = HostedWorker(
            self.name, self.scheduler, network, self.side, host_first=self._host_first
        )
        return self._hosted

    def _hand_offs(self, whole: Any) -> Any:
        return whole.metadata[1 if self._host_first else 0]

    def _run(self, line: Line, batch: Batch, whole: Any) -> Any:
        self._describe_jobs(line, batch, whole.metadata[0 if self._host_first else 1])
        results, invalid, report = self._hosted.run_both(whole, batch.output.finished_req_ids)
        line["posted"] = list(self._hosted.copies.posted)
        return self._report(results, invalid, report)

    def _update(self, line: Line) -> None:
        report = self._queue[0][1].kv_connector_worker_meta
        if report is not None:
            line["jobs_done"] = list(report.metadata[0 if self._host_first else 1].completed_jobs)
        super()._update(line)
        line["finished"].sort(key=lambda one: one[1] == "error")  # vLLM ends requests that failed last

    def _describe_jobs(self, line: Line, batch: Batch, meta: Any) -> None:
        for kind, jobs in (("loads", meta.load_jobs), ("stores", meta.store_jobs)):
            asked = self._asked[kind]
            line[kind] = [
                self._job(number, job, keys, load=kind == "loads")
                for (number, job), keys in zip(jobs.items(), asked, strict=True)
            ]
            for number, keys in zip(jobs, asked, strict=True):
                self._offload._jobs[number].keys = keys  # vLLM's set has no order
            asked.clear()
        for job, table in zip(line["loads"], self._tables, strict=True):
            job["table"] = table
        self._tables.clear()
        line["flush"] = sorted(meta.jobs_to_flush or ())
        line["store_failed"], line["evicted"] = list(self._refused), list(self._evicted)
        line["told"] = [[name, [told.get(0, 0), told.get(1, 0)]] for name, told in self._told]
        for noted in (self._refused, self._evicted, self._told):
            noted.clear()
        line["blocks"] = new_blocks(batch)

    def _job(self, number: int, job: Any, keys: list[Any], *, load: bool) -> Line:
        device, host = (job.dst_spec, job.src_spec) if load else (job.src_spec, job.dst_spec)
        return {
            "job": number,
            "req": job.req_id,
            "chunks": [self._places[key] for key in keys],
            "h": [_hash(key) for key in keys],
            "gpu": [int(block) for block in device.block_ids],
            "host": [int(chunk) for chunk in host.block_ids],
        }

    def _describe_state(self, line: Line) -> None:
        super()._describe_state(line)
        line["host_events"] = [
            {"type": "stored" if isinstance(event, BlockStored) else "removed", "h": list(event.block_hashes)}
            for event in self.play.host_events
        ]
        self.play.host_events.clear()
        policy = self._offload.manager._policy
        line["host_chunks"] = len(policy.chunks)
        line["host_ready"] = sum(chunk.is_ready for chunk in policy.chunks.values())
        line["host_lru"] = [
            _hash(key) for key in sorted(policy._evictable, key=policy._ranks.__getitem__)[:8]
        ]

    def _observe(self) -> None:
        """Wrap the methods whose calls a recording shows."""
        both = self.scheduler.connector
        children = both._connectors
        hand_offs, offload = children[::-1] if self._host_first else children
        hand_offs.connector_scheduler._last_heartbeat_time = float("-inf")  # the clock starts at 0
        self._offload = offload.connector_scheduler
        assert self._offload.manager._num_chunks == self.side["host"]["host_chunks"]
        self._places: dict[Any, int] = {}
        self._asked: dict[str, list[list[Any]]] = {"loads": [], "stores": []}
        self._tables: list[list[int]] = []
        self._refused: list[str] = []
        self._evicted: list[Any] = []
        self._told: list[tuple[str, dict[int, int]]] = []
        self._answers: list[int | None] = []
        for place, child in enumerate(children):
            self._observe_child(place, child, is_host=child is offload)
        self._observe_manager()
        self._order_sets()
        look = both.get_num_new_matched_tokens

        def looked(request: Any, computed: int) -> Any:
            self._answers = []
            answer = look(request, computed)
            self._lookups.append([request.request_id, computed, answer[0], self._answers])
            return answer

        both.get_num_new_matched_tokens = looked

    def _observe_child(self, place: int, child: Any, *, is_host: bool) -> None:
        look, allocate = child.get_num_new_matched_tokens, child.update_state_after_alloc

        def looked(request: Any, computed: int) -> Any:
            answer = look(request, computed)
            self._answers.append(answer[0])
            return answer

        def allocated(request: Any, blocks: Any, external: int) -> Any:
            if is_host and external:
                self._tables.append([block.block_id for block in blocks.blocks[0]])
            if not self._told or self._told[-1][0] != request.request_id or place in self._told[-1][1]:
                self._told.append((request.request_id, {}))
            self._told[-1][1][place] = external
            return allocate(request, blocks, external)

        child.get_num_new_matched_tokens, child.update_state_after_alloc = looked, allocated

    def _observe_manager(self) -> None:
        manager = self._offload.manager
        store, load = manager.prepare_store, manager.prepare_load

        def note_places(name: str) -> None:
            (group,) = self._offload._req_status[name].group_states
            self._places.update((key, place) for place, key in enumerate(group.offload_keys))

        def stored(keys: Any, context: Any) -> Any:
            note_places(context.req_id)
            answer = store(keys, context)
            if answer is None:
                self._refused.append(context.req_id)
                return answer
            self._evicted += [_hash(key) for key in answer.evicted_keys]
            if answer.keys_to_store:
                self._asked["stores"].append(list(answer.keys_to_store))
            return answer

        def loaded(keys: Any, context: Any) -> Any:
            note_places(context.req_id)
            self._asked["loads"].append(list(keys))
            return load(keys, context)

        manager.prepare_store, manager.prepare_load = stored, loaded

    def _order_sets(self) -> None:
        """Give vLLM's sets of requests the scenario's order."""
        offload, scheduler = self._offload, self.scheduler
        build, finish = offload.build_connector_meta, scheduler.finish_requests

        def built(output: Any) -> Any:
            names = output.finished_req_ids
            output.finished_req_ids = dict.fromkeys(self._in_order(names or ()))
            meta = build(output)
            output.finished_req_ids = names
            return meta

        def finished(names: Any, status: Any) -> list[Any]:
            ids = [names] if isinstance(names, str) else self._in_order(names)
            return [request for name in ids for request in finish(name, status)]

        offload.build_connector_meta = built
        scheduler.finish_requests = finished


def _hash(key: Any) -> Any:
    return maybe_convert_block_hash(get_offload_block_hash(key))
