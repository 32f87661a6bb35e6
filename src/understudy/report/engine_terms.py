"""Words and flags of the engines of a run, so that a report names what its reader can set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from understudy.report.verdict import list_pools

if TYPE_CHECKING:
    from understudy.report.data import ReportData


@dataclass(frozen=True, slots=True)
class EngineTerms:
    """Words and flags of one kind of engine."""

    memory: str
    """Flags for the size of the KV pool."""
    requests: str
    """Flag for the most running requests."""
    step: str
    """Flag for the prompt tokens of a step."""
    requests_setting: str
    """Setting behind `requests`."""
    step_setting: str
    """Setting behind `step`."""
    block: str
    """Unit of the cache."""
    requeued: str
    """Requests that lost their memory and wait again."""
    usage: str
    """Used share of the KV pool."""
    storm_remedy: str
    """Remedy for many requeued requests."""
    step_cause: str
    """Cause of single long gaps between tokens."""
    tier_remedy: str
    """Remedy for a slow host tier."""
    link_remedy: str
    """Remedy for a busy link."""


VLLM_TERMS = EngineTerms(
    memory="--num-gpu-blocks",
    requests="--max-num-seqs",
    step="--max-num-batched-tokens",
    requests_setting="max_num_seqs",
    step_setting="max_num_batched_tokens",
    block="block",
    requeued="preemptions",
    usage="KV usage",
    storm_remedy="Use more blocks (--num-gpu-blocks), a lower --max-num-seqs or a --watermark.",
    step_cause="some steps also prefill, or decode for more requests",
    tier_remedy="Try --offload-mode write_through, more bandwidth to the host, or offload.min_reuse.",
    link_remedy="Use more bandwidth, or offload fewer blocks (offload.min_reuse).",
)
SGLANG_TERMS = EngineTerms(
    memory="--max-total-tokens or --mem-fraction-static",
    requests="--max-running-requests",
    step="--chunked-prefill-size",
    requests_setting="max_num_seqs",
    step_setting="chunked_prefill_size",
    block="page",
    requeued="retractions",
    usage="Token usage",
    storm_remedy="Use a larger KV pool (--max-total-tokens or --mem-fraction-static), a lower "
    "--max-running-requests, or a higher --schedule-conservativeness.",
    step_cause="some steps prefill and decode nothing, or decode for more requests",
    tier_remedy="Try --hicache-write-policy write_through_selective, or more bandwidth to the host.",
    link_remedy="Use more bandwidth, or copy fewer pages (--hicache-write-policy write_through_selective).",
)


def terms_of(report: ReportData) -> EngineTerms:
    """Return the terms of a run: SGLang's if all its engines are SGLang's, else vLLM's."""
    return SGLANG_TERMS if all(map(_is_sglang, list_pools(report))) else VLLM_TERMS


def flags_of(report: ReportData, what: str) -> str:
    """Return the flags for `memory`, `requests` or `step`; with both kinds of engine, the flags of both."""
    kinds = {_is_sglang(pool) for pool in list_pools(report)}
    if len(kinds) == 2:
        return f"{getattr(VLLM_TERMS, what)} (vLLM) and {getattr(SGLANG_TERMS, what)} (SGLang)"
    return str(getattr(terms_of(report), what))


def _is_sglang(pool: Any) -> bool:
    return "sglang_version" in pool.engine
