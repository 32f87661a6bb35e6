"""Build TensorRT-LLM's executor for a scenario: its own loops, scheduler and cache manager, on the CPU.

Replaced are the model, the sampler, the request queue, and what only several ranks or a device need.
"""

from __future__ import annotations

import contextlib
import tempfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from exact import trtllm_bindings as bindings
from exact.trtllm_cuda import COPIES, STREAM, replace_torch
from exact.trtllm_modules import install

RELEASE = install()

import torch  # noqa: E402
from tensorrt_llm._torch.pyexecutor import kv_cache_manager_v2 as manager_module  # noqa: E402
from tensorrt_llm._torch.pyexecutor import py_executor as executor_module  # noqa: E402
from tensorrt_llm._torch.pyexecutor import scheduler as scheduler_module  # noqa: E402
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest  # noqa: E402
from tensorrt_llm._torch.pyexecutor.resource_manager import (  # noqa: E402
    ResourceManager,
    ResourceManagerType,
)
from tensorrt_llm._torch.pyexecutor.scheduler.waiting_queue import create_waiting_queue  # noqa: E402
from tensorrt_llm._torch.pyexecutor.seq_slot_manager import SeqSlotManager  # noqa: E402
from tensorrt_llm.runtime.kv_cache_manager_v2 import (  # noqa: E402
    CacheLevel,
    _introspection,
    _storage_manager,
)
from tensorrt_llm.runtime.kv_cache_manager_v2._core import _kv_cache  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Request = LlmRequest
VOCAB = 1 << 30
_MOST_INPUT = 0x7FFFFFFF
_SMALLEST_WINDOW_CHUNK = 256
_FOLDER = tempfile.gettempdir()

_LEVELS = {0: "device", 1: "host", 2: "disk"}


def _do_nothing(*_: object, **__: object) -> None:
    return


def _count_copies(module: Any) -> None:
    """Note copies where they are ordered: copies from and to disk are split over buffers later."""
    copy = module.batched_copy

    def counted(to: Any, source: Any, page_bytes: int, tasks: Any, stream: Any) -> None:
        below = len(COPIES)
        copy(to, source, page_bytes, tasks, stream)
        COPIES[below:] = [[f"{_LEVELS[int(source)]}>{_LEVELS[int(to)]}", len(tasks), page_bytes]]

    module.batched_copy = counted


def _replace_in_modules() -> None:
    replace_torch(torch)
    for module in (_storage_manager, _kv_cache):
        _count_copies(module)
    manager_module.get_pp_layers = lambda layers, *_, **__: (list(range(layers)), layers)
    # Copies of the page table to the device.
    manager_module.KVCacheManagerV2._prepare_swa_scratch_copy_tensors = _do_nothing
    executor_module.PyExecutor.is_benchmark_disagg = property(lambda _: False)
    executor_module._strip_py_multimodal_data_post_prefill = _do_nothing
    executor_module.merge_requests = lambda items, **_: [item.request for item in items]
    executor_module.HandleLogits = executor_module.HandleAdditionalOutputs = lambda: _do_nothing
    executor_module.ExpertStatistic = SimpleNamespace(set_iter=_do_nothing)


_replace_in_modules()


def build_manager(config: dict[str, Any]) -> Any:
    """Build the KV cache manager."""
    settings = SimpleNamespace(
        enable_swa_scratch_reuse=config["swa_scratch"],
        block_reuse_config=SimpleNamespace(policy=config["reuse_policy"], max_num_turns=8),
        event_buffer_max_size=65536 if config["events"] else 0,
        kv_cache_event_hash_algo="auto",
        max_attention_window=config["windows"],
        max_util_for_resume=config["max_util_for_resume"],
        max_gpu_total_bytes=config["max_gpu_bytes"],
        max_tokens=config["max_tokens"],
        host_cache_size=config["host_cache_size"],
        disk_cache_size=config["disk_cache_size"] or None,
        disk_cache_path=_FOLDER,
        enable_block_reuse=config["enable_block_reuse"],
        enable_partial_reuse=config["enable_partial_reuse"],
        disk_prefetch_num_reqs=0,
        dtype="auto",
        pool_ratio=config["pool_ratio"],
        avg_seq_len=config["avg_seq_len"],
    )
    mapping = SimpleNamespace(
        **dict.fromkeys(("tp_size", "pp_size", "world_size"), 1),
        rank=0,
        enable_attention_dp=False,
        cp_config={},
        has_pp=lambda: False,
        pp_layers=lambda layers: list(range(layers)),
        is_last_pp_rank=lambda: True,
    )
    return manager_module.KVCacheManagerV2(
        settings,
        bindings.CacheType.SELF,
        num_layers=config["layers"],
        num_kv_heads=config["kv_heads"],
        head_dim=config["head_dim"],
        tokens_per_block=config["tokens_per_block"],
        max_seq_len=config["max_seq_len"],
        max_batch_size=config["max_batch_size"],
        mapping=mapping,
        vocab_size=VOCAB,
        max_num_tokens=config["max_num_tokens"],
        execution_stream=STREAM,
    )


