"""Workloads: the requests of a replay, read from trace files or generated.

`read_trace` reads a file, `synthesise` generates a workload from a `SyntheticSpec`, `write_mooncake` and
`write_agentic_mooncake` write one; `OpenLoop`, `ClosedLoop`, `Lockstep` and `Plays` set when requests are sent. Times
are int64 nanoseconds.
"""

from understudy.workload.agents.mooncake import write_agentic_mooncake
from understudy.workload.arrivals import (
    ArrivalProcess,
    Burst,
    ClosedLoop,
    Constant,
    Gamma,
    Lockstep,
    OpenLoop,
    Plays,
    Poisson,
)
from understudy.workload.columns import RowError
from understudy.workload.combine import concat, repeat
from understudy.workload.distributions import Distribution, Fixed, LogNormal, Normal
from understudy.workload.files import open_trace
from understudy.workload.formats import TraceReader, read_trace, register_format, trace_formats
from understudy.workload.graph import RequestGraph
from understudy.workload.mooncake import DEFAULT_TRACE_BLOCK_SIZE, read_mooncake
from understudy.workload.synthetic import SharedRatio, SyntheticSpec, SystemPrompts, synthesise
from understudy.workload.users import scale_users
from understudy.workload.workload import Workload
from understudy.workload.write import write_mooncake

__all__ = [
    "DEFAULT_TRACE_BLOCK_SIZE",
    "ArrivalProcess",
    "Burst",
    "ClosedLoop",
    "Constant",
    "Distribution",
    "Fixed",
    "Gamma",
    "Lockstep",
    "LogNormal",
    "Normal",
    "OpenLoop",
    "Plays",
    "Poisson",
    "RequestGraph",
    "RowError",
    "SharedRatio",
    "SyntheticSpec",
    "SystemPrompts",
    "TraceReader",
    "Workload",
    "concat",
    "open_trace",
    "read_mooncake",
    "read_trace",
    "register_format",
    "repeat",
    "scale_users",
    "synthesise",
    "trace_formats",
    "write_agentic_mooncake",
    "write_mooncake",
]
