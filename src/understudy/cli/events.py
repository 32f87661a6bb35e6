"""`understudy events emit|tap|verify`: send, record and check streams of KV events."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from understudy.cli import run_flags, subscription
from understudy.cli.flag_names import add_renamed_flag
from understudy.outputs import check_outputs, create, files_named, is_stdout

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from contextlib import ExitStack

    from understudy.cli.verbs import Verbs
    from understudy.events.dialects import Dialect
    from understudy.events.publisher import Publisher

EXAMPLES = """\
examples:
  understudy events emit trace.jsonl --dialect vllm-0.24.0 --out events.jsonl
  understudy events emit trace.jsonl --dialect sglang-0.5.20 --workers 4 --bind tcp://*:5557 --replay-bind tcp://*:6557
  understudy events tap tcp://engine:5557 --replay tcp://engine:5558 --record recorded.jsonl
  understudy events verify recorded.jsonl --stream raw --dialect vllm-0.24.0
  understudy events verify tcp://engine:5557 --stream raw --joined-late --seconds 60
"""
EXIT_BREACH = 1


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy events`."""

    def parser(to: Any, name: str, short: str, description: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = to.add_parser(
            name,
            help=short,
            description=description,
            epilog=EXAMPLES,
        )
        return made

    verb = parser(
        verbs,
        "events",
        "emit, tap and verify KV events",
        "Emit KV events as any release of vLLM or SGLang sends them, record a publisher, or verify a stream.",
    )
    acts = verb.add_subparsers(dest="act", metavar="ACT", required=True)

    emit = parser(
        acts, "emit", "send the KV events of a replay", "Replay a trace and send the engines' KV events."
    )
    emit.add_argument("trace", type=Path, metavar="TRACE", help="trace file, plain or gzipped")
    emit.add_argument(
        "--dialect", default="vllm", metavar="NAME", help="vllm-0.24.0, sglang-0.5.20, … (default: vllm)"
    )
    emit.add_argument(
        "--stream",
        choices=("raw", "consolidated"),
        default="raw",
        help="raw (default): as engines send; consolidated: as routers need",
    )
    emit.add_argument(
        "--workers", type=int, metavar="N", help="simulated workers, one rank each (default: 1)"
    )
    emit.add_argument(
        "--block-size", type=int, metavar="N", help="tokens per KV block (default: 16, as of `replay`)"
    )
    run_flags.add_users(emit.add_argument)
    emit.add_argument("--num-gpu-blocks", type=int, metavar="N", help="KV blocks per worker (default: 16384)")
    emit.add_argument("--config", type=Path, metavar="YAML", help="replay settings; flags override the file")
    emit.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=V",
        help="one setting; overrides --config and flags",
    )
    emit.add_argument("--format", default="mooncake", metavar="NAME", help="trace format (default: mooncake)")
    emit.add_argument(
        "--trace-block-size",
        type=int,
        metavar="N",
        help="tokens per hash id (default: 512, else what the lengths show)",
    )
    emit.add_argument(
        "--synthesize-tokens", action="store_true", help="add token ids, generated from the trace's hash ids"
    )
    emit.add_argument(
        "--out", type=Path, metavar="PATH", help="write one line per message; -: standard output"
    )
    emit.add_argument("--bind", metavar="ADDRESS", help="publish over ZMQ: tcp://*:PORT, one port per rank")
    emit.add_argument(
        "--replay-bind", metavar="ADDRESS", help="answer replay requests: tcp://*:PORT, one port per rank"
    )
    emit.add_argument("--topic", default="", metavar="TEXT", help="topic of the messages (default: empty)")
    emit.add_argument(
        "--clock-speed",
        type=float,
        metavar="X",
        help="with --bind: publish X times as fast as the run (default: 0, without pauses)",
    )
    add_renamed_flag(emit, "--speed-up", "--clock-speed")
    emit.add_argument(
        "--wait-s", type=float, metavar="S", help="with --bind: wait before the first message (default: 1)"
    )
    emit.add_argument(
        "--linger-s", type=float, metavar="S", help="with --bind: wait after the last message (default: 1)"
    )

    tap = parser(
        acts,
        "tap",
        "print a publisher's KV events",
        "Subscribe to a publisher of KV events and print what arrives.",
    )
    tap.add_argument("endpoint", metavar="ADDRESS", help="tcp://HOST:PORT")
    subscription.add_subscription_flags(tap)
    tap.add_argument("--record", type=Path, metavar="PATH", help="write one line per message, for `verify`")
    tap.add_argument("--json", action="store_true", help="print one JSON line per event")

    verify = parser(
        acts,
        "verify",
        "check a stream against its rules",
        "Print one line per violation; exit with 1 if there is any.",
    )
    verify.add_argument(
        "source", metavar="FILE|ADDRESS", help="recorded messages, or a publisher: tcp://HOST:PORT"
    )
    verify.add_argument(
        "--stream", choices=("raw", "consolidated"), required=True, help="kind of stream to check for"
    )
    verify.add_argument("--dialect", metavar="NAME", help="release whose message format is required")
    verify.add_argument("--rank", type=int, metavar="N", help="rank that every batch must have")
    verify.add_argument(
        "--joined-late",
        action="store_true",
        help="the recording starts mid-stream: allow blocks that were stored before it",
    )
    verify.add_argument(
        "--max-breaches", type=int, default=100, metavar="N", help="violations to print (default: 100)"
    )
    subscription.add_subscription_flags(verify)


