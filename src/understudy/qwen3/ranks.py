"""Tensor parallelism: one process per rank, one manager for all. Ranks receive views, not requests."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from understudy.errors import UnderstudyError, WrongState
from understudy.qwen3.backends import make_backend
from understudy.qwen3.buffer import KvBuffer
from understudy.qwen3.executor import Computed, Step, TorchExecutor
from understudy.qwen3.graphs import StepGraphs
from understudy.qwen3.memory import count_blocks_that_fit
from understudy.qwen3.weights import load_weights, random_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.qwen3.backend import Backend
    from understudy.qwen3.config import Qwen3Config
    from understudy.qwen3.options import EngineOptions
    from understudy.qwen3.weights import Weights


class RankFailed(UnderstudyError):
    """A rank raised, died or did not answer in time. The message names it; the step has no effect."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings of every rank at start. Weights come from a folder, or from the options' seed."""

    config: Qwen3Config
    ranks: int
    options: EngineOptions
    folder: str | None = None


class RankedExecutor:
    """Executor that sends each step to every rank and returns the first rank's tokens once all have answered.

    If a rank fails, all are ended, because the others may wait for it in a sum; later steps are refused.
    """

    def __init__(self, settings: RankSettings) -> None:
        settings.config.shard(settings.ranks)  # raises if the shape does not divide, before a process starts
        self.settings = settings
        self.num_blocks = 0
        """Pages of every rank: as many as fit into the rank with the least memory."""
        self._folder = tempfile.TemporaryDirectory(prefix="understudy-ranks-")
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection[Any, Any]] = []
        self._processes = []
        for rank in range(settings.ranks):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_serve, args=(settings, rank, theirs, f"{self._folder.name}/meeting"), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._closed = False
        self._broken = ""
        try:
            room = self._answers("did not start")
            self.num_blocks = min(count for count in room if isinstance(count, int))
            self._send(self.num_blocks)
            self._answers("did not start")
        except RankFailed:
            self.close()
            raise

    def prepare(self, step: Step) -> None:
        """Do nothing: ranks receive whole steps."""

    def begin(self, step: Step) -> None:
        if self._broken or self._closed:
            raise WrongState(f"the ranks have ended ({self._broken or 'closed'}); build a new engine")
        self._send(step)

    def finish(self) -> Computed:
        computed = self._answers("did not answer")[0]
        assert isinstance(computed, Computed)
        return computed

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for pipe in self._pipes:
            pipe.close()  # a rank that reads from it ends
        for process in self._processes:
            process.join(timeout=5 if not self._broken else 0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def _send(self, message: object) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(message)
            except OSError as error:
                raise self._fail(f"rank {rank} has died") from error

    def _answers(self, what: str) -> list[object]:
        """Receive an answer from each rank; RankFailed when one fails, or none answers within the deadline."""
        answers: dict[int, object] = {}
        while len(answers) < len(self._pipes):
            open_ones = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(open_ones, self.settings.options.deadline_s)
            if not ready:
                late = next(rank for rank in range(len(self._pipes)) if rank not in answers)
                raise self._fail(f"rank {late} {what} within {self.settings.options.deadline_s:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                try:
                    answer = pipe.recv()
                except (EOFError, OSError) as error:
                    raise self._fail(f"rank {rank} has died") from error
                if isinstance(answer, str):
                    raise self._fail(f"rank {rank}: {answer}")
                if answer is not None:  # else it is still working
                    answers[rank] = answer
        return [answers[rank] for rank in range(len(self._pipes))]

    def _fail(self, why: str) -> RankFailed:
        self._broken = why
        for process in self._processes:
            process.kill()
        return RankFailed(why)


def _serve(settings: RankSettings, rank: int, pipe: Connection[Any, Any], meeting: str) -> None:
    """Run a rank: load a shard, send the number of pages that fit, then answer every step."""
    try:
        device = _join(settings, rank, meeting)
        weights = _weights(settings, rank, device)
        backend = make_backend(settings.config.shard(settings.ranks), device, settings.options.backend)
        pipe.send(_blocks(settings, weights, backend, device))
        executor = _executor(settings, weights, backend, pipe.recv(), device, lambda *_: pipe.send(None))
        pipe.send(True)
    except EOFError:  # another rank could not start
        return
    except Exception as error:  # reported to the parent process
        pipe.send(f"{type(error).__name__}: {error}")
        return
    while True:
        try:
            step = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            executor.begin(step)
            pipe.send(executor.finish() if rank == 0 else True)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def _join(settings: RankSettings, rank: int, meeting: str) -> torch.device:
    """Join the rank's process group (NCCL between GPUs, gloo between CPUs) and return its device."""
    cuda = settings.options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=Path(meeting).as_uri(),
        rank=rank,
        world_size=settings.ranks,
        timeout=timedelta(seconds=settings.options.deadline_s),
    )
    return device


def _weights(settings: RankSettings, rank: int, device: torch.device) -> Weights:
    config, ranks, seed = settings.config, settings.ranks, settings.options.random_weights
    if seed is not None:
        return random_weights(config, seed, device, rank=rank, ranks=ranks)
    assert settings.folder is not None, "a folder or a seed"
    return load_weights(config, settings.folder, device, rank=rank, ranks=ranks)


def _blocks(settings: RankSettings, weights: Weights, backend: Backend, device: torch.device) -> int:
    if settings.options.num_blocks is not None:
        return settings.options.num_blocks
    return count_blocks_that_fit(
        settings.config.shard(settings.ranks), weights, backend, settings.options, device
    )


def _executor(
    settings: RankSettings,
    weights: Weights,
    backend: Backend,
    num_blocks: int,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> TorchExecutor:
    config, options = settings.config, settings.options
    layout = config.layout(options.page_size).shard(settings.ranks)
    buffer = KvBuffer(num_blocks, layout, getattr(torch, config.dtype), device)

    def total(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    graphs = None
    if device.type == "cuda" and options.cuda_graphs:
        # All ranks capture the same shapes in the same order, so their sums match.
        graphs = StepGraphs.build(config, options, weights, buffer, backend, total, progress)
    return TorchExecutor(weights, buffer, backend, reduce=total, graphs=graphs)
