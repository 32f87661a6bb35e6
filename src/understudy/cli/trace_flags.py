"""The flags that say how a trace is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

STDIN = "-"  # as the name of the trace
FORMATS = """\
mooncake (default); mooncake-delta: the same with only what is new in a turn; applied-compute: sessions of agents;
openai: request logs with messages or prompts; sharegpt: conversations; vllm-bench: the result of `vllm bench serve
--save-detailed`; aiperf: profile_export.jsonl; azure and burstgpt: CSVs of lengths; vllm-scenario: a conformance
scenario, with its settings and in lockstep"""
_OPTIONS = ("trace_block_size", "clamp_input_length", "drop_surplus_hash_ids", "tokenizer", "keep_ids")


def add_trace_flags(verb: argparse.ArgumentParser) -> None:
    """Describe them."""
    verb.add_argument("--format", default="mooncake", metavar="NAME", help=FORMATS)
    verb.add_argument(
        "--trace-block-size",
        type=int,
        metavar="N",
        help="tokens of one hash id (mooncake; default: 512) or of one to be made (openai, sharegpt; default: 16)",
    )
    verb.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a tokenizer.json (openai, sharegpt; default: bytes are counted, approximately)",
    )
    for flag, effect in (
        ("--keep-ids", "keep the names of requests (openai)"),
        ("--clamp-input-length", "shorten prompts that are longer than their hash ids (mooncake)"),
        ("--drop-surplus-hash-ids", "forget hash ids beyond the prompt's length (mooncake)"),
    ):
        verb.add_argument(flag, action="store_const", const=True, help=effect)


def reader_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was said about the trace's reader; readers refuse what they do not know."""
    return {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}


def path_read(args: argparse.Namespace) -> Path:
    """The file that will be read, of which standard input may be another name."""
    path: Path = args.trace
    return Path("/dev/stdin") if str(path) == STDIN else path


def scenario_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What a scenario says of the run itself."""
    if args.format != "vllm-scenario":
        return {}
    from understudy.engines.scenario import read_scenario

    settings = read_scenario(args.trace).config.settings()
    return {"engine": settings, "load": {"kind": "lockstep"}}
