"""Make a scaler from its name, such as `hpa,metric=kv_use,target=0.7`, or from `FILE.py:CLASS`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.scaling.backlog import BacklogScaler, BacklogSettings
from understudy.scaling.hpa import HpaScaler, HpaSettings
from understudy.scaling.planner import DynamoPlanner
from understudy.scaling.planner_settings import PlannerSettings
from understudy.scaling.schedule import read_schedule
from understudy.scaling.wva import WvaScaler
from understudy.user_code import describe_user_failure, load_class, names_file_and_class

if TYPE_CHECKING:
    from collections.abc import Mapping

    from understudy.scaling.capabilities import WorkerCapabilities
    from understudy.scaling.estimates import PassTime
    from understudy.scaling.scaler import Scaler

NAMES = ("backlog", "dynamo-load", "dynamo-sla", "hpa", "schedule", "wva")


@dataclass(frozen=True, slots=True)
class ScalerSite:
    """The fleet that a scaler is made for."""

    capabilities: Mapping[str, WorkerCapabilities]
    pass_time: PassTime | None = None
    """Duration of a forward pass, from the timing model of the workers."""
    least: int = 1
    most: int = 8
    """Workers of each role."""


def make_scaler(text: str, site: ScalerSite, field: str = "--autoscale") -> Scaler:
    """Make a scaler. ConfigError names an unknown name or setting."""
    if names_file_and_class(text):
        return _load(text, field)
    name, _, rest = text.partition(",")
    given = dict(_read_pair(part, field) for part in rest.split(",") if part)
    if name == "schedule":
        if set(given) != {"file"}:
            raise ConfigError(f"{field} schedule: name its file, as in schedule,file=PLAN.jsonl")
        return read_schedule(Path(given["file"]))
    if name in ("dynamo-load", "dynamo-sla"):
        return DynamoPlanner(_planner_settings(name, given, site, field), site.capabilities, site.pass_time)
    limits: dict[str, Any] = {"least": site.least, "most": site.most}
    if name == "hpa":
        return HpaScaler(HpaSettings(**limits | _typed(HpaSettings, given, field)), site.capabilities)
    if name == "backlog":
        settings = BacklogSettings(**limits | _typed(BacklogSettings, given, field))
        return BacklogScaler(settings, site.capabilities, site.pass_time)
    if name == "wva":
        if set(given) - {"interval_s"}:
            raise ConfigError(f"{field} wva: knows interval_s alone")
        return WvaScaler(
            site.capabilities,
            **limits,
            interval_s=_number(given.get("interval_s", "15"), "interval_s", field),
        )
    raise ConfigError(f"{field}: {name!r} is unknown; choose one of {', '.join(NAMES)}, or FILE.py:CLASS")


def _planner_settings(name: str, given: dict[str, str], site: ScalerSite, field: str) -> PlannerSettings:
    roles = site.capabilities.values()
    values: dict[str, Any] = {
        "mode": "disagg" if "prefill" in site.capabilities else "agg",
        "optimization_target": "sla" if name == "dynamo-sla" else "throughput",
        "enable_load_scaling": True,
        "min_endpoint": site.least,
        "max_gpu_budget": sum(worker.num_gpu for worker in roles) * site.most,
    }
    values |= _typed(PlannerSettings, given, field)
    if (values["optimization_target"] == "sla") != (name == "dynamo-sla"):
        raise ConfigError(f"{field} {name}: optimization_target sla belongs to dynamo-sla, and only that")
    return PlannerSettings(**values)


def _typed(settings: Any, given: dict[str, str], field: str) -> dict[str, Any]:
    """Return settings as numbers, words or switches, by the types of their fields."""
    types = {one.name: str(one.type) for one in fields(settings)}
    made: dict[str, Any] = {}
    for name, text in given.items():
        if name not in types:
            raise ConfigError(f"{field}: unknown setting {name}; choose one of {', '.join(types)}")
        kind = types[name]
        if kind.startswith("bool"):
            if text not in ("true", "false"):
                raise ConfigError(f"{field}: {name}={text}: must be true or false")
            made[name] = text == "true"
        elif kind.startswith(("int", "float")):
            number = _number(text, name, field)
            if kind.startswith("int") and number != int(number):
                raise ConfigError(f"{field}: {name}={text}: must be a whole number")
            made[name] = int(number) if kind.startswith("int") else number
        else:
            made[name] = text
    return made


def _read_pair(part: str, field: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not equals:
        raise ConfigError(f"{field}: {part!r} must be SETTING=VALUE")
    return name.strip(), value.strip()


def _number(text: str, name: str, field: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not -1e12 < number < 1e12:
        raise ConfigError(f"{field}: {name}={text}: must be a number")
    return number


def _load(place: str, field: str) -> Scaler:
    made = load_class(field, place, ("initial_tick_ms()", "on_tick(metrics)"))
    try:
        scaler: Scaler = made()
    except ConfigError:
        raise
    except Exception as error:  # the user's code
        raise describe_user_failure(field, place, error) from error
    return scaler
