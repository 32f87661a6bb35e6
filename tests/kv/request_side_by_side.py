"""Requests next to their models on one manager: every call is made to both, and everything seen is compared."""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest

from kv.request_building import assert_idle, assert_sound, snapshot
from model import block_manager, request_kv
from understudy.errors import UnderstudyError
from understudy.kv import KvCacheManager, KvLayout, RequestKv, StepOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from model.side_by_side import DuplicatesName

PolicyName = Literal["lru", "lineage", "vllm"]
POLICIES: tuple[PolicyName, ...] = ("lru", "lineage", "vllm")
BLOCK = 4
MAX_REQUESTS = 5
WORDS = [(1, 2, 3), (1, 2, 4), (5,)]  # prompts repeat one of them, so that they share whole blocks
SALTS = [("", ""), ("", ""), ("", ""), ("tenant", ""), ("", "adapter")]


class Requests:
    """Operations take small numbers, so that a Hypothesis machine and a seeded driver can both drive them."""

    def __init__(
        self, num_blocks: int, policy: PolicyName, duplicates: DuplicatesName, *, prefix_caching: bool = True
    ) -> None:
        layout = KvLayout(page_size=BLOCK, num_layers=1, kv_heads=1, head_dim=1)
        self.manager = KvCacheManager(
            num_blocks, layout, policy=policy, duplicates=duplicates, prefix_caching=prefix_caching
        )
        self.pool = block_manager.BlockManager(
            num_blocks, policy, duplicates, reset_on_release=not prefix_caching
        )
        self.pool.allocate(1)  # padding
        self.names = request_kv.Names(BLOCK)
        self.pairs: list[tuple[RequestKv, request_kv.RequestKv]] = []

    # ── Requests come ──

    def new(self, word: int, length: int, max_output: int, salt: int) -> None:
        if len(self.pairs) == MAX_REQUESTS:
            self.close(0)
            self.pairs.pop(0)
        words = WORDS[word % len(WORDS)]
        tokens = [words[i % len(words)] for i in range(length)]
        name, lora = SALTS[salt % len(SALTS)]
        self.pairs.append(
            (
                self.manager.request(tokens, max_output, salt=name, lora=lora),
                request_kv.RequestKv(
                    self.pool,
                    self.names,
                    tokens,
                    max_output,
                    salt=name,
                    lora=lora,
                    caching=self.manager.prefix_caching,
                ),
            )
        )

    # ── Calls, good and bad ──

    def match_prefix(self, which: int) -> None:
        self.both(which, lambda kv: kv.match_prefix(), lambda kv: kv.match_prefix())

    def schedule_prefill(self, which: int, tokens: int) -> None:
        self.both(which, lambda kv: kv.schedule_prefill(tokens), lambda kv: kv.schedule_prefill(tokens))

    def schedule_decode(self, which: int) -> None:
        self.both(which, lambda kv: kv.schedule_decode(), lambda kv: kv.schedule_decode())

    def schedule_speculative(self, which: int, tokens: int) -> None:
        self.both(
            which, lambda kv: kv.schedule_speculative(tokens), lambda kv: kv.schedule_speculative(tokens)
        )

    def schedule_ahead(self, which: int) -> None:
        self.both(which, lambda kv: kv.schedule_ahead(), lambda kv: kv.schedule_ahead())

    def revert(self, which: int) -> None:
        self.both(which, lambda kv: kv.revert(), lambda kv: kv.revert())

    def apply_prefill(self, which: int, token: int | None) -> None:
        self.both(which, lambda kv: kv.apply_prefill(token), lambda kv: kv.apply_prefill(token))

    def apply_decode(self, which: int, token: int) -> None:
        self.both(which, lambda kv: kv.apply_decode(token), lambda kv: kv.apply_decode(token))

    def apply_speculative(self, which: int, accepted: list[int]) -> None:
        self.both(which, lambda kv: kv.apply_speculative(accepted), lambda kv: kv.apply_speculative(accepted))

    def preempt(self, which: int) -> None:
        self.both(which, lambda kv: kv.preempt(), lambda kv: kv.preempt())

    def close(self, which: int) -> None:
        self.both(which, lambda kv: kv.close(), lambda kv: kv.close())

    # ── Calls that move a request on ──

    def schedule_next(self, which: int, tokens: int) -> None:
        """What an engine would do: a chunk of what is left, or a decode, or some drafts."""
        if self.pairs:
            _, kv = self.pairs[which % len(self.pairs)]
            if kv.computed < kv.target:
                self.schedule_prefill(which, 1 + tokens % (kv.target - kv.computed))
            elif tokens % 3:
                self.schedule_decode(which)
            else:
                self.schedule_speculative(which, 1 + tokens)

    def apply_next(self, which: int, accepted: int) -> None:
        """Apply what is scheduled, rightly."""
        if self.pairs:
            _, kv = self.pairs[which % len(self.pairs)]
            match kv.state:
                case "prefill_scheduled":
                    last = kv.computed + kv.scheduled == kv.target
                    samples = last and kv.generated < kv.max_output
                    self.apply_prefill(which, self.sampled(kv, 1)[0] if samples else None)
                case "decode_scheduled":
                    self.apply_decode(which, self.sampled(kv, 1)[0])
                case "speculative_scheduled":
                    self.apply_speculative(which, self.sampled(kv, accepted % (kv.scheduled + 1)))

    def sampled(self, kv: request_kv.RequestKv, count: int) -> list[int]:
        """Equal prefixes say equal things."""
        return [(len(kv.tokens) + i) % 2 for i in range(count)]

    # ── Ends that nobody asked for, and the cache ──

    def drop(self, which: int) -> None:
        if self.pairs:
            _, kv = self.pairs.pop(which % len(self.pairs))
            leaks = bool(kv.blocks)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                del _
                gc.collect(0)
            assert [w.category for w in seen] == [ResourceWarning] * leaks
            kv.close()
            self.pool.counters["leaked_guards"] += leaks

    def clear_inactive(self) -> None:
        assert self.manager.blocks.clear_inactive() == self.pool.clear_inactive()

    # ── Comparing ──

    def both(
        self,
        which: int,
        call: Callable[[RequestKv], object],
        model_call: Callable[[request_kv.RequestKv], object],
    ) -> None:
        """The same result, or the same kind of error with nothing changed."""
        if not self.pairs:
            return
        real, model = self.pairs[which % len(self.pairs)]
        before = self.manager.blocks.store.dump(), snapshot(real)
        try:
            expected = model_call(model)
        except UnderstudyError as error:
            with pytest.raises(type(error)):
                call(real)
            assert (self.manager.blocks.store.dump(), snapshot(real)) == before
        else:
            result = call(real)
            if isinstance(result, StepOutcome):
                result = (result.blocks_registered, result.finished)
            elif isinstance(result, np.ndarray):
                result = result.tolist()
            assert result == expected

    def compare(self) -> None:
        for real, model in self.pairs:
            assert snapshot(real) == {
                "state": model.state,
                "block_size": BLOCK,
                "prompt_tokens": model.prompt,
                "prefill_target": model.target,
                "computed_tokens": model.computed,
                "cached_tokens": model.cached,
                "scheduled_tokens": model.scheduled,
                "generated_tokens": model.generated,
                "max_output_tokens": model.max_output,
                "finished": model.finished,
                "registered_blocks": model.registered,
                "held_blocks": len(model.blocks),
                "tokens": model.tokens,
            } | ({"view": real.view()} if model.scheduled else {})
            if model.scheduled:
                assert real.page_ids.tolist() == model.blocks[: len(model.blocks) - model.ahead]
        assert self.manager.blocks.metrics().as_dict() == self.pool.metrics()
        assert self.manager.blocks.eviction_order().tolist() == self.pool.order.order()
        assert_sound(self.manager, [real for real, _ in self.pairs], [model.ahead for _, model in self.pairs])
        self.pool.check()

    def finish(self) -> None:
        for real, model in self.pairs:
            real.close()
            model.close()
        self.compare()
        assert_idle(self.manager)
        self.manager.close()
