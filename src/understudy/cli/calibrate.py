"""`understudy calibrate BENCH...`: fit step times to benchmarks; `calibrate check` scores a timing file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from understudy.cli import deployment_flags
from understudy.cli.written import print_written
from understudy.kind_names import KIND_MODULES
from understudy.outputs import check_outputs, files_named

if TYPE_CHECKING:
    import argparse

    from understudy.calibrate.benchmark import Benchmark
    from understudy.calibrate.engine_flags import EngineFlags
    from understudy.cli.verbs import Verbs
    from understudy.timing.deployment import Deployment
    from understudy.timing.timing_file import FittedInput, TimingFile

EXAMPLES = """\
examples:
  vllm bench serve ... --save-result --save-detailed --result-filename bench.json
  understudy calibrate bench.json --model Llama-3.1-8B --gpu H100 -o timing.yaml --html fit.html
  understudy calibrate low.json high.json long.json --model Llama-3.1-70B --gpu H200 --tensor-parallel-size 4 \\
      --weight-dtype fp8 --kv-dtype fp8 --max-num-seqs 64 --max-num-batched-tokens 8192 -o timing.yaml
  understudy calibrate check other.json --timing timing.yaml
  understudy replay trace.jsonl --timing timing.yaml --max-num-seqs 64 --max-num-batched-tokens 8192

