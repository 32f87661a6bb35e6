"""Write the sample logs in logs/, one of each format that `understudy convert` reads."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

QUESTIONS = ("How tall is it?", "Who built it, and when?", "What does it cost to see it?", "Say it in verse.")
TOPICS = ("the lighthouse", "the old bridge", "the clock tower")
SYSTEM = "You are a guide to a small town. Answer briefly, name your source, and never invent a date. " * 6


def requests(count: int) -> list[dict[str, object]]:
    """Return a request log: chats about a few topics with one system prompt, some with an earlier turn."""
    draw = random.Random(1)
    rows: list[dict[str, object]] = []
    for number in range(count):
        messages = [{"role": "system", "content": SYSTEM}]
        topic = TOPICS[number % len(TOPICS)]
        messages.append(
            {"role": "user", "content": f"Tell me about {topic}. " + "Start at the beginning. " * 8}
        )
        if number % 2:
            messages.append({"role": "assistant", "content": f"It stands by the water, {topic}. " * 12})
            messages.append({"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]})
        prompt_tokens = sum(len(message["content"]) for message in messages) // 4
        rows.append(
            {
                "id": f"request-{number}",
                "created": 1_700_000_000 + number * 0.4,
                "messages": messages,
                "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": draw.randint(20, 200)},
            }
        )
    return rows


def main(folder: Path) -> None:
    """Write a log of every format into `folder`."""
    draw = random.Random(2)
    lengths = [(draw.randint(200, 3000), draw.randint(10, 300)) for _ in range(40)]
    jsonl: dict[str, list[dict[str, object]]] = {
        "requests.jsonl": requests(60),
        "profile_export.jsonl": [
            {
                "metadata": {
                    "request_start_ns": 1_700_000_000_000_000_000 + number * 250_000_000,
                    "benchmark_phase": "profiling",
                    "was_cancelled": False,
                },
                "metrics": {
                    "input_sequence_length": {"value": prompt, "unit": "tokens"},
                    "output_sequence_length": {"value": output, "unit": "tokens"},
                },
                "error": None,
            }
            for number, (prompt, output) in enumerate(lengths)
        ],
        "mooncake.jsonl": [
            {
                "timestamp": number * 300,
                "input_length": prompt,
                "output_length": output,
                "hash_ids": [0, *range(100 * number + 1, 100 * number - (-prompt // 512))],
            }
            for number, (prompt, output) in enumerate(lengths)
        ],
    }
    for name, rows in jsonl.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = [
        {
            "id": f"chat-{number}",
            "conversations": [
                {"from": "human", "value": f"Tell me about {topic}. " * 10},
                {"from": "gpt", "value": f"It stands by the water, {topic}. " * 20},
                {"from": "human", "value": QUESTIONS[number % len(QUESTIONS)] * 3},
                {"from": "gpt", "value": "Nobody wrote it down. " * 8},
            ],
        }
        for number, topic in enumerate(TOPICS * 3)
    ]
    (folder / "sharegpt.json").write_text(json.dumps(chat, indent=1) + "\n")
    bench = {
        "backend": "vllm",
        "completed": len(lengths),
        "input_lens": [prompt for prompt, _ in lengths],
        "output_lens": [output for _, output in lengths],
        "start_times": [1000.0 + number * 0.25 for number in range(len(lengths))],
        "errors": ["" for _ in lengths],
    }
    (folder / "vllm_bench.json").write_text(json.dumps(bench, indent=1) + "\n")
    azure = [
        f"2023-11-16 18:{15 + number // 60:02}:{number % 60:02}.6805900,{prompt},{output}"
        for number, (prompt, output) in enumerate(lengths)
    ]
    (folder / "azure.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *azure]) + "\n")
    burst = [
        f"{5 + number},ChatGPT,{prompt},{output},{prompt + output},Conversation log"
        for number, (prompt, output) in enumerate(lengths)
    ]
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    (folder / "burstgpt.csv").write_text("\n".join([header, *burst]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "logs")
