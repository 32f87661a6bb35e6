"""Real clients, unmodified, against a live server and a KV-routed fleet of 20: `make clients-ci`, `make clients`.

Each is run as its users run it. Counts of requests and tokens must be the server's own, exactly; times as the client
saw them are shown beside the engine's record, and with `--times` must agree with it: within the lateness that the
server reports, what the machine let any sleeper oversleep meanwhile, and what a client needs for itself. Where they do
not, on a machine that is later than a client may be, the run is done again, and in the end it is told.
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
    """A server, or a fleet's door, on a free port, and the workers behind it."""

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
        return sum(
            float(line.rpartition(" ")[2])
            for port in self.workers
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
        """A chat, streamed."""
        before = self.target.record()
        script = (
            "from openai import OpenAI\n"
            f"client = OpenAI(base_url='{self.url}/v1', api_key='x', max_retries=0)\n"
            "stream = client.chat.completions.create(model='my-model', stream=True, max_tokens=9,\n"
            "    messages=[{'role': 'user', 'content': 'hello'}], stream_options={'include_usage': True})\n"
            "chunks = list(stream)\n"
            "assert chunks[-1].usage.completion_tokens == 9, chunks[-1]\n"
        )
        subprocess.run([clients / "python", "-c", script], check=True, timeout=120)
        after = self.target.record()
        assert after.output_tokens - before.output_tokens == 9
        print(f"openai, {self.target.name}: a chat of 9 tokens")

    def aiperf(self, clients: Path, flags: str) -> None:
        """One run of aiperf."""
        self._try(lambda: self._aiperf(clients, flags))

    def vllm(self, clients: Path, flags: str) -> None:
        """One run of vLLM's own bench."""
        self._try(lambda: self._vllm(clients, flags))

    def guidellm(self, clients: Path) -> None:
        """One run of guidellm."""
        self._try(lambda: self._guidellm(clients))

    def _try(self, run: Callable[[], bool]) -> None:
        """Once, or as often as the machine spoils the times."""
        if any(run() for _ in range(TRIES)):
            self.compared += 1
        else:
            self.spoilt += 1

    def _aiperf(self, clients: Path, flags: str) -> bool:
        before, folder = self.target.record(), self._new_folder()
        late_ms = self._run(
            f"{clients / 'aiperf'} profile --model my-model --url {self.url} --streaming {flags} "
            f"--tokenizer understudy/tok --extra-inputs ignore_eos:true --ui simple --artifact-dir {folder}"
        )
        (found,) = folder.rglob("profile_export_aiperf.json")
        told = json.loads(found.read_text())
        count, tokens = told["request_count"]["avg"], told["output_sequence_length"]["avg"]
        first, gap = told["time_to_first_token"]["avg"], told["inter_token_latency"]["avg"]
        seen = Seen(count, round(tokens * count), first, gap)
        return self._compare("aiperf", flags, seen, before, late_ms)

    def _vllm(self, clients: Path, flags: str) -> bool:
        """It sends one request more, to see whether anybody is there."""
        before, folder = self.target.record(), self._new_folder()
        late_ms = self._run(
            f"{clients / 'vllm'} bench serve --backend openai --base-url {self.url} --endpoint /v1/completions "
            f"--model understudy/tok --served-model-name my-model {flags} --ready-check-timeout-sec 20 "
            f"--save-result --result-dir {folder} --result-filename told.json"
        )
        told = json.loads((folder / "told.json").read_text())
        seen = Seen(told["completed"], told["total_output_tokens"], told["mean_ttft_ms"], told["mean_itl_ms"])
        return self._compare("vllm bench serve", flags, seen, before, late_ms, more_requests=1)

    def _guidellm(self, clients: Path) -> bool:
        before, folder = self.target.record(), self._new_folder()
        flags = f"--profile kind=concurrent,streams=4 --constraint kind=max_requests,count={REQUESTS}"
        late_ms = self._run(
            f"{clients / 'guidellm'} run --backend kind=openai_http,target={self.url},model=my-model "
            f"--tokenizer kind=hf_auto,model=understudy/tok {flags} "
            f"--data kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS} "
            f"--output kind=json,path={folder / 'told.json'} --disable-console-interactive"
        )
        told = json.loads((folder / "told.json").read_text())["benchmarks"][0]["metrics"]
        names = ("output_token_count", "time_to_first_token_ms", "inter_token_latency_ms")
        tokens, first, gap = (told[name]["successful"] for name in names)
        seen = Seen(told["request_totals"]["successful"], tokens["total_sum"], first["mean"], gap["mean"])
        return self._compare("guidellm", flags, seen, before, late_ms)

    def _new_folder(self) -> Path:
        self._runs += 1
        folder = self.folder / f"{self.target.name}-{self._runs}"
        folder.mkdir()
        return folder

    def _run(self, command: str) -> float:
        """How late the machine was meanwhile, in milliseconds."""
        environment = {
            **os.environ,
            "HF_HOME": str(self._home),
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with Machine() as machine:
            ran = subprocess.run(
                command.split(), timeout=900, env=environment, capture_output=True, text=True, check=False
            )
        if ran.returncode:
            raise SystemExit(f"{command}\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}\nexit {ran.returncode}")
        return machine.late_ms

    def _compare(
        self,
        client: str,
        flags: str,
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
        kind = next((word for word in ("mooncake", "timed_trace", "random") if word in flags), "concurrency")
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
            chat = f"--endpoint-type chat --concurrency 4 --request-count {REQUESTS} --isl 128 --osl {OUTPUT_TOKENS}"
            trace = "--endpoint-type completions --custom-dataset-type mooncake_trace --fixed-schedule"
            trace += f" --use-server-token-count --input-file {check.trace}"
            check.aiperf(clients, chat if check.target.name == "serve" else trace)
    if args.vllm is not None:
        lengths = f"--random-input-len 128 --random-output-len {OUTPUT_TOKENS}"
        clients = args.vllm.absolute()
        check.vllm(clients, f"--dataset-name random {lengths} --num-prompts {REQUESTS} --max-concurrency 4")
        check.vllm(
            clients,
            f"--dataset-name timed_trace --dataset-path {check.trace} --num-prompts {REQUESTS} "
            "--timed-trace-chunk-hash-size 512 --timed-trace-sec-multiplier 0.001",
        )
    if args.guidellm is not None:
        check.guidellm(args.guidellm.absolute())


if __name__ == "__main__":
    main()
