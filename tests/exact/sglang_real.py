"""Build the scheduler of an installed SGLang for a scenario, on the CPU and without a model.

Queues, policies, batches, allocators, radix cache and host tier are SGLang's own objects. Only what a model, a device
or a socket would need is replaced.
"""

from __future__ import annotations

import os
from collections import deque
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import schedule_policy
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.mem_cache import radix_cache
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

if TYPE_CHECKING:
    from collections.abc import Callable

    from exact.sglang_host import Transfers

VOCAB = 1 << 40
"""More than any token of a scenario: SGLang ends a request whose token is outside."""

_FLAGS = (
    "page_size",
    "max_running_requests",
    "max_prefill_tokens",
    "chunked_prefill_size",
    "prefill_max_requests",
    "schedule_policy",
    "schedule_conservativeness",
    "enable_mixed_chunk",
    "disable_radix_cache",
    "radix_eviction_policy",
    "enable_priority_scheduling",
    "priority_scheduling_preemption_threshold",
    "schedule_low_priority_values_first",
    "disable_priority_preemption",
    "retraction_policy",
    "max_queued_requests",
    "prefill_decode_interval",
    "prefill_decode_interval_min_bs",
    "decode_log_interval",
)
_VARIABLES = {
    "init_new_token_ratio": "SGLANG_INIT_NEW_TOKEN_RATIO",
    "min_new_token_ratio_factor": "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR",
    "new_token_ratio_decay_steps": "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
    "retract_decode_steps": "SGLANG_RETRACT_DECODE_STEPS",
}
_CONSTANTS = {
    "clip_max_new_tokens": "CLIP_MAX_NEW_TOKENS",
    "in_batch_check_threshold": "IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD",
    "in_batch_deprioritize_threshold": "IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD",
}
"""Settings that SGLang reads from its environment: at each use, or once at import."""


class Anything:
    """An object without effect: every attribute is a function that returns nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False


class _Model:
    """A model's config: a large vocabulary, and nothing special."""

    vocab_size = VOCAB

    def __init__(self, context_len: int) -> None:
        self.context_len = context_len

    def __getattr__(self, name: str) -> None:
        return None


class Reporter:
    """The parts of SGLang's metrics reporter that have an effect: it counts decodes and publishes KV events.

    `publish` gets the kind of the result: prefill, decode, or idle.
    """

    enable_metrics = False

    def __init__(self, interval: int, publish: Callable[[str], None]) -> None:
        self._interval = interval
        self.publish = publish
        self.forward_ct_decode = 0
        self.num_generated_tokens = 0
        self.num_retracted_reqs = 0

    def report_prefill_stats(self, *_: object, **__: object) -> None:
        """Publish after a prefill or mixed result."""
        self.publish("prefill")

    def report_decode_stats(self, *_: object, **__: object) -> None:
        """Publish after every `decode_log_interval`-th decode result."""
        if self.forward_ct_decode % self._interval == 0:
            self.publish("decode")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def real_scheduler(
    config: dict[str, Any],
    *,
    transfers: Transfers | None,
    on_abort: Callable[[Any], None],
    publish: Callable[[str], None],
) -> Scheduler:
    """Build the scheduler of a scenario's complete config.

    `transfers` attaches a host tier, `on_abort` gets each request that ends outside a result.
    """
    context = get_context()
    for name, variable in _VARIABLES.items():
        os.environ[variable] = str(config[name])
    for name, constant in _CONSTANTS.items():
        setattr(schedule_policy, constant, config[name])
    host = config["hicache_write_policy"] is not None
    flags = {name: config[name] for name in _FLAGS}
    context.override_server_args(
        **flags,
        device="cpu",
        disable_overlap_schedule=not config["overlap"],
        enable_hierarchical_cache=host,
        hicache_ratio=config["hicache_ratio"],
        hicache_write_policy=config["hicache_write_policy"] or "write_through",
        pp_max_micro_batch_size=config["max_running_requests"],
    ).install()
    get_parallel().override_permanently(
        tp_rank=0, pp_rank=0, attn_tp_rank=0, attn_cp_rank=0, attn_dp_rank=0, dp_rank=None
    )
    return _assemble(config, transfers, on_abort, publish)


