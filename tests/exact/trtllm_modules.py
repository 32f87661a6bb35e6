"""Import TensorRT-LLM's scheduler, cache manager and executor loops from a source tree, without its C++ library.

TRTLLM_SOURCES names the tree. Modules in `_OWN` are its own; of the others, `_WRITTEN` are written here and the rest
are empty: each of their attributes is a class without effect.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from exact import trtllm_bindings as bindings
from exact import trtllm_cuda as cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_EXECUTOR = "tensorrt_llm._torch.pyexecutor"
_MANAGER = "tensorrt_llm.runtime.kv_cache_manager_v2"
_OWN = {
    "tensorrt_llm.runtime.kv_cache_hash",
    *(
        f"{_EXECUTOR}.{name}"
        for name in (
            *("scheduler", "scheduler.scheduler", "scheduler.scheduler_v2", "scheduler.waiting_queue"),
            *("scheduler.adp_router", "kv_cache_manager_v2", "llm_request", "kv_cache_stats", "py_executor"),
            *("resource_manager", "request_utils", "executor_request_queue", "seq_slot_manager"),
            "finish_reason",
        )
    ),
}
_ABSENT = {
    *("PIL", "flashinfer", "llguidance", "mpi4py", "nvtx", "psutil", "pynvml", "ray", "soundfile"),
    *("transformers", "triton", "xgrammar", "zmq"),
}
"""Packages that are imported and do nothing here."""


def find_sources() -> Path:
    """Return the folder of the sources; exit with the remedy when it is not one."""
    named = os.environ.get("TRTLLM_SOURCES", "")
    folder = Path(named)
    if not named or not (folder / "tensorrt_llm" / "runtime" / "kv_cache_manager_v2").is_dir():
        raise SystemExit(
            f"TRTLLM_SOURCES: {named or 'not set'}: has no tensorrt_llm/runtime/kv_cache_manager_v2; name a checkout "
            "of TensorRT-LLM (git clone --depth 1 https://github.com/NVIDIA/TensorRT-LLM)"
        )
    return folder.resolve()


class _Empty(type):
    """Classes whose attributes are such classes too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _make_empty(name)

    def __or__(cls, _: object) -> Any:
        return cls

    def __ror__(cls, _: object) -> Any:
        return cls

    def __getitem__(cls, _: object) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def _make_empty(name: str) -> Any:
    def call(_: object, *args: Any, **__: object) -> Any:  # decorators return what they decorate
        return args[0] if len(args) == 1 and callable(args[0]) else None

    def attribute(_: object, one: str) -> Any:
        if one.startswith("__"):
            raise AttributeError(one)
        return _make_empty(one)

    body = {
        "__init__": lambda *_, **__: None,
        "__call__": call,
        "__getattr__": attribute,
        "__module__": "empty",
    }
    return _Empty(name, (), body)


