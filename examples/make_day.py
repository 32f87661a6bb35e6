"""Write a request log to size a fleet for: python examples/make_day.py requests.jsonl [CHATS].

A support desk, open for twelve hours: every chat has one system prompt, one of 60 manuals, and one to five questions,
each after the answer to the one before. A quarter of the chats begin within the same hour. The model thinks before it
answers; its thoughts are generated, but not sent back with the next question.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SYSTEM = "You answer questions about machines. Quote the manual, name the page, and never guess. " * 12
WORDS = (
    "valve",
    "pump",
    "filter",
    "hose",
    "belt",
    "gear",
    "motor",
    "shaft",
    "sensor",
    "panel",
    "switch",
    "fuse",
)
HOURS = 12
PEAK_HOUR = 7


def write_text(draw: random.Random, words: int) -> str:
    """Return random words."""
    return " ".join(draw.choices(WORDS, k=words))


def make_requests(chats: int) -> list[dict[str, object]]:
    """Return the rows of the log, by time."""
    draw = random.Random(7)
    manuals = [write_text(draw, draw.randint(300, 2000)) for _ in range(60)]
    rows: list[dict[str, object]] = []
    for chat in range(chats):
        manual = manuals[min(int(draw.expovariate(0.08)), 59)]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": manual}]
        hour = PEAK_HOUR + draw.random() if draw.random() < 0.25 else HOURS * draw.random()
        time_s = 3600 * hour
        for turn in range(draw.randint(1, 5)):
            messages.append({"role": "user", "content": f"Chat {chat}: {write_text(draw, 30)}?"})
            answer = write_text(draw, draw.randint(40, 300))
            thoughts = draw.randint(1000, 6000)
            rows.append(
                {
                    "id": f"chat-{chat}-{turn}",
                    "created": round(1_700_000_000 + time_s, 3),
                    "messages": list(messages),
                    "usage": {"completion_tokens": thoughts + len(answer) // 4},
                }
            )
            messages.append({"role": "assistant", "content": answer})
            time_s += draw.uniform(60, 240)
    return sorted(rows, key=lambda row: str(row["created"]))


def main() -> None:
    """Write the log that the command line names."""
    chats = int(sys.argv[2]) if len(sys.argv) > 2 else 480
    rows = make_requests(chats)
    Path(sys.argv[1]).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
