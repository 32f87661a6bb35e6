"""Cost of a fleet under its load: per hour, per month and per million tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from understudy.sweep.candidate import Summary
    from understudy.sweep.trials import Trial

HOURS_PER_MONTH = 730
"""Hours of a mean month: 365 · 24 / 12."""


class Cost(NamedTuple):
    """Cost of a fleet in the currency of its prices. Per token: the fleet's price over the tokens of the replay."""

    per_hour: float
    per_month: float
    per_million_tokens: float | None
    """Per million tokens of prompts and outputs of completed requests; None if there are none."""
    per_million_output_tokens: float | None

    @classmethod
    def of(cls, trial: Trial) -> Cost:
        """Compute the costs of a trial whose GPUs have prices."""
        return cls.of_summary(trial.cost, trial.summary)

    @classmethod
    def of_summary(cls, per_hour: float, summary: Summary) -> Cost:
        """Compute the costs of a fleet of this price per hour from the results of its replay."""
        output, prompt = summary.output_tokens_per_s, summary.input_tokens_per_s
        total = None if output is None or prompt is None else prompt + output
        return cls(
            per_hour,
            per_hour * HOURS_PER_MONTH,
            _per_million(per_hour, total),
            _per_million(per_hour, output),
        )

    def describe(self) -> str:
        """Return the costs per month and per million tokens in words."""
        words = [f"${self.per_month:,.0f} per month ({HOURS_PER_MONTH} h)"]
        if self.per_million_tokens is not None:
            words.append(f"{format_price(self.per_million_tokens)} per million tokens (input and output)")
        if self.per_million_output_tokens is not None:
            words.append(f"{format_price(self.per_million_output_tokens)} per million output tokens")
        return ", ".join(words)


def format_price(price: float | None) -> str:
    """Return a price per million tokens with three significant digits, or a dash."""
    if price is None:
        return "-"
    return f"${price:,.2f}" if price >= 1 else f"${price:.3g}"


def _per_million(per_hour: float, tokens_per_s: float | None) -> float | None:
    return per_hour / 3600 / tokens_per_s * 1e6 if tokens_per_s else None
