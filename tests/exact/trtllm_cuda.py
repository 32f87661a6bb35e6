"""A CUDA driver without a device: every call succeeds at once, and copies are counted."""

from __future__ import annotations

import contextlib
import enum
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GPU_BYTES = 1 << 50
"""More than any pool of a scenario."""
_PAGE = 1 << 21

COPIES: list[list[Any]] = []
"""Copies that the cache manager ordered: [from>to, pages, bytes of a page]."""


class Number(int):
    """A handle or an address; a class of its own because the driver's types are called as classes."""


class Blank:
    """A structure whose fields are set and never read."""

    def __init__(self, *_: object) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Blank()
        object.__setattr__(self, name, value)
        return value


class Result(enum.IntEnum):
    """Results of driver calls."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801


class RuntimeResult(enum.IntEnum):
    """Results of runtime calls."""

    cudaSuccess = 0


class Stream:
    """A stream on which all work is done at once."""

    cuda_stream = 7

    def wait_stream(self, _: object) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


STREAM = Stream()
_handles = count(1)
_next_address = [1 << 40]


def _reserve(size: int, *_: object) -> tuple[Result, Number]:
    address = _next_address[0]
    _next_address[0] += -(-size // _PAGE) * _PAGE + _PAGE
    return Result.CUDA_SUCCESS, Number(address)


def _succeed(*_: object) -> tuple[Result]:
    return (Result.CUDA_SUCCESS,)


def _give_handle(*_: object) -> tuple[Result, Number]:
    return Result.CUDA_SUCCESS, Number(next(_handles))


DRIVER: dict[str, Any] = {
    "CUresult": Result,
    **dict.fromkeys(
        ("CUdeviceptr", "CUevent", "CUstream", "CUmemGenericAllocationHandle"),
        Number,
    ),
    **dict.fromkeys(("CUmemAccessDesc", "CUmemAllocationProp"), Blank),
    **{
        name: Blank()
        for name in (
            *("CUmemAccess_flags", "CUmemAllocationHandleType", "CUmemAllocationType", "CUmemLocationType"),
            *("CUevent_flags", "CUstream_flags"),
        )
    },
    "CU_MEMHOSTREGISTER_DEVICEMAP": 1,
    "CU_MEMHOSTREGISTER_PORTABLE": 2,
    "CU_STREAM_WAIT_VALUE_COMPLETED": 0,
    "cuCtxGetDevice": lambda: (Result.CUDA_SUCCESS, 0),
    "cuGetErrorString": lambda _: (Result.CUDA_SUCCESS, b"error"),
    "cuMemGetInfo": lambda: (Result.CUDA_SUCCESS, GPU_BYTES, GPU_BYTES),
    "cuMemAddressReserve": _reserve,
    **dict.fromkeys(("cuEventCreate", "cuMemCreate", "cuStreamCreate"), _give_handle),
    **dict.fromkeys(
        (
            *("cuCtxSynchronize", "cuEventDestroy", "cuEventQuery", "cuEventRecord", "cuEventSynchronize"),
            *("cuMemAddressFree", "cuMemHostRegister", "cuMemHostUnregister", "cuMemMap", "cuMemRelease"),
            *("cuMemSetAccess", "cuMemUnmap", "cuStreamDestroy", "cuStreamSynchronize", "cuStreamWaitEvent"),
        ),
        _succeed,
    ),
}
RUNTIME: dict[str, Any] = {
    "cudaError_t": RuntimeResult,
    "cudaFree": lambda _: (RuntimeResult.cudaSuccess,),
    "cudaSetDevice": lambda _: (RuntimeResult.cudaSuccess,),
}


def _count_copies(way: str) -> Callable[[list[Any], int, object], int]:
    def copy(tasks: list[Any], page_bytes: int, _: object) -> int:
        COPIES.append([way, len(tasks), page_bytes])
        return 0

    return copy


LEVELS = ("device", "host", "disk")
COPY_CALLS: dict[str, Any] = {
    f"copy_{one}_to_{other}": _count_copies(f"{one}>{other}") for one in LEVELS for other in LEVELS
}


class CopyTask(tuple[Any, ...]):
    """Two addresses."""

    def __new__(cls, to: Any, source: Any) -> CopyTask:
        """Pair them."""
        return tuple.__new__(cls, (to, source))


@contextlib.contextmanager
def in_stream(_: object) -> Iterator[None]:
    """Do nothing."""
    yield


def replace_torch(torch: Any) -> None:
    """Let PyTorch's CUDA calls succeed as well."""
    torch.cuda.set_device = lambda *_: None
    torch.cuda.current_stream = lambda *_: STREAM
    torch.cuda.stream = in_stream
