"""Typed errors. Each says what is wrong, names the field or the request, and is raised before anything changes."""

from __future__ import annotations


class UnderstudyError(Exception):
    """Base of every error that Understudy raises on purpose."""


class ConfigError(UnderstudyError, ValueError):
    """A setting is unknown, contradictory or cannot be honoured; the message names the field."""


class InvalidArgument(UnderstudyError, ValueError):
    """A value, a length or an id that the call cannot take."""


class MalformedBatch(UnderstudyError, ValueError):
    """Bytes that came over the wire are no batch of KV events. Nothing of them was applied."""


class WrongState(UnderstudyError):
    """The object is not in the state that the call needs (for example a guard that was released)."""


class UnknownBlock(UnderstudyError, LookupError):
    """A block id that the pool does not have."""


class CapacityExhausted(UnderstudyError):
    """Fewer blocks are available than were asked for. Nothing was taken."""


class PolicyError(UnderstudyError):
    """A policy or a router of yours broke its contract; the message says how."""


class InvariantViolated(UnderstudyError, AssertionError):
    """A self-check found inconsistent state: a defect in Understudy, please report it."""
