"""Replay: workloads through simulated workers on a virtual clock. The room can be called: `understudy.replay(...)`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A room that is also the verb it is named after."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from understudy.report.run import replay

        return replay(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
