"""The kind of engine that simulates SGLang."""

from __future__ import annotations

from understudy.engines.kinds.kind import EngineKind
from understudy.engines.kinds.launch import LaunchCommand
from understudy.engines.kinds.terms import EngineTerms
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.sglang_memory import apply_sglang_pools

_FEWER_COPIES = "Try --hicache-write-policy write_through_selective, or more bandwidth to the host."

KIND = EngineKind(
    name="sglang",
    title="SGLang",
    config_class=SglangConfig,
    version_setting="sglang_version",
    event_producer="sglang",
    metrics="sglang",
    launch=LaunchCommand(
        words=("python", "-m", "sglang.launch_server", "--model-path"),
        image="lmsysorg/sglang",
        tensor_parallel="tp-size",
        data_parallel="dp-size",
        memory_share="mem-fraction-static",
        pool="max-total-tokens",
        fp8_kv="fp8_e4m3",
        always_gives_share=True,
        splits_experts=True,
        names={
            "block_size": "page-size",
            "max_num_seqs": "max-running-requests",
            "max_model_len": "context-length",
        },
        always=("block_size", "chunked_prefill_size"),
        left_out=(
            *(
                "max_num_batched_tokens",
                "enable_prefix_caching",
                "load_back_threshold",
                "hicache_write_policy",
                "swa_window",
            ),
        ),
    ),
    terms=EngineTerms(
        memory="--max-total-tokens or --mem-fraction-static",
        requests="--max-running-requests",
        step="--chunked-prefill-size",
        pool_setting="max_total_tokens",
        step_setting="chunked_prefill_size",
        step_has_whole_blocks=True,
        caution_setting="schedule_conservativeness",
        block="page",
        more_memory="a larger KV pool",
        requeued="retractions",
        usage="Token usage",
        storm_remedy="Use a larger KV pool (--max-total-tokens or --mem-fraction-static), a lower "
        "--max-running-requests, or a higher --schedule-conservativeness.",
        step_cause="some steps prefill and decode nothing, or decode for more requests",
        tier_remedy=_FEWER_COPIES,
        write_through_remedy=_FEWER_COPIES,
        link_remedy="Use more bandwidth, or copy fewer pages (--hicache-write-policy write_through_selective).",
    ),
    hands_off=True,
    apply_pools=apply_sglang_pools,
    pools_need_different_layers=True,
    sizes_pool_in_tokens=True,
    steps_apart="SGLang's way to it (DP attention) is not simulated",
    shortens_requests=True,
    answers_full_queue=True,
    without_cache={"disable_radix_cache": True},
    last_token_switch="disable_overlap_schedule",
)
