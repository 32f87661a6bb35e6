"""Hypothesis profiles: no test measures time, and the sanitized core gets by with fewer examples.

The same commit passes or fails everywhere: examples are drawn from a fixed seed. `make fuzz` draws new ones.
"""

import gc
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "random", settings.get_profile("default"), max_examples=100, derandomize=False, print_blob=True
)
settings.register_profile("sanitize", settings.get_profile("default"), max_examples=25)
settings.load_profile("default")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the collected tests from garbage collection, which took a quarter of the time to collect them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