def storage_statistics(manager: Any, level: int) -> Any:
    """Return the counts of pages of a level, by group of pools."""
    return _introspection.storage_statistics(manager.impl, CacheLevel(level))


def chunk_unit(config: dict[str, Any]) -> int:
    """Return the tokens that a chunk is a multiple of."""
    unit: int = config["chunk_unit"] or config["tokens_per_block"]
    slides = config["windows"] and config["max_seq_len"] > min(config["windows"])
    return max(_SMALLEST_WINDOW_CHUNK, unit) if slides else unit


def build_scheduler(config: dict[str, Any], manager: Any) -> Any:
    """Build the scheduler of cache manager V2."""
    chunks = (bindings.Chunking.FIRST_COME_FIRST_SERVED, chunk_unit(config)) if config["chunked"] else None
    return scheduler_module.KVCacheV2Scheduler(
        config["max_batch_size"],
        config["max_num_tokens"],
        manager,
        bindings.Policy[config["policy"]],
        chunks,
        scheduler_capacity=config["max_batch_size"],
        enable_prefix_aware_scheduling=config["prefix_aware"],
        enable_recompute_pause=config["recompute_pause"],
    )


class _HangDetector:
    checkpoint = staticmethod(_do_nothing)
    pause = staticmethod(contextlib.nullcontext)

    def __enter__(self) -> _HangDetector:
        return self

    def __exit__(self, *_: object) -> None:
        return


def build_executor(
    config: dict[str, Any],
    manager: Any,
    scheduler: Any,
    *,
    sampler: Any,
    fetch: Callable[[Any], list[Any]],
    forward: Callable[..., Any],
    begin_pass: Callable[[], None],
    on_answers: Callable[[list[Any]], None],
) -> Any:
    """Build the executor; `begin_pass` is called before each pass, and `on_answers` with the answers of one."""
    resources = ResourceManager(
        {
            ResourceManagerType.SEQ_SLOT_MANAGER: SeqSlotManager(config["max_batch_size"] * 2),
            ResourceManagerType.KV_CACHE_MANAGER: manager,
        }
    )
    executor = object.__new__(executor_module.PyExecutor)
    executor.__dict__.update(_fields(config))
    executor.__dict__.update(
        resource_manager=resources,
        kv_cache_manager=manager,
        scheduler=scheduler,
        sampler=sampler,
        waiting_queue=create_waiting_queue(bindings.WaitingPolicy(config["waiting_policy"])),
        executor_request_queue=SimpleNamespace(get_from_request_queue=fetch),
        model_engine=SimpleNamespace(forward=forward, is_spec_decode=False, spec_config=None),
        _enqueue_responses=on_answers,
    )

    @contextlib.contextmanager
    def profiler() -> Iterator[Callable[[], None]]:
        yield begin_pass

    def fail(error_msg: str | None = None, *_: object, **__: object) -> None:
        raise RuntimeError(error_msg)

    executor.__dict__.update(_profiler=profiler, _handle_errors=fail)
    return executor


