"""Settings that imitate Dynamo's mocker and its replay where they differ from the engine."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from understudy import _core
from understudy.checks import plain_number, whole_number
from understudy.errors import ConfigError

_MTP_SEED = 42


class MockerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings with the names and meanings of Dynamo's mocker. The defaults change nothing.

    `aic_nextn` draft tokens are verified in every step that samples; `aic_nextn_accept_rates` are the probabilities
    that each is accepted if those before it were ("0.85,0.3"; missing ones are 0, more than `aic_nextn` are cut off).
    Worker i samples from the stream `aic_mtp_seed` + i.
    """

    aic_nextn: int | None = None
    aic_nextn_accept_rates: str | None = None
    aic_mtp_seed: int = _MTP_SEED
    speedup_ratio: float = 1.0
    """Divisor of the times of all steps."""
    decode_speedup_ratio: float = 1.0
    """Divisor of the times of decoding."""
    charge_first_token: bool = True
    """False: no decode time for requests whose prompt ends in the step, as in Dynamo's mocker 1.6.1."""
    route_rejected: bool = False
    """Route requests that can never fit before they are rejected, as Dynamo's replay does."""

    def __post_init__(self) -> None:
        for field in ("charge_first_token", "route_rejected"):
            value = getattr(self, field)
            if not isinstance(value, bool | np.bool_):
                raise ConfigError(f"{field} must be True or False, got {value!r}")
            msgspec.structs.force_setattr(self, field, bool(value))
        for field in ("speedup_ratio", "decode_speedup_ratio"):
            number = plain_number(field, getattr(self, field))
            if not math.isfinite(number) or number <= 0:
                raise ConfigError(
                    f"{field} must be finite and above 0, got {number:g}; 1 leaves times as they are"
                )
            msgspec.structs.force_setattr(self, field, number)
        self._check_drafts()

    def _check_drafts(self) -> None:
        if not 0 <= self.aic_mtp_seed < 2**64:
            raise ConfigError(f"aic_mtp_seed must be in 0 … 2^64−1, got {self.aic_mtp_seed}")
        if self.aic_nextn is None:
            if self.aic_nextn_accept_rates is not None:
                raise ConfigError("aic_nextn_accept_rates needs aic_nextn, the number of draft tokens")
            if self.aic_mtp_seed != _MTP_SEED:  # the mocker writes its default without drafts too
                raise ConfigError("aic_mtp_seed needs aic_nextn, the number of draft tokens")
            return
        msgspec.structs.force_setattr(self, "aic_nextn", whole_number("aic_nextn", self.aic_nextn))
        if not 1 <= self.aic_nextn <= 5:
            raise ConfigError(f"aic_nextn must be from 1 to 5 draft tokens, got {self.aic_nextn}")
        if self.decode_speedup_ratio != 1:
            raise ConfigError(
                "decode_speedup_ratio contradicts aic_nextn: speculation makes decoding faster by itself; leave it at 1"
            )
        rates = _read_rates(self.aic_nextn_accept_rates, self.aic_nextn)
        normalised = ",".join(f"{rate:g}" if float(f"{rate:g}") == rate else repr(rate) for rate in rates)
        msgspec.structs.force_setattr(self, "aic_nextn_accept_rates", normalised)

    @property
    def accept_rates(self) -> list[float]:
        """Accept rate of every draft token; empty without speculation."""
        return [] if self.aic_nextn is None else _read_rates(self.aic_nextn_accept_rates, self.aic_nextn)

    def native(self) -> _core.MockerSettings:
        """Build the core's form."""
        return _core.MockerSettings(
            speedup_ratio=self.speedup_ratio,
            decode_speedup_ratio=self.decode_speedup_ratio,
            charge_first_token=self.charge_first_token,
            accept_rates=self.accept_rates,
            burst_seed=self.aic_mtp_seed,
            route_rejected=self.route_rejected,
        )


def _read_rates(text: str | None, count: int) -> list[float]:
    """Parse the rates of `count` draft tokens, padded with 0 or cut off. ConfigError names a wrong one."""
    rates: list[float] = []
    for index, part in enumerate((text or "0.85,0.3").split(",")):
        try:
            rate = float(part)
        except ValueError:
            raise ConfigError(f"aic_nextn_accept_rates[{index}] is not a number: {part!r}") from None
        if not 0 <= rate <= 1:
            raise ConfigError(f"aic_nextn_accept_rates[{index}] must be in [0, 1], got {part.strip()}")
        rates.append(rate)
    return (rates + [0.0] * count)[:count]
