"""The flags that say which model runs on which GPUs, for verbs that predict and fit times."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from understudy.engines.config import VllmConfig
    from understudy.timing.deployment import Deployment


def add_deployment_flags(verb: argparse.ArgumentParser, *, needed: bool) -> None:
    """Describe them, in groups of their own."""
    import argparse

    from understudy.engines.profiles import NEWEST

    group = verb.add_argument_group("what runs on what")
    group.add_argument("--model", metavar="NAME", required=needed, help="a known name, or a config.json")
    group.add_argument(
        "--gpu", metavar="NAME", required=needed, help="H100, H200, B200, A100, L40S, RTX 4090, …"
    )
    group.add_argument(
        "--weights", metavar="TYPE", help="bf16, fp8, int4, mxfp4, nvfp4 (default: the model's own)"
    )
    group.add_argument(
        "--kv-dtype", metavar="TYPE", default="bf16", help="of the KV cache: bf16 (default) or fp8"
    )
    group.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs of a rank")
    group.add_argument("--data-parallel-size", type=int, default=1, metavar="N", help="ranks")
    group.add_argument(
        "--enable-expert-parallel", action="store_true", help="deal experts out whole, do not cut them"
    )
    engine = verb.add_argument_group("engine")
    engine.add_argument(
        "--max-num-seqs", type=int, default=128, metavar="N", help="requests in a batch (default: 128)"
    )
    engine.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="tokens in a step (default: 2048)",
    )
    engine.add_argument("--max-model-len", type=int, metavar="N", help="context window (default: none)")
    engine.add_argument(
        "--num-gpu-blocks", type=int, metavar="N", help="usable KV blocks of 16 tokens (default: an estimate)"
    )
    engine.add_argument(
        "--vllm-version",
        default=NEWEST,
        metavar="VERSION",
        help=f"a release of vLLM, as 0.19.0 (default: {NEWEST})",
    )
    engine.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="find prefixes in the cache, as those of preempted requests (default: yes)",
    )


def deployment_of(args: argparse.Namespace) -> Deployment:
    """What the flags describe. ConfigError names the one at fault."""
    from understudy.timing.architecture import Architecture
    from understudy.timing.deployment import Deployment, Parallelism
    from understudy.timing.gpus import find_gpu

    model = Architecture.find(args.model)
    gpus = args.tensor_parallel_size * args.data_parallel_size
    return Deployment(
        model=model,
        gpu=find_gpu(args.gpu),
        weights=args.weights or model.weights,
        kv=args.kv_dtype,
        parallel=Parallelism(
            tensor=args.tensor_parallel_size,
            data=args.data_parallel_size,
            expert=gpus if args.enable_expert_parallel else 1,
        ),
    )


def engine_of(args: argparse.Namespace, deployment: Deployment) -> VllmConfig:
    """The engine that the flags describe, without its timing."""
    from understudy.calibrate.experiment import engine_for

    return engine_for(
        deployment,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        num_gpu_blocks=args.num_gpu_blocks,
        enable_prefix_caching=args.enable_prefix_caching,
        vllm_version=args.vllm_version,
    )
