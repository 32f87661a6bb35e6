"""`understudy events emit|tap|verify`: the conformance kit for KV events. It needs no engine and no router."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from understudy.cli import listening
from understudy.outputs import check_outputs, create, files_named, is_stdout

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from contextlib import ExitStack

    from understudy.cli import Verbs
    from understudy.events.dialects import Dialect
    from understudy.events.publisher import Publisher

EXAMPLES = """\
examples:
  understudy events emit trace.jsonl --dialect vllm-0.24.0 --out events.jsonl
  understudy events emit trace.jsonl --dialect sglang-0.5.20 --workers 4 --bind tcp://*:5557 --replay-bind tcp://*:6557
  understudy events tap tcp://engine:5557 --replay tcp://engine:5558 --record heard.jsonl
  understudy events verify heard.jsonl --stream raw --dialect vllm-0.24.0
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
        "Emit KV events as any release of vLLM or SGLang sends them, tap a publisher, hold a stream to its rules.",
    )
    acts = verb.add_subparsers(dest="act", metavar="ACT", required=True)

    emit = parser(
        acts, "emit", "send what the engines of a replay would send", "Replay a trace and send its events."
    )
    emit.add_argument("trace", type=Path, metavar="TRACE", help="trace file, plain or gzipped")
    emit.add_argument(
        "--dialect", default="vllm", metavar="NAME", help="vllm-0.24.0, sglang-0.5.20, … (default: vllm)"
    )
    emit.add_argument(
        "--stream", choices=("raw", "consolidated"), default="raw", help="default: raw, as engines do"
    )
    emit.add_argument("--workers", type=int, metavar="N", help="simulated workers, each a rank (default: 1)")
    emit.add_argument("--block-size", type=int, metavar="N", help="tokens of a KV block (default: 64)")
    emit.add_argument("--num-gpu-blocks", type=int, metavar="N", help="KV blocks a worker (default: 16384)")
    emit.add_argument("--config", type=Path, metavar="YAML", help="settings of the replay; flags win over it")
    emit.add_argument(
        "--set", action="append", default=[], metavar="A.B=V", help="one setting; wins over all"
    )
    emit.add_argument("--format", default="mooncake", metavar="NAME", help="of the trace (default: mooncake)")
    emit.add_argument(
        "--trace-block-size", type=int, metavar="N", help="tokens of one hash id (default: 512)"
    )
    emit.add_argument(
        "--synthesize-tokens", action="store_true", help="token ids too, made from the trace's ids"
    )
    emit.add_argument(
        "--out", type=Path, metavar="PATH", help="write the messages, a line each; -: standard output"
    )
    emit.add_argument("--bind", metavar="ADDRESS", help="publish over ZMQ: tcp://*:PORT, a rank a port")
    emit.add_argument(
        "--replay-bind", metavar="ADDRESS", help="answer replay requests: tcp://*:PORT, a rank a port"
    )
    emit.add_argument("--topic", default="", metavar="TEXT", help="of the messages (default: empty)")
    emit.add_argument(
        "--speed-up", type=float, metavar="X", help="--bind: 1: at the run's pace; 0 (default): at once"
    )
    emit.add_argument(
        "--wait-s", type=float, metavar="S", help="--bind: before the first message (default: 1)"
    )
    emit.add_argument("--linger-s", type=float, metavar="S", help="--bind: after the last one (default: 1)")

    tap = parser(
        acts,
        "tap",
        "print what a publisher says",
        "Listen to a publisher of KV events and print what it says.",
    )
    tap.add_argument("endpoint", metavar="ADDRESS", help="tcp://HOST:PORT")
    listening.add_listening_flags(tap)
    tap.add_argument(
        "--record", type=Path, metavar="PATH", help="keep the messages, a line each, for `verify`"
    )
    tap.add_argument("--json", action="store_true", help="print a JSON line an event")

    verify = parser(
        acts, "verify", "hold a stream to its rules", "A line for every breach; exit code 1 if there is one."
    )
    verify.add_argument(
        "source", metavar="FILE|ADDRESS", help="recorded messages, or a publisher: tcp://HOST:PORT"
    )
    verify.add_argument(
        "--stream", choices=("raw", "consolidated"), required=True, help="what it claims to be"
    )
    verify.add_argument("--dialect", metavar="NAME", help="the release that it claims to come from")
    verify.add_argument("--rank", type=int, metavar="N", help="that every batch must bear")
    verify.add_argument("--joined-late", action="store_true", help="it may speak of what came before")
    verify.add_argument(
        "--max-breaches", type=int, default=100, metavar="N", help="lines to print (default: 100)"
    )
    listening.add_listening_flags(verify)


def run(args: argparse.Namespace) -> int:
    """Emit, tap or verify."""
    return {"emit": _emit, "tap": _tap, "verify": _verify}[args.act](args)


# --- emit ---------------------------------------------------------------------------------------------

_PACE = {"speed_up": 0.0, "wait_s": 1.0, "linger_s": 1.0}
"""Of what is sent, by flag."""


