"""Pipelines of a vLLM engine: settings that they do not work with, and how vLLM spaces the decodes of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.engines.profiles import VersionProfile
    from understudy.engines.vllm_settings import VllmSettings
    from understudy.timing.physical import Basis


def refuse_pipeline(config: VllmSettings, profile: VersionProfile, called: str) -> None:
    """Raise ConfigError for settings that a pipeline does not work with; `called` is the release as it was given."""
    stages = config.pipeline_parallel_size
    if stages == 1:
        return
    problem = None
    if not profile.has_batch_queue:
        problem = f"the batch queue of vLLM {called} is not known; choose 0.33 or newer"
    elif config.speculative_config is not None or config.mocker.aic_nextn is not None:
        problem = "speculation in the stages of a pipeline is not simulated; leave one of them out"
    elif config.kv_cache_groups:
        problem = "stages with several KV cache groups are not simulated; leave the groups out"
    elif config.prefill_schedule_interval > 1:
        problem = "prefill_schedule_interval in the stages of a pipeline is not simulated; leave it out"
    if problem is not None:
        raise ConfigError(f"pipeline_parallel_size={stages}: {problem}")


def spaces_decodes(config: VllmSettings, *, is_asynchronous: bool) -> bool:
    """Whether a request decodes once in as many schedules as there are stages, so that stages work in parallel.

    That is vLLM's second model runner, its default for dense models. With the first one, which runs models with
    experts (GLM-5 excepted), every batch has all decoding requests and waits for the tokens of the one before.
    """
    if config.pipeline_parallel_size == 1 or not is_asynchronous:
        return False
    basis: Basis | None = getattr(config.timing, "basis", None)
    if basis is None:
        return True
    model = basis.deployment.model
    return not model.num_experts or (model.indexer is not None and model.latent is not None)


def note_pipeline(config: VllmSettings) -> list[str]:
    """Note how many batches are in flight, and what the times of stages rest on; nothing without a pipeline."""
    stages = config.pipeline_parallel_size
    if stages == 1:
        return []
    spaced = spaces_decodes(config, is_asynchronous=config.asynchronous)
    batches = stages + (1 if spaced else 0)
    how = f"up to {batches} batches in flight"
    if config.asynchronous and not spaced:
        how += (
            ", each with all decoding requests, so that it waits for the tokens of the one before (vLLM's first model "
            "runner, which models with experts have); --no-async-scheduling lets stages work in parallel"
        )
    if getattr(config.timing, "stages", ()):
        source = "times of stages follow from their layers and were never measured"
    else:
        source = f"a step's time is divided evenly among {stages} stages"
    return [f"pipeline of {stages} stages: {how}; {source}"]
