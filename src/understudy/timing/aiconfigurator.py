"""Step times from the operator database of the AIConfigurator package (extra [aiconfigurator])."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.timing.architecture import plain_name
from understudy.timing.weight_types import kv_type, weight_type

if TYPE_CHECKING:
    from understudy._core import StepLoad
    from understudy.timing.deployment import Deployment

_SYSTEMS = {
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "A100": "a100_sxm",
    "L40S": "l40s",
    "RTX PRO 6000": "rtx_pro_6000_server",
}
_LINEAR = {"bf16": "bfloat16", "fp8": "fp8", "int4": "int4_wo", "nvfp4": "nvfp4"}
_EXPERTS = {**_LINEAR, "mxfp4": "w4a16_mxfp4"}
_KV = {"bf16": "bfloat16", "fp8": "fp8"}


class AiconfiguratorSteps:
    """Timing model in Python that sums the package's times of the parts of a step.

    Linear layers, experts and communication process all tokens of the step; each prompt chunk has its own attention,
    and decodes attend at their mean context. Only kernel times are counted, no engine overhead.
    """

    def __init__(self, deployment: Deployment) -> None:
        """Compile the engine. ConfigError if the package is missing or does not cover the deployment."""
        self._engine = _compile(deployment)
        self._shared = lru_cache(maxsize=1 << 16)(self._shared_ms)
        self._prompt = lru_cache(maxsize=1 << 16)(self._prompt_ms)
        try:
            self._shared(16, 1)
            self._prompt(16, 0)
            self._engine.decode_step_latency(1, 16, 2)
        except Exception as error:
            raise _uncovered(deployment, error) from error

    def step_ms(self, step: StepLoad, /) -> float:
        """Return the time of a step in milliseconds."""
        chunks, decodes = step.chunks, step.decodes
        mean = max(round(step.context_tokens / decodes), 1) if decodes else 0
        if not chunks:
            return float(self._engine.decode_step_latency(step.tokens, mean, 2))
        new = sum(tokens for tokens, _ in chunks)
        # Draft tokens count as decodes.
        ms = self._shared(new, step.tokens - new) + sum(self._prompt(*chunk) for chunk in chunks)
        if decodes:
            ms += self._engine.mixed_step_breakdown(new, decodes, mean, 2)[3]
        return float(ms)

    def _shared_ms(self, new: int, decodes: int) -> float:
        """Return the time of everything but attention."""
        return float(self._engine.mixed_step_breakdown(new, decodes, new, 2)[1])

    def _prompt_ms(self, new: int, history: int) -> float:
        """Return the attention time of a prompt chunk."""
        whole = self._engine.predict_prefill_latency(1, new + history, history)
        return max(float(whole) - self._shared(new, 0), 0.0)


def aiconfigurator_version() -> str:
    """Return the version of the installed package. ConfigError if it is not installed."""
    try:
        import aiconfigurator_core  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--timing aiconfigurator needs that package; pip install 'understudy[aiconfigurator]'"
        ) from error
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("aiconfigurator-core")
    except PackageNotFoundError:
        return "of an unknown version"


def _compile(deployment: Deployment) -> Any:
    aiconfigurator_version()
    from aiconfigurator_core.sdk.engine import EngineHandle

    # Silence its warnings about substituted tables; missing ones raise.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    model, parallel = deployment.model, deployment.parallel
    system = _SYSTEMS.get(deployment.gpu.name)
    if system is None:
        raise ConfigError(
            f"aiconfigurator has no {deployment.gpu.name}, only {', '.join(_SYSTEMS)}; use --timing physical"
        )
    linear, experts = weight_type(model.linear_type(deployment.weights)).name, deployment.weights
    if linear not in _LINEAR:
        raise ConfigError(f"aiconfigurator has no linear layers in {linear}; use --timing physical")
    sizes: dict[str, Any] = {"tp_size": parallel.tensor, "attention_dp_size": parallel.data}
    if model.num_experts:
        gpus = parallel.tensor * parallel.data
        sizes |= {"moe_tp_size": gpus // parallel.expert, "moe_ep_size": parallel.expert}
        sizes["moe_quant_mode"] = _EXPERTS[weight_type(experts).name]
    elif parallel.data > 1:
        del sizes["attention_dp_size"]  # ranks of a dense model are independent
    try:
        return EngineHandle.compile(
            _model_path(model.name),
            system,
            "vllm",
            gemm_quant_mode=_LINEAR[linear],
            kvcache_quant_mode=_KV[kv_type(deployment.kv)],
            **sizes,
        )
    except ConfigError:
        raise
    except Exception as error:
        raise _uncovered(deployment, error) from error


def _model_path(name: str) -> str:
    """Return the model name that the package has a shape for; it would download any other."""
    from importlib.resources import files

    wanted = plain_name(name)
    for file in sorted(
        entry.name for entry in files("aiconfigurator_core").joinpath("model_configs").iterdir()
    ):
        path = file.removesuffix("_config.json").replace("--", "/", 1)
        if file.endswith("_config.json") and plain_name(path) == wanted:
            return path
    raise ConfigError(f"aiconfigurator has no shape of {name}; use --timing physical")


def _uncovered(deployment: Deployment, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    return ConfigError(
        f"aiconfigurator does not cover {deployment.model.name} in {deployment.weights} (KV {deployment.kv}) on "
        f"{deployment.gpu.name}: {reason}; use --timing physical"
    )