def _emit(args: argparse.Namespace) -> int:
    import sys
    from contextlib import ExitStack

    from understudy.checks import positive_number
    from understudy.cli.progress import progress_bar
    from understudy.cli.trace_flags import scenario_settings
    from understudy.errors import ConfigError
    from understudy.events.dialects import dialect
    from understudy.events.emit import wire_batches
    from understudy.events.endpoints import rank_endpoint
    from understudy.events.synthesize import TokenSource
    from understudy.run.offline import run_offline
    from understudy.run.settings import ReplaySettings, files_given
    from understudy.workload.formats import read_trace

    if (args.out is None) == (args.bind is None):
        raise ConfigError("say where to: either --out PATH or --bind ADDRESS")
    if args.replay_bind is not None and args.bind is None:
        raise ConfigError("--replay-bind answers for what --bind sends")
    for name, default in _PACE.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
            continue
        flag = f"--{name.replace('_', '-')}"
        positive_number(flag, getattr(args, name), or_zero=True)
        if args.bind is None:
            raise ConfigError(f"{flag} is of --bind, which sends; --out writes all at once")
    rules = dialect(args.dialect)
    given = {name: getattr(args, name) for name in ("block_size", "num_gpu_blocks")}
    flags: dict[str, Any] = {} if args.workers is None else {"workers": args.workers}
    if engine := {name: value for name, value in given.items() if value is not None}:
        flags["engine"] = engine
    settings = ReplaySettings.read(args.config, flags, args.set, base=scenario_settings(args))
    if settings.pools:
        raise ConfigError("events emit plays workers that are all alike: give engine and workers, not pools")
    given_files = files_given(args.config, args.set) | files_named(settings)
    inputs = {"TRACE": args.trace, "--config": args.config, **given_files}
    check_outputs({"--out": args.out}, inputs)
    reading = {} if args.trace_block_size is None else {"trace_block_size": args.trace_block_size}
    for address in (args.bind, args.replay_bind):
        if address is not None:
            rank_endpoint(address, max(settings.workers - 1, 0))  # known before the run, not after it
    workload = read_trace(args.trace, args.format, **reading)
    with ExitStack() as stack:
        # An address that is taken is known before the run too.
        publishers = [] if args.bind is None else _publishers(stack, args, rules, settings.workers)
        with progress_bar("replaying", len(workload), "requests") as progress:
            played = run_offline(
                workload,
                settings.engine,
                workers=settings.workers,
                routing=settings.policy,
                seed=settings.seed,
                load=settings.load,
                tiers=settings.tiers,
                route_rejected=settings.route_rejected,
                ranks=settings.ranks,
                events=True,
                progress=progress,
            )
        assert played.kv is not None
        streams: list[Any] = [played.kv.events(worker, args.stream) for worker in range(settings.workers)]
        if args.synthesize_tokens:
            source = TokenSource(workload, settings.engine.block_size)
            streams = [source.spoken(events) for events in streams]
        batches = wire_batches(streams, rules, block_size=settings.engine.block_size)
        sent = (
            _publish(args, publishers, batches)
            if publishers
            else _write(args, rules, settings.workers, batches)
        )
    print(
        f"{sent:,} messages of {settings.workers} publishers, {rules.name}, {args.stream}",
        file=sys.stderr if args.out is not None and is_stdout(args.out) else sys.stdout,
    )
    return 0


def _write(args: argparse.Namespace, rules: Dialect, workers: int, batches: Iterator[Any]) -> int:
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


def _publishers(stack: ExitStack, args: argparse.Namespace, rules: Dialect, workers: int) -> list[Publisher]:
    from understudy.events.publisher import Publisher

    how: dict[str, Any] = {"replay": args.replay_bind, "bind": True, "dialect": rules, "topic": args.topic}
    return [stack.enter_context(Publisher(args.bind, rank=rank, **how)) for rank in range(workers)]


def _publish(args: argparse.Namespace, publishers: list[Publisher], batches: Iterator[Any]) -> int:
    for publisher in publishers:
        print(f"rank {publisher.rank}: {publisher.endpoint}, replay {publisher.replay}", flush=True)
    time.sleep(args.wait_s)
    began = time.monotonic()
    for time_ns, rank, events in batches:
        if args.speed_up:
            time.sleep(max(0.0, time_ns / 1e9 / args.speed_up - (time.monotonic() - began)))
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
    from understudy.events.verify import spoken_line
    from understudy.events.wire import decode_batch, parse_frames

    if args.record is not None and is_stdout(args.record):
        raise ConfigError("--record needs a file: what is heard is printed")
    check_outputs({"--record": args.record}, {})
    with ExitStack() as stack:
        # Not beside it: what was heard stays when the listener is ended.
        record = stack.enter_context(args.record.open("wb")) if args.record is not None else None
        for frames in listening.messages(args, args.endpoint):
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
                    text = spoken_line(from_wire(event))
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

    whole_number("--max-breaches", args.max_breaches)
    rules = None if args.dialect is None else dialect(args.dialect)
    live = "://" in args.source
    if not live:
        listening.refuse_for_a_file(args)
    source: Iterator[tuple[str, list[bytes]]] = (
        (("", frames) for frames in listening.messages(args, args.source))
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
            for breach in verifier.feed(frames):
                breaches += 1
                if breaches <= args.max_breaches:
                    print(f"{name}: {breach}" if name else breach, flush=True)
    except KeyboardInterrupt:
        if not live:
            raise
    told = (
        sum(getattr(each, key) for each in verifiers.values()) for key in ("messages", "events", "blocks")
    )
    messages, events, blocks = told
    if not messages:
        raise InvalidArgument(f"{args.source}: not one message, so nothing was verified")
    print(f"{messages:,} messages, {events:,} events, {blocks:,} blocks: {breaches:,} breaches")
    return EXIT_BREACH if breaches else 0
