"""Wrong commands of every verb: one line that names the flag and what is right, no traceback, exit code 2."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from understudy.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "examples" / "demo_trace.jsonl"
DEEP = "[" * 500 + "]" * 500
FILES = {
    "deep.yaml": f"pools: {DEEP}\n",
    "octal.yaml": "base_port: 010\n",
    "twice.yaml": "port: 8000\nport: 8001\n",
    "pools.yaml": "pools: 3\n",
    "text.yaml": "pools: [{workers: '3'}]\n",
    "flags.yaml": "pools: [{workers: 1, flags: [a]}]\n",
    "unknown.yaml": "pols: []\n",
    "port.yaml": "port: abc\n",
    "router.yaml": "routing: kv\nrouter: {nope: 1}\n",
    "empty.jsonl": "",
    "empty.csv": "",
    "deep.json": DEEP,
    "trace.jsonl": '{"timestamp": 0, "output_length": 1, "hash_ids": [1]}\n',
    "run.jsonl": '{"request_id": "a", "arrival_s": 0, "input_tokens": 9, "output_tokens": 2}\n',
    "report.json": "{}",
}


TOGETHER = [
    (
        "--max-num-active-seqs 9 --max-num-seqs 3",
        "--max-num-active-seqs=9 must not be above --max-num-seqs=3",
    ),
    (
        "--preemption-mode fifo --scheduling-policy priority",
        "fifo contradicts --scheduling-policy=priority, where",
    ),
    (
        "--long-prefill-token-threshold 9 --max-model-len 8",
        "-threshold=9 must not be above --max-model-len=8",
    ),
    ("--long-prefill-token-threshold 9 --set engine.max_model_len=8", "must not be above max_model_len=8"),
    ("--decode-speedup-ratio 2 --aic-nextn 2", "--decode-speedup-ratio contradicts --aic-nextn: speculation"),
    (
        "--planner-profile-data x.npz --timing polynomial",
        "--planner-profile-data and --timing both name a timing",
    ),
    (
        "--gpu-bandwidth-gbps 9 --gpu-tflops 9 --model Llama-3.1-8B",
        "needs --gpu-memory; give both",
    ),
    (
        "--gpu H100 --gpu-bandwidth-gbps 9 --gpu-tflops 9 --model Llama-3.1-8B",
        "--gpu and a data sheet (--gpu-bandwidth-gbps, --gpu-tflops) both define the GPU",
    ),
    (
        "--g3 100 --kv-bytes-per-token 100",
        "--g3 needs g2, because blocks pass through host memory; add a g2 tier",
    ),
    (
        "--expert-parallel-size 3 --model Qwen3-30B-A3B --gpu H100 --tensor-parallel-size 2",
        "the 2 GPUs of --tensor-parallel-size=2 and --data-parallel-size=1",
    ),
    (
        "--gpu-memory 24GB --gpu-weights 40GB --model Llama-3.1-8B",
        "a higher --gpu-memory-utilization or more --tensor-parallel-size",
    ),
    (
        "--routing kv --router-queue-policy lcfs",
        "orders the router's queue, which needs --router-queue-threshold; give it, or leave --router-queue-policy out",
    ),
]


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """What a command line says on standard error when it is refused."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> str:
        try:
            code = main(line.split())
        except SystemExit as left:
            code = int(str(left.code))
        told = capsys.readouterr()
        assert code == 2, told
        assert told.out == ""
        assert "Traceback" not in told.err
        assert "$" not in told.err
        return told.err

    return run


