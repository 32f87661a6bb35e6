"""`EngineTerms`: words and flags of one kind of engine, so that a report names what its reader can set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTerms:
    """Words and flags of one kind of engine; the defaults are those of vLLM and of settings that all kinds have."""

    memory: str = "--num-gpu-blocks"
    """Flags for the size of the KV pool."""
    requests: str = "--max-num-seqs"
    """Flag for the most running requests."""
    step: str = "--max-num-batched-tokens"
    """Flag for the prompt tokens of a step."""
    pool_setting: str = "num_gpu_blocks"
    """Setting that sizes the KV pool, in blocks, or in tokens if the kind's flags give those."""
    requests_setting: str = "max_num_seqs"
    """Setting behind `requests`."""
    step_setting: str = "max_num_batched_tokens"
    """Setting behind `step`."""
    step_has_whole_blocks: bool = False
    """Whether `step_setting` is a multiple of the block; else it is no less than the most running requests."""
    caution_setting: str | None = None
    """Setting whose increase makes the engine admit fewer requests; None: there is none."""
    block: str = "block"
    """Unit of the cache."""
    more_memory: str = "more blocks"
    """A larger KV pool."""
    requeued: str = "preemptions"
    """Requests that lost their memory and wait again."""
    usage: str = "KV usage"
    """Used share of the KV pool."""
    storm_remedy: str = "Use more blocks (--num-gpu-blocks), or a lower --max-num-seqs."
    """Remedy for many requeued requests."""
    step_cause: str = "some steps also prefill, or decode for more requests"
    """Cause of single long gaps between tokens."""
    tier_remedy: str = "Try --offload-mode write_through, more bandwidth to the host, or offload.min_reuse."
    """Remedy for a slow host tier."""
    write_through_remedy: str = (
        "Use more bandwidth to the host, or offload reused blocks only (offload.min_reuse)."
    )
    """Remedy for a slow host tier whose mode is write_through."""
    link_remedy: str = "Use more bandwidth, or offload fewer blocks (offload.min_reuse)."
    """Remedy for a busy link."""
