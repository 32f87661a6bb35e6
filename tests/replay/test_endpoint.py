"""Plays against an endpoint: order, exact counts, and failures, with a server that answers at once."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from replay.test_plays import DIAMOND, make
from understudy.cli import main
from understudy.errors import ConfigError
from understudy.online.endpoint import run_against
from understudy.workload import Plays, write_agentic_mooncake

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def endpoint(status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve answers of the length that is asked for; yield the URL and the requests so far."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append({**body, "session": self.headers["x-session-id"]})
            self.send_response(status)
            self.end_headers()
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            for chunk in ({"choices": [{"text": "a"}]}, {"choices": [], "usage": usage}):
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_requests_follow_those_they_wait_for_with_exact_lengths() -> None:
    workload = make(DIAMOND, [0] * 4)
    with endpoint() as (url, asked):
        found = run_against(url, workload, model="m", load=Plays())
    assert not found.errors
    assert found.prompt_tokens.tolist() == [64] * 4
    assert found.output_tokens.tolist() == workload.output_tokens.tolist()
    assert found.arrival_ns[1] >= found.arrival_ns[0] + 3_000_000
    assert found.arrival_ns[2] >= found.finish_ns[0] + 5_000_000
    assert found.arrival_ns[3] >= max(found.finish_ns[1], found.finish_ns[2] + 7_000_000)
    assert [one["ignore_eos"] for one in asked] == [True] * 4
    assert all(256 <= token < 32_000 for one in asked for token in one["prompt"])


def test_lanes_bound_the_plays_at_a_time() -> None:
    workload = make([(1, 0, 1, 20), (3, 2, 1, 0)], [0, 0, 1, 1])
    with endpoint() as (url, _):
        found = run_against(url, workload, model="m", load=Plays(lanes=1))
    assert found.arrival_ns[2] >= found.finish_ns[1]


def test_failures_are_kept_and_do_not_stop_a_play() -> None:
    workload = make([(1, 0, 1, 0)], [0, 0])
    with endpoint(503) as (url, asked):
        found = run_against(url, workload, model="m")
    assert len(asked) == 2
    assert found.errors[0].startswith("503: ")
    assert (found.finish_ns >= 0).all()


def test_the_verb_prints_requests_and_plays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_agentic_mooncake(make(DIAMOND, [0] * 4), tmp_path / "graph.jsonl")
    rows = tmp_path / "rows.jsonl"
    with endpoint() as (url, _):
        arguments = ["agents", "run", str(tmp_path / "graph.jsonl"), "--url", url, "--model", "m"]
        assert main([*arguments, "--requests-jsonl", str(rows)]) == 0
    printed = capsys.readouterr().out
    assert "requests: 4 answered, 0 failed" in printed
    assert "plays: 1, makespan" in printed
    assert [json.loads(line)["prompt_tokens"] for line in rows.read_text().splitlines()] == [64] * 4


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="url must begin with http"):
        run_against("localhost:80", make([], [0]), model="m")
