"""A client of an OpenAI-compatible endpoint: streams the answers to a workload's rows, and keeps times and counts."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from understudy.errors import ConfigError
from understudy.online.content import prompt_of
from understudy.server.api.session_headers import SESSION

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from understudy.online.hints import SessionTeller
    from understudy.workload import Workload
    from understudy.workload.columns import Int32Column, Int64Column

MOST_THREADS = 4096
"""Requests that are in flight at most: each has a thread."""
SPECIAL_TOKENS = 256
"""Tokens at the start of a vocabulary that prompts leave out: control tokens of most tokenizers are among them."""
_WORDS = tuple(
    f"{first}{second}" for first in ("be", "do", "go", "in", "me", "no", "so", "up") for second in " aeiou"
)
"""Words of chat prompts; equal tokens give equal words. Only the endpoint knows their number of tokens."""


@dataclass(frozen=True, eq=False, kw_only=True)
class EndpointRun:
    """One row per request, as the client saw it; times in ns since the start, −1 for never."""

    due_ns: Int64Column
    """When the load wanted the request to be sent."""
    arrival_ns: Int64Column
    """When the request was sent."""
    first_admit_ns: Int64Column
    """Equal to `arrival_ns`: a client does not see the queue."""
    first_token_ns: Int64Column
    last_token_ns: Int64Column
    finish_ns: Int64Column
    chunks: Int32Column
    """Pieces of the answer with content."""
    prompt_tokens: Int32Column
    """As the endpoint counted, −1 where it does not say."""
    output_tokens: Int32Column
    cached_tokens: Int32Column
    errors: dict[int, str]
    """Answers other than 200, by row."""


MOST_TIMEOUT_S = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where requests go, and how they are written."""

    url: str
    model: str
    vocabulary: int = 32_000
    """Prompts are token ids below it."""
    timeout_s: float = 3600.0
    api_key: str | None = None
    chat: bool = False
    """Send prompts as one chat message of words, to endpoints that accept no token ids."""
    ignore_eos: bool = True
    """Ask for exact lengths of answers, which is an extension of vLLM, SGLang and others."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
        except ValueError as error:
            raise ConfigError(f"url: {error}; got {self.url!r}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url must begin with http:// or https://, got {self.url!r}")
        try:
            _ = parts.port
        except ValueError as error:
            raise ConfigError(f"url: {error}; got {self.url!r}") from None
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("the API key has characters that no header can carry; set OPENAI_API_KEY again")
        if not 0 < self.timeout_s <= MOST_TIMEOUT_S:
            raise ConfigError(
                f"timeout_s must be above 0 and at most {MOST_TIMEOUT_S:g}, got {self.timeout_s:g}"
            )
        if self.vocabulary <= SPECIAL_TOKENS:
            raise ConfigError(f"vocabulary must be above {SPECIAL_TOKENS}, got {self.vocabulary}")

    @property
    def path(self) -> str:
        """Path of the route."""
        base = urlsplit(self.url).path.rstrip("/").removesuffix("/v1")
        return f"{base}/v1/{'chat/' if self.chat else ''}completions"

    def connect(self) -> http.client.HTTPConnection:
        """Open a connection lazily: it connects with the first request."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        assert parts.hostname is not None
        return kind(parts.hostname, parts.port, timeout=self.timeout_s)