_OFF = (
    *("enable_kv_pool_rebalance", "enable_attention_dp", "enable_early_first_token_response"),
    *("enable_iter_perf_stats", "enable_iter_req_stats", "attention_dp_enable_balance", "is_warmup"),
    *("has_previous_draft_tokens", "is_encoder_decoder", "is_shutdown", "gather_all_responses"),
    *("_mm_encoder_item_scheduling_enabled", "_resource_governor_enabled", "_disable_mpi"),
    *("_enable_non_overlap_adp_forward_intent", "force_terminate_ctx_for_partial_reuse", "use_spec_decode"),
)
_ABSENT = (
    *("drafter", "draft_model_engine", "guided_decoder", "speculation_gate", "previous_batch"),
    *("kv_cache_transceiver", "kv_connector_manager", "_disagg_pp_termination_handler", "dwdp_manager"),
    "_pending_adp_dummy_request",
)
_ZERO = (
    *("device_id", "global_rank", "iter_counter", "max_draft_len", "max_total_draft_tokens"),
    *("batch_wait_iters_count", "encoder_batch_wait_iters_count", "num_fetch_requests"),
    *("num_fetch_requests_cur_rank", "expected_num_active_requests", "num_scheduled_requests"),
    "benchmark_req_queues_size",
)
_LISTS = (
    *("active_requests", "_pending_transfer_responses", "_pending_response_terminations"),
    *("_pending_timed_out_requests", "pending_encoder_steps", "control_requests", "request_accumulated"),
    "canceled_req_ids",
)
_SETS = (
    *("_prefetched_request_ids", "_pending_recompute_pause_ids", "_disagg_timed_out_ctx_cancelled_ids"),
    "_disagg_timed_out_gen_cancelled_ids",
)
_WITHOUT_EFFECT = (
    *("_wait_for_model_engine_input_copy", "_validate_request", "_maybe_prefetch_next_iter_mm_encoders"),
    *("_accumulate_spec_dec_stats", "_send_kv_async", "_maybe_attach_ctx_usage"),
    *("_finalize_adp_dummy_allocation", "_handle_dynamic_draft_len", "_poll_encoder_steps"),
    *("_handle_kv_transfer_timeouts_synced", "_flush_iter_stats_synced", "_get_ctx_mla_kv_len_cap"),
    *("_attach_encoder_output_to_execution_stream", "_mark_cross_kv_projection_consumed"),
)


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an executor on one rank, without a model."""
    waits = config["batch_wait_timeout_iters"] > 0 or config["batch_wait_max_tokens_ratio"] > 0
    return {
        **dict.fromkeys(_OFF, False),
        **dict.fromkeys(_ABSENT),
        **dict.fromkeys(_ZERO, 0),
        **{name: [] for name in _LISTS},
        **{name: set() for name in _SETS},
        **dict.fromkeys(_WITHOUT_EFFECT, _do_nothing),
        **{name: config[name] for name in ("max_num_tokens", "max_batch_size")},
        **{name: config[name] for name in ("batch_wait_timeout_iters", "batch_wait_max_tokens_ratio")},
        "max_num_active_requests": config["max_batch_size"],
        "enable_batch_waiting": waits,
        "disable_overlap_scheduler": not config["overlap"],
        "enable_kv_cache_events": config["events"],
        "execution_stream": STREAM,
        "active": True,
        "max_beam_width": 1,
        "stream_interval": 1,
        "max_input_len": _MOST_INPUT,
        "inflight_req_ids": bindings.IdSet(),
        "result_wait_queues": {},
        "responses": {},
        "llm_args": SimpleNamespace(),
        "_is_kv_manager_v2": True,
        "_adp_dummy_is_gen": True,
        "hang_detector": _HangDetector(),
        "dist": SimpleNamespace(
            **dict.fromkeys(("rank", "tp_rank", "cp_rank"), 0),
            **dict.fromkeys(("tp_size", "pp_size", "cp_size", "world_size"), 1),
            has_pp=False,
            cp_config={},
        ),
        "perf_manager": SimpleNamespace(
            enabled=False,
            create_timing_events=lambda: (None, None, None),
            record_perf_events=lambda *_: contextlib.nullcontext(SimpleNamespace()),
            compute_batch_gpu_times=_do_nothing,
            append_step_metrics=_do_nothing,
            get_timestamp=lambda: 0,
            save_timing_to_requests=_do_nothing,
        ),
        "request_broadcaster": SimpleNamespace(broadcast=lambda requests: (requests, None)),
        "async_transfer_manager": SimpleNamespace(has_any_inflight_requests=lambda: False),
        "_should_exclude_last_generation_logits": lambda: False,
        "_check_benchmark_disagg_gate": lambda *_: (True, False),
    }
