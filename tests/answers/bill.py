"""An auditor of bills: it reads the commands of a fleet as the engines' own parsers do, and counts their GPUs."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml

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
    "--quantization": "quantization",
    "--kv-cache-dtype": "kv",
}
SGLANG = {
    "--model-path": "model",
    "--tp-size": "tp",
    "--tp": "tp",
    "--tensor-parallel-size": "tp",
    "--pp-size": "pp",
    "--dp-size": "dp",
    "--dp": "dp",
    "--data-parallel-size": "dp",
    "--ep-size": "ep",
    "--ep": "ep",
    "--mem-fraction-static": "memory",
    "--page-size": "block",
    "--max-total-tokens": "tokens",
    "--quantization": "quantization",
    "--kv-cache-dtype": "kv",
}
SWITCHES = {"--enable-expert-parallel": "whole experts", "--enable-dp-attention": "dp attention"}
COUNTS = ("tp", "pp", "dp", "ep", "block", "blocks", "tokens")


@dataclass(frozen=True)
class Engine:
    """One engine as its command line describes it."""

    kind: str
    model: str
    given: dict[str, Any]

    @property
    def gpus(self) -> int:
        """GPUs that the command needs."""
        tp, pp, dp = (int(self.given.get(name, 1)) for name in ("tp", "pp", "dp"))
        if self.kind == "sglang" and self.given.get("dp attention"):
            return tp * pp  # ranks of attention lie within the tensor-parallel group
        return tp * pp * dp

    @property
    def blocks(self) -> int | None:
        """KV blocks that the command sets; None if the engine measures its memory."""
        if "tokens" in self.given:
            return int(self.given["tokens"]) // int(self.given.get("block", 1))
        return self.given.get("blocks")


def read_engine(words: list[str]) -> Engine:
    """Read the words of `vllm serve` or of SGLang's launcher; AssertionError for another program."""
    if words[:2] == ["vllm", "serve"]:
        kind, names, rest = "vllm", VLLM, words[2:]
    else:
        assert words[:3] == ["python", "-m", "sglang.launch_server"], words
        kind, names, rest = "sglang", SGLANG, words[3:]
    given: dict[str, Any] = {}
    free: list[str] = []
    while rest:
        word, rest = rest[0], rest[1:]
        if word in SWITCHES:
            given[SWITCHES[word]] = True
        elif word.startswith("-"):
            has_value = bool(rest) and not rest[0].startswith("--")
            value = rest[0] if has_value else "true"
            rest = rest[has_value:]
            name = names.get(word, word)
            given[name] = int(value) if name in COUNTS else value
        else:
            free.append(word)
    model = str(given.get("model", free[0] if free else ""))
    return Engine(kind, model, given)


def count_commands(lines: list[str]) -> tuple[int, list[Engine]]:
    """Count the GPUs of a fleet from the lines of a printed answer, which say how many times each command runs."""
    heads = [place for place, line in enumerate(lines) if line.startswith("Commands of the answer (")]
    assert heads, "no commands"
    head = lines[heads[0]]
    counts = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) x [\w-]+", head)]
    commands = [
        line.strip()
        for line in lines[heads[0] + 1 :]
        if line.strip().startswith(("vllm serve", "python -m sglang"))
    ][: len(counts)]
    engines = [read_engine(shlex.split(command)) for command in commands]
    assert len(engines) == len(counts), head
    return sum(count * engine.gpus for count, engine in zip(counts, engines, strict=True)), engines


def count_manifest(text: str) -> int:
    """Count the GPUs that a Kubernetes manifest asks for; those of every pod are those of its command."""
    total = 0
    for document in yaml.safe_load_all(text):
        if document["kind"] != "StatefulSet":
            continue
        (container,) = document["spec"]["template"]["spec"]["containers"]
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        words = list(map(str, container["command"]))
        assert read_engine(words).gpus == gpus, words
        total += int(document["spec"]["replicas"]) * gpus
    return total
