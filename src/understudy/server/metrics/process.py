"""Metrics of a Python server: its process, garbage collector and HTTP."""

from __future__ import annotations

import gc
import os
import platform
import resource
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.server.metrics.families import Counter, Histogram, Registry, Summary

_FINE_S = (
    *(
        0.01,
        0.025,
        0.05,
        0.075,
        0.1,
        0.25,
        0.5,
        0.75,
        1.0,
        1.5,
        2.0,
        2.5,
        3.0,
        3.5,
        4.0,
        4.5,
        5.0,
        7.5,
        10.0,
        30.0,
    ),
    60.0,
)


def add_process(registry: Registry) -> None:
    """Add the metrics of the process and its garbage collector."""
    names = {
        "objects_collected": "collected",
        "objects_uncollectable": "uncollectable",
        "collections": "collections",
    }
    collected = {
        (key, generation): registry.counter(
            f"python_gc_{name}", "Garbage collection.", generation=str(generation)
        )
        for name, key in names.items()
        for generation in range(3)
    }

    def refresh() -> None:
        stats = gc.get_stats()
        for (key, generation), counter in collected.items():
            counter.value = float(stats[generation][key])

    registry.before_page(refresh)
    major, minor, patch = sys.version_info[:3]
    registry.gauge(
        "python_info",
        "The interpreter.",
        lambda: 1.0,
        implementation=platform.python_implementation(),
        major=str(major),
        minor=str(minor),
        patchlevel=str(patch),
        version=platform.python_version(),
    )
    page = os.sysconf("SC_PAGE_SIZE")
    registry.gauge("process_virtual_memory_bytes", "Virtual memory.", lambda: _statm(0) * page)
    registry.gauge("process_resident_memory_bytes", "Resident memory.", lambda: _statm(1) * page)
    started = time.time()
    registry.gauge("process_start_time_seconds", "When it started.", lambda: started)
    cpu = registry.counter("process_cpu_seconds", "Processor time.")

    def refresh_cpu() -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu.value = usage.ru_utime + usage.ru_stime

    registry.before_page(refresh_cpu)
    registry.gauge("process_open_fds", "Open files.", lambda: float(len(os.listdir("/proc/self/fd"))))
    registry.gauge(
        "process_max_fds",
        "Files that may be open.",
        lambda: float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    )


def _statm(field: int) -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return float(file.read().split()[field])


_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "QUERY"})


class HttpMetrics:
    """HTTP metrics by method and status."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._requests: dict[tuple[str, str], Counter] = {}
        self._durations: dict[str, Histogram] = {}
        self._request_bytes: Summary | None = None
        self._response_bytes: Summary | None = None
        self._fine = registry.histogram(
            "http_request_duration_highr_seconds", "Duration of requests.", _FINE_S
        )

    def answered(self, method: str, status: int, seconds: float, received: int, sent: int) -> None:
        """Count an answered request."""
        registry = self._registry
        if method not in _METHODS:  # any client can make up a name: each would be a series for ever
            method = "other"
        group = f"{status // 100}xx"
        counter = self._requests.get((method, group))
        if counter is None:
            counter = self._requests[method, group] = registry.counter(
                "http_requests", "Requests by method and status.", handler="none", method=method, status=group
            )
        counter.add()
        if self._request_bytes is None:
            self._request_bytes = registry.summary(
                "http_request_size_bytes", "Size of requests.", handler="none"
            )
            self._response_bytes = registry.summary(
                "http_response_size_bytes", "Size of answers.", handler="none"
            )
        self._request_bytes.observe(received)
        assert self._response_bytes is not None
        self._response_bytes.observe(sent)
        self._fine.observe(seconds)
        duration = self._durations.get(method)
        if duration is None:
            duration = self._durations[method] = registry.histogram(
                "http_request_duration_seconds",
                "Duration of requests.",
                (0.1, 0.5, 1.0),
                handler="none",
                method=method,
            )
        duration.observe(seconds)
