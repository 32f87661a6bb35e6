"""The kernels against plain torch: on CUDA where there is one, else interpreted, which is slow and exact enough."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from qwen3.building import TINY, manager_of, prompt_of

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="triton is not installed")

from typing import TYPE_CHECKING

from understudy.qwen3.batch import Batch, Chunk, Decode
from understudy.qwen3.buffer import KvBuffer
from understudy.qwen3.forward import forward
from understudy.qwen3.kernels import argmax, decode, gated, matvec, norm, prefill
from understudy.qwen3.reference import ReferenceBackend
from understudy.qwen3.triton_backend import TritonBackend
from understudy.qwen3.weights import random_weights
from understudy.timing.recorded.shapes import Parts

if TYPE_CHECKING:
    from understudy.qwen3.backend import Backend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rand(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert not ours.isnan().any()
    assert (ours - theirs).abs().max() <= 2e-5 * (1 + theirs.abs().max())


@pytest.mark.parametrize("width", [48, 64, 100])
def test_norms_and_gates_are_those_of_torch(width: int) -> None:
    backend = ReferenceBackend(TINY, DEVICE)
    x, residual, weight = rand(5, width), rand(5, width) * 2, rand(width)
    for given in (x, None):
        normed, total = norm.add_norm(given, residual, weight, TINY.norm_eps)
        expected = residual if given is None else given + residual
        close(total, expected)
        close(normed, backend.norm(expected, weight))
    both = rand(3, 2 * width)
    close(norm.gate(both), torch.nn.functional.silu(both[:, :width]) * both[:, width:])


@pytest.mark.parametrize(("outs", "width"), [(7, 48), (64, 1000), (130, 16)])
def test_one_row_times_a_matrix_is_that_of_torch(outs: int, width: int) -> None:
    x, weight = rand(1, width), rand(outs, width) * width**-0.5
    close(matvec.matvec(x, weight), x @ weight.T)
    backend = ReferenceBackend(TINY, DEVICE)
    residual, scale = rand(1, width) * 3, rand(width)
    for given in (x, None):
        ours = matvec.normed_matvec(given, residual, scale, weight, TINY.norm_eps)
        for one, other in zip(ours, backend.normed_linear(given, residual, scale, weight), strict=True):
            close(one, other)
    if outs % 2 == 0:
        gated, _ = matvec.normed_matvec(x, residual, scale, weight, TINY.norm_eps, gates=True)
        close(gated, backend.normed_gated(x, residual, scale, weight)[0])


@pytest.mark.parametrize("rows", [2, 16, 17, 33, 64])
@pytest.mark.parametrize(("outs", "width"), [(7, 48), (64, 200)])
def test_few_rows_times_the_gated_matrix_are_those_of_torch(rows: int, outs: int, width: int) -> None:
    x, weight = rand(rows, width), rand(2 * outs, width) * width**-0.5
    product = x @ weight.T
    close(gated.gated(x, weight), torch.nn.functional.silu(product[:, :outs]) * product[:, outs:])
    last = gated.gated(x, weight)[-1:]
    close(gated.gated(x[-1:], weight), last)  # whoever shares the batch


@pytest.mark.parametrize("width", [7, 4096, 4097, 13000])
def test_the_likeliest_token_is_the_first_of_the_largest(width: int) -> None:
    logits = (rand(4, width) * 8).round().to(torch.bfloat16)  # many are equal
    logits[1] = -3.0
    logits[2, -1] = 99.0
    logits[3, :-1] = float("-inf")
    out = torch.full((4,), -1, dtype=torch.int64, device=DEVICE)
    argmax.argmax(logits, out)
    expected = [int((row == row.max()).nonzero()[0, 0]) for row in logits]
    assert out.tolist() == expected
    assert expected[1:] == [0, width - 1, width - 1]
    ours, theirs = out.clone(), torch.empty_like(out)
    ReferenceBackend(TINY, DEVICE).argmax(logits.float(), theirs)
    assert logits.gather(-1, ours[:, None]).equal(logits.gather(-1, theirs[:, None]))


def _pages(lengths: list[int], page: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(4)
    counts = [-(-length // page) for length in lengths]
    ids = np.concatenate([rng.permutation(blocks)[:count] for count in counts]).astype(np.int32)
    return torch.from_numpy(ids).to(DEVICE), torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32).to(
        DEVICE
    )


def _dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, position: int
) -> torch.Tensor:
    group = query.shape[0] // keys.shape[2]
    k = keys[pages.long()].flatten(0, 1)[: position + 1].repeat_interleave(group, 1)
    v = values[pages.long()].flatten(0, 1)[: position + 1].repeat_interleave(group, 1)
    weight = (torch.einsum("hd,nhd->hn", query, k) * query.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("hn,nhd->hd", weight, v)


@pytest.mark.parametrize("parts", [Parts(1), Parts(2), Parts(8), Parts(4, 128)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (5, 1)])
def test_paged_decoding_is_dense_attention(parts: Parts, heads: int, kv_heads: int) -> None:
    lengths, page, dim = [1, 70, 64, 290], 16, 16
    pages, indptr = _pages(lengths, page, 24)
    buffer = rand(24, 2, 2, page, kv_heads, dim)
    keys, values = buffer[:, 1, 0], buffer[:, 1, 1]
    queries = rand(4, heads, dim)
    out = torch.full_like(queries, float("nan"))
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    decode.decode_attention(queries, pages, indptr, seq_lens, keys, values, out, parts)
    for row, length in enumerate(lengths):
        mine = pages[indptr[row] : indptr[row + 1]]
        close(out[row], _dense(queries[row], keys, values, mine, length - 1))


def test_paged_prefill_is_dense_causal_attention_behind_its_history() -> None:
    lengths, chunks, page, dim, heads = [5, 90, 40, 33], [5, 70, 1, 20], 16, 16, 4
    pages, indptr = _pages(lengths, page, 24)
    buffer = rand(24, 1, 2, page, 2, dim)
    keys, values = buffer[:, 0, 0], buffer[:, 0, 1]
    queries = rand(sum(chunks), heads, dim)
    out = torch.full_like(queries, float("nan"))
    chunk_indptr = torch.tensor([0, *np.cumsum(chunks)], dtype=torch.int32, device=DEVICE)
    tiles = [(1, 64), (3, 0), (-1, 5), (1, 0), (0, 0), (2, 0)]  # in any order, and some of nobody's
    owners, starts = torch.tensor(tiles, dtype=torch.int32, device=DEVICE).T.contiguous()
    prefill.prefill_attention(
        queries,
        pages,
        indptr,
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        chunk_indptr,
        (owners, starts, 64),
        keys,
        values,
        out,
    )
    row = 0
    for request, (length, chunk) in enumerate(zip(lengths, chunks, strict=True)):
        mine = pages[indptr[request] : indptr[request + 1]]
        for position in range(length - chunk, length):
            close(out[row], _dense(queries[row], keys, values, mine, position))
            row += 1


@torch.inference_mode()
def test_a_whole_step_of_chunks_and_decodes_is_that_of_the_reference() -> None:
    config = replace(TINY, num_layers=2)  # interpreted kernels are slow
    weights = random_weights(config, 7, DEVICE)
    manager = manager_of(config, 32, page=8)
    buffers = [KvBuffer(32, manager.layout, torch.float32, DEVICE) for _ in range(2)]
    backends: tuple[Backend, ...] = (ReferenceBackend(config, DEVICE), TritonBackend(config, DEVICE))
    first, second = prompt_of(1, 21), prompt_of(2, 13)
    with manager.request(first, 4) as a, manager.request(second, 4) as b:
        a.schedule_prefill(21)
        opening = [Chunk(np.array(first), a.view())]
        for buffer, backend in zip(buffers, backends, strict=True):
            forward(weights, Batch.build(opening, (), DEVICE), buffer, backend)
        a.apply_prefill(5)
        a.schedule_decode()
        b.schedule_prefill(13)
        batch = Batch.build([Chunk(np.array(second), b.view())], [Decode(5, a.view())], DEVICE)
        theirs, ours = (
            forward(weights, batch, buffer, backend)
            for buffer, backend in zip(buffers, backends, strict=True)
        )
        close(ours, theirs)
        close(buffers[1].pages, buffers[0].pages)
        alone = Batch.build((), [Decode(5, a.view())], DEVICE)
        theirs, ours = (
            forward(weights, alone, buffer, backend)
            for buffer, backend in zip(buffers, backends, strict=True)
        )
        close(ours, theirs)
