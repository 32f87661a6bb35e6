"""Schedule steps: admission by lifetime, prompts in chunks next to decodes, priorities.

A step has four phases: *schedule* allocates the blocks that it writes, *view* freezes them, the executor *runs*,
*apply* commits. An admitted request can always run to its end: it never waits for a block and is never preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.errors import InvalidArgument
from understudy.qwen3.plan import Plan
from understudy.qwen3.request import Output, Request
from understudy.qwen3.restores import Restores

if TYPE_CHECKING:
    from understudy.kv import KvCacheManager
    from understudy.qwen3.executor import Computed
    from understudy.qwen3.host import HostTier
    from understudy.qwen3.limits import SchedulerConfig


class Scheduler:
    """Owns the requests and their blocks. It computes nothing and reads no clock."""

    def __init__(
        self, manager: KvCacheManager, config: SchedulerConfig, *, seed: int = 0, host: HostTier | None = None
    ) -> None:
        self.manager = manager
        self.config = config
        self.seed = seed
        self.restores = None if host is None else Restores(host)
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self._suspects: list[Request] = []  # requests of a failed step; each runs alone next
        self._arrivals = 0

    # ── Requests ──

    def add(self, request: Request) -> Output | None:
        """Queue a request, or return its rejection if it can never run."""
        if any(request.id == other.id for other in self.live()):
            raise InvalidArgument(f"request {request.id!r} is already running or queued; choose another id")
        request.arrival = self._arrivals
        request.seed = (
            self.seed * 1_000_003 + self._arrivals if request.sampling.seed is None else request.sampling.seed
        )
        self._arrivals += 1
        if why := self.refusal(len(request.prompt), request.max_tokens):
            return Output(request.id, finish_reason="rejected", error=why)
        self._queue(request)
        return None

    def live(self) -> list[Request]:
        """List all requests that have not ended."""
        loading = [] if self.restores is None else self.restores.loading
        return self.waiting + loading + self.prefilling + self.decoding

    def cancel(self, request_id: str) -> bool:
        """End a request in any state; False when there is none. A current step then ignores it."""
        for request in self.live():
            if request.id == request_id:
                self._drop(request)
                return True
        return False

    @property
    def idle(self) -> bool:
        """Whether there are no requests."""
        return not self.live()

    # ── A step ──

    def schedule(self) -> Plan | None:
        """Schedule the next step with its views; None when there is nothing to compute. All or nothing."""
        if self.restores is not None:
            for request in self.restores.collect_loaded():
                self._queue(request)
        self._admit()
        plan = Plan()
        try:
            if self._suspects:
                self._schedule_suspect(plan)
            else:
                budget = self._schedule_decodes(plan)
                self._schedule_chunks(plan, budget)
        except BaseException:
            plan.revert()
            raise
        return plan if len(plan.step) else None

    def apply(self, plan: Plan, computed: Computed) -> list[Output]:
        """Commit the executor's results: append tokens to requests, and free the blocks of those that end."""
        outputs: list[Output] = []
        rows = zip(plan.requests, computed.tokens, computed.logprobs, strict=True)
        for row, (request, token, logprobs) in enumerate(rows):
            kv = request.kv
            if kv is None:  # cancelled while the step ran
                continue
            unfinished = row < len(plan.chunks) and kv.view_length < kv.prefill_target
            if row >= len(plan.chunks):
                kv.apply_decode(token)
            else:
                kv.apply_prefill(None if unfinished else token)
            if self.restores is not None:
                self.restores.offload(request)  # before it may end
            if unfinished:
                continue
            if row < len(plan.chunks):
                self.prefilling.remove(request)
                self.decoding.append(request)
            outputs.append(self._receive(request, token, logprobs))
        self._suspects = [request for request in self._suspects if request not in plan.requests]
        return outputs

    def predict_next(self, plan: Plan) -> Plan | None:
        """Predict the step after the current one, except its tokens, assuming that no request joins or ends.

        Allocates its blocks. None if more than the tokens is unknown.
        """
        if plan.chunks or self._suspects or not self._keeps_requests(plan):
            return None
        if any(len(request.output) + 2 > request.max_tokens for request in plan.decodes):
            return None
        return plan.build_next()

    def has_stop_token(self, plan: Plan, computed: Computed) -> bool:
        """Return whether a computed token ends its request."""
        rows = zip(plan.requests, computed.tokens, strict=True)
        return any(token in request.stop_ids for request, token in rows)

    def confirm(self, predicted: Plan, computed: Computed) -> bool:
        """Return whether the prediction is right after the previous step was computed; then set its tokens.

        No token is a stop token. The step may begin immediately; the previous one is applied meanwhile, and
        `schedule_confirmed` follows.
        """
        if self.restores is not None:
            for request in self.restores.collect_loaded():
                self._queue(request)
        if not self._keeps_requests(predicted):
            return False
        predicted.set_tokens(computed.tokens)
        return True

    def schedule_confirmed(self, confirmed: Plan) -> None:
        """Schedule the requests of a confirmed step, after the previous step was applied."""
        for request in confirmed.decodes:
            request.held.schedule_decode()

    def fail(self, plan: Plan, error: BaseException) -> list[Output]:
        """Roll back a failed step. Several requests are retried one by one, so that only the failing one ends."""
        plan.revert()
        affected = [request for request in plan.requests if request.kv is not None]
        if len(affected) > 1:
            self._suspects = affected
            return []
        for request in affected:
            self._drop(request)
        return [Output(request.id, finish_reason="error", error=str(error)) for request in affected]

    # ── Admission ──

    def refusal(self, prompt: int, output: int) -> str | None:
        """Return why a request of such lengths can never run; None if it can."""
        return self.config.refusal(self.manager, prompt, output)

    def _admit(self) -> None:
        """Admit requests in order while all their blocks fit next to the future blocks of active requests."""
        while self.waiting and len(self.prefilling) + len(self.decoding) < self.config.max_num_seqs:
            request = self.waiting[0]
            active = [other.kv for other in self.prefilling + self.decoding if other.kv is not None]
            room = self.manager.available_blocks - self.manager.future_blocks(active)
            needed = self.manager.lifetime_blocks(len(request.prompt), request.max_tokens)
            needed -= sum(map(len, request.holds))  # it already has these
            if needed > room:
                if active or self.restores is None or not self.restores.release_one(self.waiting[1:]):
                    return
                continue
            if self.restores is not None and self.restores.begin(request):
                self.waiting.pop(0)
                continue
            request.kv = self.manager.request(
                request.tokens,
                request.max_tokens,
                salt=request.salt,
                lora=request.lora,
            )
            request.cached_tokens = request.kv.match_prefix()
            request.release_holds()
            self.prefilling.append(self.waiting.pop(0))

    def _queue(self, request: Request) -> None:
        self.waiting.append(request)
        self.waiting.sort(key=lambda queued: (queued.priority, queued.arrival))

    def _keeps_requests(self, plan: Plan) -> bool:
        """Return whether all running requests are the decodes of `plan`, and no other can be admitted."""
        full = len(self.decoding) >= self.config.max_num_seqs
        # A rejected duplicate would move pages to another copy while an older view refers to them.
        keeps_pages = self.manager.blocks.duplicates == "allow"
        return (
            (full or not self.waiting)
            and not self.prefilling
            and plan.decodes == self.decoding
            and keeps_pages
        )

    # ── The parts of a plan ──

    def _schedule_decodes(self, plan: Plan) -> int:
        for request in self.decoding:
            plan.add_decode(request)
        return self.config.max_batched_tokens - len(self.decoding)

    def _schedule_chunks(self, plan: Plan, budget: int) -> None:
        for request in self.prefilling:
            if budget <= 0 or len(plan.chunks) == self.config.max_chunks:
                return
            budget -= plan.add_chunk(request, budget)

    def _schedule_suspect(self, plan: Plan) -> None:
        request = self._suspects[0]
        if request.prefilling:
            plan.add_chunk(request, self.config.max_batched_tokens)
        else:
            plan.add_decode(request)

    # ── Ends ──

    def _receive(self, request: Request, token: int, logprobs: object) -> Output:
        reason = None
        if token in request.stop_ids:
            reason = "stop"
        else:
            request.output.append(token)
            if request.chain is not None:
                request.chain.append(token)
            if len(request.output) == request.max_tokens:
                reason = "length"
        output = Output(
            request.id,
            token=None if reason == "stop" else token,
            logprobs=logprobs,  # type: ignore[arg-type]
            finish_reason=reason,  # type: ignore[arg-type]
            cached_tokens=request.cached_tokens,
        )
        if reason is not None:
            self._drop(request)
        return output

    def _drop(self, request: Request) -> None:
        if self.restores is not None:
            self.restores.drop(request)
        if request.kv is not None:
            request.kv.close()
            request.kv = None
        for queue in (self.waiting, self.prefilling, self.decoding, self._suspects):
            if request in queue:
                queue.remove(request)
