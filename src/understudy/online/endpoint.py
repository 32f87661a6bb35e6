"""Plays against any OpenAI-compatible endpoint: a client that sends each request when its answers are there."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
import numpy as np

from understudy.errors import ConfigError
from understudy.online.content import prompt_of
from understudy.online.plays import play_graph
from understudy.workload import Plays

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.workload import Workload
    from understudy.workload.columns import Int32Column, Int64Column

_MOST_THREADS = 4096
_SPECIAL_TOKENS = 256
"""Tokens at the start of a vocabulary that prompts leave out: control tokens of most tokenizers are among them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class EndpointRun:
    """One row per request, as the client saw it; times in ns since the start, −1 for never."""

    arrival_ns: Int64Column
    """When the request was sent."""
    first_admit_ns: Int64Column
    """Equal to `arrival_ns`: a client does not see the queue."""
    first_token_ns: Int64Column
    finish_ns: Int64Column
    prompt_tokens: Int32Column
    """As the endpoint counted, −1 where it does not say."""
    output_tokens: Int32Column
    cached_tokens: Int32Column
    errors: dict[int, str]
    """Answers other than 200, by row."""


def run_against(
    url: str,
    workload: Workload,
    *,
    model: str,
    load: Plays | None = None,
    vocabulary: int = 32_000,
    timeout_s: float = 3600.0,
    progress: Callable[[int], None] | None = None,
) -> EndpointRun:
    """Play a workload with a graph against `url`, in real time; prompts are token ids below `vocabulary`.

    Lengths are exact: `max_tokens` with `ignore_eos`; a request without output asks for one token. Errors: ConfigError
    for a URL or a workload that does not fit.
    """
    load = Plays() if load is None else load
    if workload.graph is None:
        raise ConfigError(
            "the requests do not wait for one another; `understudy agents run` needs a trace of agents"
        )
    if not load.lanes and not workload.has_arrivals:
        raise ConfigError("the workload has no timestamps; run it in lanes (--lanes N)")
    if vocabulary <= _SPECIAL_TOKENS:
        raise ConfigError(f"vocabulary must be above {_SPECIAL_TOKENS}, got {vocabulary}")
    if load.clock == "client":
        workload = replace(workload, graph=workload.graph.without_floors())
    workload = workload.normalised().scale_arrival_rate(load.arrival_rate_scale)
    client = _Client(url, workload, model, vocabulary, timeout_s, progress)
    return asyncio.run(client.play(load.lanes))


class _Client:
    """Sends requests in threads, and collects their times."""

    def __init__(
        self,
        url: str,
        workload: Workload,
        model: str,
        vocabulary: int,
        timeout_s: float,
        progress: Callable[[int], None] | None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url must begin with http:// or https://, got {url!r}")
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/completions"
        self._workload, self._model, self._vocabulary = workload, model, vocabulary
        self._timeout_s, self._progress = timeout_s, progress
        assert workload.graph is not None
        self._parents = workload.graph.parent_sessions(workload.session).tolist()
        rows = len(workload)
        self._times = {name: np.full(rows, -1, np.int64) for name in ("arrival", "first", "finish")}
        self._counts = {name: np.full(rows, -1, np.int32) for name in ("prompt", "output", "cached")}
        self._errors: dict[int, str] = {}
        self._ended = 0
        self._began_ns = 0

    async def play(self, lanes: int) -> EndpointRun:
        """Run all plays to their end."""
        graph = self._workload.graph
        assert graph is not None
        self._began_ns = time.monotonic_ns()
        with ThreadPoolExecutor(min(_MOST_THREADS, max(len(self._workload), 1))) as threads:
            self._threads = threads
            await play_graph(self._workload, graph, lanes, self._now_ns, self._send)
        return EndpointRun(
            arrival_ns=self._times["arrival"],
            first_admit_ns=self._times["arrival"],
            first_token_ns=self._times["first"],
            finish_ns=self._times["finish"],
            prompt_tokens=self._counts["prompt"],
            output_tokens=self._counts["output"],
            cached_tokens=self._counts["cached"],
            errors=self._errors,
        )

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._began_ns

    async def _send(self, row: int, due_ns: int, on_dispatch: Callable[[], None]) -> None:
        while (wait_ns := due_ns - self._now_ns()) > 0:
            await asyncio.sleep(wait_ns / 1e9)
        self._times["arrival"][row] = self._now_ns()
        on_dispatch()
        await asyncio.get_running_loop().run_in_executor(self._threads, self._request, row)
        self._ended += 1
        if self._progress is not None:
            self._progress(self._ended)

    def _request(self, row: int) -> None:
        connection = self._connect(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request("POST", self._path, self._body(row), self._headers(row))
            response = connection.getresponse()
            if response.status != 200:
                self._errors[row] = f"{response.status}: {response.read(300).decode('utf-8', 'replace')}"
                return
            for line in response:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    self._read_chunk(row, line[5:])
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            self._errors[row] = f"{type(error).__name__}: {error}"
        finally:
            self._times["finish"][row] = self._now_ns()
            connection.close()

    def _read_chunk(self, row: int, text: bytes) -> None:
        chunk = json.loads(text)
        if chunk.get("choices") and self._times["first"][row] < 0:
            self._times["first"][row] = self._now_ns()
        usage = chunk.get("usage")
        if usage:
            self._counts["prompt"][row] = usage.get("prompt_tokens", -1)
            self._counts["output"][row] = usage.get("completion_tokens", -1)
            details = usage.get("prompt_tokens_details") or {}
            self._counts["cached"][row] = details.get("cached_tokens", -1)

    def _body(self, row: int) -> bytes:
        tokens = prompt_of(self._workload, row) % (self._vocabulary - _SPECIAL_TOKENS) + _SPECIAL_TOKENS
        return msgspec.json.encode(
            {
                "model": self._model,
                "prompt": tokens.tolist(),
                "max_tokens": max(int(self._workload.cut_output_tokens[row]), 1),
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "priority": int(self._workload.priority[row]),
            }
        )

    def _headers(self, row: int) -> dict[str, str]:
        session = int(self._workload.session[row])
        headers = {
            "content-type": "application/json",
            "x-request-id": f"row-{row}",
            "x-session-id": self._session_name(session),
        }
        parent = self._parents[session]
        if parent >= 0:
            headers["x-parent-session-id"] = self._session_name(parent)
        return headers

    def _session_name(self, session: int) -> str:
        names = self._workload.session_ids
        return str(session) if names is None else names[session]
