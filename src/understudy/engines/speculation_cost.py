"""The cost of speculation in step times, and notes on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.engines.timing import Constant, Interpolated, Polynomial

if TYPE_CHECKING:
    from understudy._core import StepTiming
    from understudy.engines.vllm_settings import VllmSettings
    from understudy.timing.drafter import Drafter
    from understudy.timing.physical import Basis


def add_drafter(timing: StepTiming, config: VllmSettings) -> StepTiming:
    """Add the drafter's passes to every step of `timing`; unchanged without a drafter, or without its sizes."""
    found = _drafter_of(config)
    if found is None:
        return timing
    drafter, basis = found
    return drafter.build(timing, basis.deployment, basis.efficiencies, config.draft_tokens)


def note_speculation(config: VllmSettings, *, own_times: bool) -> list[str]:
    """Note the acceptance, with its numbers, and what drafts cost; nothing without speculation."""
    speculation = config.speculative_config
    if speculation is None:
        rates = config.mocker.accept_rates
        if not rates:
            return []
        shown = ", ".join(f"{rate:.3g}" for rate in rates)
        return [
            f"speculation (aic_nextn={config.mocker.aic_nextn}): acceptance is assumed, {shown} (each if those before "
            "it were accepted); drafts and their verification take no time, as in Dynamo's mocker"
        ]
    return [speculation.note_acceptance(), f"speculation: {_describe_cost(config, own_times=own_times)}"]


def _describe_cost(config: VllmSettings, *, own_times: bool) -> str:
    speculation = config.speculative_config
    assert speculation is not None
    if own_times:
        return (
            "the user-defined timing model is given the drafts to verify; a drafter's time is its own to add"
        )
    if speculation.method == "ngram":
        drafting = "ngram lookups run on the CPU and are charged no time"
    elif (found := _drafter_of(config)) is not None:
        drafter, passes = found[0], speculation.num_speculative_tokens
        drafting = (
            f"every step ends with {passes} pass{'es' if passes > 1 else ''} of the drafter ({drafter.origin}, "
            f"{drafter.parameters / 1e9:.2g} B parameters)"
        )
    else:
        drafting = (
            "the drafter is charged no time, because these times know no model (give --model and --gpu)"
        )
    return f"{_describe_verification(config)}; {drafting}"


def _describe_verification(config: VllmSettings) -> str:
    if isinstance(config.timing, Constant):
        return "verifying drafts takes no time, because step times are constants"
    if isinstance(config.timing, Polynomial | Interpolated):
        return "a draft is verified in the time of another prompt token"
    return "a step computes its drafts like other tokens, rejected ones included"


def _drafter_of(config: VllmSettings) -> tuple[Drafter, Basis] | None:
    speculation = config.speculative_config
    basis: Basis | None = getattr(config.timing, "basis", None)
    if speculation is None or basis is None:
        return None
    drafter = speculation.drafter(basis.deployment)
    return None if drafter is None else (drafter, basis)
