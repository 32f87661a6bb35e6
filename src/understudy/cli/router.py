"""`understudy router --workers URL,...`: a proxy that routes requests to engines by their KV events."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from understudy._core import GroupLayout
    from understudy.cli.verbs import Verbs

EXAMPLES = """\
examples:
  understudy router --workers http://gpu1:8000,http://gpu2:8000 --port 8080
  understudy router --workers http://gpu1:8000=tcp://gpu1:5557+tcp://gpu1:5558 --block-size 16     before vLLM 0.32
  understudy router --workers http://gpu1:8000,http://gpu2:8000 --router '{"predict_ttl_ms": 2000}'
  understudy router --discover srv:_http._tcp.understudy-workers.default.svc.cluster.local
  curl localhost:8080/v1/completions -H 'content-type: application/json' -d '{"model": "m", "prompt": "hello"}'
  curl localhost:8080/dump                                                     engines and the state of their KV views
  curl localhost:8080/query --json '{"token_ids": [1, 2, 3]}'                  cached blocks of a prompt per engine
  curl localhost:8080/register --json '{"url": "http://gpu3:8000"}'

A worker is URL, URL=EVENTS or URL=EVENTS+REPLAY; without EVENTS, the router asks the engine (/kv_event_sources).
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy router`."""
    verb = verbs.add_parser(
        "router",
        help="route requests to real engines by their KV events",
        description="An HTTP proxy for /v1/... that sends each request to the engine with the least work for it, its "
        "cache considered. Works with any vLLM that publishes KV events, and with `understudy serve`.",
        epilog=EXAMPLES,
    )
    verb.add_argument(
        "--workers",
        default="",
        metavar="URL,...",
        help="engines, which may start later; add more with POST /register (default: none)",
    )
    verb.add_argument(
        "--discover",
        action="append",
        default=[],
        metavar="SERVICE",
        help="list of engines that come and go: srv:NAME (DNS SRV), or endpointslices:NAMESPACE/SERVICE[:PORT] "
        "(Kubernetes); read every 5 s",
    )
    verb.add_argument(
        "--routing",
        default="kv",
        metavar="POLICY",
        help="kv (default), round_robin, random, least_loaded, power_of_two, session_affinity, session_tree, "
        "or FILE.py:CLASS",
    )
    verb.add_argument(
        "--router",
        metavar="JSON",
        help="settings of kv routing, as under `router` in a replay's configuration",
    )
    verb.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    verb.add_argument("--port", type=int, default=8080, help="port to listen on (default: 8080)")
    verb.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help="keys, one of which /v1/... and control routes need; the first is sent to engines with the router's own "
        "requests (default: VLLM_API_KEY)",
    )
    verb.add_argument(
        "--admin-host",
        nargs="+",
        default=(),
        metavar="NETWORK",
        help="addresses or networks, besides loopback, whose clients may call control routes (/register, /dump, ...) "
        "when no key is set",
    )
    verb.add_argument(
        "--block-size", type=int, metavar="N", help="tokens per KV block of the engines (default: ask them)"
    )
    verb.add_argument(
        "--kv-cache-groups",
        metavar="JSON",
        help="KV cache groups of the engines, as for replay (default: learned from their events)",
    )
    verb.add_argument(
        "--prefix-match-unit",
        type=int,
        metavar="N",
        help="tokens per hash of these groups (default: as in vLLM)",
    )
    verb.add_argument(
        "--index-groups",
        choices=("all", "first"),
        help="KV cache groups that the router indexes (default: all; first: ignore the others)",
    )
    verb.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="local Hugging Face directory, or builtin (default: the engines' /tokenize)",
    )
    verb.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="tokens per step of the engines, for queue_threshold (default: 8192)",
    )
    verb.add_argument(
        "--silence-s",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds without events, while it serves requests, after which an engine's view counts as incomplete "
        "(default: 5)",
    )
    verb.add_argument(
        "--first-byte-timeout-s",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds to wait for the first byte of an engine's answer, 0 for no limit (default: 600)",
    )
    verb.add_argument(
        "--stall-timeout-s",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds without a byte in the middle of an answer, 0 for no limit (default: 300)",
    )
    verb.add_argument(
        "--retry",
        type=int,
        default=0,
        metavar="N",
        help="send a request to up to N other engines if one fails before the first byte of its answer's body "
        "(default: 0, since the request may have caused the failure)",
    )
    verb.add_argument(
        "--max-request-body-size-mb",
        type=float,
        default=32.0,
        metavar="MB",
        help="largest request body (default: 32)",
    )
    verb.add_argument(
        "--max-request-body-depth",
        type=int,
        default=64,
        metavar="N",
        help="deepest nesting of a request body (default: 64)",
    )
    verb.add_argument(
        "--seed", type=int, metavar="N", help="seed of routing kv, random or power_of_two (default: 0)"
    )


def _read_groups(text: str | None, unit: int | None) -> GroupLayout | None:
    """Read --kv-cache-groups and --prefix-match-unit. ConfigError names the wrong one."""
    import msgspec

    from understudy.engines.group_layouts import layout_of_settings
    from understudy.errors import ConfigError

    if text is None:
        if unit is not None:
            raise ConfigError("--prefix-match-unit: needs --kv-cache-groups; give it too")
        return None
    try:
        groups = msgspec.json.decode(text, type=list)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"--kv-cache-groups: {error}; give a JSON list of groups") from None
    return layout_of_settings(groups, unit)


def run(args: argparse.Namespace) -> int:
    """Route until SIGINT or SIGTERM; exit code 0."""
    import asyncio
    import logging

    import msgspec

    from understudy.checks import port_number, positive_number, whole_number
    from understudy.cli.router_flags import build_live_policy, read_seed
    from understudy.errors import ConfigError
    from understudy.http import address_of
    from understudy.proxy.address import WorkerAddress
    from understudy.proxy.found_workers import read_name_service
    from understudy.proxy.service import RouterService, RouterSettings
    from understudy.server.flags.plan import read_api_keys
    from understudy.server.server import run_until_stopped

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        router = {} if args.router is None else msgspec.json.decode(args.router, type=dict)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f'--router must be a JSON object such as {{"temperature": 0.5}}: {error}') from None
    if args.index_groups is not None:
        router["index_groups"] = args.index_groups
    policy = build_live_policy(args.routing, router)
    settings = RouterSettings(
        workers=tuple(WorkerAddress.parse(text.strip()) for text in args.workers.split(",") if text.strip()),
        discover=tuple(map(read_name_service, args.discover)),
        routing=policy,
        host=args.host,
        port=port_number("--port", args.port),
        block_size=None if args.block_size is None else whole_number("--block-size", args.block_size, 1),
        kv_cache_groups=_read_groups(args.kv_cache_groups, args.prefix_match_unit),
        tokenizer=args.tokenizer,
        max_num_batched_tokens=whole_number("--max-num-batched-tokens", args.max_num_batched_tokens, 1),
        silence_s=positive_number("--silence-s", args.silence_s),
        first_byte_timeout_s=positive_number(
            "--first-byte-timeout-s", args.first_byte_timeout_s, or_zero=True
        ),
        stall_timeout_s=positive_number("--stall-timeout-s", args.stall_timeout_s, or_zero=True),
        retries=whole_number("--retry", args.retry, 0),
        max_body_bytes=int(
            positive_number("--max-request-body-size-mb", args.max_request_body_size_mb) * 1024 * 1024
        ),
        max_body_depth=whole_number("--max-request-body-depth", args.max_request_body_depth, 1),
        awaits_workers=True,
        seed=read_seed(args.seed, policy),
        api_keys=read_api_keys(args.api_key),
        admin_hosts=tuple(args.admin_host),
    )

    async def serve() -> None:
        service = RouterService(settings)

        async def start() -> None:
            await service.start()
            count = len(service.workers.ranks)
            followed = sum(rank.follower.source is not None for rank in service.workers.ranks)
            events = (
                f"{followed} with KV events"
                if service.workers.dispatcher.wants_events
                else "KV events not read by this routing"
            )
            awaited = len(service.workers.awaited)
            print(
                f"understudy router: {count} engine{'s' * (count != 1)}, {events}, "
                f"{f'{awaited} awaited, ' * bool(awaited)}on http://{address_of(settings.host, service.port)}",
                file=sys.stderr,
                flush=True,
            )

        await run_until_stopped(start, service.stop, address_of(settings.host, settings.port))

    asyncio.run(serve())
    return 0
