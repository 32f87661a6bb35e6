"""Checks of vLLM settings: values that contradict each other, have no effect, or are not in a release."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from understudy.checks import share
from understudy.defaults import Default
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.engines.profiles import VersionProfile
    from understudy.engines.vllm_settings import VllmSettings


def fit_defaults(config: VllmSettings) -> None:
    """Fit the limits that were not given to those that were, as vLLM does."""
    budget, length = config.max_num_batched_tokens, config.max_model_len
    if (
        isinstance(budget, Default)
        and not config.enable_chunked_prefill
        and length is not None
        and length > budget
    ):
        budget = Default(length)
        msgspec.structs.force_setattr(config, "max_num_batched_tokens", budget)
    requests = config.max_num_seqs
    if isinstance(requests, Default) and budget is not None and requests > budget:
        msgspec.structs.force_setattr(config, "max_num_seqs", Default(budget))


def refuse_contradictions(config: VllmSettings) -> None:
    """Refuse limits that contradict each other, as vLLM does."""
    if config.max_num_active_seqs is not None and config.max_num_active_seqs > (
        config.max_num_seqs or config.max_num_active_seqs
    ):
        raise ConfigError(
            f"max_num_active_seqs={config.max_num_active_seqs} must not be above max_num_seqs={config.max_num_seqs}"
        )
    share("watermark", config.watermark, or_zero=True, or_one=False)
    budget = config.max_num_batched_tokens
    if budget is not None and config.max_num_seqs is not None and config.max_num_seqs > budget:
        raise ConfigError(
            f"max_num_seqs={config.max_num_seqs} must not be above max_num_batched_tokens={budget}: "
            "every request of a batch computes at least one token"
        )
    if config.max_model_len is not None and config.long_prefill_token_threshold > config.max_model_len:
        raise ConfigError(
            f"long_prefill_token_threshold={config.long_prefill_token_threshold} must not be above "
            f"max_model_len={config.max_model_len}"
        )


def refuse_unused(config: VllmSettings) -> None:
    """Refuse settings without an effect, because they need another one."""
    if config.max_loras != 1 and not config.enable_lora:
        raise ConfigError("max_loras needs enable_lora, without which requests name no adapter")
    if config.long_prefill_token_threshold_adaptive and not config.long_prefill_token_threshold:
        raise ConfigError(
            "long_prefill_token_threshold_adaptive needs long_prefill_token_threshold, which it raises"
        )


def refuse_speculation(config: VllmSettings) -> None:
    """Refuse speculation that other settings, or the release, do not support."""
    if config.speculative_config is not None:
        if config.mocker.aic_nextn is not None:
            raise ConfigError("aic_nextn contradicts speculative_config (vLLM's own speculation); give one")
        if config.async_scheduling and config.speculative_config.method == "ngram":
            raise ConfigError(
                "async_scheduling contradicts method ngram, which needs the tokens of a batch before the next is "
                "scheduled; leave it out (mtp, eagle, eagle3 and draft_model support it)"
            )
        if config.kv_manager == "kvbm":
            raise ConfigError(
                "speculative_config needs kv_manager=native, where rejected drafts stay in their blocks"
            )
        config.speculative_config.native(config.profile, config.max_num_seqs)
    if config.async_scheduling and config.mocker.aic_nextn is not None:
        raise ConfigError(
            "async_scheduling contradicts aic_nextn: the next step is scheduled before a burst is known"
        )


def refuse_absent(config: VllmSettings, profile: VersionProfile, called: str) -> None:
    """Refuse settings that the profile does not have; `called` is the version as the user gave it."""
    if config.watermark and not profile.has_watermark:
        raise ConfigError(f"watermark is not a setting of vLLM {called}; leave it out")
    if config.scheduler_reserve_full_isl and not profile.has_reserve_full_isl:
        raise ConfigError(f"scheduler_reserve_full_isl is not a setting of vLLM {called}; leave it out")
    if config.prefill_schedule_interval > 1 and not profile.has_prefill_interval:
        raise ConfigError(
            f"prefill_schedule_interval has no effect on a single engine of vLLM {called}; choose 0.33 or newer"
        )
    for field in ("max_num_active_seqs", "long_prefill_token_threshold_adaptive"):
        if getattr(config, field) and not profile.has_active_seqs:
            raise ConfigError(f"{field} is not a setting of vLLM {called}; choose 0.31 or newer")