def run(args: argparse.Namespace) -> int:
    """Run `emit`, `tap` or `verify`."""
    return {"emit": _emit, "tap": _tap, "verify": _verify}[args.act](args)


# --- emit ---------------------------------------------------------------------------------------------

_PUBLISHING_DEFAULTS = {"clock_speed": 0.0, "wait_s": 1.0, "linger_s": 1.0}
"""Defaults of the flags that need --bind."""


def _emit(args: argparse.Namespace) -> int:
    import sys
    from contextlib import ExitStack

    from understudy.checks import positive_number
    from understudy.cli.progress import progress_bar
    from understudy.cli.trace_flags import read_workload, scenario_settings
    from understudy.errors import ConfigError
    from understudy.events.dialects import dialect
    from understudy.events.emit import merge_wire_batches
    from understudy.events.endpoints import rank_endpoint
    from understudy.run.fleet_size import count_workers
    from understudy.run.offline import run_offline
    from understudy.run.run_plan import RunPlan
    from understudy.run.settings import ReplaySettings, list_given_files
    from understudy.text import plural
    from understudy.workload import scale_users
    from understudy.workload.block_tokens import TokenSource

    if (args.out is None) == (args.bind is None):
        raise ConfigError("the output is not named; give either --out PATH or --bind ADDRESS")
    if args.replay_bind is not None and args.bind is None:
        raise ConfigError("--replay-bind needs --bind; give both")
    for name, default in _PUBLISHING_DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
            continue
        flag = f"--{name.replace('_', '-')}"
        positive_number(flag, getattr(args, name), or_zero=True)
        if args.bind is None:
            raise ConfigError(f"{flag} needs --bind; --out writes without pauses, so leave it out")
    rules = dialect(args.dialect)
    given = {name: getattr(args, name) for name in ("block_size", "num_gpu_blocks")}
    fleet = {name: getattr(args, name) for name in ("workers", "users")}
    flags: dict[str, Any] = {name: value for name, value in fleet.items() if value is not None}
    if engine := {name: value for name, value in given.items() if value is not None}:
        flags["engine"] = engine
    settings = ReplaySettings.read(args.config, flags, args.set, base=scenario_settings(args))
    workers = count_workers(settings)
    if settings.pools:
        raise ConfigError("pools: events emit supports equal workers only; give engine and workers instead")
    given_files = list_given_files(args.config, args.set) | files_named(settings)
    inputs = {"TRACE": args.trace, "--config": args.config, **given_files}
    check_outputs({"--out": args.out}, inputs)
    reading = {} if args.trace_block_size is None else {"trace_block_size": args.trace_block_size}
    for address in (args.bind, args.replay_bind):
        if address is not None:
            rank_endpoint(address, max(workers - 1, 0))  # reject a bad address before the run
    workload = read_workload(args.trace, args.format, reading)
    workload = scale_users(workload, settings.users, seed=settings.seed)
    with ExitStack() as stack:
        # Bind before the run, so that an address in use fails early.
        publishers = [] if args.bind is None else _open_publishers(stack, args, rules, workers)
        with progress_bar("replaying", len(workload), "requests") as progress:
            run = run_offline(
                RunPlan(
                    workload,
                    settings.engine,
                    workers=settings.workers,
                    routing=settings.policy,
                    seed=settings.seed,
                    load=settings.load,
                    tiers=settings.tiers,
                    ranks=settings.ranks,
                    events=True,
                    progress=progress,
                )
            )
        assert run.kv is not None
        streams: list[Any] = [run.kv.events(worker, args.stream) for worker in range(workers)]
        if args.synthesize_tokens:
            source = TokenSource(workload, settings.engine.block_size)
            streams = [source.add_tokens(events) for events in streams]
        batches = merge_wire_batches(
            streams,
            rules,
            block_size=settings.engine.block_size,
            native_offload=settings.tiers.offload.mode == "vllm" or bool(settings.engine.kv_cache_groups),
        )
        sent = (
            _publish(args, publishers, batches)
            if publishers
            else _write_messages(args, rules, workers, batches)
        )
    print(
        f"{plural(sent, 'message')} of {plural(workers, 'publisher')}, {rules.name}, {args.stream}",
        file=sys.stderr if args.out is not None and is_stdout(args.out) else sys.stdout,
    )
    return 0


