"""Record pairs of a prefill and a decode instance, joined by vLLM's NIXL connectors, tick by tick."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import vllm

from exact.pd_network import WIRE, Network
from exact.pd_play import Instance
from exact.pd_worker import without_devices

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from exact.pd_network import Line

CONFIG = (
    *("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold"),
    *("enable_prefix_caching", "enable_chunked_prefill", "policy", "scheduler_reserve_full_isl", "watermark"),
    *("max_model_len", "async_scheduling"),
)
"""Settings in a header, in order."""
COUNTED = (
    *("aborted", "expired", "failed", "finished", "heartbeat", "notify_only", "preempted", "reads", "recved"),
    "sent",
)
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Parameters of a prompt's first leg, as routers send them."""
DECODE_AT_ONCE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p",
    "remote_host": "localhost",
    "remote_port": 5600,
    "tp_size": 1,
}
"""Parameters of the second leg when both are sent at once, without the request's id."""


def record_pair(scenario: Line, model: Path) -> Line:
    """Record a scenario; `recorded` has the header, a line per iteration of an instance, and the totals."""
    network = Network({**WIRE, **scenario["wire"]}, scenario.get("fail") or {})
    with without_devices(network):
        pair = Pair(scenario, model, network)
        return {"recorded": [{"header": pair.header()}, *pair.lines()]}


