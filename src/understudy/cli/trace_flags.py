"""Flags for reading a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from understudy.workload import Workload

STDIN = "-"  # name of the trace that means standard input
FORMATS = """\
default: guessed from the file. mooncake; mooncake-delta: the same with only the new tokens of each turn;
weka, agentic-mooncake, dynamo, dag-jsonl: agents, whose requests wait for one another; applied-compute: agent sessions;
openai: request logs with messages or prompts; sharegpt: conversations; vllm-bench: result of `vllm bench serve
--save-detailed`; aiperf: profile_export.jsonl; azure and burstgpt: CSVs of lengths; table: other tables of lengths
(CSV, JSON lines, Parquet); lengths: rows of them; server-log: logs of vLLM and SGLang; vllm-scenario: a conformance
scenario, with its settings and in lockstep; benchmark: a file that `understudy calibrate` reads, with its load"""
_OPTIONS = ("trace_block_size", "clamp_input_length", "drop_surplus_hash_ids", "tokenizer", "keep_ids")


def add_trace_flags(verb: argparse.ArgumentParser) -> None:
    """Add the flags of the trace reader to a verb."""
    verb.add_argument("--format", metavar="NAME", help=FORMATS)
    verb.add_argument(
        "--trace-block-size",
        type=int,
        metavar="N",
        help="tokens per hash id in the file (mooncake; default: 512, else what the lengths show) or to generate "
        "(openai, sharegpt; default: 16)",
    )
    verb.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json to count tokens with (openai, sharegpt; default: estimate from bytes)",
    )
    for flag, effect in (
        ("--keep-ids", "keep request ids (openai)"),
        ("--clamp-input-length", "shorten prompts that are longer than their hash ids (mooncake)"),
        ("--drop-surplus-hash-ids", "drop hash ids beyond the prompt's length (mooncake)"),
    ):
        verb.add_argument(flag, action="store_const", const=True, help=effect)


def reader_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the reader options that were given; the reader rejects unknown ones."""
    return {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}


def read_workload(path: Path, format: str | None, options: dict[str, Any]) -> Workload:  # noqa: A002
    """Read a trace, or the load of a benchmark file (format `benchmark`). Errors as `read_trace`."""
    from understudy.errors import ConfigError
    from understudy.workload import read_trace

    if format != "benchmark":
        return read_trace(path, format=format, **options)
    from understudy.calibrate.inputs import read_only_load

    if options:
        raise ConfigError(f"{next(iter(options))} is not an option of format benchmark; leave it out")
    return read_only_load(path).workload


def path_read(args: argparse.Namespace) -> Path:
    """Return the path of the trace; /dev/stdin for standard input."""
    path: Path = args.trace
    return Path("/dev/stdin") if str(path) == STDIN else path


def scenario_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine and load settings that the file contains; empty for formats without any."""
    if args.format == "benchmark":
        from understudy.calibrate.inputs import read_only_load

        concurrency = read_only_load(args.trace).concurrency
        return {"load": {"kind": "closed_loop", "concurrency": concurrency}} if concurrency else {}
    if args.format != "vllm-scenario":
        return {}
    from understudy.workload.scenario import read_scenario

    settings = read_scenario(args.trace).config.settings()
    return {"engine": settings, "load": {"kind": "lockstep"}}
