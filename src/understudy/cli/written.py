"""Name the files that a command wrote."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from understudy.outputs import is_stdout
from understudy.text import visible

if TYPE_CHECKING:
    from collections.abc import Iterable

    from understudy.outputs import FilePath


def print_written(paths: Iterable[FilePath | None]) -> None:
    """Name on standard error the files among the outputs."""
    for path in paths:
        if path is not None and not is_stdout(path):
            print(f"written: {visible(str(path))}", file=sys.stderr)
