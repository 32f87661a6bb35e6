"""`understudy calibrate BENCH...`: fit step times to benchmarks; `calibrate check` scores a timing file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from understudy.cli import deployment_flags
from understudy.outputs import check_outputs, files_named

if TYPE_CHECKING:
    import argparse

    from understudy.calibrate.benchmark import Benchmark
    from understudy.calibrate.fit import EngineFlags
    from understudy.cli import Verbs
    from understudy.timing.deployment import Deployment
    from understudy.timing.timing_file import FittedInput, TimingFile

EXAMPLES = """\
examples:
  vllm bench serve ... --save-result --save-detailed --result-filename bench.json
  understudy calibrate bench.json --model Llama-3.1-8B --gpu H100 -o timing.yaml --html fit.html
  understudy calibrate low.json high.json long.json --model Llama-3.1-70B --gpu H200 --tensor-parallel-size 4 \\
      --weight-dtype fp8 --kv-dtype fp8 --max-num-seqs 64 --max-num-batched-tokens 8192 -o timing.yaml
  understudy calibrate check other.json --timing timing.yaml
  understudy replay trace.jsonl --timing timing.yaml --block-size 16 --max-num-seqs 64 --max-num-batched-tokens 8192

BENCH is what a load generator saved: vllm bench serve (plain or detailed), aiperf (profile_export.jsonl or
profile_export_aiperf.json), guidellm (benchmarks.json), a CSV of summaries (isl, osl, conc, mean_ttft_ms,
mean_tpot_ms), or understudy replay --requests-jsonl. Its keys say which. Settings of the engine are not in such files:
say them here, or with vllm bench serve --metadata max_num_seqs=64.
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy calibrate`."""
    verb = verbs.add_parser(
        "calibrate",
        help="fit step times to benchmarks",
        description="Replay the load of benchmarks, and fit the numbers of the timing model until the times agree.",
        epilog=EXAMPLES,
    )
    verb.add_argument(
        "benchmarks", nargs="+", metavar="BENCH", help="files of benchmarks; `check` before them: only score"
    )
    verb.add_argument("-o", "--output", type=Path, metavar="YAML", help="the timing file to write")
    verb.add_argument("--timing", type=Path, metavar="YAML", help="check: the timing file to score")
    verb.add_argument("--html", type=Path, metavar="PATH", help="write a page: measured beside simulated")
    verb.add_argument(
        "--least-length",
        type=float,
        metavar="X",
        help="shortest random length, as a share of the longest, where a summary does not say (default: all alike; "
        "CSV: 0.8)",
    )
    verb.add_argument(
        "--in-engine",
        action="store_true",
        help="times were taken in the engine: nothing passes before and after it",
    )
    deployment_flags.add_deployment_flags(verb, leave_out=deployment_flags.IDLE_IN_A_FIT)


def run(args: argparse.Namespace) -> int:
    """Fit and write, or score."""
    from understudy.errors import ConfigError

    if args.least_length is not None and not 0 < args.least_length <= 1:
        raise ConfigError(f"--least-length must be above 0 and at most 1, got {args.least_length:g}")
    if args.benchmarks[0] == "check":
        return _check(args, [Path(name) for name in args.benchmarks[1:]])
    return _fit(args, [Path(name) for name in args.benchmarks])


def _fit(args: argparse.Namespace, paths: list[Path]) -> int:
    import sys

    from understudy.calibrate.fit import fit
    from understudy.calibrate.page import page
    from understudy.cli.progress import progress_bar
    from understudy.errors import ConfigError
    from understudy.outputs import create, is_stdout
    from understudy.timing.presets import preset

    if args.timing is not None:
        raise ConfigError(
            "--timing names the file that `calibrate check` scores; a fit writes one: -o timing.yaml"
        )
    if args.output is None:
        raise ConfigError("-o is missing: the timing file to write, as -o timing.yaml")
    if not deployment_flags.is_described(args):
        raise ConfigError("--model and --gpu are needed: what ran, and on what")
    inputs = {f"BENCH {number}": path for number, path in enumerate(paths, 1)}
    inputs |= files_named({"--model": args.model})
    check_outputs({"--output": args.output, "--html": args.html}, inputs)
    deployment = deployment_flags.deployment_of(args)
    benchmarks = _read(args, paths, deployment)
    start = preset(deployment.model, deployment.gpu, deployment.weights, deployment.kv)
    iterations = 8
    with progress_bar("fitting", iterations, "rounds at most") as progress:
        found = fit(
            benchmarks,
            deployment,
            start.efficiencies,
            _flags(args),
            in_engine=args.in_engine,
            iterations=iterations,
            progress=progress,
        )
    with create(args.output) as file:
        file.write(found.file.text().encode())
    if args.html is not None:
        with create(args.html) as file:
            file.write(page(found.file, benchmarks, found.outcomes).encode())
    _print(found.file, found.file.inputs)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    for path in (args.output, args.html):
        if path is not None and not is_stdout(path):
            print(f"written: {path}", file=sys.stderr)
    return 0


def _check(args: argparse.Namespace, paths: list[Path]) -> int:
    from msgspec.structs import replace

    from understudy.calibrate.fit import Run, score
    from understudy.calibrate.page import page
    from understudy.cli.progress import progress_bar
    from understudy.errors import ConfigError
    from understudy.outputs import create
    from understudy.timing.timing_file import TimingFile

    if args.timing is None or not paths:
        raise ConfigError("calibrate check needs benchmarks and --timing, the file to score")
    if args.output is not None:
        raise ConfigError("calibrate check writes no timing file; leave out -o")
    deployment_flags.refuse_beside_timing_file(args)
    inputs = {f"BENCH {number}": path for number, path in enumerate(paths, 1)}
    check_outputs({"--html": args.html}, {**inputs, "--timing": args.timing})
    file = TimingFile.read(args.timing)
    benchmarks = _read(args, paths, file.deployment)
    flags, outcomes = _flags(args), []
    reached = replace(file.efficiencies, front_end_ms=0.0) if args.in_engine else file.efficiencies
    with progress_bar("replaying", len(benchmarks), "benchmarks") as progress:
        for one in benchmarks:
            outcomes.append(Run.of(one, file.deployment, flags).play(reached))
            if progress is not None:
                progress(len(outcomes))
    scores = [score(one, outcome) for one, outcome in zip(benchmarks, outcomes, strict=True)]
    if args.html is not None:
        with create(args.html) as out:
            out.write(page(file, benchmarks, outcomes).encode())
    _print(file, scores, numbers=False)
    return 0


def _read(args: argparse.Namespace, paths: list[Path], deployment: Deployment) -> list[Benchmark]:
    """ConfigError names a flag that is nothing to any of them."""
    from understudy.calibrate.readers import TAKE_LEAST_LENGTH, read_benchmarks
    from understudy.errors import ConfigError

    ranks = deployment.parallel.data
    found = [
        one
        for path in paths
        for one in read_benchmarks(path, least_length=args.least_length, data_parallel_size=ranks)
    ]
    if args.least_length is not None and not any(one.format in TAKE_LEAST_LENGTH for one in found):
        raise ConfigError(
            "--least-length is for summaries that do not say how random their lengths were, and these files "
            f"({', '.join(sorted({one.format for one in found}))}) do; leave it out"
        )
    for name in _NAMED_IN_FILES:
        said, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        own = {one.engine.get(name) for one in found}
        if said is not None and None not in own and own != {said}:
            raise ConfigError(
                f"{flag} is for files that do not say it, and each of these does "
                f"({name}: {', '.join(map(str, sorted(filter(None, own))))}); leave it out"
            )
    return found


_NAMED_IN_FILES = ("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks")
"""Settings of the engine that a file may have, by `vllm bench serve --metadata`; they win over the flags."""


def _flags(args: argparse.Namespace) -> EngineFlags:
    from understudy.calibrate.fit import EngineFlags

    return EngineFlags(**deployment_flags.engine_values(args)._asdict())


def _print(
    file: TimingFile, scores: list[FittedInput] | tuple[FittedInput, ...], *, numbers: bool = True
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(
        title=f"simulated / measured − 1: {file.model.name} on {file.gpu.name}", title_justify="left"
    )
    table.add_column("benchmark")
    table.add_column("requests", justify="right")
    for name in ("TTFT", "TPOT", "E2E"):
        table.add_column(name, justify="right")
    for one in scores:
        table.add_row(
            one.file,
            f"{one.requests:,}",
            *map(_percent, (one.ttft_percent, one.tpot_percent, one.e2e_percent)),
        )
    console.print(table)
    console.print(f"times from {file.timing().described_origin()}", style="dim")
    if not numbers:
        return
    table = Table(title="numbers", title_justify="left")
    for name in ("number", "value", "uncertainty", "preset", "determined by the data"):
        table.add_column(name, justify="left" if name in ("number", "determined by the data") else "right")
    for number in file.fitted:
        table.add_row(
            number.name,
            f"{number.value:.4g}",
            f"± {number.plus_minus_percent:.1f} %",
            f"{number.preset:.4g}",
            "yes" if number.determined else "no",
        )
    console.print(table)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1f} %"
