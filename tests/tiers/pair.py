"""An engine with tiers and its model, driven alike and compared after everything that they do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from engines.building import engine_profile
from model.tiers import TieredModel
from model.vllm_config import RECORDED, Profile
from model.vllm_format import RequestSpec
from understudy import _core
from understudy.conformance.submit import blocks_of
from understudy.workload.scenario import ScenarioConfig, ScenarioRequest

if TYPE_CHECKING:
    from fractions import Fraction

    from model.tier_store import TierSettings
    from understudy.tokens import Identities


def gbps(bandwidth: Fraction | None) -> float:
    """Bytes per nanosecond are GB/s."""
    return math.inf if bandwidth is None else float(bandwidth)


def native(tiers: TierSettings) -> _core.TierConfig:
    """The engine's form of the model's settings."""
    free = _core.LinkPairConfig(down_gbps=math.inf, up_gbps=math.inf)
    below: dict[str, Any] = {
        f"g{tier}": _core.SharedTierConfig(
            num_blocks=blocks,
            worker=_core.LinkPairConfig(down_gbps=gbps(down), up_gbps=gbps(up)),
            backend=free,
        )
        for tier, blocks, down, up in tiers.below
    }
    return _core.TierConfig(
        bytes_per_block=tiers.block_bytes,
        g2_blocks=tiers.g2_blocks,
        host=_core.LinkPairConfig(
            down_gbps=gbps(tiers.down),
            up_gbps=gbps(tiers.up),
            down_fixed_ns=tiers.fixed_ns,
            up_fixed_ns=tiers.fixed_ns,
        ),
        offload_concurrency=tiers.concurrency,
        write_through=tiers.write_through,
        exclusive=tiers.exclusive,
        min_reuse=tiers.min_reuse,
        offload_batch_size=tiers.batch,
        onboard_preempted=tiers.onboard_preempted,
        recompute_fallback=tiers.ns_per_token is not None,
        **below,
    )


class TokenTiming:
    """A prompt takes as long as the tokens of it that are not cached."""

    def __init__(self, ns_per_token: int) -> None:
        self.ms_per_token = ns_per_token / 1e6

    def prefill_ms(self, requests: int, mean_input: int, mean_cached: int) -> float:
        return requests * (mean_input - mean_cached) * self.ms_per_token

    def decode_ms(self, *_: int) -> float:
        return 1.0


class TierPair:
    """Requests have numbers; a step is `begin` and, unless both sleep, `end`."""

    def __init__(self, config: dict[str, Any], tiers: TierSettings, profile: Profile = RECORDED) -> None:
        settings = msgspec.convert(config, ScenarioConfig)
        native_tiers = native(tiers)
        self.run = _core.TierRun(native_tiers, settings.block_size, True)
        self.engine = _core.VllmEngine(
            settings.engine_config(engine_profile(profile)),
            _core.python_timing(TokenTiming(tiers.ns_per_token or 0)),
            tiers=native_tiers,
            run=self.run,
        )
        self.model = TieredModel(config, profile, tiers)
        self.prompts: list[Identities] = []
        self.in_step = False
        self.now_ns = 0
        self.records: dict[int, _core.RequestRecord] = {}
        self.names: dict[int, int] = {}  # sequence hash -> the model's key
        self.stats: dict[str, int] = dict.fromkeys(("told", "parked", "held", "slept", "preempted"), 0)

    # --- what can be done to them -------------------------------------------------------------------------

    def add(self, prompt: list[int | list[int]], max_tokens: int, priority: int = 0) -> int:
        index, config = len(self.prompts), self.model.config
        spec = RequestSpec(
            id=f"r{index:04}", prompt=prompt, max_tokens=max_tokens, arrival_step=0, priority=priority
        )
        request = msgspec.convert(spec, ScenarioRequest)
        identities, _ = blocks_of(request.tokens(index, config.max_model_len), config.block_size)
        length = len(request.prompt_tokens())
        assert self.engine.never_fits(length, max_tokens) is None
        asked = _core.RequestSpec(
            index, spec["id"], length, max_tokens, identities, priority=priority, arrival_time=index
        )
        # The time is the model's: the step in progress has no end yet.
        self.engine.submit(asked, self.now_ns)
        self.prompts.append(identities)
        self.model.add(spec, index)
        return index

    def cancel(self, index: int) -> bool:
        ended = self.engine.cancel(index, self.now_ns).finished
        if ended:
            self.records[index] = ended[0]
            self.model.land(self.now_ns)
            self.model.cancel(f"r{index:04}")
        self.compare()
        return bool(ended)

    def prefetch(self, index: int, blocks: int) -> None:
        tokens = self.tokens[index]
        assert self.engine.prefetch(self.prompts[index][:blocks], self.now_ns) == self.model.prefetch(
            tokens, min(blocks, len(self.prompts[index])), self.now_ns
        )
        self.compare()

    @property
    def tokens(self) -> dict[int, list[int]]:
        model = self.model
        return {request.index: request.tokens for request in [*model.running, *model.waiting, *model.parked]}

    def land(self, now_ns: int) -> None:
        self.now_ns = max(self.now_ns, now_ns)
        self.engine.land(now_ns)
        self.model.land(now_ns)
        self.compare()

    def begin(self) -> bool:
        """Whether a step has begun."""
        self.engine.begin_recorded_step(self.now_ns)
        self.plan = self.model.begin(self.now_ns)
        assert self.engine.asleep == (self.plan is None)
        self.compare()
        if self.plan is None:
            self.stats["slept"] += 1
            return False
        plan = self.plan
        assert self.engine.scheduled == [(request.index, count) for request, count in plan.scheduled.items()]
        resumed = set(plan.resumed)
        assert self.engine.admitted == [
            (request.index, request in resumed, count) for request, count in plan.cached.items()
        ]
        assert self.engine.preempted == [request.index for request in plan.preempted]
        self.stats["preempted"] += len(plan.preempted)
        self.in_step = True
        return True

    def end(self, duration_ns: int) -> None:
        assert self.plan is not None
        self.in_step = False
        self.now_ns += duration_ns
        self.records |= {record.id: record for record in self.engine.end_recorded_step(self.now_ns).finished}
        self.model.end(self.plan, self.now_ns)
        self.compare()

    def drain(self) -> None:
        """Until nothing is left; then nothing is active, held or reserved, and every byte has arrived."""
        if self.in_step:
            self.end(10)
        for _ in range(5000):
            if self.engine.idle:
                break
            if self.begin():
                assert not self.engine.stuck
                self.end(500)
            else:
                self.wake()
        assert self.engine.idle
        while self.engine.wake_ns is not None:
            self.wake()
        free, active, inactive, held = self.engine.tier_blocks(_core.Tier.G1)
        assert (active, held, free + inactive) == (0, 0, self.model.config.num_blocks - 1)
        assert self.engine.tier_blocks(_core.Tier.G2)[1] == 0
        assert self.model.next_end() is None
        assert (self.model.held, self.model.host.reserved) == (0, 0)

    def wake(self) -> None:
        """Let time pass up to the next transfer's end."""
        wake = self.engine.wake_ns
        assert wake is not None
        self.land(max(wake, self.now_ns))

    # --- what is compared ---------------------------------------------------------------------------------

    def compare(self) -> None:
        engine, model = self.engine, self.model
        engine.check()
        self.run.check()
        assert engine.running == [request.index for request in model.running]
        assert engine.waiting_head(1000) == [request.index for request in model.waiting]
        assert engine.parked == len(model.parked)
        assert engine.free_blocks == model.pool.free_count()
        assert [block + 1 for block in engine.free_head(1000)] == model.pool.free_head(1000)
        assert engine.tier_blocks(_core.Tier.G1)[3] == model.held
        host = model.host
        unused = host.capacity - len(host.refs) - host.reserved
        active = len(host.refs) - len(host.idle) + host.reserved
        assert engine.tier_blocks(_core.Tier.G2) == (unused, active, len(host.idle), 0)
        totals = engine.tier_totals
        assert (totals.offloaded_blocks, totals.dropped_blocks) == (model.offloaded, model.dropped)
        assert (totals.onboarded_blocks, totals.slow_loads) == (model.onboarded, model.slow_loads)
        wake, end = engine.wake_ns, model.next_end()
        assert (wake is None) == (end is None)
        assert wake is None or end is None or wake <= end
        self.compare_events()
        for request in [*model.running, *model.waiting, *model.parked]:
            self.compare_lookup(request.index, request.tokens)
        self.stats["parked"] += len(model.parked)
        self.stats["held"] += model.held

    def compare_events(self) -> None:
        self.model.take_device_events()
        publishers = [(self.engine.take_all_events(), self.model.told)]
        for store in self.model.below:
            theirs = [event for event in self.model.told_below if event[1] == store.tier]
            publishers.append((self.run.take_events(_core.Tier(store.tier))[0], theirs))
        for batch, told in publishers:
            kinds = ["stored" if kind == 0 else "removed" for kind in batch.kinds.tolist()]
            assert list(zip(kinds, batch.tiers.tolist(), strict=True)) == [told_of[:2] for told_of in told]
            for name, (_, _, key) in zip(batch.sequence_hashes.tolist(), told, strict=True):
                assert self.names.setdefault(name, key) == key
            self.stats["told"] += len(told)
        assert len(set(self.names.values())) == len(self.names)
        self.model.told.clear()
        self.model.told_below.clear()

    def compare_lookup(self, index: int, tokens: list[int]) -> None:
        model = self.model
        count = len(tokens) // model.config.block_size
        theirs = []
        for key in model.keys_of(tokens, 0, count):
            place = model.locate(key)
            if place is None:
                break
            theirs.append((self._kind(key, place[0]), place[1]))
        ours = [row for row in self.engine.tier_lookup(self.prompts[index][:count]) if row[0] != "miss"]
        assert [(kind, tier) for kind, tier, _ in ours] == theirs
        assert all((ready_ns > 0) == (kind == "pending") for kind, _, ready_ns in ours)

    def _kind(self, key: int, how: str) -> str:
        """What a lookup answers: a time is known once the last transfer of the way is under way."""
        if how in ("device", "here"):
            return "hit"
        if how == "coming":
            return "retry" if self.model.landing.get(key) in self.model.queue else "pending"
        load = self.model.loading[key]
        return "pending" if load.phase == "loading" and load.joins == 0 else "retry"