@pytest.mark.parametrize(
    ("line", "message"),
    [
        # ports
        ("serve --port 99999", "--port must be at most 65,535, got 99,999"),
        ("serve --port -1", "--port must be at least 0, got -1"),
        ("serve --port abc", "--port must be a whole number, got 'abc'"),
        ("fleet --port 70000", "--port must be at most 65,535"),
        ("fleet --base-port -5", "--base-port must be at least 0"),
        (
            "fleet --base-port 65000 --workers 1000",
            "--base-port must be at most 64,536 for 1,000 consecutive ports, got 65,000",
        ),
        ("fleet --workers 100000", "100,000 consecutive ports are needed, and there are 65,535"),
        (
            "fleet --workers 100000 --base-port 0",
            "100,000 consecutive ports are needed, and there are 65,535",
        ),
        ("serve --workers 4", "several workers behind one address are `understudy fleet --workers N`"),
        ("serve --routing kv", "several workers behind one address are `understudy fleet --routing POLICY`"),
        ("router --port 99999", "--port must be at most 65,535"),
        (
            "router --workers http://localhost:99999",
            "--workers: 'http://localhost:99999' is not the URL of an engine: Port out of range",
        ),
        ("events tap tcp://localhost:99999", "port 99999 of tcp://localhost:99999 exceeds 65535"),
        ("events tap nonsense", "endpoint: 'nonsense' is not known; write tcp://HOST:PORT"),
        (
            "events verify tcp://localhost:99999 --stream raw",
            "port 99999 of tcp://localhost:99999 exceeds 65535",
        ),
        ("events emit trace.jsonl --bind nonsense", "endpoint: 'nonsense' is not known"),
        (
            "events emit trace.jsonl --bind tcp://*:65535 --workers 3",
            "port 65535 + rank 2 of tcp://*:65535 exceeds 65535",
        ),
        # numbers
        ("serve --time-to-first-token -5", "--time-to-first-token must be a finite number from 0, got -5"),
        ("serve --startup-duration -1", "--startup-duration must be a finite number from 0, got -1"),
        ("serve --max-model-len 3x", "--max-model-len must be a number, as 32768, 32k or 32K, got '3x'"),
        ("fleet --workers 0", "--workers must be at least 1, got 0"),
        ("router --block-size 0", "--block-size must be at least 1, got 0"),
        ("router --silence-s nan", "--silence-s must be a finite number above 0, got nan"),
        ("events emit trace.jsonl --out o --wait-s -1", "--wait-s must be a finite number from 0, got -1"),
        ("events tap tcp://localhost:5 --seconds -1", "--seconds must be a finite number above 0"),
        ("events tap tcp://localhost:5 --count 0", "--count must be at least 1"),
        ("workload fanout -o x --count 0", "--count must be at least 1, got 0"),
        ("workload turns -o x --seed -1", "--seed must be at least 0, got -1"),
        ("workload turns -o x --count 99999999999", "--count must be at most 10,000,000"),
        ("predict run.jsonl --model Llama-3.1-8B --gpu H100 --threads 0", "--threads must be at least 1"),
        (
            "predict run.jsonl --model Llama-3.1-8B --gpu H100 --threads 2",
            "--threads is for a table of experiments",
        ),
        (
            "calibrate run.jsonl -o x --least-length 2",
            "--least-length must be a share above 0 and at most 1, got 2; for",
        ),
        ("convert trace.jsonl o --trace-block-size 0", "--trace-block-size must be at least 1, got 0"),
        (f"replay {TRACE} --routing kv --router-temperature -1", "--router-temperature must be a finite"),
        (f"replay {TRACE} --slo-ttft-ms 0", "--slo-ttft-ms must be a positive number of milliseconds"),
        (f"replay {TRACE} --g2-bytes 3x --model Llama-3.1-8B", "--g2-bytes: '3x' has an unknown unit"),
        ("serve --kv-cache-metrics --kv-cache-metrics-sample 7", "--kv-cache-metrics-sample is a share of"),
        ("serve --kv-cache-metrics-sample 0", "--kv-cache-metrics-sample is a share of blocks, above 0 and"),
        # what does nothing without another
        ("serve --response-file trace.jsonl", "--response-file needs --response-mode recorded"),
        (
            "serve --response-mode echo --response-file trace.jsonl",
            "--response-file needs --response-mode recorded",
        ),
        (f"replay {TRACE} --max-loras 4", "--max-loras needs --enable-lora"),
        (f"replay {TRACE} --set engine.max_loras=4", "max_loras needs enable_lora"),
        (f"replay {TRACE} --aic-mtp-seed 5", "--aic-mtp-seed needs --aic-nextn, the number of draft tokens"),
        (
            f"replay {TRACE} --long-prefill-token-threshold-adaptive",
            "--long-prefill-token-threshold-adaptive needs --long-prefill-token-threshold, which it raises",
        ),
        (
            f"replay {TRACE} --vllm-version 0.25 --long-prefill-token-threshold-adaptive",
            "--long-prefill-token-threshold-adaptive is not a setting of vLLM 0.25; choose 0.31 or newer",
        ),
        (f"replay {TRACE} --vllm-version 0.22 --watermark 0.1", "--watermark is not a setting of vLLM 0.22"),
        (
            f"replay {TRACE} --routing kv --router-queue-policy wspt",
            "--router-queue-policy=wspt orders the router's queue, which needs",
        ),
        (
            f"replay {TRACE} --quiet --gpu H100 --model Llama-3.1-8B --no-charge-first-token",
            "--no-charge-first-token needs a timing model that times decoding separately; this one times whole steps",
        ),
        *(
            (
                f"replay {TRACE} --quiet --engine qwen3 --step-times run.jsonl {flag}",
                f"{flag.split()[0]} has no effect on --engine qwen3; leave it out",
            )
            for flag in (
                *(
                    "--threads 2",
                    "--no-fast-forward",
                    "--synthesize-tokens",
                    "--route-rejected",
                    "--seed 1",
                    "--seed 0",
                ),
            )
        ),
        (
            f"replay {TRACE} --quiet --online --model Qwen3-30B-A3B --gpu RTX-PRO-6000 --data-parallel-size 2",
            "--data-parallel-size makes ranks that step together, which only offline runs support; leave out",
        ),
        (
            f"replay {TRACE} --concurrency 3 --set load.arrival_rate_scale=2",
            "load.arrival_rate_scale is not known; known are concurrency, turnaround_ms\n",
        ),
        # files
        ("fleet --fleet-config deep.yaml", "deep.yaml: lists or settings are nested too deeply"),
        ("fleet --fleet-config octal.yaml", "octal.yaml:1: 010 is an octal"),
        ("fleet --fleet-config twice.yaml", "twice.yaml:2: port is given twice"),
        ("fleet --fleet-config pools.yaml", "pools must be a list of one or more"),
        ("fleet --fleet-config text.yaml", "workers must be a whole number, got '3'"),
        ("fleet --fleet-config flags.yaml", "pools: flags must be a mapping of names to values"),
        ("fleet --fleet-config unknown.yaml", "pols is not known; known are routing, router, base_port"),
        ("fleet --fleet-config port.yaml", "port must be a whole number, got 'abc'"),
        ("fleet --fleet-config router.yaml", "router.nope is not known; known are overlap_score_credit"),
        ("serve --config deep.yaml", "deep.yaml: lists or settings are nested too deeply"),
        ("serve --config octal.yaml", "octal.yaml:1: 010 is an octal"),
        (f"serve --tiers {DEEP}", "--tiers must be a JSON object"),
        ("calibrate check run.jsonl --timing deep.yaml", "deep.yaml: lists or settings are nested too"),
        ("events emit trace.jsonl --out trace.jsonl", "--out would overwrite trace.jsonl, which is read for"),
        ("events emit trace.jsonl --out nodir/x", "nodir/x: the folder does not exist"),
        ("events tap tcp://localhost:5 --record nodir/x", "nodir/x: the folder does not exist"),
        ("events verify empty.jsonl --stream raw", "empty.jsonl: no message arrived; nothing was verified"),
        ("workload fanout -o nodir/x", "nodir/x: the folder does not exist"),
        ("convert empty.csv o --format azure", "column TIMESTAMP is missing; the file is empty"),
        (
            "convert trace.jsonl o --format aiperf",
            "metadata is missing; not a record of AIPerf; the file looks",
        ),
        ("convert trace.jsonl o --format openai", "looks like format mooncake (--format mooncake)"),
        ("compare report.json deep.json", "report.json is not a report"),
        # what is called by its flag, though the setting has another name
        (f"replay {TRACE} --no-kv-events", "--no-kv-events is for routing kv, but routing is round_robin"),
        (f"replay {TRACE} --keep-ids", "--keep-ids is not an option of format mooncake; known are"),
        (
            f"replay {ROOT}/examples/logs/sharegpt.json --format sharegpt",
            "has no timestamps; replay it closed loop (--concurrency N",
        ),
        (
            'serve m --tiers {"tiers":[{"tier":"g2","blocks":4096}]}',
            "--tiers: g2 needs the KV bytes per token; give kv_bytes_per_token, or model: a known name or the path of",
        ),
        (
            'serve m --tiers {"tiers":[{"tier":"g3","blocks":4096}]}',
            "--tiers: g3 needs g2, because blocks pass through host memory; add a g2 tier\n",
        ),
        ('serve m --tiers {"model":"nonsense"}', "--tiers: model needs a tier: give tiers"),
        ('serve m --tiers {"tiers":[],"model":"nonsense"}', "--tiers: model 'nonsense' is neither a known"),
        # choices
        ("fleet --routing kv --router nonsense", "--router must be a mapping"),
        (
            'fleet --routing kv --router {"queue_policy":"x"}',
            "router.queue_policy must be one of fcfs, lcfs, wspt; got 'x'",
        ),
        ("router --router [1]", "--router must be a JSON object"),
        (f"replay {TRACE} --event-delay-ms 5", "--event-delay-ms is for routing kv, but routing is round"),
        (
            f"replay {TRACE} --no-kv-events --router-temperature 1 --event-loss 0.5 --set router.queue_threshold=2",
            "--event-loss, --router-temperature, --no-kv-events, queue_threshold are for routing kv, but routing is",
        ),
        (
            'fleet --router {"temperature":1,"event_loss":0.5}',
            "temperature, event_loss are for --routing kv, not",
        ),
        # a seed of nothing
        (
            f"replay {TRACE} --workers 2 --seed 3",
            "--seed has no effect: routing round_robin is not random; leave it out, or route by random, power_of",
        ),
        (
            f"replay {TRACE} --seed 0 --online --routing least_loaded",
            "--seed has no effect: routing least_loaded",
        ),
        (
            f"replay {TRACE} --seed 0 --routing mine.py:Mine",
            "--seed has no effect: routing mine.py:Mine is not random",
        ),
        (
            "router --routing session_affinity --seed 1",
            "--seed has no effect: routing session_affinity is not random",
        ),
        (
            "qwen3 generate m --prompt-tokens 1 --seed 3",
            "--seed needs --temperature, without which",
        ),
        (
            "qwen3 generate m --prompt-tokens 1 --top-p 0.5",
            "--top-p needs --temperature, without which",
        ),
        ("qwen3 bench m --seed 3", "--seed needs --record, which runs a workload; leave it out"),
        (
            "qwen3 bench m --host-blocks 3",
            "--host-blocks needs --record, which runs a workload; leave it out",
        ),
        (
            "qwen3 bench m --record o --context 3",
            "--context is for the table that is measured without --record",
        ),
        # two that do not go together, each by its flag
        *((f"replay {TRACE} {flags}", message) for flags, message in TOGETHER),
        (
            "serve m --max-num-seqs 4000 --max-num-batched-tokens 100",
            "--max-num-seqs=4000 must not be above --max-num-batched-tokens=100: every",
        ),
        (
            'fleet --routing kv --router {"queue_policy":"lcfs"}',
            "orders the router's queue, which needs queue_threshold; give it, or leave queue_policy out",
        ),
    ],
)
def test_a_wrong_command_is_refused_by_name(refused: Callable[[str], str], line: str, message: str) -> None:
    said = refused(line)
    assert message in said
    assert said.count("\n") == 1


def test_events_and_workloads_go_to_standard_output_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["events", "emit", str(TRACE), "--num-gpu-blocks", "256", "--out", "-"]) == 0
    told = capfdbinary.readouterr()
    assert all(line.startswith(b"{") for line in told.out.splitlines())
    assert b"messages of 1 publisher," in told.err
    heard = tmp_path / "heard.jsonl"
    heard.write_bytes(told.out)
    assert main(["events", "verify", str(heard), "--stream", "raw"]) == 0
    capfdbinary.readouterr()

    assert main(["workload", "fanout", "--count", "2", "-o", "-"]) == 0
    made = capfdbinary.readouterr()
    assert b"16 requests" in made.err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(made.out)))
    assert main(["replay", "-", "--digest"]) == 0


def test_settings_files_may_be_utf16_or_begin_with_a_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = []
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        config = tmp_path / f"{encoding}.yaml"
        config.write_bytes("workers: 2\nengine: {num_gpu_blocks: 512}\n".encode(encoding))
        assert main(["replay", str(TRACE), "--config", str(config), "--digest"]) == 0
        digests.append(capsys.readouterr().out)
    assert len(set(digests)) == 1
