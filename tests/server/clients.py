"""Real clients, unmodified, against a live server and a KV-routed fleet of 20: `make clients-ci`, `make clients`.

Each is run as its page in docs/clients says. Counts of requests and tokens must be the server's own, exactly; times as
the client saw them are shown beside the engine's record, and with `--times` must agree with it: within the lateness
that the server reports, what the machine let any sleeper oversleep meanwhile, and what a client needs for itself. Where
they do not, on a machine that is later than a client may be, the run is done again, and in the end it is told.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

REQUESTS, OUTPUT_TOKENS = 20, 16
TIMES = ("--time-to-first-token", "60", "--inter-token-latency", "10")
OWN_MS = 10.0
"""What a client may need for itself, on top of the lateness that the server reports."""
TRIES = 3
"""How often a run is done whose times a busy machine spoilt."""

DOCS = Path(__file__).parents[2] / "docs" / "clients"


def documented(client: str) -> list[str]:
    """The commands of its page that run the client itself."""
    text = (DOCS / f"{client}.md").read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
    return [line.removeprefix("PYTHONHASHSEED=0 ") for line in lines if not line.startswith("understudy")]


def documented_python(client: str) -> str:
    """The Python of its page."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (DOCS / f"{client}.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return "".join(blocks)


MORE_OF_OPENAI = """
assert chunk.usage.completion_tokens == 16, chunk
assert [model.id for model in client.models.list()] == ["my-model"]
asked = {"model": "my-model", "max_tokens": 16}
hello = [{"role": "user", "content": "hello"}]
for answer in (
    client.chat.completions.create(messages=hello, **asked),
    client.completions.create(prompt="hello", **asked),
    *client.completions.create(prompt="hello", stream=True, stream_options={"include_usage": True}, **asked),
):
    assert answer.choices or answer.usage, answer
    assert answer.usage is None or answer.usage.completion_tokens == 16, answer
"""


class Record(NamedTuple):
    """What the engines have written so far."""

    requests: float
    output_tokens: float
    first_tokens: float
    first_token_s: float
    gaps: float
    gap_s: float


class Seen(NamedTuple):
    """What a client reports of its run."""

    requests: float
    output_tokens: float
    first_token_ms: float
    gap_ms: float


class Machine:
    """How late the machine wakes whoever sleeps: what no client can be faster than."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Machine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def late_ms(self) -> float:
        """The p99 so far."""
        late = sorted(self._late_s) or [0.0]
        return 1e3 * late[int(0.99 * (len(late) - 1))]

    def _watch(self) -> None:
        while not self._over.is_set():
            began_s = time.monotonic()
            time.sleep(0.005)
            self._late_s.append(time.monotonic() - began_s - 0.005)


class Target:
    """A server, or a fleet's front, on a free port, and the workers behind it."""

    def __init__(self, verb: str, *flags: str) -> None:
        self.name = verb
        self.process = subprocess.Popen(
            [sys.executable, "-m", "understudy", verb, "my-model", "--port", "0", *TIMES, *flags],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        ports = (re.search(r"http://127\.0\.0\.1:(\d+)$", line.rstrip()) for line in self.process.stderr)
        found = next((port for port in ports if port), None)
        if found is None:
            raise SystemExit(f"understudy {verb} did not start")
        self.port = int(found[1])
        self.workers = [self.port]
        if verb == "fleet":
            self.workers = json.loads(self._read(self.port, "/fleet/state"))["ports"]

    def stop(self) -> None:
        """As Kubernetes does it."""
        self.process.terminate()
        assert self.process.wait(20) == 0

    def metric(self, name: str, *labels: str) -> float:
        """The sum of a metric's samples over all workers."""
        return sum(self.metric_of(port, name, *labels) for port in self.workers)

    def metric_of(self, port: int, name: str, *labels: str) -> float:
        """Sum the samples of a metric of one worker."""
        return sum(
            float(line.rpartition(" ")[2])
            for line in self._read(port, "/metrics").splitlines()
            if line.startswith(name + "{") and all(label in line for label in labels)
        )

    def record(self) -> Record:
        """Of all workers."""
        first, gap = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
        names = ("vllm:request_success_total", "vllm:generation_tokens_total")
        return Record(
            *map(self.metric, (*names, f"{first}_count", f"{first}_sum", f"{gap}_count", f"{gap}_sum"))
        )

    def late_ms(self) -> float:
        """The p99 of lateness that it reports; the workers of a process share it."""
        lateness = self.metric("understudy:lateness_quantile_seconds", 'quantile="0.99"', 'what="token"')
        return 1e3 * lateness / len(self.workers)

    @staticmethod
    def _read(port: int, path: str) -> str:
        answer = urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30)
        return str(answer.read().decode())


