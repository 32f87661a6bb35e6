"""Ask a recorder that runs in another environment, next to an installed vLLM or SGLang."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from types import TracebackType

RECORD = Path(__file__).parents[1] / "exact" / "record.py"


class RecordingFailed(Exception):
    """The real scheduler refused a scenario or raised while it ran."""


class Recorder(Protocol):
    """A source of recordings."""

    def record(self, kind: str, scenario: dict[str, Any]) -> dict[str, Any]:
        """Return `recorded`, `vllm`, and for speculation `events`; RecordingFailed says what vLLM raised."""


class RecorderProcess:
    """The recorder of an environment; use it as a context manager."""

    def __init__(self, python: Path, log: Path, record: Path = RECORD) -> None:
        self._command = [str(python), str(record), "--serve"]
        self._log = log

    def __enter__(self) -> Self:
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def record(self, kind: str, scenario: dict[str, Any]) -> dict[str, Any]:
        """Record a scenario; RecordingFailed says what vLLM raised."""
        return self._ask({"kind": kind, "scenario": scenario})

    def facts(self) -> dict[str, Any]:
        """Return the release's version, flags, metrics, event fields, and source folder."""
        return self._ask({"kind": "facts"})

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SystemExit(f"the recorder has ended; {self._log} says why") from None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the recorder has ended; {self._log} says why")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RecordingFailed(answer["error"])
        return answer
