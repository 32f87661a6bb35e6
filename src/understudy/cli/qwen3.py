"""`understudy qwen3`: run the real engine on one prompt, or measure its step times."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.cli.needs_torch import check_torch_is_installed
from understudy.cli.progress import counter, progress_bars
from understudy.errors import ConfigError
from understudy.outputs import check_outputs, files_named

if TYPE_CHECKING:
    import argparse

    from understudy.cli.verbs import Verbs

EXAMPLES = """\
examples:
  understudy qwen3 generate ~/models/Qwen3-0.6B --prompt 'Why is the sky blue?'
  understudy qwen3 generate Qwen3-0.6B --random-weights 1 --prompt-tokens 1,2,3 --device cpu --num-blocks 64
  understudy qwen3 bench Qwen3-4B --random-weights 1          decode, whole steps and prefill against hardware limits
  understudy qwen3 bench Qwen3-4B --random-weights 1 --record steps.jsonl     times of each step of a workload
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
  understudy replay trace.jsonl --engine qwen3 --step-times steps.jsonl       replay a trace with those times
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy qwen3`."""
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
        description="Load the model, or random weights of its size, and answer one prompt.",
        epilog=GENERATE_EXAMPLES,
    )
    _add_engine(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text; needs a folder with a tokenizer.json (package tokenizers)")
    prompt.add_argument("--prompt-tokens", metavar="IDS", help="token ids, separated by commas")
    generate.add_argument("--max-tokens", type=int, default=64, help="most tokens to generate (default: 64)")
    generate.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature (default: 0, greedy)"
    )
    sampled = "with a temperature"
    generate.add_argument(
        "--top-k", type=int, help=f"{sampled}: keep the K likeliest tokens (default: 0, all)"
    )
    generate.add_argument(
        "--top-p", type=float, help=f"{sampled}: keep the likeliest tokens up to this mass (default: 1)"
    )
    generate.add_argument("--seed", type=int, help=f"{sampled}: seed of the sampler (default: 0)")
    generate.add_argument("--ignore-eos", action="store_true", help="continue after the model's stop tokens")
    bench = tasks.add_parser(
        "bench",
        help="measure step times and compare them with the device's limits (CUDA)",
        description="Measure the steps of the engine and compare them with the limits of the GPU.",
        epilog=BENCH_EXAMPLES,
    )
    _add_engine(bench)
    bench.add_argument(
        "--record",
        type=Path,
        metavar="PATH",
        help="run a workload instead and write each step's composition and milliseconds (JSON lines)",
    )
    bench.add_argument("--requests", type=int, help="with --record: requests of the workload (default: 480)")
    bench.add_argument("--seed", type=int, help="with --record: seed of the workload (default: 0)")
    bench.add_argument(
        "--host-blocks",
        type=int,
        metavar="N",
        help="with --record: also measure the link to pinned host memory, with N pages",
    )
    bench.add_argument(
        "--context", type=int, help="without --record: context tokens of decode steps (default: 1024)"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="folder with config.json and safetensors, or a published name such as Qwen3-4B"
    )
    parser.add_argument(
        "--random-weights",
        type=int,
        metavar="SEED",
        help="generate weights from a seed instead of loading them",
    )
    parser.add_argument("--device", help="cuda or cpu (default: cuda if available)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="data type (default: the model's own)"
    )
    parser.add_argument(
        "--backend", choices=("reference", "triton"), help="attention kernels (default: triton on CUDA)"
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens per KV page (default: 16)")
    parser.add_argument("--num-blocks", type=int, help="KV pages (default: as many as fit on the device)")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="requests per batch (default: 256)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, help="tokens per step (default: 2048)"
    )
    parser.add_argument("--max-model-len", type=int, help="context window (default: the model's own)")
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="processes over which attention heads are sharded (default: 1)",
    )
    parser.add_argument(
        "--no-cuda-graphs", action="store_true", help="launch kernels one by one instead of as CUDA graphs"
    )


def run(args: argparse.Namespace) -> int:
    """Generate an answer, or measure step times."""
    from understudy.checks import whole_number

    _reject_unused_flags(args)
    check_torch_is_installed()
    if args.task == "generate":
        whole_number("--max-tokens", args.max_tokens, 1)
        return _generate(args)
    for name in ("requests", "context", "host_blocks"):
        if getattr(args, name) is not None:
            whole_number(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    if args.tensor_parallel_size != 1 and (args.record is None or args.host_blocks is not None):
        raise ConfigError(
            "--tensor-parallel-size above 1 is measured with --record only, and without --host-blocks"
        )
    return _bench(args) if args.record is None else _record(args)


def _reject_unused_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for a flag that would have no effect."""
    if args.task == "generate":
        names: tuple[str, ...] = () if args.temperature else ("seed", "top_k", "top_p")
        why = "needs --temperature, without which the likeliest token is taken"
    elif args.record is None:
        names, why = ("seed", "requests", "host_blocks"), "needs --record, which runs a workload"
    else:
        names, why = ("context",), "is for the table that is measured without --record"
    for name in names:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {why}; leave it out")


def _build_engine(args: argparse.Namespace) -> Any:
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
    with progress_bars() as report_progress:
        return build_engine(args.model, options, report_progress)


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
        tokens = _parse_token_ids(args.prompt_tokens, find_config(args.model).vocab_size)
    stops = frozenset() if args.ignore_eos else frozenset(find_config(args.model).eos_token_ids)
    sampling = SamplingParams(
        args.temperature,
        0 if args.top_k is None else args.top_k,
        1.0 if args.top_p is None else args.top_p,
        args.seed or 0,
    )
    engine = _build_engine(args)
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


def _parse_token_ids(text: str, vocab_size: int) -> list[int]:
    try:
        tokens = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--prompt-tokens must be integers separated by commas, got {text!r}") from error
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"--prompt-tokens: {token} is not a token id of this model; ids are 0 to {vocab_size - 1}"
            )
    return tokens


def _bench(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from understudy.qwen3.bench import ROWS, Bench
    from understudy.qwen3.build import find_device
    from understudy.qwen3.config import find_config

    if find_device(args.device).type != "cuda":
        raise ConfigError("qwen3 bench needs a CUDA device; on others only --record is supported")
    engine = _build_engine(args)
    try:
        bench = Bench(engine, find_config(args.model))
        console = Console()
        console.print(
            f"{args.model}: {engine.scheduler.manager.total_blocks} pages of {args.page_size} tokens, copies at "
            f"{bench.copy_bytes_per_ms / 1e6:.0f} GB/s (read and written)"
        )
        table = Table("measured", "ms", "limit", "ms", "ratio")
        with counter("measuring", ROWS, "rows") as measured:
            for row in bench.rows(context=args.context or 1024):
                table.add_row(
                    row.what, f"{row.ms:.3f}", row.baseline, f"{row.baseline_ms:.3f}", f"{row.ratio:.2f}×"
                )
                if measured is not None:
                    measured(table.row_count)
        console.print(table)
    finally:
        engine.close()
    return 0


def _record(args: argparse.Namespace) -> int:
    """Record the steps of a workload with all kinds of steps, after a short run that warms the device up."""
    from understudy.qwen3.config import find_config
    from understudy.qwen3.host import HostTier
    from understudy.qwen3.link import measure_link
    from understudy.qwen3.pages import PinnedPages
    from understudy.qwen3.runner import measure
    from understudy.qwen3.workloads import RAMP, generate_workload
    from understudy.timing.recorded.record import Record

    check_outputs({"--record": args.record}, files_named(Path(args.model), "MODEL"))
    engine = _build_engine(args)
    try:
        manager, config = engine.scheduler.manager, find_config(args.model)
        link = None
        if args.host_blocks is not None:
            link = measure_link(HostTier(manager, PinnedPages(args.host_blocks, engine.executor.buffer)))
        longest = min(engine.scheduler.config.max_positions, manager.max_request_blocks * args.page_size)
        requests = args.requests or 480
        for count in (max(8, requests // 8), requests):
            rows = generate_workload(RAMP, count, config.vocab_size, seed=args.seed or 0, longest=longest)
            manager.blocks.clear_inactive()
            doing = "warming up" if count < requests else "recording"
            with counter(doing, len(rows), "requests") as report_progress:
                measured = measure(engine, rows, report_progress)
        record = Record.of(
            measured.steps,
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
        f"{len(record.steps)} steps of {len(measured.tokens)} requests: mean TTFT {measured.mean_ttft_ms:.2f} ms, "
        f"TPOT {measured.mean_tpot_ms:.2f} ms; written: {args.record}"
    )
    return 0
