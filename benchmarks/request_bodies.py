"""Reading of request bodies: ours (msgspec and tables of fields) against pydantic v2 models of the same fields.

    python benchmarks/request_bodies.py [--seconds 0.2] [--rounds 5] [--vllm] [--json [FOLDER]]

Each reader checks a completion of 1 KB, a chat of 1 KB and a completion of 32,768 token ids; the readers alternate.
FastAPI decodes with json.loads and then validates, as in vLLM; pydantic can also validate the bytes. The peer's models
check types only; ours also checks contradictions and collects the sampling parameters. --vllm adds vLLM's own models,
which check contradictions too, and needs its environment. pydantic is optional; without it only ours is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal

from harness.publish import add_json_flag, publish
from understudy.http import Request
from understudy.http.parsing import RequestParser
from understudy.server.api.body_checks import check_chat, check_completion
from understudy.server.api.fields import Fields, read_body
from understudy.server.api.prompts import MAX_PROMPTS, read_messages, read_prompts
from understudy.server.api.sampling import read_sampling
from understudy.server.api.schema import CHAT, COMPLETION, Shape
from understudy.server.api.type_checks import check_types
from understudy.server.release import NEWEST

if TYPE_CHECKING:
    from collections.abc import Callable


COMMON = {
    "model": "m",
    "max_tokens": 128,
    "temperature": 0.7,
    "top_p": 0.9,
    "seed": 7,
    "stream": True,
    "stop": ["x"],
}
TEXT = "The quick brown fox jumps over the lazy dog. "
MESSAGES = [{"role": role, "content": TEXT * 4} for role in ("system", "user", "assistant", "user")]
BODIES: dict[str, dict[str, Any]] = {
    "completion, 1 KB of text": {**COMMON, "prompt": TEXT * 20},
    "chat, 1 KB in 4 messages": {**COMMON, "messages": MESSAGES},
    "completion, 32,768 token ids": {
        **COMMON,
        "prompt": [number * 7919 % 128_000 for number in range(32_768)],
    },
}


CHAT_PATH = "/v1/chat/completions"


def receive(path: str, body: bytes) -> Request:
    """Return a request as the server's parser builds it."""
    parser = RequestParser(1 << 30, 100)
    head = b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    parser.feed(head % (path.encode(), len(body)) + body)
    return parser.requests.popleft()


def read_ours(request: Request) -> None:
    """Read a request as the server does, up to tokenization."""
    body = read_body(Request(request.head, request.body))  # a request decodes its body once
    fields = Fields(body)
    chat = request.path == CHAT_PATH
    if chat:
        check_chat(body)
        read_messages(fields, "messages", "m")
        check_types(fields, CHAT)
    else:
        check_completion(body, MAX_PROMPTS)
        check_types(fields, COMPLETION)
        read_prompts(fields, NEWEST)
    fields.done()
    read_sampling(fields, chat=chat)


def build_models(pydantic: Any) -> dict[bool, Any]:
    """Build pydantic models of the same fields, for completions (False) and chats (True)."""
    token: Any = Annotated[int, pydantic.Field(ge=0)]
    special: dict[str, Any] = {
        "prompt": list[token] | list[list[token]] | str | list[str] | None,
        "messages": list[dict[str, Any]],
        "stop": str | list[str] | None,
    }
    kinds: dict[str, Any] = {
        "str": str,
        "int": int,
        "float": float,
        "bool": bool,
        "ints": list[int],
        "strs": list[str],
        "floats by name": dict[str, float],
        "object": dict[str, Any],
        "objects": list[dict[str, Any]],
        "any": Any,
    }

    def describe(name: str, shape: Shape) -> Any:
        if name in special:
            return special[name], None
        kind: Any = Literal[shape.choices] if shape.choices else kinds[shape.kind]
        kind = kind | None if shape.null and kind is not Any else kind
        limits = {"ge": shape.least, "le": shape.most}
        return kind, pydantic.Field(
            None, **{name: limit for name, limit in limits.items() if limit is not None}
        )

    return {
        chat: pydantic.create_model("Body", **{name: describe(name, shape) for name, shape in schema.items()})
        for chat, schema in ((False, COMPLETION), (True, CHAT))
    }


def list_readers(*, vllm: bool) -> tuple[dict[str, Callable[[Request], object]], list[str]]:
    """List the readers by name, pydantic's if it is installed and vLLM's if requested, and the peers' versions."""
    readers: dict[str, Callable[[Request], object]] = {"ours, msgspec": read_ours}
    peers: list[str] = []
    try:
        pydantic: Any = import_module("pydantic")
    except ImportError:
        print("pydantic is not installed; only ours is measured")
        return readers, peers
    peers.append(f"pydantic {pydantic.VERSION}")
    models = build_models(pydantic)

    def model_of(request: Request) -> Any:
        return models[request.path == CHAT_PATH]

    readers["pydantic, json.loads first"] = lambda request: model_of(request).model_validate(
        json.loads(request.body)
    )
    readers["pydantic, from bytes"] = lambda request: model_of(request).model_validate_json(request.body)
    if vllm:
        peers.append(f"vLLM {import_module('vllm').__version__}")
        rooms = ("completion", "CompletionRequest"), ("chat_completion", "ChatCompletionRequest")
        protocols = [import_module(f"vllm.entrypoints.openai.{room}.protocol") for room, _ in rooms]
        theirs: list[Any] = [getattr(one, kind) for one, (_, kind) in zip(protocols, rooms, strict=True)]
        readers["vLLM's own models"] = lambda request: theirs[request.path == CHAT_PATH].model_validate(
            json.loads(request.body)
        )
    return readers, peers


def measure(read: Callable[[Request], object], request: Request, seconds: float) -> float:
    """Return CPU microseconds per body."""
    count, began = 0, time.process_time()
    while (spent := time.process_time() - began) < seconds:
        for _ in range(10):
            read(request)
        count += 10
    return 1e6 * spent / count


def main() -> None:
    """Measure all readers on all bodies and print medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.2, help="CPU seconds per reader, body and round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; medians are printed")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM's own models too")
    add_json_flag(parser)
    args = parser.parse_args()
    requests = {
        name: receive(CHAT_PATH if "messages" in body else "/v1/completions", json.dumps(body).encode())
        for name, body in BODIES.items()
    }
    readers, peers = list_readers(vllm=args.vllm)
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds):
        for body, request in requests.items():
            for reader, read in readers.items():
                taken.setdefault((body, reader), []).append(measure(read, request, args.seconds))
    measured: dict[str, dict[str, float]] = {body: {} for body in requests}
    for (body, reader), times in taken.items():
        measured[body][reader] = statistics.median(times)
    publish("request_bodies", measured, args.json, peers=peers)


if __name__ == "__main__":
    main()
