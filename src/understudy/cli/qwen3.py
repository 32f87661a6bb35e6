"""`understudy qwen3`: the real engine by itself, for one prompt or for a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.cli.progress import counter, progress_bars
from understudy.errors import ConfigError
from understudy.outputs import check_outputs, files_named

if TYPE_CHECKING:
    import argparse

    from understudy.cli import Verbs

EXAMPLES = """\
examples:
  understudy qwen3 generate ~/models/Qwen3-0.6B --prompt 'Why is the sky blue?'
  understudy qwen3 generate Qwen3-0.6B --random-weights 1 --prompt-tokens 1,2,3 --device cpu --num-blocks 64
  understudy qwen3 bench Qwen3-4B --random-weights 1          decode, whole steps and prefill beside their floors
  understudy qwen3 bench Qwen3-4B --random-weights 1 --record steps.jsonl     each step of a workload, for the twin
  understudy replay trace.jsonl --engine qwen3 --step-times steps.jsonl --block-size 16 --num-gpu-blocks 20000
"""


GENERATE_EXAMPLES = """\
examples:
  understudy qwen3 generate ~/models/Qwen3-0.6B --prompt 'Why is the sky blue?'
  understudy qwen3 generate Qwen3-0.6B --random-weights 1 --prompt-tokens 1,2,3 --device cpu --num-blocks 64
"""
BENCH_EXAMPLES = """\
examples:
  understudy qwen3 bench Qwen3-4B --random-weights 1 --max-model-len 32768    the tables of docs/qwen3.md, on CUDA
  understudy qwen3 bench Qwen3-4B --random-weights 1 --record steps.jsonl --host-blocks 4096
  understudy replay trace.jsonl --engine qwen3 --step-times steps.jsonl       then a trace takes those times
"""


def add_parser(verbs: Verbs) -> None:
    """Describe the verb and its arguments."""
    parser = verbs.add_parser(
        "qwen3",
        help="a real engine: dense Qwen3 in PyTorch on the KV manager (extra [torch])",
        description="Dense Qwen3 in PyTorch on the KV manager. Needs the extra [torch].",
        epilog=EXAMPLES,
    )
    tasks = parser.add_subparsers(dest="task", metavar="TASK", required=True)
    generate = tasks.add_parser(
        "generate",
        help="answer one prompt",
        epilog=GENERATE_EXAMPLES,
    )
    _add_engine(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text; needs a folder with a tokenizer.json (package tokenizers)")
    prompt.add_argument("--prompt-tokens", metavar="IDS", help="token ids, separated by commas")
    generate.add_argument("--max-tokens", type=int, default=64, help="tokens to generate at most (64)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    drawn = "with a temperature"
    generate.add_argument("--top-k", type=int, help=f"{drawn}: keep the likeliest so many; 0: all (0)")
    generate.add_argument("--top-p", type=float, help=f"{drawn}: keep the likeliest of this mass (1)")
    generate.add_argument("--seed", type=int, help=f"{drawn}: of the choice of tokens (0)")
    generate.add_argument("--ignore-eos", action="store_true", help="go on after the model's stop tokens")
    bench = tasks.add_parser(
        "bench",
        help="step times beside what the device could do (CUDA)",
        epilog=BENCH_EXAMPLES,
    )
    _add_engine(bench)
    bench.add_argument(
        "--record",
        type=Path,
        metavar="PATH",
        help="play a workload instead, and write each step: its composition and milliseconds (JSON lines)",
    )
    bench.add_argument("--requests", type=int, help="of that workload (480)")
    bench.add_argument("--seed", type=int, help="of that workload (0)")
    bench.add_argument(
        "--host-blocks",
        type=int,
        metavar="N",
        help="with --record: measure the link to pinned host memory with N pages too",
    )
    bench.add_argument(
        "--context", type=int, help="without --record: tokens of context of decode steps (1024)"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="a folder with config.json and safetensors, or a published name: Qwen3-4B"
    )
    parser.add_argument(
        "--random-weights", type=int, metavar="SEED", help="weights from a seed, not from a file"
    )
    parser.add_argument("--device", help="cuda or cpu; by default cuda where there is one")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="by default the model's own"
    )
    parser.add_argument("--backend", choices=("reference", "triton"), help="by default triton on CUDA")
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page of KV (16)")
    parser.add_argument("--num-blocks", type=int, help="pages of KV; by default what the device has room for")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="requests at a time (256)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="tokens in a step (2048)")
    parser.add_argument("--max-model-len", type=int, help="a smaller window than the model's own")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="processes that share the heads (1)"
    )
    parser.add_argument("--no-cuda-graphs", action="store_true", help="launch every kernel of every step")


def run(args: argparse.Namespace) -> int:
    """Do the work; return the exit code."""
    from understudy.checks import whole_number

    _refuse_idle(args)
    needs_torch()
    if args.task == "generate":
        whole_number("--max-tokens", args.max_tokens, 1)
        return _generate(args)
    for name in ("requests", "context", "host_blocks"):
        if getattr(args, name) is not None:
            whole_number(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    if args.tensor_parallel_size != 1 and (args.record is None or args.host_blocks is not None):
        raise ConfigError("of several ranks only --record without --host-blocks is measured")
    return _bench(args) if args.record is None else _record(args)


def _refuse_idle(args: argparse.Namespace) -> None:
    """ConfigError names a flag that would change nothing."""
    if args.task == "generate":
        names: tuple[str, ...] = () if args.temperature else ("seed", "top_k", "top_p")
        why = "is of tokens that are drawn, and without --temperature the likeliest is taken"
    elif args.record is None:
        names, why = ("seed", "requests", "host_blocks"), "is of the workload that --record plays"
    else:
        names, why = ("context",), "is of the table that is measured without --record"
    for name in names:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {why}; leave it out")


def needs_torch() -> None:
    """ConfigError where the extra is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ConfigError("the real engine needs PyTorch: pip install 'understudy[torch]'") from error


