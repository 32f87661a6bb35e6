"""`understudy fleet --workers N`: many live workers in one process, behind one routed front end."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from understudy.cli.verbs import Verbs
    from understudy.fleets.fleet import FleetSettings
    from understudy.server.flags import Flag
    from understudy.server.settings import ServerSettings

EXAMPLES = """\
examples:
  understudy fleet --workers 20 --routing kv             front end and page on 8000, workers on 9000 ... 9019
  understudy fleet my-model --workers 200 --base-port 9000 --max-num-seqs 64
  understudy fleet Llama-3.1-8B --gpu H100 --workers 20  times and blocks of a known model on a GPU
  understudy fleet --engine sglang --workers 4 --routing kv --page-size 64    SGLang workers
  understudy fleet --fleet-config fleet.yaml             pools of different engines
  understudy fleet --prefill-workers 2 --decode-workers 4 --kv-link-gbps 25 --kv-bytes-per-token 131072
  understudy fleet --workers 4 --routing kv --fault kill:2@60s+30s --on-loss migrate
  understudy fleet --workers 2 --autoscale backlog --max-workers 8 --startup-s 20
  curl localhost:8000/admin/fault --json '{"kind": "kill", "workers": [3]}'

flags of the fleet:
  --workers N             number of workers (default: 4)
  --processes N           run the workers in N processes; the front end is then the standalone router
  --base-port PORT        port of the first worker (default: 9000); 0: any free ports
  --port PORT             port of the front end (default: 8000)
  --routing POLICY        round_robin (default), random, least_loaded, power_of_two, session_affinity,
                          session_tree, kv or FILE.py:CLASS, a user-defined router
  --decisions FILE        write a JSON line per routing decision while the fleet runs
  --router JSON           settings of kv: '{"queue_threshold": 2, "queue_policy": "wspt", "predict_ttl_ms": 2000}'
  --fleet-config FILE     YAML: routing, router, base_port, port, pools: [{workers: 8, flags: {max-num-seqs: 64}}];
                          a pool with the flag engine: sglang takes SGLang's flags
  --disaggregate          prefill and decode workers, which hand over KV blocks (half of --workers each);
                          --prefill-workers N, --decode-workers N set the numbers
  --disaggregation RULE   when a prefill worker computes the prompt: always (default), uncached:TOKENS, ratio:SHARE,
                          llm-d:TOKENS or isl_bounding; --disaggregation-order prefill_first|decode_first
  --decode-routing POLICY routing of decode workers (default: round_robin); --routing and --router are of
                          prefill workers
  --kv-link-gbps X, --kv-link-backend-gbps X, --kv-link-latency-ms MS, --kv-lease-duration S,
  --kv-load-failure-policy fail|recompute      links and rules of the hand-offs
  --autoscale NAME        a scaler as of `understudy replay`: backlog, hpa,metric=kv_use,target=0.7, FILE.py:CLASS;
                          --workers are those at the start, --min-workers N, --max-workers N, --startup-s S its limits
  --fault KIND[:WORKER]@TIME[+DURATION], --faults FILE, --chaos SEED --chaos-rate PER_HOUR [--chaos-kinds KINDS]
                          faults in time from the start, as of `understudy replay`
  --on-loss fail|retry|migrate                 requests whose worker crashes; --retry-delay-ms X, --max-attempts N,
                          --drain-limit-s S
