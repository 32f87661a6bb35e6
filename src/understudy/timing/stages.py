"""Stages of a pipeline: how a model's layers are divided among them."""

from __future__ import annotations

from understudy.errors import ConfigError


def divide_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage, as vLLM divides them: the last stage, which has the head, gets no remainder.

    ConfigError if there are more stages than layers.
    """
    if stages > layers:
        raise ConfigError(
            f"pipeline_parallel_size={stages} exceeds the {layers} layers of the model; choose at most {layers}"
        )
    parts = [layers // stages] * stages
    for place in range(2, layers % stages + 2):
        parts[-place] += 1
    return tuple(parts)
