"""vLLM's own HTTP front end before an engine that only waits: the peer of `live_load.py --beside-vllm`.

    .venv-vllm-0.33.0/bin/python benchmarks/vllm_front.py --model NEW --tokenizer DIR --step-ms 25.6 [--streams 256]

Runs in an environment that has vLLM (0.33) and needs no GPU. Everything from the socket to the engine is
vLLM's: its app, its serving classes, its input and output processors, its metrics. In place of the engine core, which
lives in a process of its own, stands one that gives every request a token at the end of each step of constant length.
What a real one costs (scheduling, and moving outputs between the processes) is left out, in vLLM's favour. Prints the
port it will answer on, and ends at SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(
    VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1"
)


class Waiting:
    """An engine core: at the end of each step, a token for everybody who is there. What nobody calls is not here."""

    def __init__(self, step_s: float, tokens: list[int]) -> None:
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self._step_s = step_s
        self._tokens = tokens
        self._left: dict[str, int] = {}
        self._prompts: dict[str, int] = {}
        self._due_s = 0.0
        self._anybody = asyncio.Event()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """It generates."""
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """There is none."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing runs."""

    async def add_request_async(self, request: Any) -> None:
        """It takes part from the next step on."""
        if not self._left:
            self._due_s = time.monotonic() + self._step_s
        self._left[request.request_id] = request.sampling_params.max_tokens
        self._prompts[request.request_id] = len(request.prompt_token_ids)
        self._anybody.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Its client has gone."""
        for name in request_ids:
            self._left.pop(name, None)
            self._prompts.pop(name, None)

    async def get_output_async(self) -> Any:
        """What the next step gave, when it has ended. One that is late is followed by the next at once."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.metrics.stats import PrefillStats, SchedulerStats

        while not self._left:
            self._anybody.clear()
            await self._anybody.wait()
        await asyncio.sleep(max(0.0, self._due_s - time.monotonic()))
        self._due_s += self._step_s
        outputs = []
        for name, left in list(self._left.items()):
            prefill = None
            prompt = self._prompts.pop(name, None)
            if prompt is not None:
                prefill = PrefillStats(num_prompt_tokens=prompt, num_computed_tokens=prompt)
            token = self._tokens[left % len(self._tokens)]
            ended = FinishReason.LENGTH if left == 1 else None
            outputs.append(EngineCoreOutput(name, [token], finish_reason=ended, prefill_stats=prefill))
            if left == 1:
                del self._left[name]
            else:
                self._left[name] = left - 1
        stats = SchedulerStats(num_running_reqs=len(outputs))
        return EngineCoreOutputs(outputs=outputs, scheduler_stats=stats)


def write_model(folder: Path, tokenizer: Path, length: int) -> None:
    """A model small enough that nobody minds, with our tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {**json.loads((tokenizer / "config.json").read_text()), **shape, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": length}))


def words_of(tokenizer: Path, count: int = 64) -> list[int]:
    """Tokens that are a space and letters, as those of our filler are."""
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    words = [number for text, number in vocabulary.items() if text.startswith("Ġ") and text[1:].isalpha()]
    return words[-count:]


async def serve(model: Path, step_s: float, streams: int, tokens: list[int]) -> None:
    """Until SIGTERM."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import EngineCoreClient

    flags = ["--model", str(model), "--served-model-name", "bench", "--host", "127.0.0.1", "--port", "0"]
    flags += ["--max-num-seqs", str(streams), "--disable-uvicorn-access-log", "--uvicorn-log-level", "error"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    validate_parsed_serve_args(args)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    config.cache_config.num_gpu_blocks = streams * 300
    core = Waiting(step_s, tokens)
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: core)
    engine = AsyncLLM.from_vllm_config(config)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    await (await build_and_serve(engine, "", listener, args))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="where its files are to be written")
    parser.add_argument("--tokenizer", type=Path, required=True, help="of `understudy tokenizer export`")
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--streams", type=int, default=256)
    args = parser.parse_args()
    write_model(args.model, args.tokenizer, 4096)
    import uvloop

    uvloop.run(serve(args.model, args.step_ms / 1e3, args.streams, words_of(args.tokenizer)))


if __name__ == "__main__":
    main()
