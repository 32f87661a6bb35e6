"""Fault plans: what fails during a run, when and for how long, and what becomes of requests that lose their worker."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from understudy._core import Fault as CoreFault
from understudy._core import LostRequests, Tier
from understudy.checks import read_as, whole_number
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from os import PathLike

Kind = Literal[
    "kill",
    "slow",
    "slow_link",
    "lose_events",
    "late_events",
    "double_events",
    "stop_events",
    "restart_router",
    "fail_loads",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
EVENT_KINDS: tuple[Kind, ...] = (
    "lose_events",
    "late_events",
    "double_events",
    "stop_events",
    "restart_router",
)
"""Faults of what a router receives; they need one that receives events."""
MAX_FACTOR = 1000
_TAKES: dict[str, tuple[str, ...]] = {
    "slow": ("factor",),
    "slow_link": ("factor", "tier"),
    "lose_events": ("rate",),
    "late_events": ("delay_ms",),
    "fail_loads": ("rate", "tier"),
}
"""Fields of a fault by kind, in addition to time, duration and worker."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Something that fails `at_s` seconds after the start of a run, for `duration_s`, or to its end.

    `kill`: a worker dies with its device and host cache, and is back after the duration; without one it stays away.
    `slow`: its steps take `factor` times as long. `slow_link`: links to and from `tier` have 1/`factor` of their
    bandwidth. `lose_events`: a share `rate` of event batches never reaches the router, which reads all blocks anew at
    the end. `late_events`: they arrive `delay_ms` later. `double_events`: each arrives twice. `stop_events`: none
    arrives until the end, then all in order. `restart_router`: it forgets all blocks, and reads them anew at the end.
    `fail_loads`: a share `rate` of loads from `tier` fails. Errors: ConfigError names the field.
    """

    kind: Kind
    at_s: float
    duration_s: float | None = None
    worker: int | None = None
    """None: all workers."""
    factor: float = 10.0
    rate: float = 1.0
    delay_ms: float = 1000.0
    tier: Literal["g2", "g3", "g4"] = "g2"

    def __post_init__(self) -> None:
        for name, least in (("at_s", 0.0), ("duration_s", 0.0), ("delay_ms", 0.0)):
            value = getattr(self, name)
            if value is not None and not least <= value < 1e9:
                raise ConfigError(f"{name}: {value} is not a time; give 0 or more")
        if self.duration_s == 0:
            raise ConfigError("duration_s: must be above 0; leave it out for a fault without an end")
        if self.worker is not None:
            whole_number("worker", self.worker, 0)
        if not 1 <= self.factor <= MAX_FACTOR:
            raise ConfigError(f"factor: {self.factor:g} must be from 1 to {MAX_FACTOR}")
        if not 0 <= self.rate <= 1:
            raise ConfigError(f"rate: {self.rate:g} must be a share from 0 to 1")

    def describe(self) -> str:
        """Return it as `--fault` reads it."""
        who = "" if self.worker is None else f":{self.worker}"
        lasts = "" if self.duration_s is None else f"+{self.duration_s:g}s"
        more = "".join(f",{name}={_plain(getattr(self, name))}" for name in _TAKES.get(self.kind, ()))
        return f"{self.kind}{who}@{self.at_s:g}s{lasts}{more}"

    def native(self) -> CoreFault:
        """Return the core's fault."""
        return CoreFault(
            kind=self.kind,
            time_ns=round(self.at_s * 1e9),
            worker=self.worker,
            duration_ns=0 if self.duration_s is None else max(1, round(self.duration_s * 1e9)),
            factor=self.factor,
            rate=self.rate,
            delay_ns=round(self.delay_ms * 1e6),
            tier=Tier[self.tier.upper()],
        )


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults of a run, and what becomes of requests whose worker crashes or drains for too long.

    Errors: ConfigError names a field out of range.

    Example:
        us.replay("trace.jsonl", workers=4, faults=FaultPlan(faults=(parse_fault("kill:2@600s+30s"),)))
    """

    faults: tuple[Fault, ...] = ()
    on_loss: Literal["fail", "retry", "migrate"] = "retry"
    """`fail`: the request ends; `retry`: it starts anew on another worker; `migrate`: it goes on there, with the tokens
    so far as a part of its prompt."""
    retry_delay_ms: float = 0.0
    """Time from the loss until the request is routed again."""
    max_attempts: int | None = None
    """A request fails that has lost its worker so often; None: no limit."""
    drain_limit_s: float | None = None
    """A worker that has drained for so long hands back its requests; None: it ends them."""
    seed: int = 0
    """Draws which event batches are lost."""

    def __post_init__(self) -> None:
        for name in ("retry_delay_ms", "drain_limit_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1e9:
                raise ConfigError(f"{name}: {value} is not a time; give 0 or more")
        if self.max_attempts is not None:
            whole_number("max_attempts", self.max_attempts, 1, 1 << 20)
        whole_number("seed", self.seed, 0, 2**64 - 1)

    def native(self) -> tuple[list[CoreFault], LostRequests]:
        """Return the core's faults and policy."""
        limit_s = self.drain_limit_s
        return [fault.native() for fault in self.faults], LostRequests(
            survival=self.on_loss,
            delay_ns=round(self.retry_delay_ms * 1e6),
            most_attempts=self.max_attempts or 0,
            drain_ns=None if limit_s is None else round(limit_s * 1e9),
        )

    def describe(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        given: dict[str, Any] = {"on_loss": self.on_loss, "faults": [one.describe() for one in self.faults]}
        for name in ("retry_delay_ms", "max_attempts", "drain_limit_s", "seed"):
            if value := getattr(self, name):
                given[name] = value
        return given


_SPEC = re.compile(
    r"(?P<kind>[a-z_]+)(:(?P<worker>\d+|\*))?@(?P<at>[^+,]+)(\+(?P<lasts>[^,]+))?(?P<more>(,.*)?)"
)
_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_fault(text: str, *, field: str = "fault") -> Fault:
    """Read KIND[:WORKER]@TIME[+DURATION][,FIELD=VALUE…], such as `kill:2@600s+30s`. ConfigError names the mistake."""
    found = _SPEC.fullmatch(text.strip())
    if found is None:
        raise ConfigError(
            f"{field}: {text!r} is not KIND[:WORKER]@TIME[+DURATION][,FIELD=VALUE…]; an example is kill:2@600s+30s"
        )
    kind = found["kind"]
    if kind not in KINDS:
        raise ConfigError(f"{field}: {kind} is not a fault; choose {', '.join(KINDS)}")
    given: dict[str, Any] = {"kind": kind, "at_s": _read_time(found["at"], field)}
    if found["worker"] not in (None, "*"):
        given["worker"] = int(found["worker"])
    if found["lasts"] is not None:
        given["duration_s"] = _read_time(found["lasts"], field)
    for part in filter(None, found["more"].split(",")):
        name, _, value = part.partition("=")
        given[name] = value if name == "tier" else _read_number(value, f"{field}: {name}")
    return read_fault(given, field=field)


def read_fault(given: Any, *, field: str) -> Fault:
    """Read a fault from JSON values. ConfigError names a field that is wrong, or unused by its kind."""
    try:
        fault = read_as(Fault, given)
        for name in given:
            taken = ("kind", "at_s", "duration_s", "worker", *_TAKES.get(fault.kind, ()))
            if name not in taken:
                raise ConfigError(
                    f"{name}: is not a field of {fault.kind}, which takes {', '.join(taken[1:])}"
                )
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None
    return fault


def read_fault_file(path: str | PathLike[str]) -> tuple[Fault, ...]:
    """Read a file with a fault per line, in the short form or as an object {"kind": "kill", "worker": 2, "at_s": 600}.

    Empty lines and lines that begin with # are skipped. ConfigError names the line.
    """
    faults = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            text, field = line.strip(), f"{path}, line {number}"
            if not text or text.startswith("#"):
                continue
            if not text.startswith("{"):
                faults.append(parse_fault(text, field=field))
                continue
            try:
                given = msgspec.json.decode(text)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{field}: {error}; give a JSON object") from None
            faults.append(read_fault(given, field=field))
    return tuple(faults)


def _read_time(text: str, field: str) -> float:
    unit = re.search(r"[a-z]*$", text)
    assert unit is not None
    if unit[0] and unit[0] not in _UNITS:
        raise ConfigError(f"{field}: {text!r} is not a time; give seconds, or a unit of {', '.join(_UNITS)}")
    return _read_number(text.removesuffix(unit[0]), field) * _UNITS[unit[0] or "s"]


def _read_number(text: str, field: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{field}: {text!r} is not a number")
    return value


def fields_of(kind: Kind) -> tuple[str, ...]:
    """Return the fields of a kind of fault, in addition to time, duration and worker."""
    return _TAKES.get(kind, ())


def _plain(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
