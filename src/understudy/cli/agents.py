"""`understudy agents run TRACE --url URL`: play a trace of agents against a live endpoint, as a client."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from understudy.cli import trace_flags
from understudy.outputs import check_outputs

if TYPE_CHECKING:
    import argparse

    from understudy.cli.verbs import Verbs

EXAMPLES = """\
examples:
  understudy agents run agents.jsonl --url http://127.0.0.1:8000 --model my-model --lanes 8
  understudy agents run agents.jsonl --url http://127.0.0.1:8000 --model my-model --arrival-rate-scale 10
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy agents`."""
    verb = verbs.add_parser(
        "agents",
        help="play a trace of agents against a live endpoint",
        description="Send the requests of agents to an OpenAI-compatible endpoint, each when its answers are there.",
        epilog=EXAMPLES,
    )
    verb.add_argument("action", choices=["run"], help="action to run")
    verb.add_argument("trace", type=Path, metavar="TRACE", help="trace of agents; -: standard input")
    verb.add_argument("--url", required=True, metavar="URL", help="endpoint, such as http://127.0.0.1:8000")
    verb.add_argument("--model", required=True, metavar="NAME", help="model that the requests name")
    verb.add_argument(
        "--lanes", type=int, default=0, metavar="N", help="at most N plays at a time (default: all)"
    )
    verb.add_argument(
        "--clock",
        choices=("client", "recorded"),
        default="client",
        help="whether requests that wait for answers also come no earlier than recorded (default: client)",
    )
    verb.add_argument(
        "--arrival-rate-scale", type=float, default=1.0, metavar="X", help="divide delays by X (default: 1)"
    )
    verb.add_argument(
        "--vocabulary",
        type=int,
        default=32_000,
        metavar="N",
        help="prompts are token ids below N (default: 32000); at most the model's vocabulary",
    )
    verb.add_argument("--requests-jsonl", type=Path, metavar="FILE", help="write a line per request")
    trace_flags.add_trace_flags(verb)


def run(args: argparse.Namespace) -> int:
    """Play the trace and print the latencies of requests and plays."""
    import msgspec
    import numpy as np

    from understudy.cli.progress import progress_bar, progress_bars
    from understudy.errors import WrongState
    from understudy.online.endpoint import run_against
    from understudy.report.plays import measure_plays
    from understudy.workload import Plays
    from understudy.workload.files import create_trace
    from understudy.workload.progress import reporting_progress

    check_outputs({"--requests-jsonl": args.requests_jsonl}, {"TRACE": trace_flags.path_read(args)})
    load = Plays(lanes=args.lanes, clock=args.clock, arrival_rate_scale=args.arrival_rate_scale)
    with progress_bars() as report_progress, reporting_progress(report_progress):
        workload = trace_flags.read_workload(args.trace, args.format, trace_flags.reader_options(args))
    with progress_bar("playing", len(workload), "requests") as progress:
        found = run_against(
            args.url, workload, model=args.model, load=load, vocabulary=args.vocabulary, progress=progress
        )
    if args.requests_jsonl is not None:
        names = workload.request_ids or [f"request_{row}" for row in range(len(workload))]
        lines = [
            {
                "request_id": names[row],
                "arrival_ms": float(found.arrival_ns[row] / 1e6),
                "ttft_ms": float((found.first_token_ns[row] - found.arrival_ns[row]) / 1e6),
                "finish_ms": float(found.finish_ns[row] / 1e6),
                "prompt_tokens": int(found.prompt_tokens[row]),
                "output_tokens": int(found.output_tokens[row]),
                "cached_tokens": int(found.cached_tokens[row]),
                "error": found.errors.get(row),
            }
            for row in range(len(workload))
        ]
        with create_trace(args.requests_jsonl) as file:
            file.write(msgspec.json.Encoder().encode_lines(lines))
    answered = np.flatnonzero(found.first_token_ns >= 0)
    if not len(answered):
        reason = next(iter(found.errors.values()), "no tokens")
        raise WrongState(f"no request was answered ({reason}); check --url and --model")
    ttft_ms = (found.first_token_ns[answered] - found.arrival_ns[answered]) / 1e6
    p50, p99 = np.percentile(ttft_ms, [50, 99])
    prompt = np.maximum(found.prompt_tokens, 0).sum()
    cached = np.maximum(found.cached_tokens, 0).sum()
    print(
        f"requests: {len(answered):,} answered, {len(found.errors):,} failed; "
        f"TTFT p50 {p50:,.0f} ms, p99 {p99:,.0f} ms; "
        f"prompt tokens {prompt:,}, of which cached {cached:,}; makespan {found.finish_ns.max() / 1e9:,.1f} s"
    )
    print(measure_plays(workload, found).describe())
    return 0
