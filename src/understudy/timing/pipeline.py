"""Step coefficients of the stages of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from understudy.timing.stages import divide_layers

if TYPE_CHECKING:
    from understudy.timing.coefficients import StepCoefficients
    from understudy.timing.deployment import Deployment
    from understudy.timing.efficiencies import Efficiencies
    from understudy.timing.presets import Preset

_OF_LAYERS = (
    *("weights_ms", "token_ms", "expert_ms", "expert_token_ms", "context_ms", "window_context_ms"),
    *("attention_ms", "window_attention_ms", "draft_attention_ms", "history_ms"),
    *("comm_ms", "comm_token_ms", "comm_rank_token_ms", "floor_ms"),
)
"""Coefficients that are sums over layers."""


def label_stages(found: Preset, stages: int) -> Preset:
    """Return a preset that says that times of stages were never measured; unchanged without a pipeline."""
    if stages == 1:
        return found
    return msgspec.structs.replace(
        found,
        trust="uncalibrated",
        origin=f"{stages} stages of a pipeline, whose times were never measured; {found.origin}",
        range_text="no error is known of a pipeline",
    )


def stage_coefficients(deployment: Deployment, efficiencies: Efficiencies) -> tuple[StepCoefficients, ...]:
    """Return the step coefficients of each stage; none without a pipeline.

    A stage has its share of the layers, all kinds alike, and a step's overheads of its own; the last one has the head.
    Every other sends its result, hidden states and residual, over a link between GPUs: the next one waits for it.
    """
    model, parallel = deployment.model, deployment.parallel
    if parallel.pipeline == 1:
        return ()
    whole = deployment.coefficients(efficiencies)
    step_ms, sequence_ms = efficiencies.step_ms, efficiencies.sequence_us / 1e3
    link_gbps = parallel.stage_link_gbps or deployment.gpu.link_gbps
    sent_ms = 2 * model.hidden_size * 2 / parallel.tensor * 1e3 / (link_gbps * 1e9 * efficiencies.link)
    found = []
    for place, layers in enumerate(divide_layers(model.num_layers, parallel.pipeline)):
        share = layers / model.num_layers
        numbers = {name: getattr(whole, name) * share for name in _OF_LAYERS}
        if place > 0:
            numbers["comm_ms"] += efficiencies.link_latency_us / 1e3
            numbers["comm_token_ms"] += sent_ms
        is_last = place == parallel.pipeline - 1
        found.append(
            msgspec.structs.replace(
                whole,
                **numbers,
                head_ms=whole.head_ms if is_last else 0.0,
                head_sequence_ms=whole.head_sequence_ms if is_last else 0.0,
                step_ms=step_ms + (whole.step_ms - step_ms) * share,
                sequence_ms=sequence_ms + (whole.sequence_ms - sequence_ms) * share,
            )
        )
    return tuple(found)
