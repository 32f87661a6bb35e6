"""Kernels that begin before the one ahead of them has ended (programmatic dependent launch, from Hopper on).

Such a kernel lets the next one begin at once, reads what nobody writes (weights), and then waits: behind `wait` all
that ran ahead of it has ended. Every program of it waits, so that the end of a kernel is the end of all before it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next(early: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next kernel may begin. It waits itself for what is written here."""
    if early:
        gdc_launch_dependents()


@triton.jit
def wait(early: tl.constexpr):  # type: ignore[no-untyped-def]
    """From here on what other kernels wrote may be read, and what they read may be written."""
    if early:
        gdc_wait()


@cache
def launch() -> dict[str, Any]:
    """Options of a launch: whether kernels begin early."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        return {"early": True, "launch_pdl": True}
    return {"early": False}