class Completions:
    """Sends rows of a workload in threads, and collects their times and the endpoint's counts."""

    def __init__(
        self,
        endpoint: Endpoint,
        workload: Workload,
        threads: Executor,
        *,
        teller: SessionTeller | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._endpoint, self._workload, self._threads = endpoint, workload, threads
        self._teller, self._progress = teller, progress
        rows = len(workload)
        names = ("due", "arrival", "first", "last", "finish")
        self._times = {name: np.full(rows, -1, np.int64) for name in names}
        self._counts = {name: np.full(rows, -1, np.int32) for name in ("prompt", "output", "cached")}
        self._chunks = np.zeros(rows, np.int32)
        self._errors: dict[int, str] = {}
        self._open: set[http.client.HTTPConnection] = set()
        self._ended = 0
        self._began_ns = time.monotonic_ns()

    def now_ns(self) -> int:
        """Return the time since the start."""
        return time.monotonic_ns() - self._began_ns

    async def send(self, row: int, due_ns: int, on_dispatch: Callable[[], None] = lambda: None) -> None:
        """Send a row when it is due, and wait for the end of its answer."""
        while (wait_ns := due_ns - self.now_ns()) > 0:
            await asyncio.sleep(wait_ns / 1e9)
        self._times["due"][row] = due_ns
        self._times["arrival"][row] = self.now_ns()
        on_dispatch()
        session = {SESSION: self._session_name(row)} if self._teller is None else self._teller.send(row)
        await asyncio.get_running_loop().run_in_executor(self._threads, self._request, row, session)
        if self._teller is not None:
            self._teller.on_answer(row)
        self._ended += 1
        if self._progress is not None:
            self._progress(self._ended)

    def result(self) -> EndpointRun:
        """Return the columns."""
        return EndpointRun(
            due_ns=self._times["due"],
            arrival_ns=self._times["arrival"],
            first_admit_ns=self._times["arrival"],
            first_token_ns=self._times["first"],
            last_token_ns=self._times["last"],
            finish_ns=self._times["finish"],
            chunks=self._chunks,
            prompt_tokens=self._counts["prompt"],
            output_tokens=self._counts["output"],
            cached_tokens=self._counts["cached"],
            errors=self._errors,
        )

    def abort(self) -> None:
        """Break off all answers, so that the threads that read them end."""
        for connection in list(self._open):
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _request(self, row: int, session: dict[str, str]) -> None:
        """Send a row, with the headers of its session, and read its answer."""
        connection = self._endpoint.connect()
        self._open.add(connection)
        try:
            headers = {**self._headers(row), **session}
            connection.request("POST", self._endpoint.path, self._body(row), headers)
            response = connection.getresponse()
            if response.status != 200:
                self._errors[row] = f"{response.status}: {response.read(300).decode('utf-8', 'replace')}"
                return
            for line in response:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    self._read_chunk(row, line[5:])
        except (OSError, http.client.HTTPException, ValueError, TypeError, AttributeError) as error:
            # The endpoint may send anything: what is no answer of this API fails this request alone.
            self._errors[row] = f"{type(error).__name__}: {error}"
        finally:
            self._times["finish"][row] = self.now_ns()
            self._open.discard(connection)
            connection.close()

    def _read_chunk(self, row: int, text: bytes) -> None:
        chunk = json.loads(text)
        if chunk.get("error"):
            self._errors[row] = f"in the stream: {json.dumps(chunk['error'])[:300]}"
        choices = chunk.get("choices")
        if choices and _has_content(choices[0]):
            now_ns = self.now_ns()
            if self._times["first"][row] < 0:
                self._times["first"][row] = now_ns
            self._times["last"][row] = now_ns
            self._chunks[row] += 1
        usage = chunk.get("usage")
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            self._counts["prompt"][row] = _read_count(usage.get("prompt_tokens"))
            self._counts["output"][row] = _read_count(usage.get("completion_tokens"))
            self._counts["cached"][row] = _read_count(details.get("cached_tokens"))

    def _body(self, row: int) -> bytes:
        endpoint, workload = self._endpoint, self._workload
        tokens = prompt_of(workload, row) % (endpoint.vocabulary - SPECIAL_TOKENS) + SPECIAL_TOKENS
        most = max(int(workload.cut_output_tokens[row]), 1)
        body: dict[str, Any] = {
            "model": endpoint.model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": most,
        }
        if endpoint.chat:
            text = " ".join(_WORDS[token % len(_WORDS)].strip() for token in tokens.tolist())
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = tokens.tolist()
        if endpoint.ignore_eos:
            body |= {"ignore_eos": True, "priority": int(workload.priority[row])}
        return msgspec.json.encode(body)

    def _headers(self, row: int) -> dict[str, str]:
        headers = {"content-type": "application/json", "x-request-id": f"row-{row}"}
        if self._endpoint.api_key is not None:
            headers["authorization"] = f"Bearer {self._endpoint.api_key}"
        return headers

    def _session_name(self, row: int) -> str:
        session, names = int(self._workload.session[row]), self._workload.session_ids
        return str(session) if names is None else names[session]


def _has_content(choice: dict[str, Any]) -> bool:
    """Whether a choice has a part of the answer; the first chunk of a chat has a role alone."""
    if "delta" in choice:
        delta = choice["delta"] or {}
        return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
    return True


def _read_count(value: object) -> int:
    """Return a number of tokens; -1 for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else -1
