"""An auditor of bills: it counts the GPUs of the commands of a fleet, and of its Kubernetes manifest."""

from __future__ import annotations

import re
import shlex

import yaml

from answers.engine_commands import Engine, read_engine


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