class _EmptyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in sys.modules or full in _OWN or full == _MANAGER or full in _WRITTEN:
            return importlib.import_module(full)
        value = _make_empty(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, sources: Path) -> None:
        self._sources = sources

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the sources, one that is written here, or an empty one."""
        del path, target
        top = name.partition(".")[0]
        if name in _WRITTEN or top in _ABSENT:
            return ModuleSpec(name, self, is_package=True)
        if top != "tensorrt_llm":
            return None
        if name in _OWN or name == _MANAGER or name.startswith(f"{_MANAGER}."):
            return self._find_own(name)
        return ModuleSpec(name, self, is_package=True)

    def _find_own(self, name: str) -> ModuleSpec | None:
        base = self._sources.joinpath(*name.split("."))
        if base.is_dir():
            return importlib.util.spec_from_file_location(
                name, base / "__init__.py", submodule_search_locations=[str(base)]
            )
        file = base.with_suffix(".py")
        if file.exists():
            return importlib.util.spec_from_file_location(name, file)
        return PathFinder.find_spec(name, [str(Path(sys.prefix) / "rawref")])  # built with the environment

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make an empty module."""
        module = _EmptyModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Add what is written here."""
        for name, value in _WRITTEN.get(module.__name__, {}).items():
            setattr(module, name, value)


class _Logger:
    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _LogprobMode:
    RAW = "raw"

    def __new__(cls, value: Any = None) -> Any:
        return value


def _leave(*_: object, **__: object) -> Callable[[Any], Any]:
    """Return a decorator without effect."""
    return lambda function: function


_WRITTEN: dict[str, dict[str, Any]] = {
    "cuda": {},
    "cuda.bindings": {},
    "cuda.bindings.driver": cuda.DRIVER,
    "cuda.bindings.runtime": cuda.RUNTIME,
    "cuda.cudart": cuda.RUNTIME,
    "tensorrt_llm._utils": {
        "nvtx_range": _leave,
        "nvtx_range_debug": _leave,
        "maybe_compile": _leave,
        "prefer_pinned": lambda: False,
        "mpi_rank": lambda: 0,
        "mpi_disabled": lambda: True,
        "get_size_in_bytes": lambda count, kind: count * bindings.ELEMENT_BYTES[kind],
        "CUASSERT": lambda _: None,
    },
    "tensorrt_llm._torch.utils": {"maybe_compile": _leave},
    "tensorrt_llm.logger": {"logger": _Logger()},
    "tensorrt_llm.mapping": {"Mapping": type("Mapping", (), {}), "CpType": bindings.CpType},
    "tensorrt_llm.bindings": {"LlmRequestState": bindings.State, "DataType": bindings.DataType},
    "tensorrt_llm.bindings.executor": {"FinishReason": bindings.Finish},
    "tensorrt_llm.bindings.internal": {},
    "tensorrt_llm.bindings.internal.batch_manager": {
        "LlmRequest": bindings.LlmRequest,
        "LlmRequestType": bindings.RequestType,
        "ReqIdsSet": bindings.IdSet,
        "PrefixReuseSummary": bindings.PrefixReuseSummary,
        "CacheType": bindings.CacheType,
    },
    "tensorrt_llm.bindings.internal.batch_manager.kv_cache_manager_v2_utils": {
        "IndexMapper": bindings.IndexMapper,
        "DiskAddress": lambda file, place: SimpleNamespace(fd=file, pos=place),
        **dict.fromkeys(
            ("MemToMemTask", "DiskToDiskTask", "DiskToHostTask", "HostToDiskTask"), cuda.CopyTask
        ),
        **cuda.COPY_CALLS,
    },
    "tensorrt_llm.llmapi": {},
    "tensorrt_llm.llmapi.llm_args": {
        "CapacitySchedulerPolicy": bindings.Policy,
        "ContextChunkingPolicy": bindings.Chunking,
        "WaitingQueuePolicy": bindings.WaitingPolicy,
    },
    "tensorrt_llm.executor.request": {"DEFAULT_REQUEST_PRIORITY": 0.5},
    "tensorrt_llm.sampling_params": {"LogprobMode": _LogprobMode},
    "tensorrt_llm._torch.speculative": {"get_num_extra_kv_tokens": lambda _: 0},
    f"{_EXECUTOR}.config_utils": {
        "uses_vswa_kv_cache_layout": lambda windows: len(set(windows or ())) > 1,
    },
}


def install() -> str:
    """Make the modules importable; return the release of the sources."""
    sources = find_sources()
    os.environ["TLLM_KV_CACHE_MANAGER_V2_BACKEND"] = "python"
    os.environ.setdefault("TLLM_DEBUG_MODE", "1")
    sys.meta_path.insert(0, _Finder(sources))
    for name in sorted(_WRITTEN):
        module = importlib.import_module(name)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(importlib.import_module(parent), leaf, module)
    namespace: dict[str, Any] = {}
    exec((sources / "tensorrt_llm" / "version.py").read_text(encoding="utf-8"), namespace)
    return str(namespace["__version__"])