All flags of `understudy serve` configure the workers: --gpu NAME, --timing FILE, --clock-speed X, --tiers JSON, ...
--api-key and --admin-host also protect the control routes of the front end (/fleet/..., /admin/...).
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy fleet`."""
    from understudy.cli.serve import take_rest

    verb = verbs.add_parser(
        "fleet",
        help="live workers in one process behind a routing front end, with a status page",
        description="Serve a fleet: every worker has its own port, KV events and metrics; the front end routes.",
        usage="understudy fleet [MODEL] [--workers N] [--routing POLICY] [--engine NAME] [flags of that engine]",
        epilog=EXAMPLES,
    )
    take_rest(verb)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; exit code 0."""
    import logging

    from understudy.fleets.fleet import Fleet, print_lateness
    from understudy.fleets.spread import SpreadFleet
    from understudy.http import address_of
    from understudy.server.loop import run as run_loop
    from understudy.server.server import run_until_stopped

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    settings, processes = read_fleet(args.rest)

    async def serve() -> None:
        fleet = Fleet(settings) if processes == 1 else SpreadFleet(settings, processes)

        async def start() -> None:
            await fleet.start()
            ports = fleet.ports
            sources = dict.fromkeys(pool.describe_times() for _, pool in settings.pools)
            notes = dict.fromkeys(note for _, pool in settings.pools for note in pool.notes)
            where = "" if processes == 1 else f"in {processes} processes, "
            front = f"{settings.pools[0][1].scheme}://{address_of(settings.host, fleet.port)}"
            print(
                f"understudy fleet: {describe_ports(ports)}, {where}front end and page "
                f"on {front}\ntimes from {'; '.join(sources)}" + "".join(f"\nnote: {note}" for note in notes),
                file=sys.stderr,
                flush=True,
            )

        async def stop() -> None:
            await fleet.stop()
            if isinstance(fleet, Fleet):  # the processes of others print their own
                print_lateness(fleet)

        await run_until_stopped(start, stop, settings.host)

    run_loop(serve())
    return 0


def describe_ports(ports: Sequence[int]) -> str:
    """Return the number of workers and their ports."""
    if len(ports) == 1:
        return f"1 worker on port {ports[0]}"
    return f"{len(ports):,} workers on ports {ports[0]} … {ports[-1]}"


def list_fleet_flags() -> tuple[Flag, ...]:
    """List the flags of `fleet` that `serve` does not have."""
    from understudy.cli import fleet_elastic, fleet_stages
    from understudy.server.flags import Flag

    return (
        Flag(["--workers"], "int"),
        Flag(["--processes"], "int"),
        Flag(["--base-port"], "int"),
        Flag(["--routing"], "str"),
        Flag(["--decisions"], "str"),
        Flag(["--router"], "json"),
        Flag(["--fleet-config"], "str"),
        *fleet_stages.FLAGS,
        *fleet_elastic.FLAGS,
    )


def read_fleet(arguments: list[str]) -> tuple[FleetSettings, int]:
    """Read the fleet's settings and its number of processes. ConfigError names the invalid flag."""
    from pathlib import Path

    from understudy.checks import port_number
    from understudy.cli import fleet_elastic, fleet_stages
    from understudy.cli.router_flags import build_live_policy
    from understudy.cli.serve import print_unused_flags
    from understudy.errors import ConfigError
    from understudy.fleets.fleet import FleetSettings
    from understudy.router.dispatch import reads_events
    from understudy.server.flags.serving import read_serve
    from understudy.yaml_text import read_yaml

    fleet_flags = list_fleet_flags()
    arguments = fleet_elastic.join_faults(arguments)
    divided = fleet_stages.has_stages(arguments, fleet_flags)
    plan = read_serve(
        [*arguments, *(fleet_stages.transfer_flag("kv_producer", {}) if divided else ())], more=fleet_flags
    )
    print_unused_flags(plan.idle)
    values = dict(plan.line.values)
    stages = None
    if divided:
        values.pop("kv-transfer-config")
        stages = fleet_stages.read_stages(values)
    else:
        fleet_stages.refuse_without_stages(values)
    if "uds" in values:
        raise ConfigError("--uds is for `understudy serve`; the workers of a fleet listen on ports")
    content: dict[str, Any] = {}
    if path := values.get("fleet-config"):
        content = read_yaml(Path(path))
        known = ("routing", "router", "base_port", "port", "pools")
        if not isinstance(content, dict):
            raise ConfigError(f"--fleet-config {path}: expected {', '.join(known)} by name")
        for name in content:
            if name not in known:
                raise ConfigError(f"--fleet-config {path}: {name} is not known; known are {', '.join(known)}")
    if "pools" in content and not (isinstance(content["pools"], list) and content["pools"]):
        raise ConfigError(
            f"--fleet-config {path}: pools must be a list of one or more; for equal workers use --workers instead"
        )
    if content.get("pools") and "workers" in values:
        raise ConfigError(
            "--workers and the pools of --fleet-config both set the number of workers; give one"
        )
    if stages is None:
        pools = _read_pools(arguments, content.get("pools") or ({"workers": values.get("workers", 4)},))
    elif content.get("pools"):
        raise ConfigError(
            "--disaggregate and the pools of --fleet-config both set the workers; leave one of them out"
        )
    else:
        roles = (("kv_producer", stages.prefill_workers), ("kv_consumer", stages.decode_workers))
        pools = [
            (
                count,
                read_serve(
                    [*arguments, *fleet_stages.transfer_flag(role, values)], more=fleet_flags
                ).settings,
            )
            for role, count in roles
            if count is not None
        ]
    base_port = values.get("base-port", content.get("base_port", 9000))
    routing = build_live_policy(
        values.get("routing", content.get("routing", "round_robin")),
        values.get("router") or content.get("router") or {},
    )
    autoscale = fleet_elastic.read_autoscale(values)
    faults = fleet_elastic.read_plan(values, pools, reads_events=reads_events(routing))
    processes = values.get("processes", 1)
    if processes > 1 and (autoscale is not None or faults is not None):
        flag = "--autoscale" if autoscale is not None else "--fault and --on-loss"
        raise ConfigError(f"{flag} need a fleet in one process; leave --processes out")
    settings = FleetSettings(
        pools=tuple(pools),
        base_port=base_port,
        host=plan.settings.host,
        port=port_number("port", values.get("port", content.get("port", 8000))),
        routing=routing,
        autoscale=autoscale,
        faults=faults,
        seed=plan.settings.seed,
        admin_hosts=plan.settings.admin_hosts,
        disaggregation=stages,
        decisions=Path(values["decisions"]) if "decisions" in values else None,
    )
    port_number("base_port", base_port, sum(count for count, _ in settings.most_workers()))
    return settings, processes


def _read_pools(
    arguments: list[str], given_pools: Sequence[dict[str, Any]]
) -> list[tuple[int, ServerSettings]]:
    """Read pools of equal workers: the fleet's flags, with each pool's own. ConfigError names an invalid one."""
    import json

    from understudy.checks import whole_number
    from understudy.errors import ConfigError
    from understudy.server.flags.serving import read_serve

    pools = []
    for pool in given_pools:
        if not isinstance(pool, dict) or set(pool) - {"workers", "flags"}:
            raise ConfigError(f"pools: each pool must be a mapping with workers and flags, got {pool!r}")
        count = whole_number("workers", pool.get("workers", 1), 1)
        more: list[str] = []
        given = pool.get("flags") or {}
        if not isinstance(given, dict):
            raise ConfigError(
                f"pools: flags must be a mapping of names to values, such as max-num-seqs: 64, got {given!r}"
            )
        for name, value in given.items():
            if isinstance(value, list):
                more += [f"--{name}", *map(str, value)]
            else:
                more.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
        pools.append((count, read_serve([*arguments, *more], more=list_fleet_flags()).settings))
    return pools