def _assemble(
    config: dict[str, Any],
    transfers: Transfers | None,
    on_abort: Callable[[Any], None],
    publish: Callable[[str], None],
) -> Scheduler:
    """Set the attributes that `Scheduler.__init__` would set, in place of loading a model."""
    self = Scheduler.__new__(Scheduler)
    nothing = Anything()
    page, tokens = config["page_size"], config["max_total_num_tokens"]
    self.server_args = get_context().server_args
    for name in (
        "schedule_policy",
        "enable_priority_scheduling",
        "schedule_low_priority_values_first",
        "priority_scheduling_preemption_threshold",
        "page_size",
        "max_running_requests",
        "max_prefill_tokens",
        "max_queued_requests",
        "disable_radix_cache",
    ):
        setattr(self, name, config[name])
    self.enable_overlap = config["overlap"]
    self.enable_hierarchical_cache = config["hicache_write_policy"] is not None
    self.max_total_num_tokens = tokens
    self.max_req_len = min(config["context_len"] - 1, tokens - 1)
    self.max_req_input_len = self.max_req_len - 5
    self.device = "cpu"
    self.is_generation = True
    self.spec_algorithm = SpeculativeAlgorithm.from_string(None)
    self.disaggregation_mode = DisaggregationMode.NULL
    self.model_config = _Model(config["context_len"])
    runner = SimpleNamespace(attn_backend=object(), prefill_aware_swa=False, device="cpu")
    self.tp_worker = self.model_worker = SimpleNamespace(model_runner=runner)
    pool = MHATokenToKVPool(
        size=tokens,
        page_size=page,
        dtype=torch.float16,
        head_num=1,
        head_dim=1,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    if page == 1:
        allocator = TokenToKVPoolAllocator(tokens, torch.float16, "cpu", pool, False)
    else:
        allocator = PagedTokenToKVPoolAllocator(tokens, page, torch.float16, "cpu", pool, False)
    self.token_to_kv_pool_allocator = allocator
    self.req_to_token_pool = ReqToTokenPool(
        config["max_running_requests"], min(config["context_len"], tokens + page) + 4, "cpu", False
    )
    self.tree_cache = _tree(config, self.req_to_token_pool, allocator, transfers)
    for name in (
        "enable_lora",
        "enable_hisparse",
        "enable_lmcache",
        "enable_unified_cache_external_linker",
        "enable_hicache_storage",
        "is_hybrid_swa",
        "require_mlp_sync",
        "abort_on_priority_when_disabled",
        "enable_overlap_mlx",
        "enable_session_radix_cache",
    ):
        setattr(self, name, False)
    for name in (
        "dllm_config",
        "decode_offload_manager",
        "draft_worker",
        "metrics_collector",
        "mm_receiver",
        "lora_drainer",
        "hisparse_coordinator",
        "min_free_slots_delayer",
        "dynamic_chunk_sizer",
        "sliding_window_size",
        "max_new_tokens_limit",
        "truncation_align_size",
        "tokenizer",
        "scheduler_stage_metrics",
    ):
        setattr(self, name, None)
    self.grammar_manager = SimpleNamespace(
        has_waiting_grammars=lambda: False, abort_requests=lambda _: None, grammar_queue=[]
    )
    self.dllm_manager = SimpleNamespace(any_staging_reqs=lambda: False)
    self.beam_coordinator = SimpleNamespace(
        pending_member_rows=lambda _: 0, commit_decode=lambda _: set(), retire_group=lambda _: None
    )
    self.dp_attn_adapter = SimpleNamespace(
        maybe_prepare_mlp_sync_batch=lambda batch, **_: batch, maybe_convert_decode_to_extend=lambda b: b
    )
    self.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, **_: batch)
    self.load_inquirer = SimpleNamespace(_get_num_pending_tokens=lambda **_: 0)
    self.metrics_reporter = Reporter(config["decode_log_interval"], publish)
    self.send_abort_output = lambda _, req: on_abort(req)
    self.processed_tokens_counter = self.forward_ct = 0
    self.waiting_queue = []
    self.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    self.last_batch = None
    self.result_queue = deque()
    self.enable_continuous_input_polling = False
    self.enable_skip_finishing_decode = config["overlap"]
    self._engine_paused = False
    scheduler_module.get_resolved_model_impl = lambda _: None  # there is no model
    self.init_chunked_prefill()
    self.init_schedule_policy()
    self.batch_result_processor = SchedulerBatchResultProcessor(
        is_generation=True,
        disaggregation_mode=self.disaggregation_mode,
        enable_overlap=self.enable_overlap,
        enable_overlap_mlx=False,
        model_config=self.model_config,
        token_to_kv_pool_allocator=allocator,
        tree_cache=self.tree_cache,
        hisparse_coordinator=None,
        req_to_token_pool=self.req_to_token_pool,
        decode_offload_manager=None,
        metrics_collector=nothing,
        metrics_reporter=self.metrics_reporter,
        draft_worker=None,
        model_worker=self.model_worker,
        logprob_result_processor=nothing,
        output_streamer=nothing,
        beam_coordinator=self.beam_coordinator,
        abort_request=self.abort_request,
    )
    return self


def _tree(
    config: dict[str, Any], requests: ReqToTokenPool, allocator: Any, transfers: Transfers | None
) -> Any:
    params = CacheInitParams(
        disable=config["disable_radix_cache"],
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=allocator,
        page_size=config["page_size"],
        eviction_policy=config["radix_eviction_policy"],
        enable_kv_cache_events=config["kv_events"] or config["publish_events"],
        chunked_prefill_size=config["chunked_prefill_size"],
        tree_components=(ComponentType.FULL,),
        tree_core_backend="python",
    )
    if config["tree"] == "radix":
        counter = count()
        radix_cache.time = SimpleNamespace(monotonic=lambda: next(counter), perf_counter=lambda: 0.0)
        return RadixCache(params)
    tree = UnifiedRadixCache(params)
    if transfers is not None:
        transfers.attach(tree, params)
    return tree