class Pair:
    """A scenario on two new instances. A tick is the router, the prefill instance, then the decode instance."""

    def __init__(self, scenario: Line, model: Path, network: Network) -> None:
        self._scenario = scenario
        self._network = network
        self._p, self._d = (_instance(name, scenario, model, network) for name in ("p", "d"))
        self._to_arrive = list(scenario["requests"])
        self._specs = {spec["id"]: spec for spec in scenario["requests"]}
        self._order = {name: place for place, name in enumerate(self._specs)}
        self._on_the_way: dict[str, tuple[int, Line]] = {}
        self._gone: set[str] = set()
        self._totals: Counter[str] = Counter()

    def header(self) -> Line:
        """Return the header of the recording."""
        scenario = self._scenario
        return {
            "format": 1,
            "scenario": scenario["name"],
            "vllm": vllm.__version__,
            "token_rule": "output token at 0-based position p of the request with index i "
            "(position in the scenario's list) = 1000000 + i*100000 + p",
            **{
                instance.name: {
                    "config": {key: instance.play.config[key] for key in CONFIG},
                    "side": instance.side,
                }
                for instance in (self._p, self._d)
            },
            "wire": self._network.wire,
            "requests": len(scenario["requests"]),
            "max_ticks": scenario["max_ticks"],
            "v2_model_runner": bool(self._p.scheduler.vllm_config.use_v2_model_runner),
        }

    def lines(self) -> Iterator[Line]:
        """Yield a line per iteration, then the totals."""
        if not self._hosted:
            yield from self._lines()
            return
        *lines, end = self._lines()
        for instance in self._hosted:
            instance.name_content(line for line in lines if line["i"] == instance.name)
        yield from lines
        yield end

    @property
    def _hosted(self) -> list[Any]:
        return [one for one in (self._p, self._d) if _is_hosted(one.side)]

    def _lines(self) -> Iterator[Line]:
        reason = "max_ticks"
        for tick in range(self._scenario["max_ticks"]):
            self._network.tick = tick
            self._arrive(tick)
            for instance in (self._p, self._d):
                if instance.iterates(tick):
                    line = instance.iterate(tick)
                    if instance is self._p:
                        self._send_on(line, tick)
                    self._count(line)
                    yield line
            if not (self._to_arrive or self._on_the_way or self._p.has_work or self._d.has_work):
                reason = "done"
                break
        counts = {key: self._totals[key] for key in sorted(self._totals) if self._totals[key]}
        end = {"reason": reason, "ticks": self._network.tick + 1, "gone": len(self._gone), **counts}
        yield {"end": end}

    def _arrive(self, tick: int) -> None:
        due = [spec for spec in self._to_arrive if spec["arrival_tick"] <= tick]
        self._to_arrive = [spec for spec in self._to_arrive if spec["arrival_tick"] > tick]
        for spec in due:
            if spec.get("local"):
                self._d.play.add(spec)
                continue
            self._p.play.add({**spec, "max_tokens": 1}, PREFILL)
            if self._network.wire.get("dispatch") == "parallel":
                self._on_the_way[spec["id"]] = tick, {**DECODE_AT_ONCE, "remote_request_id": spec["id"]}
        there = [name for name, (when, _) in self._on_the_way.items() if when <= tick]
        for name in sorted(there, key=self._order.__getitem__):
            self._d.play.add(self._specs[name], self._on_the_way.pop(name)[1])

    def _send_on(self, line: Line, tick: int) -> None:
        """Send the requests that the prefill instance finished on their way to the decode instance."""
        wire = self._network.wire
        for name in line.get("handoff", ()):
            spec = self._specs[name]
            if spec.get("drop"):
                self._gone.add(name)
            elif wire.get("dispatch") != "parallel":
                self._on_the_way[name] = tick + spec.get("proxy", wire["proxy"]), self._p.handed[name]

    def _count(self, line: Line) -> None:
        side, totals = line["i"], self._totals
        for key in COUNTED:
            totals[f"{key}_{side}"] += len(line.get(key, ()))
        totals[f"scheduled_tokens_{side}"] += sum(line.get("scheduled", {}).values())
        totals[f"steps_{side}"] += 1
        totals["read_blocks"] += sum(len(read["local"]) for read in line.get("reads", ()))
        self._gone.update(name for name, _ in line.get("aborted", ()))
        if self._hosted:
            self._count_hosted(line)
        if side == "d":
            self._gone.update(name for name, _ in line.get("finished", ()))
            if "reads" in line and not self._hosted:
                totals["local_hit_tokens_d"] += sum(local for _, local, _ in line.get("lookups", ()))

    def _count_hosted(self, line: Line) -> None:
        """Add what recordings with a host count besides."""
        side, totals = line["i"], self._totals
        for _, status in line.get("aborted", ()):
            totals[f"aborted_{status}_{side}"] += 1
        totals["errors"] += sum(reason == "error" for _, reason in line.get("finished", ()))
        totals[f"resets_{side}"] += "reset" in line
        instance = self._p if side == "p" else self._d
        if not _is_hosted(instance.side):
            return
        for key in ("loads", "stores"):
            totals[f"{key}_{side}"] += len(line.get(key, ()))
            totals[f"{key[:-1]}_chunks_{side}"] += sum(len(job["h"]) for job in line.get(key, ()))
        totals[f"store_failed_{side}"] += len(line.get("store_failed", ()))
        totals[f"evicted_{side}"] += len(line.get("evicted", ()))
        totals[f"flushed_{side}"] += len(line.get("flush", ()))
        last = {name: answers for name, _, _, answers in line.get("lookups", ())}
        for answers in last.values():
            first, second = (*answers, 0)[:2]
            pull, host = (second, first) if instance.side["connector"] == "multi_rev" else (first, second)
            totals[f"lookup_both_hit_{side}"] += bool(pull and host)
            totals[f"lookup_host_hit_{side}"] += bool(host and not pull)
            totals[f"lookup_deferred_{side}"] += host is None
            totals[f"lookup_deferred_pull_{side}"] += bool(host is None and pull)
            totals[f"lookup_pull_no_host_{side}"] += bool(pull and host == 0)


def _instance(name: str, scenario: Line, model: Path, network: Network) -> Instance:
    if not _is_hosted(scenario[name]["side"]):
        return Instance(name, scenario, model, network)
    from exact.multi_play import HostedInstance  # releases before 0.33 lack what it imports

    return HostedInstance(name, scenario, model, network)


def _is_hosted(side: Line) -> bool:
    return bool(side.get("connector", "multi" if "host" in side else "nixl") != "nixl")
