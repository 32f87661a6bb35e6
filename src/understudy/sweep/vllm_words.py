"""Flags of a vLLM command that other engines lack, as far as the chosen release has them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.defaults import BLOCK_SIZE, BatchLimits, is_default
from understudy.engines.chosen import choose_block_size
from understudy.engines.kinds.registry import kind_of
from understudy.server.flags.grammar import vllm_flags
from understudy.server.release import RELEASES
from understudy.sweep.checkpoints import has_whole_experts
from understudy.sweep.group_words import add_group_flags
from understudy.sweep.own_words import OwnWords
from understudy.tiers.sizes import parse_bytes

if TYPE_CHECKING:
    from understudy.engines.speculation import SpeculativeConfig
    from understudy.sweep.candidate import Candidate
    from understudy.tiers.gpu import GpuSettings

GIB = 1 << 30

_LONG_KNOWN = frozenset(
    (
        *(
            "tensor-parallel-size",
            "data-parallel-size",
            "enable-expert-parallel",
            "max-num-seqs",
            "block-size",
        ),
        *("max-num-batched-tokens", "gpu-memory-utilization", "max-model-len", "enable-prefix-caching"),
        *("enable-chunked-prefill", "scheduling-policy", "kv-cache-dtype", "num-gpu-blocks-override"),
        *("long-prefill-token-threshold", "speculative-config", "quantization", "async-scheduling"),
        *("enable-lora", "max-loras", "kv-events-config"),
    )
)
"""Flags of every simulated vLLM release; for releases whose flags are not recorded."""


class VllmWords(OwnWords):
    """Flags of vLLM."""

    def add_parallelism(self, given: dict[str, Any], gpu: GpuSettings) -> None:
        """Set the flag of expert parallelism."""
        if has_whole_experts(gpu):
            given["enable-expert-parallel"] = True

    def chooses_itself(self, candidate: Candidate, field: str) -> bool:
        """Whether vLLM chooses the value of a field without a flag.

        Its limits follow from the GPU: without a known one they are not those of the run.
        """
        value = getattr(candidate.settings.engine, field)
        if field == "block_size":
            model = candidate.model
            return bool(value == (BLOCK_SIZE if model is None else choose_block_size(model)))
        if field in BatchLimits._fields:
            return candidate.settings.gpu is not None and is_default(value)
        return super().chooses_itself(candidate, field)

    def add_features(self, given: dict[str, Any], candidate: Candidate, missing: list[str]) -> None:
        """Set the flags of speculation, groups and offload; move those that the release lacks to `missing`."""
        engine, tiers = candidate.settings.engine, candidate.settings.tiers
        if engine.speculative_config is not None:
            given["speculative-config"] = _speculation_of(engine.speculative_config, missing)
        add_group_flags(given, candidate, missing)
        if tiers.tiers:
            host = tiers.tiers[0]
            if tiers.offload.mode == "vllm" and host.bytes is not None:
                given["kv-offloading-size"] = parse_bytes("g2.bytes", host.bytes) / GIB
            else:
                missing.append("KV tiers (in vLLM: --kv-offloading-size, which replays as itself)")
        known = _list_vllm_flags(kind_of(engine).version_of(engine))
        unknown = [flag for flag in given if flag not in known]
        missing += [f"{flag}={given.pop(flag)}" for flag in unknown]


def _speculation_of(speculation: SpeculativeConfig, missing: list[str]) -> dict[str, Any]:
    """Return the settings that vLLM has too: not the acceptance, which is the traffic's."""
    own = ("accept_rates", "acceptance_per_position", "seed")
    if speculation.model is None and speculation.method in ("eagle", "eagle3", "draft_model"):
        missing.append("the drafter's checkpoint: name it as model in --speculative-config")
    plain: dict[str, Any] = msgspec.to_builtins(speculation)
    return {
        name: value
        for name, value in plain.items()
        if name not in own and value is not None and value is not False
    }


def _list_vllm_flags(version: str) -> frozenset[str]:
    """Return the names of a release's flags, without dashes; for releases that are not recorded, a safe few."""
    numbers = re.match(r"v?(\d+\.\d+)", version)
    for release in RELEASES:
        if numbers is not None and release.version.startswith(f"{numbers[1]}."):
            return frozenset(name.removeprefix("--") for name in vllm_flags(release.version))
    return _LONG_KNOWN
