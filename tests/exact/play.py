"""Drive vLLM's own scheduler: add and abort requests, schedule, and update with the tokens of a scenario."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from exact.real import complete, real_scheduler
from exact.wire import EventNames
from model.vllm_format import expand_prompt, output_token

if TYPE_CHECKING:
    from pathlib import Path

    from model.vllm_format import KvEvent

EOS = 2
DRAFT = 7
"""Token id of every draft; the scheduler does not read it."""


@dataclass(frozen=True)
class Batch:
    """A schedule: vLLM's output, admissions, and whether each request samples."""

    output: Any
    samples: dict[str, bool]
    new: list[str]
    resumed: list[str]
    preempted: list[str]
    cached: dict[str, int]
    free_blocks: int

    @property
    def scheduled(self) -> dict[str, int]:
        """Tokens of each request, in the order of the schedule."""
        return dict(self.output.num_scheduled_tokens)

    @property
    def drafts(self) -> dict[str, int]:
        """Number of drafts of each request that has some."""
        drafts = self.output.scheduled_spec_decode_tokens
        return {name: len(drafts[name]) for name in self.scheduled if drafts.get(name)}


class Play:
    """One scenario on a new scheduler."""

    def __init__(self, scenario: dict[str, Any], model: Path, transfer: Any = None) -> None:
        self.scenario = scenario
        self.config = complete(scenario)
        self.k = scenario.get("k", 0)
        self.scheduler = real_scheduler(
            self.config, model, method=scenario.get("method"), k=self.k, transfer=transfer
        )
        self.scheduler.kv_event_publisher = self
        self.requests: dict[str, Any] = {}
        self.names = EventNames(self.config["block_size"])
        self.host_events: list[Any] = []
        self._events: list[Any] = []
        self._index = {request["id"]: i for i, request in enumerate(scenario["requests"])}
        self._preempted: list[str] = []
        self._hasher = self._make_hasher()
        self._watch_preemptions()

    @property
    def pool(self) -> Any:
        """The scheduler's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def waiting(self) -> list[str]:
        """Ids of waiting requests; those that hold blocks, or were passed over, come first."""
        queues = ("kv_holding_waiting", "skipped_waiting", "waiting")  # some releases lack some of them
        return [r.request_id for name in queues for r in getattr(self.scheduler, name, ())]

    @property
    def running(self) -> list[str]:
        """Ids of running requests, in order."""
        return [request.request_id for request in self.scheduler.running]

    def publish(self, batch: Any) -> None:
        """Keep the events of an update, in place of vLLM's publisher."""
        self._events.extend(batch.events)

    def take_events(self) -> list[KvEvent]:
        """Return the GPU's events since the last call, as recordings write them."""
        self.host_events += [event for event in self._events if getattr(event, "medium", None) == "CPU"]
        events = self.names.named(self._events)
        self._events.clear()
        return events

    def take_raw_events(self) -> list[Any]:
        """Take vLLM's own events since the last call."""
        events, self._events = self._events, []
        return events

    def hash_with(self, make: Any, block_size: int) -> None:
        """Hash the requests to come in blocks of another size."""
        if self._hasher is not None:
            self._hasher = make(block_size, sha256)

    def add(self, spec: dict[str, Any], transfer: dict[str, Any] | None = None) -> None:
        """Submit a request; `transfer` are its `kv_transfer_params`."""
        sampling = SamplingParams(
            max_tokens=spec["max_tokens"],
            ignore_eos=spec.get("eos_at") is None,
            temperature=0,
            extra_args=None if transfer is None else {"kv_transfer_params": dict(transfer)},
        )
        if spec.get("eos_at") is not None:
            sampling._eos_token_id = EOS
        lora = spec.get("lora", 0)
        request = Request(
            request_id=spec["id"],
            prompt_token_ids=expand_prompt(spec["prompt"]),
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=spec.get("arrival_time", float(self._index[spec["id"]])),
            priority=spec.get("priority", 0),
            lora_request=LoRARequest(str(lora), lora, "unused") if lora else None,
            block_hasher=self._hasher,
        )
        self.requests[spec["id"]] = request
        self.scheduler.add_request(request)

    def abort(self, name: str) -> bool:
        """Abort a request; return whether it was still in the scheduler."""
        if name not in self.requests or self.requests[name].is_finished():
            return False
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        return True

    def abort_due(self, step: int, when: str) -> list[str]:
        """Apply the scenario's aborts of a step."""
        return [
            abort["id"]
            for abort in self.scenario.get("aborts") or ()
            if (abort["step"], abort["when"]) == (step, when) and self.abort(abort["id"])
        ]

    def schedule(self) -> Batch:
        """Call the scheduler once."""
        before = {name: request.status for name, request in self.requests.items()}
        loaded = {n for n, status in before.items() if status == RequestStatus.WAITING_FOR_REMOTE_KVS}
        self._preempted.clear()
        output = self.scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        resumed = [
            n for n in scheduled if before[n] == RequestStatus.PREEMPTED or (n in loaded and self._ran(n))
        ]
        new = [
            n for n in scheduled if (before[n] == RequestStatus.WAITING or n in loaded) and n not in resumed
        ]
        return Batch(
            output=output,
            samples={name: not self.requests[name].is_prefill_chunk for name in scheduled},
            new=new,
            resumed=resumed,
            preempted=list(self._preempted),
            cached={n: self.requests[n].num_computed_tokens - scheduled[n] for n in new + resumed},
            free_blocks=self.pool.get_num_free_blocks(),
        )

    def update(self, batch: Batch, connector: Any = None) -> list[Any]:
        """Give the batch its tokens and drafts; return vLLM's outputs, in order."""
        names = list(batch.output.num_scheduled_tokens)
        said = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[self._tokens(name, batch) if batch.samples[name] else [] for name in names],
            kv_connector_output=connector,
        )
        answers = self.scheduler.update_from_output(batch.output, said)
        if self.k and not self.config["async_scheduling"]:
            drafts = [[DRAFT] * self.k if batch.samples[name] else [] for name in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        return [answer for part in answers.values() for answer in part.outputs]

    def _ran(self, name: str) -> bool:
        return bool(self.requests[name].num_preemptions)

    def _tokens(self, name: str, batch: Batch) -> list[int]:
        """Return the sampled token, ahead of it the accepted drafts; blank drafts of an admission are never right."""
        spec = self.scenario["requests"][self._index[name]]
        first = self.requests[name].num_output_tokens
        drafts = 0 if name in batch.cached else batch.drafts.get(name, 0)
        accepted = min(spec["accept"][first % len(spec["accept"])], drafts) if drafts else 0
        return [
            EOS if spec.get("eos_at") == place + 1 else output_token(self._index[name], place)
            for place in range(first, first + accepted + 1)
        ]

    def _make_hasher(self) -> Any:
        if not self.config["enable_prefix_caching"] and self.scheduler.connector is None:
            return None
        settings: dict[str, Any] = {}
        if "num_hash_lookahead_tokens" in inspect.signature(get_request_block_hasher).parameters:
            settings["num_hash_lookahead_tokens"] = self.scheduler.num_hash_lookahead_tokens
        return get_request_block_hasher(self.config["block_size"], sha256, **settings)

    def _watch_preemptions(self) -> None:
        preempt = self.scheduler._preempt_request  # vLLM's set of victims has no order

        def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._preempted.append(request.request_id)
            return preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = noted
