"""Share one workload between processes: its columns lie in memory that every process maps."""

from __future__ import annotations

import mmap
import os
import pickle
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from understudy.workload import Workload

_ALIGN = 64


class SharedWorkload(NamedTuple):
    """A workload without its columns (`pickled`), and where they lie in the shared memory."""

    pickled: bytes
    places: list[tuple[int, int]]
    """Offset and length of every column, in bytes."""

    def load(self, descriptor: int) -> Workload:
        """Map the columns and return the workload; nothing is copied."""
        mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        view = memoryview(mapped)
        columns = [view[start : start + length] for start, length in self.places]
        return cast("Workload", pickle.loads(self.pickled, buffers=columns))


def share_workload(workload: Workload) -> tuple[int, SharedWorkload]:
    """Copy the columns into anonymous shared memory; return its descriptor, which the caller closes."""
    columns: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(workload, protocol=5, buffer_callback=columns.append)
    descriptor = os.memfd_create("understudy-workload")
    places = []
    with os.fdopen(os.dup(descriptor), "wb") as file:
        for column in columns:
            file.seek(-file.tell() % _ALIGN, os.SEEK_CUR)
            content = column.raw()
            places.append((file.tell(), content.nbytes))
            file.write(content)
        file.truncate(max(1, file.tell()))
    return descriptor, SharedWorkload(pickled, places)
