"""`understudy predict [INPUTS]`: predict the times of benchmarks without running them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.cli import deployment_flags
from understudy.cli.predict_times import Source, build_gpu_times, read_fitted_times, read_named_times
from understudy.outputs import check_outputs, files_named
from understudy.timing.gpu_flags import RECORD_SUFFIX, TIMING_HELP

if TYPE_CHECKING:
    import argparse

    from understudy.calibrate.inputs import NamedLoad
    from understudy.cli.verbs import Verbs
    from understudy.engines.engine_config import EngineConfig
    from understudy.timing.deployment import Deployment

EXAMPLES = """\
examples:
  understudy predict --isl 2000 --osl 300 --concurrency 64 --model Llama-3.1-8B --gpu H100
  understudy predict bench.json --model Llama-3.1-8B --gpu H100
  understudy predict experiments.csv -o predictions.csv
  understudy predict run.jsonl --model Llama-3.1-8B --gpu "RTX PRO 6000" -o predictions.csv
  understudy predict run.jsonl --model Llama-3.1-8B --gpu "RTX 4090" --timing profiles/RTX4090/Llama-3.1-8B/tp1
  understudy predict run.jsonl --model Llama-3.1-70B --gpu H100 --tensor-parallel-size 4 --weight-dtype fp8
  understudy predict run.jsonl --timing timing.yaml
  understudy predict run.jsonl --timing steps.jsonl --num-gpu-blocks 27000