def _engine(args: argparse.Namespace) -> Any:
    from understudy.qwen3 import EngineOptions, build_engine

    options = EngineOptions(
        device=args.device,
        dtype=args.dtype,
        backend=args.backend,
        page_size=args.page_size,
        num_blocks=args.num_blocks,
        max_num_seqs=args.max_num_seqs,
        max_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        cuda_graphs=not args.no_cuda_graphs,
        random_weights=args.random_weights,
        tensor_parallel_size=args.tensor_parallel_size,
    )
    with progress_bars() as told:
        return build_engine(args.model, options, told)


def _generate(args: argparse.Namespace) -> int:
    from understudy.qwen3 import Request, SamplingParams
    from understudy.qwen3.config import find_config

    tokenizer = None
    if args.prompt is not None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError("--prompt needs the package tokenizers; or give --prompt-tokens") from error
        file = Path(args.model) / "tokenizer.json"
        if not file.exists():
            raise ConfigError(f"--prompt needs {file}; or give --prompt-tokens")
        tokenizer = Tokenizer.from_file(str(file))
        tokens = tokenizer.encode(args.prompt).ids
    else:
        tokens = _ids(args.prompt_tokens, find_config(args.model).vocab_size)
    stops = frozenset() if args.ignore_eos else frozenset(find_config(args.model).eos_token_ids)
    sampling = SamplingParams(
        args.temperature,
        0 if args.top_k is None else args.top_k,
        1.0 if args.top_p is None else args.top_p,
        args.seed or 0,
    )
    engine = _engine(args)
    try:
        engine.submit(Request("generate", tokens, args.max_tokens, sampling, stops))
        answer: list[int] = []
        while not engine.idle:
            for output in engine.step():
                if output.finish_reason in ("rejected", "error"):
                    raise ConfigError(str(output.error))
                if output.token is not None:
                    answer.append(output.token)
                    if tokenizer is None:
                        print(output.token, end=" ", flush=True)
        print(tokenizer.decode(answer) if tokenizer is not None else "")
    finally:
        engine.close()
    return 0


def _ids(text: str, vocab_size: int) -> list[int]:
    try:
        tokens = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--prompt-tokens must be ints separated by commas, got {text!r}") from error
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"--prompt-tokens: {token} is not a token of this model (0 to {vocab_size - 1})"
            )
    return tokens


def _bench(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from understudy.qwen3.bench import ROWS, Bench
    from understudy.qwen3.build import device_of
    from understudy.qwen3.config import find_config

    if device_of(args.device).type != "cuda":
        raise ConfigError("qwen3 bench measures CUDA devices; elsewhere only --record runs")
    engine = _engine(args)
    try:
        bench = Bench(engine, find_config(args.model))
        console = Console()
        console.print(
            f"{args.model}: {engine.scheduler.manager.total_blocks} pages of {args.page_size} tokens, copies at "
            f"{bench.copy_bytes_per_ms / 1e6:.0f} GB/s (read and written)"
        )
        table = Table("what", "ms", "beside", "ms", "ratio")
        with counter("measuring", ROWS, "rows") as measured:
            for row in bench.rows(context=args.context or 1024):
                table.add_row(
                    row.what, f"{row.ms:.3f}", row.beside, f"{row.beside_ms:.3f}", f"{row.ratio:.2f}×"
                )
                if measured is not None:
                    measured(table.row_count)
        console.print(table)
    finally:
        engine.close()
    return 0


def _record(args: argparse.Namespace) -> int:
    """Play a workload that has steps of every kind, twice: the first time warms the device up."""
    from understudy.qwen3.config import find_config
    from understudy.qwen3.host import HostTier
    from understudy.qwen3.link import measure_link
    from understudy.qwen3.pages import PinnedPages
    from understudy.qwen3.play import measure
    from understudy.qwen3.workloads import RAMP, workload
    from understudy.timing.recorded.record import Record

    check_outputs({"--record": args.record}, files_named(Path(args.model), "MODEL"))
    engine = _engine(args)
    try:
        manager, config = engine.scheduler.manager, find_config(args.model)
        link = None
        if args.host_blocks is not None:
            link = measure_link(HostTier(manager, PinnedPages(args.host_blocks, engine.executor.buffer)))
        longest = min(engine.scheduler.config.max_positions, manager.max_request_blocks * args.page_size)
        requests = args.requests or 480
        for count in (max(8, requests // 8), requests):
            rows = workload(RAMP, count, config.vocab_size, seed=args.seed or 0, longest=longest)
            manager.blocks.clear_inactive()
            doing = "warming up" if count < requests else "recording"
            with counter(doing, len(rows), "requests") as told:
                played = measure(engine, rows, told)
        record = Record.of(
            played.steps,
            link,
            model=args.model,
            num_blocks=manager.max_request_blocks,
            block_size=args.page_size,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
        )
        record.write(args.record)
    finally:
        engine.close()
    print(
        f"{len(record.steps)} steps of {len(played.tokens)} requests: mean TTFT {played.mean_ttft_ms:.2f} ms, "
        f"TPOT {played.mean_tpot_ms:.2f} ms; written: {args.record}"
    )
    return 0
