"""An LLM-serving fleet without its GPUs: engines simulated down to the KV-cache block."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from understudy.version import __version__ as __version__

if TYPE_CHECKING:
    from understudy.api import replay as replay
    from understudy.cache.api import cache as cache
    from understudy.calibrate.api import calibrate as calibrate
    from understudy.calibrate.predict import predict as predict
    from understudy.engines.kv_groups import KvCacheGroup as KvCacheGroup
    from understudy.engines.sglang_config import SglangConfig as SglangConfig
    from understudy.engines.trtllm_config import TrtllmConfig as TrtllmConfig
    from understudy.engines.vllm_config import VllmConfig as VllmConfig
    from understudy.explain.api import explain as explain
    from understudy.live import fleet as fleet
    from understudy.live import serve as serve
    from understudy.planning.api import plan as plan
    from understudy.report.compare import compare as compare
    from understudy.report.report import Report as Report
    from understudy.router.kv import KvRouting as KvRouting
    from understudy.run.disaggregation import Disaggregation as Disaggregation
    from understudy.run.options import Execution as Execution
    from understudy.run.options import Outputs as Outputs
    from understudy.sweep.api import sweep as sweep
    from understudy.tiers.capacity import capacity as capacity
    from understudy.tiers.settings import TiersConfig as TiersConfig
    from understudy.workload.convert import convert as convert
    from understudy.workload.formats import read_trace as read_trace

_MODULE_OF = {
    "Disaggregation": "run.disaggregation",
    "Execution": "run.options",
    "KvCacheGroup": "engines.kv_groups",
    "KvRouting": "router.kv",
    "Outputs": "run.options",
    "Report": "report.report",
    "SglangConfig": "engines.sglang_config",
    "TrtllmConfig": "engines.trtllm_config",
    "TiersConfig": "tiers.settings",
    "VllmConfig": "engines.vllm_config",
    "cache": "cache.api",
    "calibrate": "calibrate.api",
    "capacity": "tiers.capacity",
    "compare": "report.compare",
    "convert": "workload.convert",
    "explain": "explain.api",
    "fleet": "live",
    "plan": "planning.api",
    "predict": "calibrate.predict",
    "read_trace": "workload.formats",
    "replay": "api",
    "serve": "live",
    "sweep": "sweep.api",
}
"""Modules of the public names; each is imported at the first use of its name, so `import understudy` stays fast."""


def __dir__() -> list[str]:
    return sorted(_MODULE_OF)


class _Package(ModuleType):
    """This package, in which a public function keeps a name that is also a room's, such as `sweep`.

    An import sets a room as an attribute of its package. `from understudy.sweep.candidate import …` does not need it.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value

    sys.modules[__name__].__class__ = _Package
