"""A reader of the commands that start vLLM and SGLang, as strict as the engines' own parsers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

VLLM = {
    "--tensor-parallel-size": "tp",
    "-tp": "tp",
    "--pipeline-parallel-size": "pp",
    "-pp": "pp",
    "--data-parallel-size": "dp",
    "-dp": "dp",
    "--gpu-memory-utilization": "memory",
    "--block-size": "block",
    "--num-gpu-blocks-override": "blocks",
    "--max-num-seqs": "max-num-seqs",
    "--max-num-batched-tokens": "max-num-batched-tokens",
    "--max-model-len": "max-model-len",
    "--long-prefill-token-threshold": "long-prefill-token-threshold",
    "--quantization": "quantization",
    "--kv-cache-dtype": "kv",
    "--scheduling-policy": "scheduling-policy",
    "--max-loras": "max-loras",
    "--kv-offloading-size": "kv-offloading-size",
    "--prefix-cache-retention-interval": "prefix-cache-retention-interval",
    "--speculative-config": "speculation",
    "--kv-transfer-config": "transfers",
    "--kv-events-config": "events",
    "--host": "host",
    "--port": "port",
}
VLLM_SWITCHES = {
    "--enable-expert-parallel": "whole experts",
    "--enable-lora": "lora",
    "--async-scheduling": "async",
    "--enable-prefix-caching": "prefix caching",
    "--enable-chunked-prefill": "chunked prefill",
    "--disable-hybrid-kv-cache-manager": "one pool",
}
"""Switches of vLLM; each has a form with `--no-` in front."""
SGLANG = {
    "--model-path": "model",
    "--tp-size": "tp",
    "--tensor-parallel-size": "tp",
    "--pp-size": "pp",
    "--dp-size": "dp",
    "--data-parallel-size": "dp",
    "--ep-size": "ep",
    "--ep": "ep",
    "--mem-fraction-static": "memory",
    "--page-size": "block",
    "--max-total-tokens": "tokens",
    "--max-running-requests": "max-num-seqs",
    "--context-length": "max-model-len",
    "--chunked-prefill-size": "chunked-prefill-size",
    "--max-prefill-tokens": "max-prefill-tokens",
    "--max-queued-requests": "max-queued-requests",
    "--schedule-policy": "scheduling-policy",
    "--schedule-conservativeness": "schedule-conservativeness",
    "--prefill-max-requests": "prefill-max-requests",
    "--radix-eviction-policy": "radix-eviction-policy",
    "--priority-scheduling-preemption-threshold": "preemption-threshold",
    "--retraction-policy": "retraction-policy",
    "--hicache-size": "hicache-size",
    "--hicache-write-policy": "hicache-write-policy",
    "--quantization": "quantization",
    "--kv-cache-dtype": "kv",
    "--kv-events-config": "events",
    "--host": "host",
    "--port": "port",
}
SGLANG_SWITCHES = {
    "--enable-dp-attention": "dp attention",
    "--enable-mixed-chunk": "mixed chunk",
    "--enable-hierarchical-cache": "hicache",
    "--disable-overlap-schedule": "no overlap",
    "--disable-radix-cache": "no cache",
    "--disable-hybrid-swa-memory": "one pool",
    "--enable-priority-scheduling": "priorities",
    "--schedule-low-priority-values-first": "low values first",
    "--disable-priority-preemption": "no preemption",
}
WHOLE = (
    *("tp", "pp", "dp", "ep", "block", "blocks", "tokens", "max-num-seqs", "max-num-batched-tokens"),
    *("max-model-len", "long-prefill-token-threshold", "max-loras", "chunked-prefill-size", "hicache-size"),
    *("max-prefill-tokens", "max-queued-requests", "prefill-max-requests", "preemption-threshold"),
    "port",
)
SHARES = ("memory",)
OBJECTS = ("speculation", "transfers", "events")


@dataclass(frozen=True)
class Engine:
    """One engine as its command line describes it."""

    kind: str
    model: str
    given: dict[str, Any]

    @property
    def gpus(self) -> int:
        """GPUs that the command needs."""
        tp, pp, dp = (self.given.get(name, 1) for name in ("tp", "pp", "dp"))
        if self.kind == "sglang" and self.given.get("dp attention"):
            return int(tp * pp)  # ranks of attention lie within the tensor-parallel group
        return int(tp * pp * dp)

    @property
    def blocks(self) -> int | None:
        """KV blocks that the command sets; None if the engine measures its memory."""
        if "tokens" in self.given:
            return int(self.given["tokens"] // self.given.get("block", 1))
        return self.given.get("blocks")


def read_engine(words: list[str]) -> Engine:
    """Read the words of `vllm serve` or of SGLang's launcher.

    AssertionError for another program, a flag that is unknown or given twice, a value that its flag cannot take, and
    more or less than one model.
    """
    if words[:2] == ["vllm", "serve"]:
        kind, names, switches, rest = "vllm", VLLM, VLLM_SWITCHES, words[2:]
    else:
        assert words[:3] == ["python", "-m", "sglang.launch_server"], words
        kind, names, switches, rest = "sglang", SGLANG, SGLANG_SWITCHES, words[3:]
    negative = {name.replace("--", "--no-", 1): key for name, key in switches.items() if kind == "vllm"}
    given: dict[str, Any] = {}
    models: list[str] = []
    while rest:
        word, rest = rest[0], rest[1:]
        if not word.startswith("-"):
            models.append(word)
            continue
        assert word in names or word in switches or word in negative, f"{kind} has no flag {word}"
        key = names.get(word) or switches.get(word) or negative[word]
        assert key not in given, f"{word} is given twice"
        if word in names:
            assert rest, f"{word} has no value"
            given[key] = read_value(key, rest[0])
            rest = rest[1:]
        else:
            given[key] = word in switches
    if "model" in given:
        models.append(given["model"])
    assert len(models) == 1, f"the models {models}"
    return Engine(kind, models[0], given)


def read_value(key: str, text: str) -> Any:
    """Read the value of a flag; AssertionError if it has the wrong type."""
    if key in WHOLE:
        assert text.isascii(), text
        assert text.removeprefix("-").isdigit(), f"{key}: {text}"
        return int(text)
    if key in SHARES:
        assert 0 < float(text) <= 1, f"{key}: {text}"
    elif key in OBJECTS:
        value = json.loads(text)
        assert isinstance(value, dict), f"{key}: {text}"
        return value
    else:
        assert not text.startswith("-"), f"{key}: {text}"
    return text
