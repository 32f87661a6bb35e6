"""Faults of one line in the batch queue of a pipeline."""

from __future__ import annotations

from mutant import Mutant

PIPELINE = "tests/engines/test_pipeline.py"
PIPELINE_MUTANTS = [
    Mutant(
        "a stage computes two batches at a time",
        "core/engine/vllm/pipeline.cpp",
        "std::max(end_ns, free_ns_[stage])",
        "(FAULT ? end_ns : std::max(end_ns, free_ns_[stage]))",
        PIPELINE,
    ),
    Mutant(
        "a batch does not wait for the tokens that it computes from",
        "core/engine/vllm/pipeline.cpp",
        "ready_ns = std::max(ready_ns, scheduler_->requests()[turn.slot].token_ns)",
        "ready_ns = FAULT ? ready_ns : std::max(ready_ns, scheduler_->requests()[turn.slot].token_ns)",
        PIPELINE,
    ),
    Mutant(
        "a preempted request resumes while a batch with its tokens is in flight",
        "core/engine/vllm/admit.cpp",
        "request.in_flight > 0",
        "(!FAULT && request.in_flight > 0)",
        PIPELINE,
    ),
    Mutant(
        "a request decodes in every schedule of a pipeline",
        "core/engine/vllm/schedule.cpp",
        "if (counts_.schedules + 1 < request",
        "if (!FAULT && counts_.schedules + 1 < request",
        PIPELINE,
    ),
]
