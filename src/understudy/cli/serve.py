"""`understudy serve MODEL [flags of the engine]`: a live server with the API of an engine, which is simulated."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.cli.verbs import Verbs
    from understudy.server.flags.plan import ServePlan
    from understudy.server.server import Server

EXAMPLES = """\
examples:
  understudy serve                                     the built-in tokenizer, port 8000, loopback
  understudy serve my-model --port 9000 --max-model-len 32k --max-num-seqs 64
  understudy serve Llama-3.1-8B --gpu H100             step times and KV blocks of a known model on a GPU
  understudy serve Llama-3.1-70B --gpu H100 --tensor-parallel-size 4 --timing timing.yaml
  understudy serve my-model --set timing.kind=constant timing.prefill_ms=20 timing.decode_ms=5
  understudy serve my-model --time-to-first-token 20 --inter-token-latency 5
  understudy serve my-model --kv-events-config.enable_kv_cache_events true
  understudy serve my-model --config vllm.yaml         read vLLM's flags from a file
  understudy serve my-model --engine sglang --page-size 64 --schedule-policy lpm    SGLang's API and flags, port 30000
  understudy serve my-model --engine trtllm --config options.yaml    the API and flags of trtllm-serve
  understudy serve ~/models/Qwen3-4B --engine qwen3    a real engine: the answers are computed (extra [torch])
  understudy serve --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'    prefill server
  curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "hello", "max_tokens": 8}'

vLLM 0.33's 320 flags are accepted, in its grammar (with --vllm-version 0.32 or older, 0.32's 316). Flags without effect
on a simulated engine are listed at start. With --engine sglang, SGLang 0.5.23's 530 flags are accepted instead,
with --engine trtllm those of trtllm-serve 1.3.0rc25.

flags of understudy:
  --clock-speed X         run the simulated clock X times as fast as real time
  --response-mode MODE    filler (default), echo, recorded (with --response-file JSONL of prompt and response)
  --gpu NAME              H100, H200, B200, A100, L40S, RTX-4090, RTX-PRO-6000, …: step times and KV blocks of the model
                          on it; describe another GPU with --gpu-bandwidth-gbps, --gpu-tflops, --gpu-link-gbps and
                          --gpu-memory; --weight-dtype bf16|fp8|int4|mxfp4|nvfp4, if not the model's own
                          of a model without step times: --gpu-memory and --gpu-weights give its groups and blocks
  --timing FILE|NAME      step times fitted by `understudy calibrate`; a folder of op tables or aiconfigurator
                          (both with --gpu); or polynomial (generic, not a real GPU)
  --set NAME=VALUE ...    any setting of the engine, such as timing.kind=constant
  --kv-transfer-config JSON, --kv-peer HOST ...   hand over KV blocks as a prefill or decode server (vLLM's
                          NixlConnector): kv_role kv_producer or kv_consumer; a decode server contacts loopback and the
                          peers only; --kv-side-channel-host, --kv-side-channel-port (or VLLM's variables), and
                          --kv-link-gbps X, --kv-link-latency-ms MS, --kv-bytes-per-token N set the channel and the link
  --kv-cache-groups JSON  groups of layers that keep different KV (default: those of the model on its --gpu)
  --tiers JSON            KV tiers below the GPU: {"tiers": [{"tier": "g2", "blocks": 4096}], ...}
  --session-kv SETTING=VALUE[,...]    KV of sessions between their requests: hold_s=S, release=end, release_after_s=S,
                          offload_after_s=S, prefetch=predicted or told, client_hold_s=S; or FILE.py:CLASS
  --time-to-first-token MS, --inter-token-latency MS    constant times instead of a timing model
  --startup-duration S    answer 503 for the first S seconds
  --metrics vllm|sglang, --old-metric-names, --dev-mode
  --admin-host NETWORK ...  addresses or networks, besides loopback, whose clients may call control routes (/admin/...,
                          /fleet/..., those of --dev-mode) when no --api-key is set; with one, they need the key
  --engine vllm|sglang|trtllm|qwen3  simulated vLLM (default), SGLang, TensorRT-LLM, or Qwen3 in PyTorch, with --device,
                          --backend, --random-weights SEED, --dtype, --gpu-memory-utilization and --enforce-eager
"""


def take_rest(verb: argparse.ArgumentParser) -> None:
    """Pass all arguments to the verb unparsed, because vLLM's grammar differs from argparse's."""

    def parse_known_args(args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        rest = list(args or ())
        if any(word in ("-h", "--help") for word in rest):
            verb.print_help()
            raise SystemExit(0)
        namespace = argparse.Namespace() if namespace is None else namespace
        namespace.rest = rest
        return namespace, []

    verb.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy serve`."""
    verb = verbs.add_parser(
        "serve",
        help="a live server with the API, flags and metrics of vLLM, SGLang or TensorRT-LLM",
        description="Serve the HTTP API of an engine that is simulated, in real time. No GPU and no weights "
        "are needed.",
        usage="understudy serve [MODEL] [--engine vllm|sglang|trtllm] [flags of that engine]",
        epilog=EXAMPLES,
    )
    take_rest(verb)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; exit code 0."""
    import logging

    from understudy.http import address_of
    from understudy.server.flags.serving import read_serve
    from understudy.server.loop import run as run_loop
    from understudy.server.server import Server, run_until_stopped

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    plan = read_serve(args.rest)
    real = plan.line.values.get("engine") == "qwen3"
    used = (
        ("random-weights", "device", "backend", "dtype", "gpu-memory-utilization", "enforce-eager")
        if real
        else ()
    )
    print_unused_flags([name for name in plan.idle if name not in used], "real" if real else "simulated")
    close: Callable[[], None] | None = None
    if real:
        server, close = _open_real_server(plan)
    else:
        server = Server(plan.settings)

    where = plan.settings.uds or address_of(plan.settings.host, plan.settings.port)

    async def start() -> None:
        await server.start()
        print(
            f"understudy serves {', '.join(plan.settings.names)} on {server.address}\n"
            f"times from {'the engine, which computes' if real else plan.settings.describe_times()}"
            + "".join(f"\nnote: {note}" for note in plan.settings.notes),
            file=sys.stderr,
            flush=True,
        )

    async def stop() -> None:
        await server.stop()
        server.runtime.driver.stop()

    try:
        run_loop(run_until_stopped(start, stop, where))
    finally:
        if close is not None:
            close()
    return 0


def _open_real_server(plan: ServePlan) -> tuple[Server, Callable[[], None]]:
    """Open a server with the real engine; return it and the function that closes the engine."""
    from understudy.cli.needs_torch import check_torch_is_installed
    from understudy.cli.progress import progress_bars

    check_torch_is_installed()
    from understudy.qwen3.serve import open_server

    with progress_bars() as progress:
        server, serving = open_server(plan, progress)
    return server, serving.close


def print_unused_flags(names: list[str], kind: str = "simulated") -> None:
    """Print the accepted flags that have no effect on this kind of engine."""
    if names:
        flags = ", ".join(f"--{name}" for name in names)
        print(f"accepted, but without effect on a {kind} engine: {flags}", file=sys.stderr)
