"""The real engine needs torch; without it its tests are skipped."""

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="the extra [torch] is not installed", minversion="2.11")
torch.set_num_threads(1)  # small tensors, and the tests run side by side

from qwen3 import building  # noqa: E402 - needs torch


@pytest.fixture(autouse=True)
def _engines_are_closed() -> Iterator[None]:
    yield
    while building.OPEN:
        building.OPEN.pop().close()
