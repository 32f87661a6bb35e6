"""Measure the engine relative to the device's limits: the tables of `understudy qwen3 bench`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from understudy.kv import KvView
from understudy.qwen3.batch import Batch, Chunk, Decode
from understudy.qwen3.executor import TorchExecutor
from understudy.qwen3.forward import forward
from understudy.qwen3.host import HostTier
from understudy.qwen3.pages import PinnedPages
from understudy.qwen3.request import Request
from understudy.tokens import TokenBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from understudy.qwen3.config import Qwen3Config
    from understudy.qwen3.engine import Engine


BATCHES = (1, 8, 64, 256)
PREFILLS = (2048, 8192, 16384)
ROWS = len(BATCHES) + len(PREFILLS) + 3
"""Number of rows of `Bench.rows`."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row: a measurement in ms, and the baseline that it is compared with."""

    what: str
    ms: float
    baseline: str
    baseline_ms: float

    @property
    def ratio(self) -> float:
        """The measurement divided by the baseline."""
        return self.ms / self.baseline_ms


class Bench:
    """Measure an engine on CUDA by submitting requests; nothing else may use the engine meanwhile."""

    def __init__(self, engine: Engine, config: Qwen3Config) -> None:
        executor = engine.executor
        assert isinstance(executor, TorchExecutor)
        self.engine, self.executor, self.config = engine, executor, config
        self.device = executor.buffer.pages.device
        self.page = executor.buffer.layout.page_size
        self.copy_bytes_per_ms = self._copy_bandwidth()

    def rows(self, context: int = 1024) -> Iterator[Row]:
        """Yield the rows of the table as they are measured."""
        for batch in BATCHES:
            yield self.decode(batch, context)
        yield self.whole_step(64, context)
        for tokens in PREFILLS:
            yield self.prefill(tokens)
        yield self.cached_first_token(8192)
        yield self.restore(8192)

    # ── Decode ──

    def decode(self, batch: int, context: int) -> Row:
        """Measure a replayed decode step relative to the time to read weights and KV once."""
        graphs = self.executor._graphs
        assert graphs is not None, "decode is measured with graphs"
        step = self._decodes(batch, context)
        shape = graphs.shape_of((), step)
        assert shape is not None, f"a batch of {batch} is not captured"
        graphs.replay(shape, (), step)
        ms = self._timed(graphs.graph(shape).replay)
        return Row(
            f"decode step, batch {batch}, context {context}", ms, "floor", self.floor_ms(batch, context)
        )

    def floor_ms(self, batch: int, context: int) -> float:
        """Return ms to read weights and KV once at the bandwidth of a copy."""
        kv = batch * context * self.config.layout(self.page).bytes_per_token
        return (self.config.weight_bytes + kv) / self.copy_bytes_per_ms

    def whole_step(self, batch: int, context: int, steps: int = 64) -> Row:
        """Measure the engine's step relative to the replay alone, at the same lengths."""
        rng = np.random.default_rng(1)
        engine = self.engine
        for number in range(batch):
            prompt = rng.integers(0, self.config.vocab_size, context)
            engine.submit(Request(f"bench {number}", prompt.tolist(), 4 * steps))
        while engine.scheduler.waiting or engine.scheduler.prefilling:
            engine.step()
        for _ in range(8):
            engine.step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        ms = (time.perf_counter() - start) * 1e3 / steps
        at = max(len(request.prompt) + len(request.output) for request in engine.scheduler.decoding)
        for request in engine.scheduler.live():
            engine.cancel(request.id)
        engine.run()
        alone = self.decode(batch, at)
        return Row(f"engine step, batch {batch}, context {at}", ms, "replay", alone.ms)

    # ── Prefill ──

    def prefill(self, tokens: int) -> Row:
        """Measure a cold prompt relative to torch's matrices and attention of the same sizes."""
        pages = -(-tokens // self.page)
        view = KvView(np.arange(pages, dtype=np.int32), tokens, self.page)
        prompt = np.random.default_rng(2).integers(0, self.config.vocab_size, tokens)
        batch = Batch.build([Chunk(prompt, view)], (), self.device)

        @torch.inference_mode()
        def ours() -> None:
            forward(self.executor.weights, batch, self.executor.buffer, self.executor.backend)

        return Row(f"prefill, {tokens} tokens", self._timed(ours, 5), "torch", self._torch_prefill_ms(tokens))

    def cached_first_token(self, tokens: int) -> Row:
        """Measure time to first token of a prompt with all pages but the last cached, relative to a cold one."""
        rng = np.random.default_rng(4)
        prompts = [rng.integers(0, self.config.vocab_size, tokens).tolist() for _ in range(3)]
        cold = [self._first_token_ms(prompt) for prompt in prompts]
        warm = [self._first_token_ms(prompt) for prompt in prompts]
        return Row(f"first token, {tokens} tokens cached", median(warm), "cold", median(cold))

    def restore(self, tokens: int) -> Row:
        """Measure loading a prompt's pages from pinned host memory, relative to one copy of as many bytes."""
        manager, buffer = self.engine.scheduler.manager, self.executor.buffer
        pages = (tokens - 1) // self.page
        copier = PinnedPages(pages, buffer)
        tier = HostTier(manager, copier)
        prompt = np.random.default_rng(5).integers(0, self.config.vocab_size, tokens)
        names = TokenBlocks(prompt, self.page).identities[:pages]
        tier.blocks.allocate(pages).register(names).release()
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            copy = tier.onboard(names)
            assert copy is not None
            tier.begin_copies()
            while not copy.done():
                pass
            times.append((time.perf_counter() - start) * 1e3)
            tier.commit(copy).release()
            manager.blocks.clear_inactive()
        target = torch.empty_like(copier.pages, device=self.device, pin_memory=False)
        link = self._timed(lambda: target.copy_(copier.pages, non_blocking=True), 5)
        return Row(f"restore, {pages * self.page} tokens", median(times), "link", link)

    def _first_token_ms(self, prompt: list[int]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.engine.submit(Request("first", prompt, 1))
        self.engine.run()
        return (time.perf_counter() - start) * 1e3

    @torch.inference_mode()
    def _torch_prefill_ms(self, tokens: int) -> float:
        config, kind = self.config, getattr(torch, self.config.dtype)
        layer = self.executor.weights.layers[0]
        x = torch.randn(tokens, config.hidden_size, dtype=kind, device=self.device)
        wide = torch.randn(tokens, config.attention_width, dtype=kind, device=self.device)
        mlp = torch.randn(tokens, config.intermediate_size, dtype=kind, device=self.device)
        q = torch.randn(1, config.num_heads, tokens, config.head_dim, dtype=kind, device=self.device)
        k = torch.randn(1, config.kv_heads, tokens, config.head_dim, dtype=kind, device=self.device)

        def matrices() -> None:
            F.linear(x, layer.qkv)
            F.linear(wide, layer.out)
            F.linear(x, layer.gate_up)
            F.linear(mlp, layer.down)

        def attention() -> None:
            F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)

        return config.num_layers * (self._timed(matrices, 10) + self._timed(attention, 10))

    # ── Timing ──

    def _decodes(self, batch: int, context: int) -> list[Decode]:
        pages = -(-context // self.page)
        have = self.executor.buffer.num_blocks
        rng = np.random.default_rng(3)
        return [
            Decode(
                int(rng.integers(0, self.config.vocab_size)),
                KvView((row * pages + np.arange(pages, dtype=np.int32)) % have, context, self.page),
            )
            for row in range(batch)
        ]

    def _copy_bandwidth(self) -> float:
        source = torch.empty(2 << 30, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        ms = self._timed(lambda: target.copy_(source))
        return 2 * source.nbytes / ms

    def _timed(self, act: Callable[[], object], repeat: int = 20) -> float:
        """Return the median device time in ms."""
        for _ in range(3):
            act()
        times = []
        for _ in range(repeat):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            act()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return median(times)
