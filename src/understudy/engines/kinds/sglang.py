"""The kind of engine that simulates SGLang."""

from __future__ import annotations

from understudy.engines.kinds.kind import EngineKind
from understudy.engines.kinds.launch import LaunchCommand
from understudy.engines.sglang_config import SglangConfig

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
            ),
        ),
    ),
    sizes_pool_in_tokens=True,
    steps_apart="SGLang's way to it (DP attention) is not simulated",
    shortens_requests=True,
    answers_full_queue=True,
    last_token_switch="disable_overlap_schedule",
)
