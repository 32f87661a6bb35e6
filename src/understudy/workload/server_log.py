"""Reader of the logs that servers of vLLM and SGLang print: one request per line, with times, lengths and text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from understudy.errors import InvalidArgument
from understudy.workload.files import open_trace
from understudy.workload.lengths import NO_CONTENT
from understudy.workload.table import build_lengths
from understudy.workload.text import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from understudy.workload.workload import Workload

_HEAD = (
    r"(?P<day>\d\d-\d\d) (?P<time>\d\d:\d\d:\d\d)\b.*?Received request (?P<id>\S+?): "
    r"(?:prompt: (?P<prompt>.*), )?params: "
)
_VLLM = re.compile(_HEAD + r"(?P<params>.*?), prompt_token_ids: (?P<ids>None|\[[\d, ]*\])")
_VLLM_SHORT = re.compile(_HEAD + r"(?P<params>.*)")
_SGLANG = re.compile(
    r"\[(?P<stamp>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\].*?Finish: .*'meta_info': \{(?P<meta>.*)\}"
)
_MOST = re.compile(r"\bmax_tokens=(\d+)")
_E2E = re.compile(r"'e2e_latency': ([\d.]+)")
SERVER_LOG = r"Received request \S+?: .*params: SamplingParams\(|Finish: obj=\w+\("
"""Pattern of a line of either server."""


@dataclass(frozen=True, slots=True)
class _Request:
    time_ns: int
    prompt: int
    output: int
    is_estimated: bool = False
    is_limit: bool = False


def read_server_log(path: Path) -> Workload:
    """Read a log of `vllm serve` (--enable-log-requests) or of SGLang (--log-requests).

    vLLM names the prompt and the most tokens of an output, which stand for those that were generated; without token ids
    the prompt's length is estimated from its text, which the server may have cut. SGLang prints both lengths when a
    request finishes. Prompts share nothing. Errors: InvalidArgument if no line is of either kind.
    """
    requests = list(_read_requests(path))
    if not requests:
        raise InvalidArgument(
            f"{path}: no line is a request of vLLM ('Received request', --enable-log-requests) or of SGLang "
            "('Finish:', --log-requests); give another log"
        )
    notes = [NO_CONTENT]
    estimated, limits = sum(one.is_estimated for one in requests), sum(one.is_limit for one in requests)
    if estimated:
        notes.append(
            f"{estimated:,} prompt lengths are estimated from text ({BYTES_PER_TOKEN:g} bytes per token), which the "
            "server may have cut (--max-log-len)"
        )
    if limits:
        notes.append(
            f"{limits:,} outputs are as long as their max_tokens: this log lacks the generated tokens"
        )
    return build_lengths(
        [one.time_ns for one in requests],
        [one.prompt for one in requests],
        [one.output for one in requests],
        has_arrivals=True,
        notes=notes,
    )


def _read_requests(path: Path) -> Iterator[_Request]:
    with open_trace(path) as file:
        for number, line in enumerate(file, 1):
            text = line.decode("utf-8", "replace")
            where = f"{path}:{number}"
            if (
                "Received request" in text
                and (found := _VLLM.search(text) or _VLLM_SHORT.search(text)) is not None
            ):
                yield _read_vllm(found, where)
            elif "Finish:" in text and (found := _SGLANG.search(text)) is not None:
                request = _read_sglang(found, where)
                if request is not None:
                    yield request


def _read_vllm(found: re.Match[str], where: str) -> _Request:
    parts = found.groupdict()
    most = _MOST.search(parts["params"])
    if most is None:
        raise InvalidArgument(
            f"{where}: max_tokens is missing, so the length of the output is not known; leave it out"
        )
    # The log has no year; a leap year has every day.
    moment = _parse(f"2000-{parts['day']} {parts['time']}", where)
    ids = parts.get("ids")
    if ids and ids != "None":
        return _Request(moment, max(1, ids.count(",") + 1), int(most[1]), is_limit=True)
    if not parts["prompt"]:
        raise InvalidArgument(
            f"{where}: neither the prompt nor its tokens are logged; run vllm serve with --max-log-len"
        )
    size = len(parts["prompt"].encode()) - 2  # without quotes
    return _Request(
        moment, max(1, round(size / BYTES_PER_TOKEN)), int(most[1]), is_estimated=True, is_limit=True
    )


def _read_sglang(found: re.Match[str], where: str) -> _Request | None:
    """Return a finished request, at the time of its arrival; None for one without output."""
    lengths = {
        name: re.search(rf"'{name}': (\d+)", found["meta"]) for name in ("prompt_tokens", "completion_tokens")
    }
    prompt, output = lengths["prompt_tokens"], lengths["completion_tokens"]
    if prompt is None or output is None or not int(prompt[1]) or not int(output[1]):
        return None
    end_ns = _parse(found["stamp"], where)
    latency = _E2E.search(found["meta"])
    start_ns = end_ns - (0 if latency is None else round(float(latency[1]) * 1e9))
    return _Request(start_ns, int(prompt[1]), int(output[1]))


def _parse(text: str, where: str) -> int:
    try:
        moment = datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    except ValueError:
        raise InvalidArgument(f"{where}: {text!r} is not a time") from None
    return int(moment.timestamp()) * 10**9
