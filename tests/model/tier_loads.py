"""Loads up to the device: where blocks are found, who waits for them, and what happens when somebody leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .tier_copies import CopiesDown
from .tier_store import Load, Park, Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .vllm_blocks import Block
    from .vllm_requests import Request


Outcome = Literal["miss", "slow", "retry", "parked"]
"""Of looking below the device; slow: there is something, and computing it is sooner."""


class LoadsUp(CopiesDown):
    """The other half: `onboard` and `prefetch` start loads, `resume` puts loaded requests back in their places."""

    def locate(self, key: int) -> tuple[str, int] | None:
        """(device, loading, here or coming; tier)"""
        if key in self.pool.index:
            return "device", 1
        if key in self.loading:
            load = self.loading[key]
            return "loading", load.tiers[load.keys.index(key)]
        if key in self.host.refs:
            return "here", 2
        if key in self.landing:
            return "coming", 2
        for how in ("here", "coming"):
            for store in self.below:
                if key in (store.refs if how == "here" else store.coming):
                    return how, store.tier
        return None

    def keys_of(self, tokens: Sequence[int], first: int, end: int) -> list[int]:
        """Of the blocks first … end − 1, as far as they ever existed."""
        keys: list[int] = []
        key: int | None = None
        for position in range(end):
            key = self.pool.contents.get((key, self.pool._block_tokens(tokens, position)))
            if key is None:
                break
            keys.append(key)
        return keys[first:]

    def onboard(self, request: Request, hits: list[Block]) -> Outcome:
        limit = (len(request.tokens) - 1) // self.config.block_size
        if len(hits) == limit or request in self.tried:
            return "miss"
        if request.status == "preempted" and not self.tiers.onboard_preempted:
            return "miss"
        keys = self.keys_of(request.tokens, len(hits), limit)
        outcome, park = self.bring(request, hits, keys)
        if park is not None:
            self.waiting.pop(0)
            self.parked.append(request)
            self.was[request] = "preempted" if request.status == "preempted" else "new"
            self.tried.add(request)
            self.resume()
        return outcome

    def prefetch(self, tokens: Sequence[int], blocks: int, now_ns: int) -> bool:
        self.land(now_ns)
        keys = self.keys_of(tokens, 0, blocks)
        hits = []
        for key in keys:
            if key not in self.pool.index:
                break
            hits.append(next(iter(self.pool.index[key].values())))
        outcome, _ = self.bring(None, hits, keys[len(hits) :])
        return outcome == "parked"

    def bring(
        self, request: Request | None, hits: list[Block], keys: list[int]
    ) -> tuple[Outcome, Park | None]:
        """Start loading the run of `keys` that follows `hits`."""
        plan: list[tuple[int, str, int]] = []
        for key in keys:
            place = self.locate(key)
            if place is None:
                break
            plan.append((key, *place))
        if plan and request is not None and self.tiers.ns_per_token is not None:
            self.cut_what_is_computed_sooner(plan)
            if not plan:
                return "slow", None
        while plan and plan[-1][1] == "device":
            plan.pop()
        if not plan:
            return "miss", None
        self.pool.take_hits(hits)
        pins = self.pin(plan)

        def undo() -> None:
            self.unpin(plan, pins)
            self.pool.release(hits)

        def without_staging() -> int:
            cut = staged.index(True)
            while cut > 0 and plan[cut - 1][1] == "device":
                cut -= 1
            self.unpin(plan[cut:], pins[cut:])
            return cut

        staged = [how in ("here", "coming") and tier > 2 for _, how, tier in plan]
        if request is None and sum(staged) > self.host.available():  # it evicts nothing in vain
            cut = without_staging()
            plan, pins, staged = plan[:cut], pins[:cut], []
            if not plan:
                self.pool.release(hits)
                return "miss", None
        to = self.take(request, sum(how in ("here", "coming") for _, how, _ in plan))
        if isinstance(to, str):
            undo()
            return ("retry" if to == "wait" else "miss"), None
        if any(staged) and not self.host.reserve(sum(staged)):
            cut = without_staging()
            plan, pins = plan[:cut], pins[:cut]
            needed = sum(how in ("here", "coming") for _, how, _ in plan)
            self.give_back(to[needed:])
            to = to[:needed]
            if not plan:
                self.pool.release(hits)
                return "miss", None

        held = hits + [pin for pin in pins if pin is not None]
        loads: list[Load] = []
        load = Load(to=to, pins=held, wanted=request is None) if to else None
        for key, how, tier in plan:
            if how == "loading" and self.loading[key] not in loads:
                loads.append(self.loading[key])
            if how in ("here", "coming"):
                assert load is not None
                load.keys.append(key)
                load.tiers.append(tier)
        if load is not None:
            load.eta_ns = self.eta_ns(plan)
            for joined in loads:
                joined.followers.append(load)
            load.joins = len(loads)
            load.joined = [key for key, how, _ in plan if how == "loading"]
            loads = [load]
            self.onboarded += len(load.keys)
            self.loading |= dict.fromkeys(load.keys, load)
            for key, how, tier in plan:
                if how == "coming":
                    load.pending += 1
                    if tier == 2:
                        self.landing[key].loads.append((load, key))
                    else:
                        self.store_of(tier).coming[key].append((load, key))
        park = None
        if request is not None:
            park = Park(request, len(loads), len(hits), [tier for _, _, tier in plan], self.now_ns)
            park.loads = loads
            park.pins = [] if load is not None else held
            self.parks[request] = park
            for one in loads:
                one.waiters.append(park)
        elif load is None:
            self.pool.release(held)
        if load is not None:
            load.pending += 1
            self.next_phase(load)
            self.land(self.now_ns)
        return "parked", park

    def cut_what_is_computed_sooner(self, plan: list[tuple[int, str, int]]) -> None:
        """From its end, tier by tier, until what is left arrives before it could be computed."""
        assert self.tiers.ns_per_token is not None
        block_ns = self.tiers.ns_per_token * self.config.block_size
        while plan and self.eta_ns(plan) - self.now_ns >= len(plan) * block_ns:
            tier = plan[-1][2]
            while plan and plan[-1][2] == tier:
                plan.pop()

    def eta_ns(self, plan: Sequence[tuple[int, str, int]]) -> int:
        """When all of it would be on the device: what is below the host goes there first, then all of it up."""
        from_below = [(key, how, tier) for key, how, tier in plan if how in ("here", "coming")]
        joined_ns = max(
            [self.now_ns, *(self.loading[key].eta_ns for key, how, _ in plan if how == "loading")]
        )
        if not from_below:
            return joined_ns
        there_ns = self.now_ns
        for key, how, tier in from_below:
            if how == "coming":
                eta_ns = self.landing[key].eta_ns if tier == 2 else self.store_of(tier).coming_eta_ns[key]
                there_ns = max(there_ns, eta_ns)
        staged_ns = 0
        for store_tier, _, _, up in self.tiers.below:
            blocks = sum(tier == store_tier for _, _, tier in from_below)
            staged_ns = max(staged_ns, self.flow_ns(up, blocks, 1))
        up_ns = self.tiers.fixed_ns + self.flow_ns(self.tiers.up, len(from_below), 1 + self.loading_now)
        return max(joined_ns, there_ns + staged_ns + up_ns)

    def store_of(self, tier: int) -> Store:
        return next(store for store in [self.host, *self.below] if store.tier == tier)

    def pin(self, plan: Sequence[tuple[int, str, int]]) -> list[Block | None]:
        pins: list[Block | None] = []
        for key, how, tier in plan:
            pins.append(next(iter(self.pool.index[key].values())) if how == "device" else None)
            if how == "device":
                self.pool.take_hits([b for b in pins[-1:] if b is not None])
            elif how == "here":
                self.store_of(tier).hold(key)
        return pins

    def unpin(self, plan: Sequence[tuple[int, str, int]], pins: Sequence[Block | None]) -> None:
        for (key, how, tier), block in reversed(list(zip(plan, pins, strict=True))):
            if block is not None:
                self.pool.release([block])
            elif how == "here":
                self.store_of(tier).drop([key])

    def next_phase(self, load: Load) -> None:
        """One thing less to wait for."""
        load.pending -= 1
        if load.pending > 0:
            return
        if load.phase == "landing":
            self.stage(load)
        elif load.phase == "staging":
            self.bring_up(load)
        else:
            self.finish(load)

    def stage(self, load: Load) -> None:
        """Everything is on its tier: what is below the host goes there first."""
        if self.unwanted(load):
            self.host.reserved -= sum(tier > 2 for tier in load.tiers)
            for key, tier in zip(load.keys, load.tiers, strict=True):
                self.store_of(tier).drop([key])
            self.abandon(load)
            return
        load.phase = "staging"
        load.pending = 1
        for number, store in enumerate(self.below):
            blocks = load.tiers.count(store.tier)
            if blocks:
                load.pending += 1
                self.start((3 + 2 * number,), blocks, lambda: self.next_phase(load))
        self.next_phase(load)

    def bring_up(self, load: Load) -> None:
        """Everything is on the host."""
        for store in self.below:
            keys = [key for key, tier in zip(load.keys, load.tiers, strict=True) if tier == store.tier]
            for key in keys:
                self.host.store(key)
            store.drop(keys)
        load.phase = "loading"
        if self.unwanted(load):
            for key in load.keys:
                self.host.drop([key])
            self.abandon(load)
            return
        load.pending = load.joins + 1
        self.loading_now += 1
        self.start((1,), len(load.keys), lambda: self.loaded(load))

    def loaded(self, load: Load) -> None:
        """Its own transfer has ended; it may still wait for those that it joined."""
        self.loading_now -= 1
        self.next_phase(load)

    def unwanted(self, load: Load) -> bool:
        return not (load.wanted or load.waiters or load.followers)

    def abandon(self, load: Load) -> None:
        self.onboarded -= len(load.keys)
        self.give_back(load.to)
        for other in self.loading.values():
            if load in other.followers:
                other.followers.remove(load)
        self.end_load(load)

    def finish(self, load: Load) -> None:
        come = list(zip(load.keys, load.to, strict=True))
        fresh = [(key, block) for key, block in come if key not in self.pool.index]
        self.give_back([block for key, block in come if key in self.pool.index])
        self.take_device_events()
        for key, block in fresh:
            block.key = key
            self.pool.index.setdefault(key, {})[block.id] = block
            self.told.append(("stored", 1, key))
        self.pool.release([block for _, block in fresh])
        if self.tiers.exclusive:
            self.host.leaving |= set(load.keys)
        self.host.drop(load.keys)
        self.end_load(load)

    def end_load(self, load: Load) -> None:
        for key in load.keys:
            del self.loading[key]
        self.pool.release(load.pins)
        for park in load.waiters:
            park.pending -= 1
            if park.pending == 0:
                park.parked_ns = self.now_ns - park.since_ns
                self.pool.release(park.pins)
                self.ready.append(park.request)
        for follower in load.followers:
            # Parents stay until what follows them is there.
            for key in follower.joined:
                if key in load.keys:
                    block = next(iter(self.pool.index[key].values()))
                    self.pool.take_hits([block])
                    follower.pins.append(block)
            follower.joins -= 1
            if follower.phase == "loading":
                self.next_phase(follower)

    def resume(self) -> None:
        """Those whose blocks have come take their places again."""
        for request in self.ready:
            self.parked.remove(request)
            if self.config.policy == "priority" or self.was[request] == "preempted":
                self._enqueue(request)
                continue
            later = [
                i for i, r in enumerate(self.waiting) if r.status != "preempted" and r.index > request.index
            ]
            self.waiting.insert(later[0] if later else len(self.waiting), request)
        self.ready = []
