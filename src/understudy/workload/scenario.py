"""The conformance format: scenarios that drive a scheduler step by step."""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np

from understudy.engines.profiles import PROFILES, VersionProfile
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from understudy._core import VllmEngineConfig, VllmOffload
    from understudy.engines.speculation import SpeculativeConfig

T = TypeVar("T")
DEFAULT_PROFILE = PROFILES["recorded"]
OUTPUT_BASE = 1_000_000
OUTPUT_STRIDE = 100_000
EOS = 2


class ScenarioConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the scheduler; `num_blocks` counts vLLM's reserved block 0.

    Recordings have no speculation (`aic_…`); user-defined scenarios may.
    """

    block_size: int = 16
    num_blocks: int = 1024
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    scheduler_reserve_full_isl: bool | None = None
    watermark: float = 0.0
    max_model_len: int = 131072
    max_num_active_seqs: int | None = None
    long_prefill_token_threshold_adaptive: bool = False
    max_loras: int | None = None
    prefill_schedule_interval: int = 1
    async_scheduling: bool = False
    kv_manager: Literal["native", "kvbm"] = "native"
    eviction_policy: str | None = None
    aic_nextn: int | None = None
    aic_nextn_accept_rates: str | None = None
    aic_mtp_seed: int = 42

    def settings(self) -> dict[str, Any]:
        """Return the settings under the names that `VllmConfig.from_dict` reads."""
        settings = msgspec.structs.asdict(self)
        # Only the default is lowered to a smaller budget.
        if self.max_num_seqs == 128:
            settings["max_num_seqs"] = min(128, self.max_num_batched_tokens)
        if self.max_loras is None:
            del settings["max_loras"]
        settings["enable_lora"] = self.max_loras is not None
        settings["num_gpu_blocks"] = settings.pop("num_blocks") - 1
        settings["scheduling_policy"] = settings.pop("policy")
        return settings

    def engine_config(
        self,
        profile: VersionProfile,
        *,
        check: bool = False,
        speculative_config: SpeculativeConfig | None = None,
        offload: VllmOffload | None = None,
    ) -> VllmEngineConfig:
        """The engine's settings under a version profile; ConfigError for a setting that the version lacks.

        With `check`, the engine verifies conservation and its events at the end of every step.
        """
        config = VllmConfig.from_dict(self.settings())
        config = msgspec.structs.replace(config, speculative_config=speculative_config)
        return config.native(events=True, check=check, profile=profile, offload=offload)


class ScenarioRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request. A prompt item `[start, len]` is the run start, start + 1, …; an int is one token.

    Its output token number `eos_at` (from 1) is EOS; `lora` is the number of its adapter, 0 for none.
    """

    id: str
    arrival_step: int
    prompt: list[int | tuple[int, int]]
    max_tokens: int
    priority: int = 0
    arrival_time: float | None = None
    eos_at: int | None = None
    lora: int = 0

    def tokens(self, index: int, max_model_len: int) -> npt.NDArray[np.uint32]:
        """Return prompt and output tokens of the request at position `index` of its scenario."""
        prompt = self.prompt_tokens()
        outputs = min(self.max_tokens if self.eos_at is None else self.eos_at, max_model_len)
        first = OUTPUT_BASE + index * OUTPUT_STRIDE
        tokens = np.concatenate([prompt, np.arange(first, first + outputs, dtype=np.uint32)])
        if outputs == self.eos_at:
            tokens[-1] = EOS
        return tokens

    def prompt_tokens(self) -> npt.NDArray[np.uint32]:
        """Return the expanded prompt."""
        runs = [(item, 1) if isinstance(item, int) else item for item in self.prompt]
        parts = [np.arange(start, start + length, dtype=np.uint32) for start, length in runs]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint32)


class ScenarioAbort(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request is aborted: `before` the schedule of a step, after arrivals, or `mid`, between it and the update.

    It has no effect before the request arrives or after it ends.
    """

    id: str
    step: int
    when: Literal["before", "mid"]


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workload by steps: requests arrive before the step they name."""

    name: str
    config: ScenarioConfig
    max_steps: int
    requests: list[ScenarioRequest]
    aborts: list[ScenarioAbort] | None = None


def read_file_as(kind: type[T], path: Path) -> T:
    """Read a JSON file, perhaps gzipped, as an object of a kind. InvalidArgument names the file and the wrong field."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return msgspec.json.decode(content, type=kind)
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError) as error:
        raise InvalidArgument(f"{path}: {error}") from error


def convert_scenario(kind: type[T], scenario: object, path: Path) -> T:
    """Convert the scenario that a file contains. InvalidArgument names the file and the wrong field."""
    try:
        return msgspec.convert(scenario, kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{path}: scenario: {error}") from error


def read_scenario(path: Path) -> Scenario:
    """Read a scenario file; InvalidArgument names the file and the wrong field."""
    return read_file_as(Scenario, path)
