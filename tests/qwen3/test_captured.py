"""What is captured: a step that is padded to a shape computes what it computes by itself."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3.building import CPU, TINY, Poisoned, generate, manager_of, prompt_of

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from understudy.kv import KvView
from understudy.qwen3 import EngineOptions, build_engine
from understudy.qwen3.arrays import StepArrays
from understudy.qwen3.batch import Batch, Chunk, Decode, Flat, are_uneven
from understudy.qwen3.forward import forward
from understudy.qwen3.reference import ReferenceBackend
from understudy.qwen3.weights import random_weights
from understudy.timing.recorded.shapes import (
    CHUNK_ROWS,
    DECODE_ROWS,
    MAX_CHUNKS,
    MIXED_DECODE_ROWS,
    Shape,
    is_uneven,
    parts_of,
    shape_of,
    shapes_up_to,
)

DEVICE = torch.device("cuda") if torch.cuda.is_available() else CPU


@given(st.integers(0, 2048), st.integers(0, MAX_CHUNKS), st.integers(0, 256))
def test_every_step_of_the_default_limits_has_a_shape_that_was_captured(
    tokens: int, chunks: int, decodes: int
) -> None:
    chunks = min(tokens, max(chunks, 1 if tokens else 0))
    if not chunks and not decodes:
        assert shape_of(0, 0, 0) is None
        return
    shape = shape_of(tokens if chunks else 0, chunks, decodes)
    assert shape in shapes_up_to(2048, 256)
    assert shape is not None
    assert shape.chunk_rows >= (tokens if chunks else 0)
    assert shape.decode_rows >= decodes


def test_a_large_batch_reads_a_long_context_in_parts_and_no_other() -> None:
    assert parts_of(1).most == 32  # few rows are always read in parts
    assert parts_of(16).most == 8
    assert [parts_of(rows).most for rows in (32, 48, 64, 128, 256)] == [1, 1, 1, 1, 1]
    uneven = [parts_of(rows, uneven=True) for rows in (32, 64, 128, 256)]
    assert uneven == [(16, 512), (16, 512), (16, 1024), (16, 1024)]
    for rows, most in ((32, 192), (64, 384), (256, 1536)):  # so much more than the mean costs what parts cost
        even = 1024 * (rows - 1)
        assert not is_uneven(rows, even + 1024, 1024)
        assert not is_uneven(rows, even + 1024 + most, 1024 + most)
        assert is_uneven(rows, even + 1024 + 2 * most, 1024 + 2 * most)
    assert not is_uneven(16, 15 * 1024 + 16 * 1024, 16 * 1024)  # as many rows as are read in parts anyway
    assert shape_of(0, 0, 20, uneven=True) in shapes_up_to(2048, 256)


def test_only_decodes_without_prompts_are_captured_for_uneven_contexts() -> None:
    for shape in shapes_up_to(2048, 256):
        assert not shape.uneven or (shape.chunk_rows == 0 and shape.decode_rows >= 32)
    views = [KvView(np.zeros(-(-length // 16), np.int32), length, 16) for length in [1000] * 60 + [2000]]
    decodes = [Decode(0, view) for view in views]
    assert are_uneven(decodes)
    assert not are_uneven(decodes[:-1])
    assert Batch.build((), decodes, CPU).uneven


def test_beside_prompts_many_contexts_are_always_read_in_parts() -> None:
    """A long one among them is not waited for, and one graph serves even contexts too."""
    arrays = StepArrays(
        [Shape(64, 64), Shape(64, 16), Shape(0, 64)], padding_block=0, max_pages=4, device=CPU
    )
    assert arrays.batch(Shape(64, 64)).uneven
    assert not arrays.batch(Shape(64, 16)).uneven  # so few are read in parts anyway
    assert not arrays.batch(Shape(0, 64)).uneven
    for shape in shapes_up_to(2048, 256):
        long_ones = parts_of(max(shape.decode_rows, 1), uneven=shape.in_parts)
        assert long_ones.most > 1 or shape.chunk_rows == 0  # which has another for them


def test_what_is_too_large_has_no_shape() -> None:
    assert shape_of(CHUNK_ROWS[-1] + 1, 1, 0) is None
    assert shape_of(64, MAX_CHUNKS + 1, 0) is None
    assert shape_of(64, 1, MIXED_DECODE_ROWS[-1] + 1) is None
    assert shape_of(0, 0, DECODE_ROWS[-1] + 1) is None


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500)), min_size=1, max_size=6),
    st.sampled_from([16, 64, 128]),
)
def test_tiles_cover_every_token_of_every_chunk_once(chunks: list[tuple[int, int]], rows: int) -> None:
    indptr = np.cumsum([0, *(tokens for tokens, _ in chunks)]).astype(np.int32)
    lengths = np.array([sum(chunk) for chunk in chunks], np.int32)
    empty = np.zeros(0, np.int32)
    flat = Flat(empty, empty, empty, empty, empty, lengths, indptr, empty)
    owners, starts = flat.tiles(rows)
    covered = [
        (owner, token)
        for owner, start in zip(owners.tolist(), starts.tolist(), strict=True)
        for token in range(start, min(start + rows, chunks[owner][0]))
    ]
    assert len(covered) == len(set(covered)) == sum(tokens for tokens, _ in chunks)
    contexts = [chunks[owner][1] + start for owner, start in zip(owners, starts, strict=True)]
    assert contexts == sorted(contexts, reverse=True)


@pytest.mark.parametrize("backend", ["reference", *(["triton"] if torch.cuda.is_available() else [])])
@settings(max_examples=4, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), max_size=3),
    decodes=st.integers(0, 3),
    again=st.booleans(),
)
@torch.inference_mode()
def test_a_padded_step_computes_what_the_step_itself_does(
    backend: str, lengths: list[int], decodes: int, again: bool
) -> None:
    if not lengths and not decodes:
        return
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
        from understudy.qwen3.triton_backend import TritonBackend
    backend_of = ReferenceBackend if backend == "reference" else TritonBackend
    weights = random_weights(TINY, 7, DEVICE)
    manager = manager_of(TINY, 128, page=8)
    ours, theirs = (Poisoned(128, manager.layout, torch.float32, DEVICE) for _ in range(2))
    for buffer in (ours, theirs):
        buffer.pages[manager.padding_block] = 0
    kernels = backend_of(TINY, DEVICE)
    held = [manager.request(prompt_of(seed, 9 + seed), 4) for seed in range(decodes)]
    for kv in held:
        kv.schedule_prefill(kv.prompt_tokens)
        for buffer in (ours, theirs):
            opening = Batch.build([Chunk(kv.tokens[: kv.prompt_tokens], kv.view())], (), DEVICE)
            forward(weights, opening, buffer, kernels)
        kv.apply_prefill(5)
        kv.schedule_decode()
    steps = [Decode(5, kv.view()) for kv in held]
    chunks = []
    for seed, length in enumerate(lengths):
        kv = manager.request(prompt_of(70 + seed, length), 4)
        held.append(kv)
        kv.schedule_prefill(length)
        chunks.append(Chunk(kv.tokens[:length], kv.view()))
    shape = Shape(64 if chunks else 0, 4)
    arrays = StepArrays(
        [Shape(64, 4), Shape(0, 4)], padding_block=manager.padding_block, max_pages=8, device=DEVICE
    )
    if again:  # another step was there before
        arrays.fill(shape, chunks[:1], steps[:1])
    arrays.fill(shape, chunks, steps)
    padded = forward(weights, arrays.batch(shape), ours, kernels)[: len(chunks) + len(steps)]
    alone = forward(weights, Batch.build(chunks, steps, DEVICE), theirs, kernels)
    assert not padded.isnan().any()
    assert (padded - alone).abs().max() <= 2e-5 * (1 + alone.abs().max())
    real = [page for page in range(128) if page != manager.padding_block]
    assert (ours.pages[real].nan_to_num(9) - theirs.pages[real].nan_to_num(9)).abs().max() <= 2e-5
    for kv in held:
        kv.close()
    manager.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need CUDA")
def test_graphs_and_eager_steps_generate_the_same_tokens() -> None:
    prompts = [prompt_of(seed, length, 1000) for seed, length in enumerate((5, 70, 300, 900, 33, 500))]
    how = {"random_weights": 3, "dtype": "float32", "num_blocks": 512, "max_model_len": 2048}
    answers = []
    for graphs in (True, False):
        engine = build_engine("Qwen3-0.6B", EngineOptions(cuda_graphs=graphs, max_num_seqs=8, **how))  # type: ignore[arg-type]
        cold = generate(engine, *prompts, max_tokens=12)
        assert generate(engine, *prompts, max_tokens=12) == cold  # with a warm cache
        answers.append(cold)
        engine.close()
    assert answers[0] == answers[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is sized on CUDA")
def test_captures_leave_memory_as_it_was_sized() -> None:
    torch.cuda.empty_cache()
    options = EngineOptions(random_weights=3, memory_utilization=0.4, max_model_len=8192)
    engine = build_engine("Qwen3-0.6B", options)
    free, total = torch.cuda.mem_get_info()
    buffer = engine.executor.buffer.pages  # type: ignore[attr-defined]
    assert (total - free) / total <= 0.4
    assert buffer.nbytes / total > 0.3, "and most of it is pages"
    engine.close()
    del engine, buffer
    gc.collect()
    torch.cuda.empty_cache()  # who asks next how much is free finds it