def _write_messages(args: argparse.Namespace, rules: Dialect, workers: int, batches: Iterator[Any]) -> int:
    from understudy.events.capture import write_message
    from understudy.events.wire import WireBatch, encode_batch, live_frames

    sequences = [0] * workers
    with create(args.out) as file:
        for time_ns, rank, events in batches:
            payload = encode_batch(WireBatch(time_ns / 1e9, events, rank), rules)
            frames = live_frames(args.topic.encode(), sequences[rank], payload)
            write_message(cast("BinaryIO", file), frames, f"rank {rank}")
            sequences[rank] += 1
    return sum(sequences)


def _open_publishers(
    stack: ExitStack, args: argparse.Namespace, rules: Dialect, workers: int
) -> list[Publisher]:
    from understudy.events.publisher import Publisher

    options: dict[str, Any] = {
        "replay": args.replay_bind,
        "bind": True,
        "dialect": rules,
        "topic": args.topic,
    }
    return [stack.enter_context(Publisher(args.bind, rank=rank, **options)) for rank in range(workers)]


def _publish(args: argparse.Namespace, publishers: list[Publisher], batches: Iterator[Any]) -> int:
    for publisher in publishers:
        print(f"rank {publisher.rank}: {publisher.endpoint}, replay {publisher.replay}", flush=True)
    time.sleep(args.wait_s)
    began = time.monotonic()
    for time_ns, rank, events in batches:
        if args.clock_speed:
            time.sleep(max(0.0, time_ns / 1e9 / args.clock_speed - (time.monotonic() - began)))
        publishers[rank].publish(events)
    time.sleep(args.linger_s)
    return sum(publisher.next_sequence for publisher in publishers)


# --- tap and verify -----------------------------------------------------------------------------------


def _tap(args: argparse.Namespace) -> int:
    from contextlib import ExitStack

    import msgspec

    from understudy.errors import ConfigError, MalformedBatch
    from understudy.events.capture import write_message
    from understudy.events.translate import from_wire
    from understudy.events.verify import format_event
    from understudy.events.wire import decode_batch, parse_frames

    if args.record is not None and is_stdout(args.record):
        raise ConfigError("--record: standard output is used for the printed events; name a file")
    check_outputs({"--record": args.record}, {})
    with ExitStack() as stack:
        # Written in place, not to a temporary file: the messages must survive when the process is killed.
        record = stack.enter_context(args.record.open("wb", buffering=0)) if args.record is not None else None
        for frames in subscription.receive_messages(args, args.endpoint):
            try:
                _, sequence, payload = parse_frames(frames)
                if record is not None:
                    write_message(record, frames)
                batch = decode_batch(payload)
            except MalformedBatch as error:
                print(f"unreadable: {error}", flush=True)
                continue
            for bad in batch.bad:
                print(f"{sequence} unreadable event {bad.index}: {bad.reason}", flush=True)
            rank = "" if batch.rank is None else f" rank {batch.rank}"
            for event in batch.events:
                if args.json:
                    line = {"sequence": sequence, "ts": batch.ts, "rank": batch.rank}
                    print(msgspec.json.encode(line | msgspec.to_builtins(event)).decode(), flush=True)
                    continue
                try:
                    text = format_event(from_wire(event))
                except MalformedBatch as error:
                    text = f"contradicts itself: {error}"
                print(f"{sequence} {batch.ts:.6f}{rank} {text}", flush=True)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from understudy.checks import whole_number
    from understudy.errors import InvalidArgument
    from understudy.events.capture import read_messages
    from understudy.events.dialects import dialect
    from understudy.events.verify import Verifier
    from understudy.text import plural

    whole_number("--max-breaches", args.max_breaches)
    rules = None if args.dialect is None else dialect(args.dialect)
    live = "://" in args.source
    if not live:
        subscription.reject_flags_for_file(args)
    source: Iterator[tuple[str, list[bytes]]] = (
        (("", frames) for frames in subscription.receive_messages(args, args.source))
        if live
        else ((message.publisher, message.frames) for message in read_messages(args.source))
    )
    verifiers: dict[str, Verifier] = {}
    breaches = 0
    try:
        for name, frames in source:
            verifier = verifiers.get(name)
            if verifier is None:
                verifier = verifiers[name] = Verifier(
                    args.stream, dialect=rules, rank=args.rank, from_start=not args.joined_late
                )
            for breach in verifier.check_message(frames):
                breaches += 1
                if breaches <= args.max_breaches:
                    print(f"{name}: {breach}" if name else breach, flush=True)
    except KeyboardInterrupt:
        if not live:
            raise
    messages, events, blocks = (
        sum(getattr(each, key) for each in verifiers.values()) for key in ("messages", "events", "blocks")
    )
    if not messages:
        raise InvalidArgument(f"{args.source}: no message arrived; nothing was verified")
    counts = ", ".join((plural(messages, "message"), plural(events, "event"), plural(blocks, "block")))
    print(f"{counts}: {breaches:,} {'breach' if breaches == 1 else 'breaches'}")
    return EXIT_BREACH if breaches else 0
