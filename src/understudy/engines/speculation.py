"""Speculative decoding as in vLLM: a method's demands on the scheduler, and its accept rates."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.engines.profiles import Method  # noqa: TC001  (msgspec reads the annotation)
from understudy.errors import ConfigError
from understudy.timing.drafter import Drafter, find_drafter

if TYPE_CHECKING:
    from understudy.engines.profiles import VersionProfile
    from understudy.timing.deployment import Deployment

ASSUMED_RATES = (0.85, 0.3)
"""Accept rates of the first drafts if none are given, as in Dynamo's mocker; later drafts are never accepted."""
MAX_DRAFTS = 1024


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `speculative_config`, and the accept rates of its drafts.

    Every step that samples is followed by `num_speculative_tokens` drafts, which the next step verifies: it is charged
    1 + k tokens and yields one token and the drafts before the first rejected one. Draft i is accepted with
    probability `accept_rates[i]` if those before it were, unless the request gives the number of accepted drafts
    itself. `acceptance_per_position` gives the same as vLLM's log does: the share of all drafts at each position that
    are accepted. Without either, `ASSUMED_RATES` are. Worker i samples from the stream `seed` + i.

    Step times include the drafter's (`understudy.timing.drafter`): `model` is a draft model's name, or the path of the
    drafter's config.json; without it, mtp, eagle and eagle3 have sizes that follow from the model.

    mtp, eagle and eagle3 read hidden states, which the prefix cache does not have: the last block of a hit is computed
    again, unless `disable_eagle_block_drop`. Since 0.33 the key of a block covers the token behind it instead, unless
    `disable_lookahead_block_hashes`, or a connector is in use. They and draft_model write KV of the drafts, in blocks
    after the scheduled tokens; ngram does not.
    """

    method: Method
    num_speculative_tokens: int
    accept_rates: tuple[float, ...] | None = None
    acceptance_per_position: tuple[float, ...] | None = None
    model: str | None = None
    draft_tensor_parallel_size: int | None = None
    seed: int = 42
    disable_eagle_block_drop: bool = False
    disable_lookahead_block_hashes: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTS:
            raise ConfigError(
                f"num_speculative_tokens must be from 1 to {MAX_DRAFTS:,}, got {self.num_speculative_tokens:,}; "
                "leave speculative_config out for none"
            )
        self._check_rates()
        if self.method == "ngram" and self.model is not None:
            raise ConfigError("speculative_config.model: ngram drafts without a model; leave it out")
        if self.draft_tensor_parallel_size is not None and self.draft_tensor_parallel_size < 1:
            raise ConfigError(
                "speculative_config.draft_tensor_parallel_size must be at least 1, got "
                f"{self.draft_tensor_parallel_size}"
            )
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"speculative_config.seed must be in 0 … 2^64−1, got {self.seed}")

    def _check_rates(self) -> None:
        if self.accept_rates is not None and self.acceptance_per_position is not None:
            raise ConfigError(
                "speculative_config.accept_rates and acceptance_per_position both give the acceptance; give one"
            )
        for name in ("accept_rates", "acceptance_per_position"):
            given: tuple[float, ...] | None = getattr(self, name)
            if given is None:
                continue
            if len(given) != self.num_speculative_tokens:
                raise ConfigError(
                    f"speculative_config.{name} has {len(given)} rates for "
                    f"num_speculative_tokens={self.num_speculative_tokens}; give one for each draft"
                )
            for index, rate in enumerate(given):
                if not 0 <= rate <= 1:
                    raise ConfigError(f"speculative_config.{name}[{index}] must be in [0, 1], got {rate}")
        shares = self.acceptance_per_position or ()
        for index, (before, share) in enumerate(itertools.pairwise(shares)):
            if share > before:
                raise ConfigError(
                    f"speculative_config.acceptance_per_position[{index + 1}] must be at most the share before it, "
                    f"{before}, got {share}: a draft is accepted only behind accepted ones; give rates that depend on "
                    "the drafts before as accept_rates"
                )

    @property
    def rates(self) -> tuple[float, ...]:
        """Return the probability that each draft is accepted if those before it were, one for every draft."""
        count = self.num_speculative_tokens
        if self.accept_rates is not None:
            return self.accept_rates
        if self.acceptance_per_position is not None:
            behind = (1.0, *self.acceptance_per_position)
            return tuple(share / before if before else 0.0 for before, share in itertools.pairwise(behind))
        return (*ASSUMED_RATES, *(0.0,) * count)[:count]

    @property
    def mean_tokens(self) -> float:
        """Return the mean tokens of a step with all its drafts: 1 + a1 + a1·a2 + …"""
        total = share = 1.0
        for rate in self.rates:
            share *= rate
            total += share
        return total

    def drafter(self, target: Deployment) -> Drafter | None:
        """Return the drafter of `target`; None if it takes no GPU time. ConfigError names the missing sizes."""
        if self.method == "ngram":
            return None
        return find_drafter(self.method, target, self.model, self.draft_tensor_parallel_size)

    def note_acceptance(self) -> str:
        """Note the acceptance with its numbers, and whether it was given."""
        assumed = self.accept_rates is None and self.acceptance_per_position is None
        how = "assumed" if assumed else "as given"
        remedy = (
            "; give the rates of your traffic (accept_rates, or acceptance_per_position from vLLM's log)"
            if assumed
            else ""
        )
        drafts = self.num_speculative_tokens
        rates = ", ".join(f"{rate:.3g}" for rate in self.rates)
        return (
            f"speculation ({self.method}, {drafts} draft{'s' if drafts > 1 else ''} a step): acceptance is {how}, "
            f"{rates} (each if those before it were accepted): {self.mean_tokens:.3g} tokens a step{remedy}"
        )

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
            "accept_rates": list(self.rates),
            "seed": self.seed,
        }
