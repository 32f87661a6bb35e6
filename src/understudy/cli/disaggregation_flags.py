"""Flags of prefill and decode workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

EXAMPLES = """\
  understudy replay trace.jsonl --prefill-workers 2 --decode-workers 2 --kv-link-gbps 25 --kv-bytes-per-token 131072
  understudy replay trace.jsonl --prefill-workers 4 --decode-workers 8 --disaggregation uncached:2048 --routing kv
"""
FLAGS = {
    "prefill_workers": "prefill_workers",
    "decode_workers": "decode_workers",
    "disaggregation": "rule",
    "disaggregation_order": "order",
    "decode_routing": "decode_routing",
    "kv_link_gbps": "link_gbps",
    "kv_link_backend_gbps": "backend_gbps",
    "kv_link_latency_ms": "link_latency_ms",
    "hand_off_hop_ms": "hop_ms",
    "kv_lease_duration": "lease_s",
    "transfer_failure_rate": "transfer_failure_rate",
    "kv_load_failure_policy": "kv_load_failure_policy",
}
"""Settings of `Disaggregation` by flag."""


def add_disaggregation_flags(verb: argparse.ArgumentParser) -> None:
    """Add the flags of prefill and decode workers."""
    group = verb.add_argument_group("prefill and decode workers (vLLM's hand-offs of KV blocks)")
    group.add_argument("--prefill-workers", type=int, metavar="N", help="workers that compute prompts")
    group.add_argument("--decode-workers", type=int, metavar="N", help="workers that decode")
    group.add_argument(
        "--disaggregation",
        metavar="RULE",
        help="when a prefill worker computes the prompt: always (default), uncached:TOKENS, ratio:SHARE, llm-d:TOKENS "
        "or isl_bounding (Dynamo's)",
    )
    group.add_argument(
        "--disaggregation-order",
        choices=("prefill_first", "decode_first"),
        help="which worker is chosen first (default: prefill_first; rules that read a cache choose decode first)",
    )
    group.add_argument(
        "--decode-routing",
        metavar="NAME|FILE.py:CLASS",
        help="routing of decode workers (default: round_robin, as vLLM's proxy does)",
    )
    group.add_argument(
        "--kv-link-gbps",
        type=float,
        metavar="X",
        help="bandwidth of each worker's link for hand-offs, 10^9 bytes per second (default: no limit)",
    )
    group.add_argument(
        "--kv-link-backend-gbps",
        type=float,
        metavar="X",
        help="bandwidth that all hand-offs share (default: no limit)",
    )
    group.add_argument(
        "--kv-link-latency-ms", type=float, metavar="MS", help="fixed time of a hand-off (default: 0)"
    )
    group.add_argument(
        "--hand-off-hop-ms",
        type=float,
        metavar="MS",
        help="from the end of a prompt to the arrival at the decode worker (default: 0)",
    )
    group.add_argument(
        "--kv-lease-duration",
        type=int,
        metavar="S",
        help="time that prefill workers keep blocks which no decode worker reads (default: 30)",
    )
    group.add_argument(
        "--transfer-failure-rate",
        type=float,
        metavar="X",
        help="probability that a hand-off fails; --seed decides which ones (default: 0)",
    )
    group.add_argument(
        "--kv-load-failure-policy",
        choices=("fail", "recompute"),
        help="after a failed hand-off the request fails, or its decode worker computes the prompt (default: fail)",
    )


def disaggregation_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the flags give, under `disaggregation`; empty without any."""
    given = {name: getattr(args, flag) for flag, name in FLAGS.items() if getattr(args, flag) is not None}
    return {"disaggregation": given} if given else {}
