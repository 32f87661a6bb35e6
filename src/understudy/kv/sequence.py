"""A request's tokens as blocks, and its signals to a KV manager as it grows."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from understudy.errors import ConfigError, InvalidArgument, WrongState
from understudy.tokens import Identities, Identity, TokenBlocks, lineage_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

Block: TypeAlias = Identity | int  # a full block, or the id of a partial one

_partial_ids = itertools.count()


@dataclass(frozen=True)
class Acquire:
    """Acquire these blocks."""

    blocks: tuple[Block, ...]
    token_ids: tuple[int, ...] | None = None  # of the full blocks


@dataclass(frozen=True)
class Release:
    """Release these blocks, in this order."""

    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Seal:
    """Turn a complete partial block into a full one."""

    partial: int
    identity: Identity
    token_ids: tuple[int, ...] | None = None


Signal: TypeAlias = Acquire | Release | Seal


class ActiveSequence:
    """The blocks of one request: full ones, then at most one partial.

    Signals are returned, not sent: the caller applies them to its manager and then confirms with `commit_allocation`.
    The last block stays partial until the token after it is known.

    With `enable_prefix_caching`, equal tokens give equal blocks. Without, every full block gets a unique identity from
    `rng` and keeps it, so that a preempted request finds its own blocks again. `rng` also generates output tokens
    after `planned_output`; the default is a new, unseeded one. `emit_token_ids` adds token ids to the signals, for a
    manager whose events contain them.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        max_output_tokens: int,
        *,
        block_size: int,
        enable_prefix_caching: bool = True,
        emit_token_ids: bool = False,
        planned_output: Sequence[int] = (),
        rng: random.Random | None = None,
    ) -> None:
        if emit_token_ids and not enable_prefix_caching:
            raise ConfigError("emit_token_ids needs enable_prefix_caching; without it blocks have no content")
        if max_output_tokens < 0:
            raise InvalidArgument(f"max_output_tokens must be at least 0, got {max_output_tokens}")
        self.enable_prefix_caching = enable_prefix_caching
        self.max_output_tokens = max_output_tokens
        self._emit_token_ids = emit_token_ids
        self._planned_output = tuple(planned_output)
        self._rng = rng or random.Random()
        self._tokens = TokenBlocks(prompt, block_size)
        self._prompt_tokens = len(self._tokens)
        self._allocated_tokens = 0
        self._blocks: list[Block] = [self._identity(i) for i in range(self._tokens.num_blocks)]
        if len(self._tokens) % block_size:
            self._blocks.append(next(_partial_ids))

    # ── Allocate ──

    def prepare_allocation(self, tokens: int) -> Acquire | None:
        """Return the blocks to acquire for the first `tokens` tokens; None when they are allocated.

        Changes nothing, so it can be called again after a failure; `commit_allocation` confirms.
        """
        self._check_known(tokens)
        first, last = self._blocks_for(self._allocated_tokens), self._blocks_for(tokens)
        if last <= first:
            return None
        blocks = tuple(self._blocks[first:last])
        full = sum(isinstance(block, Identity) for block in blocks)
        return Acquire(blocks, self._token_ids(first, first + full))

    def commit_allocation(self, tokens: int) -> None:
        """Record that the blocks of the first `tokens` tokens are acquired."""
        self._check_known(tokens)
        if tokens < self._allocated_tokens:
            raise InvalidArgument(
                f"tokens must be at least the {self._allocated_tokens} allocated, got {tokens}"
            )
        self._allocated_tokens = tokens

    # ── Grow ──

    def push(self, token: int) -> list[Signal]:
        """Append an output token. The first token of a new block seals the previous block and acquires a new one."""
        if self.finished:
            raise WrongState(f"all {self.max_output_tokens} output tokens are generated")
        self._tokens.append(token)
        if len(self._tokens) % self.block_size != 1 % self.block_size:
            return []
        signals: list[Signal] = []
        last = self._blocks[-1] if self._blocks else None
        if isinstance(last, int):
            index = len(self._blocks) - 1
            identity = self._identity(index)
            self._blocks[-1] = identity
            signals.append(Seal(last, identity, self._token_ids(index, index + 1)))
        self._blocks.append(next(_partial_ids))
        signals.append(Acquire((self._blocks[-1],), self._token_ids(0, 0)))
        return signals

    def generate(self) -> list[Signal]:
        """Append the next planned token, or a random one. The last one also releases every block, tail first."""
        at = self.generated_tokens
        planned = at < len(self._planned_output)
        signals = self.push(self._planned_output[at] if planned else self._rng.getrandbits(32))
        if self.finished:
            self._allocated_tokens = 0
            signals.append(Release(tuple(reversed(self._blocks))))
        return signals

    def pop(self) -> list[Signal]:
        """Remove the last output token, and release the partial block that it opened if that was allocated.

        WrongState when there is none, or when it is in a full block, which other requests may have matched.
        """
        if self.generated_tokens == 0:
            raise WrongState("there is no output token to remove")
        if isinstance(self._blocks[-1], Identity):
            raise WrongState("the last output token is in a full block and cannot be removed")
        self._tokens.pop()
        signals: list[Signal] = []
        if len(self._tokens) % self.block_size == 0:
            opened = self._blocks.pop()
            if self._allocated_tokens > len(self._tokens):
                signals.append(Release((opened,)))
        self._allocated_tokens = min(self._allocated_tokens, len(self._tokens))
        return signals

    # ── Release ──

    def free(self) -> list[Signal]:
        """Return the signals that release all allocated blocks, tail first. Changes nothing."""
        held = self._blocks[: self._blocks_for(self._allocated_tokens)]
        return [Release(tuple(reversed(held)))] if held else []

    def preempt(self) -> list[Signal]:
        """Release all allocated blocks. Tokens stay, so re-admission computes prompt and output again."""
        signals = self.free()
        self._allocated_tokens = 0
        return signals

    # ── Read ──

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def block_size(self) -> int:
        """Tokens in a full block."""
        return self._tokens.block_size

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Full blocks, then at most one partial."""
        return tuple(self._blocks)

    @property
    def identities(self) -> Identities:
        """Identities of the full blocks."""
        full = [block.lineage_hash for block in self._blocks if isinstance(block, Identity)]
        return self._tokens.identities[: len(full)] if self.enable_prefix_caching else _independent(full)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self._prompt_tokens

    @property
    def generated_tokens(self) -> int:
        """Output tokens so far."""
        return len(self._tokens) - self._prompt_tokens

    @property
    def allocated_tokens(self) -> int:
        """Leading tokens whose blocks are acquired."""
        return self._allocated_tokens

    @property
    def finished(self) -> bool:
        """Whether the output budget is used up."""
        return self.generated_tokens >= self.max_output_tokens

    @property
    def known_blocks(self) -> int:
        """Blocks of the tokens known so far."""
        return self._blocks_for(len(self._tokens))

    @property
    def completion_blocks(self) -> int:
        """Blocks of the prompt and the whole output budget."""
        return self._blocks_for(self._prompt_tokens + self.max_output_tokens)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _check_known(self, tokens: int) -> None:
        if not 0 <= tokens <= len(self._tokens):
            raise InvalidArgument(f"tokens must be in 0..{len(self._tokens)}, got {tokens}")

    def _identity(self, index: int) -> Identity:
        if self.enable_prefix_caching:
            return self._tokens.identities[index]
        return _independent([lineage_hash(self._rng.getrandbits(64) or 1, None, index)])[0]

    def _token_ids(self, first: int, stop: int) -> tuple[int, ...] | None:
        if not self._emit_token_ids:
            return None
        ids = self._tokens.tokens_at(first * self.block_size, stop * self.block_size)
        return tuple(ids.tolist())


def _independent(lineage_hashes: list[int]) -> Identities:
    return Identities.from_lineage_hashes(lineage_hashes)
