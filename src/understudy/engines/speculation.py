"""Speculative decoding as in vLLM: a method's demands on the scheduler, and its accept rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy.engines.profiles import Method  # noqa: TC001  (msgspec reads the annotation)
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.engines.profiles import VersionProfile

DEFAULT_RATES = (0.85, 0.3)
MAX_DRAFTS = 1024


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `speculative_config`, and the accept rates of its drafts.

    Every step that samples is followed by `num_speculative_tokens` drafts, which the next step verifies: it is charged
    1 + k tokens and yields one token and the drafts before the first rejected one. Draft i is accepted with
    probability `accept_rates[i]` if those before it were (missing rates are 0), unless the request gives the number of
    accepted drafts itself. Worker i samples from the stream `seed` + i.

    mtp, eagle and eagle3 read hidden states, which the prefix cache does not have: the last block of a hit is computed
    again, unless `disable_eagle_block_drop`. Since 0.33 the key of a block covers the token behind it instead, unless
    `disable_lookahead_block_hashes`, or a connector is in use. They and draft_model write KV of the drafts, in blocks
    after the scheduled tokens; ngram does not.
    """

    method: Method
    num_speculative_tokens: int
    accept_rates: tuple[float, ...] = DEFAULT_RATES
    seed: int = 42
    disable_eagle_block_drop: bool = False
    disable_lookahead_block_hashes: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTS:
            raise ConfigError(
                f"num_speculative_tokens must be from 1 to {MAX_DRAFTS:,}, got {self.num_speculative_tokens:,}; "
                "leave speculative_config out for none"
            )
        if len(self.accept_rates) > self.num_speculative_tokens and self.accept_rates != DEFAULT_RATES:
            raise ConfigError(
                f"speculative_config.accept_rates has {len(self.accept_rates)} rates for "
                f"num_speculative_tokens={self.num_speculative_tokens}; give one for each draft at most"
            )
        for index, rate in enumerate(self.accept_rates):
            if not 0 <= rate <= 1:
                raise ConfigError(f"speculative_config.accept_rates[{index}] must be in [0, 1], got {rate}")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"speculative_config.seed must be in 0 … 2^64−1, got {self.seed}")

    @property
    def reads_hidden_states(self) -> bool:
        """Whether the drafter needs the hidden states of the model."""
        return self.method in ("mtp", "eagle", "eagle3")

    def hashes_ahead(self, profile: VersionProfile) -> bool:
        """Whether the key of a block covers the token behind it, where there is a prefix cache and no connector."""
        disabled = self.disable_lookahead_block_hashes or self.disable_eagle_block_drop
        return profile.spec_hashes_ahead and self.reads_hidden_states and not disabled

    def native(
        self, profile: VersionProfile, max_num_seqs: int | None, *, has_connector: bool = False
    ) -> dict[str, Any]:
        """Build the core's arguments for these settings under a version."""
        hashes_ahead = self.hashes_ahead(profile) and not has_connector
        # A draft model's input keeps one more token than it is given.
        own_slots = int(self.method == "draft_model")
        if own_slots and not profile.spec_slots_by_request and max_num_seqs is None:
            raise ConfigError(
                f"method draft_model: vLLM {profile.name} reserves a slot for each of max_num_seqs; give it"
            )
        return {
            "tokens": self.num_speculative_tokens,
            "lookahead": 0 if self.method == "ngram" else self.num_speculative_tokens,
            "draft_slots": own_slots if profile.spec_slots_by_request else 0,
            "reserved_slots": 0 if profile.spec_slots_by_request else own_slots * (max_num_seqs or 0),
            "drops_last_hit": self.reads_hidden_states
            and not (hashes_ahead or self.disable_eagle_block_drop),
            "hashed_ahead": int(hashes_ahead),
            "keys_in_update": profile.spec_keys_in_update,
            "pads_admissions": profile.spec_pads_admissions,
            "pads_hits": profile.spec_pads_hits,
            "pads_within_context": profile.spec_pads_within_context,
            "admission_lookahead": profile.spec_admission_lookahead,
            "accept_rates": list(self.accept_rates[: self.num_speculative_tokens]),
            "seed": self.seed,
        }