class Check:
    """Runs clients against a target and compares what they saw with what it wrote."""

    def __init__(self, target: Target, folder: Path, *, times: bool) -> None:
        self.target = target
        self.folder = folder
        self.url = f"http://127.0.0.1:{target.port}"
        self._times = times
        self.compared = self.spoilt = 0
        """Runs whose times agreed, and those for which the machine was too busy."""
        self._home = folder / "hf"
        if not self._home.exists():
            export = (sys.executable, "-m", "understudy", "tokenizer", "export", str(self._home), "--hub")
            subprocess.run(export, check=True, timeout=60, stdout=subprocess.DEVNULL)
        self.trace = folder / "trace.jsonl"
        self.trace.write_text("".join(json.dumps(row) + "\n" for row in trace_rows()))
        self._runs = 0

    def openai(self, clients: Path) -> None:
        """Chats and completions, streamed and whole."""
        before = self.target.record()
        script = documented_python("openai").replace("http://127.0.0.1:8000", self.url) + MORE_OF_OPENAI
        subprocess.run([clients / "python", "-c", script], check=True, timeout=120, stdout=subprocess.DEVNULL)
        after = self.target.record()
        assert after.requests - before.requests == 4
        assert after.output_tokens - before.output_tokens == 4 * OUTPUT_TOKENS
        print(f"openai, {self.target.name}: 4 requests, {4 * OUTPUT_TOKENS} tokens", flush=True)

    def aiperf(self, clients: Path, command: str) -> None:
        """One run of aiperf."""
        self._try(lambda: self._aiperf(clients, command))

    def vllm(self, clients: Path, command: str) -> None:
        """One run of vLLM's own bench."""
        self._try(lambda: self._vllm(clients, command))

    def guidellm(self, clients: Path, command: str) -> None:
        """One run of guidellm."""
        self._try(lambda: self._guidellm(clients, command))

    def _try(self, run: Callable[[], bool]) -> None:
        """Once, or as often as the machine spoils the times."""
        if any(run() for _ in range(TRIES)):
            self.compared += 1
        else:
            self.spoilt += 1

    def _aiperf(self, clients: Path, command: str) -> bool:
        before, folder = self.target.record(), self._new_folder()
        late_ms = self._run(clients, f"{command} --artifact-dir {folder}")
        (found,) = folder.rglob("profile_export_aiperf.json")
        told = json.loads(found.read_text())
        count, tokens = told["request_count"]["avg"], told["output_sequence_length"]["avg"]
        first, gap = told["time_to_first_token"]["avg"], told["inter_token_latency"]["avg"]
        seen = Seen(count, round(tokens * count), first, gap)
        return self._compare("aiperf", command, seen, before, late_ms)

    def _vllm(self, clients: Path, command: str) -> bool:
        """It sends one request more, to see whether anybody is there."""
        before, folder = self.target.record(), self._new_folder()
        late_ms = self._run(
            clients, f"{command} --save-result --result-dir {folder} --result-filename told.json"
        )
        told = json.loads((folder / "told.json").read_text())
        seen = Seen(told["completed"], told["total_output_tokens"], told["mean_ttft_ms"], told["mean_itl_ms"])
        return self._compare("vllm bench serve", command, seen, before, late_ms, more_requests=1)

    def _guidellm(self, clients: Path, command: str) -> bool:
        before, folder = self.target.record(), self._new_folder()
        late_ms = self._run(clients, command.replace("path=g.json", f"path={folder / 'told.json'}"))
        told = json.loads((folder / "told.json").read_text())["benchmarks"][0]["metrics"]
        names = ("output_token_count", "time_to_first_token_ms", "inter_token_latency_ms")
        tokens, first, gap = (told[name]["successful"] for name in names)
        seen = Seen(told["request_totals"]["successful"], tokens["total_sum"], first["mean"], gap["mean"])
        return self._compare("guidellm", command, seen, before, late_ms)

    def _new_folder(self) -> Path:
        self._runs += 1
        folder = self.folder / f"{self.target.name}-{self._runs}"
        folder.mkdir()
        return folder

    def _run(self, clients: Path, documented: str) -> float:
        """How late the machine was meanwhile, in milliseconds."""
        command = documented.replace("http://127.0.0.1:8000", self.url).replace("t.jsonl", str(self.trace))
        environment = {
            **os.environ,
            "HF_HOME": str(self._home),
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        words = command.split()
        with Machine() as machine:
            ran = subprocess.run(
                [clients / words[0], *words[1:]],
                timeout=900,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        if ran.returncode:
            raise SystemExit(f"{command}\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}\nexit {ran.returncode}")
        return machine.late_ms

    def _compare(
        self,
        client: str,
        command: str,
        seen: Seen,
        before: Record,
        machine_ms: float,
        *,
        more_requests: int = 0,
    ) -> bool:
        """Counts must be equal, always. True if the times are too, as far as they were asked for."""
        wrote = Record(*(now - then for now, then in zip(self.target.record(), before, strict=True)))
        first_ms, gap_ms = 1e3 * wrote.first_token_s / wrote.first_tokens, 1e3 * wrote.gap_s / wrote.gaps
        late_ms = self.target.late_ms()
        kind = next(
            (word for word in ("mooncake", "timed_trace", "random") if word in command), "concurrency"
        )
        print(
            f"{client} ({kind}), {self.target.name}: {seen.requests:.0f} requests, {seen.output_tokens:.0f} tokens; "
            f"TTFT {seen.first_token_ms:.1f} ms (engine {first_ms:.1f}), ITL {seen.gap_ms:.2f} ms "
            f"(engine {gap_ms:.2f}), lateness p99 {late_ms:.1f} ms, of the machine {machine_ms:.1f} ms",
            flush=True,
        )
        assert seen.requests == REQUESTS
        assert seen.output_tokens == REQUESTS * OUTPUT_TOKENS
        assert wrote.requests == REQUESTS + more_requests
        assert wrote.output_tokens == OUTPUT_TOKENS * (REQUESTS + more_requests)
        apart_ms = max(abs(seen.first_token_ms - first_ms), abs(seen.gap_ms - gap_ms))
        if not self._times or apart_ms <= late_ms + machine_ms + OWN_MS:
            return True
        assert machine_ms > OWN_MS, f"the client saw times {apart_ms:.1f} ms from the engine's"
        print(f"  {apart_ms:.1f} ms apart, on a machine that is too busy to say why", flush=True)
        return False


def trace_rows() -> list[dict[str, object]]:
    """Twenty questions about four contexts, as Mooncake writes them."""
    return [
        {
            "timestamp": 100 * n,
            "input_length": 1024,
            "output_length": OUTPUT_TOKENS,
            "hash_ids": [n % 4, 100 + n],
        }
        for n in range(REQUESTS)
    ]


def main() -> None:
    """Run them; the exit code tells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=Path, help="bin of an environment with openai and aiperf")
    parser.add_argument("--vllm", type=Path, help="bin of one with vllm")
    parser.add_argument("--guidellm", type=Path, help="bin of one with guidellm")
    parser.add_argument("--short", action="store_true", help="aiperf in one form against each, not both")
    parser.add_argument(
        "--times", action="store_true", help="times must agree too; wants a machine that is not busy"
    )
    args = parser.parse_args()
    compared = spoilt = 0
    for words in ("serve --max-num-seqs 64", "fleet --workers 20 --base-port 0 --routing kv"):
        target = Target(*words.split())
        try:
            with tempfile.TemporaryDirectory() as folder:
                check = Check(target, Path(folder), times=args.times)
                run(check, args)
        finally:
            target.stop()
        compared, spoilt = compared + check.compared, spoilt + check.spoilt
    print("clients agree with the server")
    if args.times and spoilt:
        print(
            f"but times could be compared in {compared} of {compared + spoilt} runs only: the machine is busy"
        )
        sys.exit(not compared)


def run(check: Check, args: argparse.Namespace) -> None:
    """All clients that there are, against one target."""
    if args.clients is not None:
        clients = args.clients.absolute()
        check.openai(clients)
        if (clients / "aiperf").exists():
            concurrency, trace = documented("aiperf")
            if not (args.short and check.target.name == "fleet"):
                check.aiperf(clients, concurrency)
            if not (args.short and check.target.name == "serve"):
                check.aiperf(clients, trace)
    if args.vllm is not None:
        for command in documented("vllm-bench"):
            check.vllm(args.vllm.absolute(), command)
    if args.guidellm is not None:
        for command in documented("guidellm"):
            check.guidellm(args.guidellm.absolute(), command)


if __name__ == "__main__":
    main()