INPUTS is a benchmark's result, in any format that `understudy calibrate` reads: its load is replayed, and the means
that it measured, if any, are printed next to the predicted ones. Or it is a trace, with its --format; or a table with
one experiment per row (docs/accuracy.md lists its columns): closed loops of random lengths (key, system, model_path,
quant, kv_cache_dtype, isl, osl, conc, tp_size, …) or constant rates in stages (exp_id, model, hardware, tp, …).
Columns without effect are named on standard error. Or it is a recorded run with one JSON line per request: request_id,
arrival_s, input_tokens, output_tokens (and input_token_ids, if known); its times count from a request's arrival at the
engine. The source of the step times is printed on standard error.
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy predict`."""
    verb = verbs.add_parser(
        "predict",
        help="predict the times of benchmarks without running them",
        description="Replay the load of a benchmark with the step times of its model and GPU, and print its latencies.",
        epilog=EXAMPLES,
    )
    verb.add_argument(
        "inputs",
        type=Path,
        nargs="?",
        metavar="INPUTS",
        help="benchmark result, .csv of experiments, .jsonl of requests, or a trace with its --format",
    )
    load = verb.add_argument_group("load, instead of a file")
    load.add_argument(
        "--isl", type=int, metavar="N", help="longest prompt, in tokens; --least-length is the shortest"
    )
    load.add_argument(
        "--osl", type=int, metavar="N", help="longest output, in tokens; --least-length is the shortest"
    )
    load.add_argument("--concurrency", type=int, metavar="N", help="requests at a time (also for traces)")
    load.add_argument(
        "--num-prompts", type=int, metavar="N", help="requests in all (default: 10 times --concurrency)"
    )
    load.add_argument(
        "--least-length",
        type=float,
        metavar="X",
        help="shortest random prompt and output as a share of the longest, such as 0.8 (default); also for results of "
        "benchmarks that do not say it",
    )
    verb.add_argument("--format", metavar="NAME", help="INPUTS is a trace of this format, as of `replay`")
    verb.add_argument(
        "--trace-block-size", type=int, metavar="N", help="with --format: tokens per hash id, as of `replay`"
    )
    verb.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("-"),
        metavar="CSV",
        help="file for the predictions (default: standard output)",
    )
    verb.add_argument(
        "--threads", type=int, metavar="N", help="experiments to replay in parallel (default: one per core)"
    )
    verb.add_argument("--timing", metavar="FILE|NAME", help=f"for a recorded run: {TIMING_HELP}")
    deployment_flags.add_deployment_flags(verb, leave_out=("front-end-ms",), speculation=True)


def run(args: argparse.Namespace) -> int:
    """Predict the times and write them as CSV."""
    from understudy.checks import whole_number
    from understudy.errors import ConfigError
    from understudy.workload.guess import guess_format

    file = Path(args.timing) if args.timing is not None and Path(args.timing).is_file() else None
    read = files_named({"--timing": args.timing, "--model": args.model})
    check_outputs({"--output": args.output}, {"INPUTS": args.inputs, **read})
    if args.threads is not None:
        whole_number("--threads", args.threads, 1)
    loads = _read_loads(args)
    if loads is None and args.inputs.suffix.lower() == ".csv" and args.format is None:
        likely = guess_format(args.inputs)
        if likely not in (None, "table"):  # experiments are a table too; its columns are checked below
            raise ConfigError(
                f"{args.inputs} is no table of experiments; it looks like format {likely}: give --format {likely}"
            )
        _reject_flags_for_table(args)
        return _predict_table(args)
    if args.threads is not None:
        raise ConfigError("--threads is for a table of experiments; leave it out for any other load")
    if file is not None and file.suffix != RECORD_SUFFIX:
        deployment_flags.reject_flags_set_by_timing_file(args)
        source = read_fitted_times(file)
    elif deployment_flags.names_model_and_gpu(args):
        source = build_gpu_times(args)
    elif args.timing is None:
        what = "this load" if args.inputs is None else f"{args.inputs}: a recorded run"
        raise ConfigError(f"{what} needs step times; give --model and --gpu, or --timing (a table is a .csv)")
    else:
        source = read_named_times(args)
    return _predict_run(args, source) if loads is None else _predict_loads(args, loads, source)


def _read_loads(args: argparse.Namespace) -> list[NamedLoad] | None:
    """Read the loads that the flags or a benchmark file describe; None for a table, a trace or a recorded run."""
    from understudy.calibrate.inputs import build_closed_loop, is_benchmark, read_loads
    from understudy.checks import share
    from understudy.errors import ConfigError

    given = deployment_flags.list_given_flags(args, ("isl", "osl", "num-prompts"))
    least = args.least_length
    if least is not None:
        share("--least-length", least)
    if args.inputs is not None:
        if given:
            raise ConfigError(f"{given[0]} describes a load, and INPUTS is one; leave out one of them")
        if args.trace_block_size is not None and args.format is None:
            raise ConfigError("--trace-block-size is for traces; give the trace's --format too")
        if args.format is not None:
            if least is not None:
                raise ConfigError(
                    "--least-length is for random lengths, and a trace has exact ones; leave it out"
                )
            return None
        if args.concurrency is not None:
            raise ConfigError("--concurrency: INPUTS describes its own load; leave it out")
        if is_benchmark(args.inputs):
            return read_loads(args.inputs, least_length=least)
        if least is not None:
            raise ConfigError("--least-length is for random lengths, and INPUTS has exact ones; leave it out")
        return None
    if not given and args.concurrency is None:
        raise ConfigError("INPUTS is missing; give a file, or --isl, --osl and --concurrency")
    for name in ("isl", "osl", "concurrency"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name} is missing; give it, or a file")
    for flag, value in (("--format", args.format), ("--trace-block-size", args.trace_block_size)):
        if value is not None:
            raise ConfigError(f"{flag} is for a trace; name the file")
    return [build_closed_loop(args.isl, args.osl, args.concurrency, args.num_prompts, least)]


_COLUMN_OF_FLAG = {
    "--model": "model_path (or model)",
    "--gpu": "system (or hardware)",
    "--kv-dtype": "kv_cache_dtype",
    "--weight-dtype": "quant (or dtype)",
    "--tensor-parallel-size": "tp_size (or tp)",
    "--expert-parallel-size": "moe_ep_size",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--max-model-len": "max_model_len (constant rates)",
    "--vllm-version": "backend_version (closed loops)",
    "--speculative-config": "speculation and acceptance_per_position (closed loops)",
}
"""Columns of a table that replace the flags of a recorded run."""


def _reject_flags_for_table(args: argparse.Namespace) -> None:
    from understudy.errors import ConfigError

    names = (
        *deployment_flags.MODEL_AND_GPU_FLAGS,
        "timing",
        *deployment_flags.ENGINE_FLAGS,
        "speculative-config",
    )
    if flags := deployment_flags.list_given_flags(args, names):
        columns = [f"{_COLUMN_OF_FLAG[flag]} for {flag}" for flag in flags if flag in _COLUMN_OF_FLAG]
        others = [flag for flag in flags if flag not in _COLUMN_OF_FLAG]
        remedy = [f"fill the column {', '.join(columns)}"] if columns else []
        if others:
            remedy.append(f"leave out {', '.join(others)}, for which a table has no column")
        raise ConfigError(
            f"{', '.join(flags)} {'is' if len(flags) == 1 else 'are'} for a recorded run, and the rows of "
            f"{args.inputs} contain their own settings; {'; '.join(remedy)}"
        )


def _predict_table(args: argparse.Namespace) -> int:
    import sys

    from understudy.calibrate.predict import Predictions, predict_table
    from understudy.calibrate.tables import Table
    from understudy.cli.progress import progress_bar
    from understudy.text import plural

    table = Table.read(args.inputs)
    with progress_bar("predicting", len(table.rows), "experiments") as progress:
        found = Predictions.of(table, predict_table(table, threads=args.threads, progress=progress))
    errors = found.errors
    if not found.rows:
        raise errors[0]
    _write_csv(args.output, found.columns, found.rows)
    for origin, count in found.sources.items():
        print(f"times of {plural(count, 'row')} from {origin}", file=sys.stderr)
    if ignored := table.ignored_columns:
        print(f"columns without effect on predictions: {', '.join(ignored)}", file=sys.stderr)
    for error in errors:
        print(f"understudy predict: {error}", file=sys.stderr)
    if errors:
        print(f"{len(errors)} of {len(table.rows)} rows are left out", file=sys.stderr)
    return 2 if errors else 0


def _predict_loads(args: argparse.Namespace, loads: list[NamedLoad], source: Source) -> int:
    """Predict the mean times of each load as its client measures them, front-end time included."""
    import sys

    import msgspec

    from understudy.calibrate.experiment import MEASURES
    from understudy.calibrate.simulate import simulate
    from understudy.cli.progress import progress_bar
    from understudy.run.facts import TimeFacts
    from understudy.run.times import format_times

    deployment, rows = source.deployment, []
    engines: dict[str, None] = {}
    engine = msgspec.structs.replace(
        deployment_flags.build_engine(args, deployment, source.engine), timing=source.timing
    )
    with progress_bar("predicting", len(loads), "benchmarks") as progress:
        for one in loads:
            own = msgspec.structs.replace(engine, **_read_recorded_settings(args, one, deployment))
            engines[_describe_engine(own)] = None
            outcome = simulate(
                one.load,
                own,
                front_end_ms=source.front_end_ms,
                workers=1 if deployment is None else deployment.parallel.data,
                ranks=deployment is not None and deployment.steps_together,
            )
            rows.append((one, [outcome.mean(name) for name in MEASURES]))
            if progress is not None:
                progress(len(rows))
    compared = [name for name in MEASURES if any(one.means for one in loads)]
    _write_csv(
        args.output,
        ("benchmark", *MEASURES, *(f"measured_{name}" for name in compared)),
        [(one.name, *means, *map(one.means.get, compared)) for one, means in rows],
    )
    for one, means in rows:
        if errors := _format_errors(dict(zip(MEASURES, means, strict=True)), one.means):
            print(f"means over requests, predicted / measured − 1: {one.name} {errors}", file=sys.stderr)
    for one in loads:
        for note in one.notes:
            print(f"note: {one.name}: {note}", file=sys.stderr)
    times = TimeFacts(source.timing.describe_origin(), 0.0, source.front_end_ms)
    print(f"times from {format_times(times)}", file=sys.stderr)
    for line in engines:
        print(f"engine: {line}", file=sys.stderr)
    _print_notes(engine)
    return 0


def _print_notes(engine: EngineConfig) -> None:
    """Print what the engine assumes, such as the acceptance of drafts."""
    import sys

    for note in engine.notes():
        print(f"note: {note}", file=sys.stderr)


def _describe_engine(engine: EngineConfig) -> str:
    used = [f"{name} {getattr(engine, name):,}" for name in ("max_num_seqs", "max_num_batched_tokens")]
    return f"{', '.join(used)}, {engine.num_gpu_blocks:,} KV blocks of {engine.block_size} tokens"


def _format_errors(predicted: dict[str, float], measured: dict[str, float]) -> str:
    return ", ".join(
        f"{name.removesuffix('_ms').upper()} {100 * (value / measured[name] - 1):+.1f} %"
        for name, value in predicted.items()
        if measured.get(name) and not math.isnan(value)
    )


def _read_recorded_settings(
    args: argparse.Namespace, load: NamedLoad, deployment: Deployment | None
) -> dict[str, int]:
    """Return the engine settings in a benchmark's file. ConfigError if a flag or the deployment differs."""
    from understudy.errors import ConfigError

    settings = dict(load.engine)
    tensor = settings.pop("tensor_parallel_size", None)
    given = {name: getattr(args, name) for name in settings}
    if tensor is not None and deployment is not None:
        settings["tensor_parallel_size"], given["tensor_parallel_size"] = tensor, deployment.parallel.tensor
    for name, value in settings.items():
        if given[name] not in (None, value):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: {load.name} ran with {value}, not {given[name]}; give {flag} {value}")
    settings.pop("tensor_parallel_size", None)
    return settings


def _predict_run(args: argparse.Namespace, source: Source) -> int:
    """Predict the times of each request: a trace's at the client, as `replay` does; a recorded run's in the engine."""
    import sys

    import msgspec
    import numpy as np

    from understudy.calibrate.load import Load
    from understudy.calibrate.recorded import COLUMNS, predict_run, read_run
    from understudy.calibrate.simulate import mean_of_known
    from understudy.cli.progress import progress_bar
    from understudy.cli.trace_flags import read_workload
    from understudy.errors import InvalidArgument
    from understudy.text import plural
    from understudy.workload.guess import guess_format

    deployment = source.deployment
    engine = deployment_flags.build_engine(args, deployment, source.engine)
    if args.format is not None:
        load = Load(read_workload(args.inputs, args.format, _block_size(args)), args.concurrency or 0)
    else:
        try:
            load = read_run(args.inputs)
        except InvalidArgument as error:
            if (likely := guess_format(args.inputs)) is None:
                raise
            raise InvalidArgument(
                f"{error}; the file looks like format {likely} (--format {likely})"
            ) from None
    timing = source.timing
    if args.format is not None and source.front_end_ms > 0:
        timing = msgspec.structs.replace(timing, front_end_ms=source.front_end_ms)
    engine = msgspec.structs.replace(engine, timing=timing)
    with progress_bar("predicting", len(load.workload), "requests") as progress:
        found = predict_run(
            load,
            engine,
            workers=1 if deployment is None else deployment.parallel.data,
            ranks=deployment is not None and deployment.steps_together,
            at_client=args.format is not None,
            progress=progress,
        )
    _write_csv(args.output, COLUMNS, found.requests)
    columns = zip(*(row[1:] for row in found.requests), strict=True)
    means = [mean_of_known(np.array(column)) for column in columns]
    said = ", ".join(
        f"{name.removesuffix('_ms').upper()} {'–' if math.isnan(mean) else f'{mean:,.1f} ms'}"
        for name, mean in zip(COLUMNS[1:], means, strict=True)
    )
    count = plural(len(found.requests), "request")
    print(f"times from {found.origin}", file=sys.stderr)
    place = "in the engine" if args.format is None else "at the client"
    print(f"means over {count}, {place}: {said}", file=sys.stderr)
    _print_notes(engine)
    return 0


def _block_size(args: argparse.Namespace) -> dict[str, Any]:
    return {} if args.trace_block_size is None else {"trace_block_size": args.trace_block_size}


def _write_csv(path: Path, header: tuple[str, ...], rows: list[Any]) -> None:
    import csv
    import io

    from understudy.outputs import create

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for name, *values in rows:
        writer.writerow(
            [name, *("" if value is None or math.isnan(value) else f"{value:.4f}" for value in values)]
        )
    with create(path) as file:
        file.write(text.getvalue().encode())