BENCH is a result file: vllm bench serve (plain or detailed), aiperf (profile_export.jsonl or
profile_export_aiperf.json), guidellm (benchmarks.json), a CSV of summaries (isl, osl, conc, mean_ttft_ms,
mean_tpot_ms), or understudy replay --requests-jsonl. The format is detected from the keys. Such files lack the
engine's settings: give them as flags here, or record them with vllm bench serve --metadata max_num_seqs=64.
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy calibrate`."""
    verb = verbs.add_parser(
        "calibrate",
        help="fit step times to benchmarks",
        description="Replay the load of benchmarks and fit the parameters of the timing model to the measured times.",
        epilog=EXAMPLES,
    )
    verb.add_argument(
        "benchmarks", nargs="+", metavar="BENCH", help="benchmark files; put `check` first to score only"
    )
    verb.add_argument("-o", "--output", type=Path, metavar="YAML", help="timing file to write")
    verb.add_argument("--timing", type=Path, metavar="YAML", help="with `check`: timing file to score")
    verb.add_argument(
        "--html", type=Path, metavar="PATH", help="write a page that compares measured and simulated times"
    )
    verb.add_argument(
        "--least-length",
        type=float,
        metavar="X",
        help="shortest random length as a share of the longest, for summaries that lack it (default: 0.8)",
    )
    verb.add_argument(
        "--in-engine",
        action="store_true",
        help="times were measured inside the engine: fit no front-end time",
    )
    verb.add_argument(
        "--engine",
        choices=tuple(KIND_MODULES),
        default="vllm",
        help="engine that was measured, for the timing file (default: vllm); the load is replayed with vLLM's rules",
    )
    deployment_flags.add_deployment_flags(verb, leave_out=deployment_flags.UNUSED_IN_FITS)


def run(args: argparse.Namespace) -> int:
    """Fit and write a timing file, or score one with `check`."""
    from understudy.checks import share

    if args.least_length is not None:
        share("--least-length", args.least_length)
    if args.benchmarks[0] == "check":
        return _check(args, [Path(name) for name in args.benchmarks[1:]])
    return _fit(args, [Path(name) for name in args.benchmarks])


def _fit(args: argparse.Namespace, paths: list[Path]) -> int:
    import sys

    from understudy.calibrate.fit import fit
    from understudy.calibrate.page import page
    from understudy.cli.progress import progress_bar
    from understudy.errors import ConfigError
    from understudy.outputs import create
    from understudy.timing.presets import preset

    if args.timing is not None:
        raise ConfigError(
            "--timing is for `calibrate check`; name the file that a fit writes with -o timing.yaml"
        )
    if args.output is None:
        raise ConfigError("-o is missing; name the timing file to write, such as -o timing.yaml")
    if not deployment_flags.names_model_and_gpu(args):
        raise ConfigError("--model and --gpu are needed; name the model that ran and its GPU")
    inputs = {f"BENCH {number}": path for number, path in enumerate(paths, 1)}
    inputs |= files_named({"--model": args.model})
    check_outputs({"--output": args.output, "--html": args.html}, inputs)
    deployment = deployment_flags.read_deployment(args)
    benchmarks = _read_benchmarks(args, paths, deployment)
    start = preset(deployment.model, deployment.gpu, deployment.weights, deployment.kv)
    iterations = 8
    with progress_bar("fitting", iterations, "rounds at most") as progress:
        found = fit(
            benchmarks,
            deployment,
            start.efficiencies,
            _read_engine_flags(args),
            model=args.model,
            in_engine=args.in_engine,
            iterations=iterations,
            progress=progress,
        )
    with create(args.output) as file:
        file.write(found.file.text().encode())
    if args.html is not None:
        with create(args.html) as file:
            file.write(page(found.file, benchmarks, found.outcomes, found.notes).encode())
    _print_tables(found.file, found.file.inputs)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    print_written([args.output, args.html])
    return 0


def _check(args: argparse.Namespace, paths: list[Path]) -> int:
    import sys

    from msgspec.structs import replace

    from understudy.calibrate.fit import score
    from understudy.calibrate.held import list_notes
    from understudy.calibrate.measured_run import Run
    from understudy.calibrate.page import page
    from understudy.cli.progress import progress_bar
    from understudy.errors import ConfigError
    from understudy.outputs import create
    from understudy.timing.timing_file import TimingFile

    if args.timing is None or not paths:
        raise ConfigError("calibrate check needs benchmarks and --timing; name the file to score")
    if args.output is not None:
        raise ConfigError("calibrate check writes no timing file; leave out -o")
    deployment_flags.reject_flags_set_by_timing_file(args)
    inputs = {f"BENCH {number}": path for number, path in enumerate(paths, 1)}
    check_outputs({"--html": args.html}, {**inputs, "--timing": args.timing})
    file = TimingFile.read(args.timing)
    benchmarks = _read_benchmarks(args, paths, file.deployment)
    flags, outcomes = _read_engine_flags(args), []
    efficiencies = replace(file.efficiencies, front_end_ms=0.0) if args.in_engine else file.efficiencies
    with progress_bar("replaying", len(benchmarks), "benchmarks") as progress:
        for benchmark in benchmarks:
            outcomes.append(Run.of(benchmark, file.deployment, flags).replay(efficiencies))
            if progress is not None:
                progress(len(outcomes))
    notes = list_notes(file, benchmarks)
    scores = [score(benchmark, outcome) for benchmark, outcome in zip(benchmarks, outcomes, strict=True)]
    if args.html is not None:
        with create(args.html) as out:
            out.write(page(file, benchmarks, outcomes, notes).encode())
    _print_tables(file, scores, parameters=False)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _read_benchmarks(args: argparse.Namespace, paths: list[Path], deployment: Deployment) -> list[Benchmark]:
    """Read the benchmark files. ConfigError names a flag that applies to none of them."""
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
            "--least-length is for summaries without a range of lengths, and these files "
            f"({', '.join(sorted({one.format for one in found}))}) contain it; leave it out"
        )
    for name in _METADATA_SETTINGS:
        given, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        recorded = {one.engine.get(name) for one in found}
        if given is not None and None not in recorded and recorded != {given}:
            raise ConfigError(
                f"{flag} is for files that lack this setting, and each of these files has it "
                f"({name}: {', '.join(map(str, sorted(filter(None, recorded))))}); leave it out"
            )
    return found


_METADATA_SETTINGS = ("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks")
"""Engine settings that `vllm bench serve --metadata` records in a file; a recorded value overrides the flag."""


def _read_engine_flags(args: argparse.Namespace) -> EngineFlags:
    from msgspec.structs import replace

    from understudy.calibrate.engine_flags import EngineFlags
    from understudy.cli.gpu_flags import read_gpu_flags

    flags = EngineFlags(**deployment_flags.engine_values(args))
    share = read_gpu_flags(args).get("gpu_memory_utilization")
    flags = replace(flags, engine=args.engine)
    return flags if share is None else replace(flags, gpu_memory_utilization=share)


def _print_tables(
    file: TimingFile, scores: list[FittedInput] | tuple[FittedInput, ...], *, parameters: bool = True
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
    console.print(f"times from {file.timing().describe_origin()}", style="dim")
    if not parameters:
        return
    table = Table(title="parameters", title_justify="left")
    for name in ("parameter", "value", "uncertainty", "preset", "determined by the data"):
        table.add_column(name, justify="left" if name in ("parameter", "determined by the data") else "right")
    for number in file.fitted:
        table.add_row(
            number.name,
            f"{number.value:.4g}",
            f"± {number.plus_minus_percent:.1f} %",
            f"{number.preset:.4g}",
            number.describe_determination(),
        )
    console.print(table)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1f} %"
