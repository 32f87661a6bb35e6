"""Settings of an SGLang engine that is one side of a disaggregated server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from understudy.checks import whole_number
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy._core import SglangSettings

HOST_POOL_SHARE = 0.2
"""Host tokens for copies of retracted requests, per token of the KV pool."""


class SidedEngine(Protocol):
    """The settings of an SGLang engine that its sides depend on."""

    @property
    def num_reserved_decode_tokens(self) -> int: ...  # noqa: D102
    @property
    def disaggregation_decode_enable_radix_cache(self) -> bool: ...  # noqa: D102
    @property
    def disaggregation_decode_extra_slots(self) -> int | None: ...  # noqa: D102
    @property
    def disaggregation_decode_polling_interval(self) -> int: ...  # noqa: D102
    @property
    def disaggregation_decode_retraction_backup(self) -> str | None: ...  # noqa: D102
    @property
    def enable_priority_scheduling(self) -> bool: ...  # noqa: D102
    @property
    def disable_priority_preemption(self) -> bool: ...  # noqa: D102


def check_side(engine: SidedEngine) -> None:
    """Raise ConfigError for wrong settings of a decode server."""
    whole_number("num_reserved_decode_tokens", engine.num_reserved_decode_tokens)
    whole_number("disaggregation_decode_polling_interval", engine.disaggregation_decode_polling_interval, 1)
    if engine.disaggregation_decode_extra_slots is not None:
        whole_number("disaggregation_decode_extra_slots", engine.disaggregation_decode_extra_slots)
    if choose_backup(engine) == "host_pool" and engine.disaggregation_decode_enable_radix_cache:
        raise ConfigError(
            "disaggregation_decode_retraction_backup=host_pool contradicts disaggregation_decode_enable_radix_cache; "
            "choose cpu_tensor or none"
        )


def choose_backup(engine: SidedEngine) -> str:
    """Return where a decode server copies retracted requests: SGLang's choice for plain attention unless given."""
    if engine.disaggregation_decode_retraction_backup is not None:
        return engine.disaggregation_decode_retraction_backup
    preempts = engine.enable_priority_scheduling and not engine.disable_priority_preemption
    plain = not engine.disaggregation_decode_enable_radix_cache and not preempts
    return "host_pool" if plain else "cpu_tensor"


def set_side(settings: SglangSettings, engine: SidedEngine) -> None:
    """Set what the core needs once the engine is one side."""
    backup = choose_backup(engine)
    host_tokens = None
    if backup == "host_pool":
        longest = min(settings.context_len, settings.max_total_num_tokens)
        host_tokens = max(int(HOST_POOL_SHARE * settings.max_total_num_tokens), longest)
    settings.set_side(
        role="null",
        num_reserved_decode_tokens=engine.num_reserved_decode_tokens,
        extra_slots=engine.disaggregation_decode_extra_slots,
        polling_interval=engine.disaggregation_decode_polling_interval,
        backs_up_retracted=backup != "none",
        host_tokens=host_tokens,
        decode_radix=engine.disaggregation_decode_enable_radix_cache,
    )
