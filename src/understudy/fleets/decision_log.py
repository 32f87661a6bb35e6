"""Writes routing decisions of a live fleet to a file while it runs, one JSON line each."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("understudy.fleet")


class DecisionLog:
    """Appends decisions to a file; a line can be read as soon as the decision was made."""

    def __init__(self, path: Path) -> None:
        """Open the file, whose content is replaced. ConfigError if it cannot be written."""
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"--decisions: {path} cannot be written: {error.strerror}") from error
        self._encoder = msgspec.json.Encoder()
        self._failed = False

    def write(self, decision: dict[str, Any]) -> None:
        """Append a decision. A full disk ends the log, not the fleet."""
        if self._failed:
            return
        try:
            self._file.write(self._encoder.encode(decision) + b"\n")
        except OSError as error:
            self._failed = True
            log.error("--decisions: the file cannot be written any more: %s", error.strerror)

    def close(self) -> None:
        """Close the file."""
        self._failed = True
        self._file.close()
