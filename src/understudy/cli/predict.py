"""`understudy predict INPUTS`: times of benchmarks that nobody has to run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from understudy.cli import deployment_flags
from understudy.outputs import check_outputs, files_named
from understudy.timing.gpu_flags import RECORD_SUFFIX, TIMING_HELP

if TYPE_CHECKING:
    import argparse

    from understudy.cli import Verbs
    from understudy.engines.timing import Timing
    from understudy.timing.deployment import Deployment

EXAMPLES = """\
examples:
  understudy predict experiments.csv -o predictions.csv
  understudy predict run.jsonl --model Llama-3.1-8B --gpu "RTX PRO 6000" -o predictions.csv
  understudy predict run.jsonl --model Llama-3.1-8B --gpu "RTX 4090" --timing profiles/RTX4090/Llama-3.1-8B/tp1
  understudy predict run.jsonl --model Llama-3.1-70B --gpu H100 --tensor-parallel-size 4 --weight-dtype fp8
  understudy predict run.jsonl --timing timing.yaml
  understudy predict run.jsonl --timing steps.jsonl --num-gpu-blocks 27000

INPUTS is a table of experiments, one a row (docs/accuracy.md has its columns): closed loops of random lengths (key,
system, model_path, quant, kv_cache_dtype, isl, osl, conc, tp_size, …) or constant rates in stages (exp_id, model,
hardware, tp, …). Columns of measurements are not looked at. Or it is a recorded run, a JSON line a request:
request_id, arrival_s, input_tokens, output_tokens (and input_token_ids, where known); its times count from when the
engine sees a request. Where the times come from is told on standard error.
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy predict`."""
    verb = verbs.add_parser(
        "predict",
        help="times of benchmarks, without running them",
        description="Replay the load of each experiment through the engine, with the times of its model and GPU.",
        epilog=EXAMPLES,
    )
    verb.add_argument(
        "inputs", type=Path, metavar="INPUTS", help="a .csv of experiments or a .jsonl of requests"
    )
    verb.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("-"),
        metavar="CSV",
        help="predictions (default: standard output)",
    )
    verb.add_argument("--threads", type=int, metavar="N", help="experiments at a time (default: one a core)")
    verb.add_argument("--timing", metavar="FILE|NAME", help=f"of a recorded run: {TIMING_HELP}")
    deployment_flags.add_deployment_flags(verb, leave_out=("front-end-ms",))


def run(args: argparse.Namespace) -> int:
    """Predict, and write."""
    from understudy.checks import whole_number
    from understudy.errors import ConfigError

    file = Path(args.timing) if args.timing is not None and Path(args.timing).is_file() else None
    read = files_named({"--timing": args.timing, "--model": args.model})
    check_outputs({"--output": args.output}, {"INPUTS": args.inputs, **read})
    if args.threads is not None:
        whole_number("--threads", args.threads, 1)
    described = deployment_flags.is_described(args)
    if args.inputs.suffix.lower() == ".csv":
        _refuse_for_a_table(args)
        return _table(args)
    if args.threads is not None:
        raise ConfigError("--threads belong to a table of experiments; a recorded run is one")
    if file is not None and file.suffix != RECORD_SUFFIX:
        deployment_flags.refuse_beside_timing_file(args)
        return _run(args, _fitted(file))
    if described:
        return _run(args, _on_gpus(args))
    if args.timing is None:
        raise ConfigError(
            f"{args.inputs}: a recorded run needs --model and --gpu, or --timing (a table ends in .csv)"
        )
    return _run(args, _on_no_gpu(args))


_COLUMNS = {
    "--model": "model_path (or model)",
    "--gpu": "system (or hardware)",
    "--kv-dtype": "kv_cache_dtype",
    "--weight-dtype": "quant (or dtype)",
    "--tensor-parallel-size": "tp_size (or tp)",
    "--expert-parallel-size": "moe_ep_size",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--max-model-len": "max_model_len (of constant rates)",
    "--vllm-version": "backend_version (of closed loops)",
}
"""Where a row of a table says what a flag says of a recorded run."""


def _refuse_for_a_table(args: argparse.Namespace) -> None:
    from understudy.errors import ConfigError

    names = (*deployment_flags.WHAT_RUNS, "timing", *deployment_flags.ENGINE)
    if said := deployment_flags.given(args, names):
        columns = [f"{_COLUMNS[flag]} for {flag}" for flag in said if flag in _COLUMNS]
        rest = [flag for flag in said if flag not in _COLUMNS]
        remedy = [f"fill the column {', '.join(columns)}"] if columns else []
        if rest:
            remedy.append(f"leave out {', '.join(rest)}, for which a table has no column")
        raise ConfigError(
            f"{', '.join(said)} {'belongs' if len(said) == 1 else 'belong'} to a recorded run, and the rows of "
            f"{args.inputs} name what they ran with: {'; '.join(remedy)}"
        )


def _table(args: argparse.Namespace) -> int:
    import sys
    from collections import Counter

    from understudy.calibrate.predict import Prediction, predict_table
    from understudy.calibrate.tables import Table
    from understudy.cli.progress import progress_bar

    table = Table.read(args.inputs)
    with progress_bar("predicting", len(table.rows), "experiments") as progress:
        results = predict_table(table, threads=args.threads, progress=progress)
    name, *measures = table.columns_out
    found = [
        (row[name], result)
        for row, result in zip(table.rows, results, strict=True)
        if isinstance(result, Prediction)
    ]
    refused = [result for result in results if not isinstance(result, Prediction)]
    if not found:
        raise refused[0]
    rows = [(key, *(result.means[measure] for measure in measures)) for key, result in found]
    _write(args.output, table.columns_out, rows)
    for origin, count in Counter(result.origin for _, result in found).most_common():
        print(f"times of {count} row{'' if count == 1 else 's'} from {origin}", file=sys.stderr)
    for error in refused:
        print(f"understudy predict: {error}", file=sys.stderr)
    if refused:
        print(f"{len(refused)} of {len(results)} rows are left out", file=sys.stderr)
    return 2 if refused else 0


class _Source(NamedTuple):
    """The timing model, in the engine's own times, and the deployment, where one is known."""

    timing: Timing
    deployment: Deployment | None


def _fitted(file: Path) -> _Source:
    """What `calibrate` wrote."""
    import msgspec

    from understudy.timing.timing_file import TimingFile

    fitted = TimingFile.read(file)
    return _Source(msgspec.structs.replace(fitted.timing(), front_end_ms=0.0), fitted.deployment)


def _on_gpus(args: argparse.Namespace) -> _Source:
    """What follows from the model and the GPUs; --timing may name other times, and blocks follow all the same."""
    from understudy.checks import read_as
    from understudy.cli.gpu_flags import given_gpu
    from understudy.tiers.gpu import GpuSettings
    from understudy.timing.gpu_flags import timing_settings

    gpu, named = timing_settings(args.timing, given_gpu(args))
    settings = read_as(GpuSettings, {**gpu, "front_end_ms": 0.0}, "gpu")
    timing: Timing = settings.timing(args.model, args.kv_dtype) if named is None else _named(named)
    has_blocks, has_timing = args.num_gpu_blocks is not None, named is not None
    deployment_flags.gpu_of(args).refuse_idle(timing, has_blocks=has_blocks, has_timing=has_timing)
    return _Source(timing, settings.deployment(args.model, args.kv_dtype))


def _on_no_gpu(args: argparse.Namespace) -> _Source:
    """Recorded steps, or the polynomial: nothing tells how many blocks there are but a flag."""
    from understudy.cli.gpu_flags import given_gpu
    from understudy.errors import ConfigError
    from understudy.timing.gpu_flags import timing_settings

    _, named = timing_settings(args.timing, given_gpu(args))
    if said := deployment_flags.given(args, deployment_flags.WHAT_RUNS):
        raise ConfigError(
            f"{', '.join(said)}: blocks follow from --model and --gpu together; give both, or --num-gpu-blocks alone"
        )
    if args.num_gpu_blocks is None:
        raise ConfigError(
            f"--timing {args.timing} does not say how many KV blocks there are: give --num-gpu-blocks, or --model and "
            "--gpu, from which they follow"
        )
    assert named is not None  # the others need a GPU, and said so
    return _Source(_named(named), None)


def _named(setting: dict[str, Any]) -> Timing:
    from understudy.engines.config import VllmConfig

    return VllmConfig.from_dict({"timing": setting}).timing


def _run(args: argparse.Namespace, source: _Source) -> int:
    import sys

    import msgspec

    from understudy.calibrate.recorded import COLUMNS, predict_run, read_run
    from understudy.cli.progress import progress_bar

    deployment = source.deployment
    engine = deployment_flags.engine_of(args, deployment)
    load = read_run(args.inputs)
    with progress_bar("predicting", len(load.workload), "requests") as progress:
        found = predict_run(
            load,
            msgspec.structs.replace(engine, timing=source.timing),
            workers=1 if deployment is None else deployment.parallel.data,
            ranks=deployment is not None and deployment.steps_together,
            progress=progress,
        )
    _write(args.output, COLUMNS, found.requests)
    print(f"times from {found.origin}", file=sys.stderr)
    return 0


def _write(path: Path, header: tuple[str, ...], rows: list[Any]) -> None:
    import csv
    import io

    from understudy.outputs import create

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for name, *values in rows:
        writer.writerow([name, *(f"{value:.4f}" for value in values)])
    with create(path) as file:
        file.write(text.getvalue().encode())
