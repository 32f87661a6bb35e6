"""The work that a live router has sent to each worker and that has not ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


class OutstandingWork:
    """Workers as a Python router sees them, with the work sent to each that has not ended; `FleetView` in a replay."""

    def __init__(self) -> None:
        self.available: list[bool] = []
        """By worker id."""
        self.requests: list[int] = []
        self.tokens: list[int] = []

    def __len__(self) -> int:
        return len(self.available)

    @property
    def now_ns(self) -> int:
        """Monotonic time in ns."""
        return time.monotonic_ns()

    @property
    def ready(self) -> npt.NDArray[np.int64]:
        """Ids of the workers that may be chosen, ascending."""
        return np.flatnonzero(self.available)

    @property
    def states(self) -> tuple[str, ...]:
        """By worker: ready or gone."""
        return tuple("ready" if available else "gone" for available in self.available)

    @property
    def roles(self) -> tuple[str, ...]:
        """By worker: both, since a standalone router does not know the stages that an engine serves."""
        return ("both",) * len(self.available)

    @property
    def pools(self) -> npt.NDArray[np.int64]:
        """By worker: pool number; 0, since the workers of a standalone router are one pool."""
        return np.zeros(len(self.available), dtype=np.int64)

    @property
    def outstanding_requests(self) -> npt.NDArray[np.int64]:
        """Outstanding requests of each worker."""
        return np.array(self.requests, dtype=np.int64)

    @property
    def outstanding_tokens(self) -> npt.NDArray[np.int64]:
        """Outstanding tokens of each worker: prompt and requested output."""
        return np.array(self.tokens, dtype=np.int64)

    def add_worker(self) -> int:
        """Add an available worker without work and return its id."""
        self.available.append(True)
        self.requests.append(0)
        self.tokens.append(0)
        return len(self.available) - 1

    def count(self, worker: int, requests: int, tokens: int) -> None:
        """Add to the outstanding work of a worker; negative when requests end."""
        self.requests[worker] += requests
        self.tokens[worker] += tokens
