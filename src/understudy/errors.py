"""Error types. Messages name the field or the request; errors are raised before any state changes."""

from __future__ import annotations


class UnderstudyError(Exception):
    """Base class of all errors that Understudy raises for invalid input or misuse."""


class ConfigError(UnderstudyError, ValueError):
    """A setting is unknown, contradictory or not supported; the message names the field."""


class InvalidArgument(UnderstudyError, ValueError):
    """A value, a length or an id that the call does not accept."""


class MalformedBatch(UnderstudyError, ValueError):
    """Received bytes are not a batch of KV events; none of them was applied."""


class WrongState(UnderstudyError):
    """The object is not in the state that the call requires (for example, a guard that was released)."""


class UnknownBlock(UnderstudyError, LookupError):
    """A block id that is not in the pool."""


class CapacityExhausted(UnderstudyError):
    """Fewer blocks are available than requested; none was allocated."""


class PolicyError(UnderstudyError):
    """A user-defined policy or router broke its contract; the message says how."""


class InvariantViolated(UnderstudyError, AssertionError):
    """A self-check found inconsistent state: a defect of Understudy; please report it."""
