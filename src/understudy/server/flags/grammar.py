"""Reads a command line as vLLM does.

`-` and `_` are equal in names; booleans have `--no-x` (and since 0.33 `--disable-x` for `--enable-x`, and the other way
round); `32k` is a number; a flag that takes JSON can be given in parts
(`--kv-events-config.endpoint tcp://*:9`); lists take all values up to the next flag; `--config FILE` holds flags by
name, which those of the command line override.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from understudy.errors import ConfigError
from understudy.plain_numbers import parse_number, parse_whole_number
from understudy.server.release import NEWEST, RELEASES

if TYPE_CHECKING:
    from collections.abc import Iterable

_SIZE = re.compile(r"^(\d+(?:\.\d+)?)([kKmMgGtT]?)$")
_SCALE = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
_KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "size": "a number, as 32768, 32k or 32K",
    "json": "JSON",
}
_GONE = {
    "disable-log-requests": "requests are not logged unless --enable-log-requests says so",
    "swap-space": "vLLM no longer swaps",
    "use-v2-block-manager": "there is one block manager",
    "num-scheduler-steps": "vLLM no longer schedules several steps at once",
}
_RENAMED = {"speedup": "--clock-speed"}
_ELSEWHERE = {
    "workers": "several workers behind one address are `understudy fleet --workers N`",
    "routing": "several workers behind one address are `understudy fleet --routing POLICY`",
}
_OF_SGLANG = "--sglang-version"
"""Our flag among SGLang's only."""
_SGLANG_NAMES = {
    "block-size": "--page-size",
    "num-gpu-blocks-override": "--max-total-tokens",
    "max-num-seqs": "--max-running-requests",
    "max-num-batched-tokens": "--chunked-prefill-size",
    "max-model-len": "--context-length",
    "no-enable-prefix-caching": "--disable-radix-cache",
    "gpu-memory-utilization": "--mem-fraction-static",
    "seed": "--random-seed",
    "tokenizer": "--tokenizer-path",
}
"""SGLang's counterparts of vLLM's flags."""


_INVERSE = {"enable": "--disable-", "disable": "--enable-"}


class Flag(msgspec.Struct, frozen=True):
    """One flag. `names` have their dashes; the first is the main one."""

    names: list[str]
    kind: Literal["bool", "int", "float", "size", "json", "str", "any"] = "any"
    many: bool = False
    optional: bool = False
    choices: list[Any] | None = None

    @property
    def name(self) -> str:
        """Main name without leading dashes."""
        return self.names[0].lstrip("-")

    def negates(self, name: str) -> bool:
        """Return True if this name of the flag sets it to false."""
        inverse = _INVERSE.get(self.names[0].split("-")[2])
        return name.startswith(("--no-", inverse) if inverse else "--no-")


class CommandLine(msgspec.Struct):
    """A parsed command line: values by the flag's name, and positional words."""

    values: dict[str, Any] = msgspec.field(default_factory=dict)
    words: list[str] = msgspec.field(default_factory=list)


@cache
def vllm_flags(version: str = NEWEST.version) -> dict[str, Flag]:
    """Return the flags of a release in `RELEASES`, by every name."""
    text = files(__package__).joinpath(f"vllm-{version}.jsonl").read_text(encoding="utf-8")
    flags = [msgspec.json.decode(line, type=Flag) for line in text.splitlines()]
    return {name: flag for flag in flags for name in flag.names}


@cache
def sglang_flags() -> dict[str, Flag]:
    """Return the flags of SGLang 0.5.23, by every name."""
    text = files(__package__).joinpath("sglang-0.5.23.jsonl").read_text(encoding="utf-8")
    flags = [msgspec.json.decode(line, type=Flag) for line in text.splitlines()]
    return {name: flag for flag in flags for name in flag.names}


def read_command_line(arguments: list[str], flags: dict[str, Flag]) -> CommandLine:
    """Parse a command line. ConfigError names a flag that is unknown, removed, or has an invalid value."""
    line = CommandLine()
    rest = _with_config_file(arguments, flags)
    place = 0
    while place < len(rest):
        word = rest[place]
        place += 1
        if word == "--":
            line.words += rest[place:]
            break
        if not word.startswith("-") or _is_number(word):
            line.words.append(word)
            continue
        name, equals, inline = word.partition("=")
        name, _, part = _normal(name).partition(".")
        flag = flags.get(name)
        if flag is None:
            raise _unknown(name, flags)
        negated = flag.kind == "bool" and flag.negates(name)
        taken: list[str] = [inline] if equals else []
        if flag.kind == "bool" and not equals:
            line.values[flag.name] = not negated
            continue
        if not equals:
            while place < len(rest) and (not rest[place].startswith("-") or _is_number(rest[place])):
                if taken and not flag.many:
                    break
                taken.append(rest[place])
                place += 1
        if not taken and not flag.optional:
            raise ConfigError(f"{name} needs a value")
        _set(line, flag, name, part, taken, negated)
    return line


def _set(line: CommandLine, flag: Flag, name: str, part: str, taken: list[str], negated: bool) -> None:
    if part:
        held = line.values.setdefault(flag.name, {})
        if not isinstance(held, dict):
            raise ConfigError(f"{name}: give JSON or parts of it, not both a value and parts")
        *path, last = part.replace("-", "_").split(".")
        for step in path:
            held = held.setdefault(step, {})
        held[last] = _loose(taken[0] if taken else "")
        return
    values = [_value(flag, name, text) for text in taken]
    if flag.kind == "bool":
        line.values[flag.name] = values[0] != negated
    elif flag.many:
        line.values[flag.name] = values
    else:
        value = values[0] if values else None
        held = line.values.get(flag.name)
        line.values[flag.name] = (
            {**held, **value} if isinstance(held, dict) and isinstance(value, dict) else value
        )


def _value(flag: Flag, name: str, text: str) -> Any:
    if flag.choices is not None and text not in map(str, flag.choices):
        raise ConfigError(f"{name} must be one of {', '.join(map(str, flag.choices))}; got {text!r}")
    try:
        match flag.kind:
            case "bool":
                return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
            case "int":
                return parse_whole_number(text)
            case "float":
                number = parse_number(text)
                if math.isnan(number):
                    raise ValueError(text)
                return number
            case "size":
                return "auto" if text in ("auto", "-1") else read_size(text)
            case "json":
                return json.loads(text) if text.startswith(("{", "[")) else _loose(text)
            case "str":
                return text
    except (ValueError, KeyError):
        raise ConfigError(f"{name} must be {_KINDS[flag.kind]}, got {text!r}") from None
    except RecursionError:
        raise ConfigError(f"{name}: lists or settings are nested too deeply") from None
    return _loose(text)


def read_size(text: str) -> int:
    """Parse a size: 32k = 32000, 32K = 32768. ValueError if it is not a number."""
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(text)
    return int(float(match[1]) * _SCALE[match[2]])


def _loose(text: str) -> Any:
    if text in ("None", "null"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _normal(name: str) -> str:
    head, dot, tail = name.partition(".")
    return head.replace("_", "-") + dot + tail if head.startswith("--") else name


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _unknown(name: str, flags: Iterable[str]) -> ConfigError:
    bare = name.lstrip("-")
    if bare in _GONE:
        return ConfigError(f"{name} is gone from vLLM: {_GONE[bare]}")
    if bare in _RENAMED:
        return ConfigError(f"{name}: renamed; use {_RENAMED[bare]}")
    if bare in _ELSEWHERE:
        return ConfigError(f"{name} is not a flag of one server: {_ELSEWHERE[bare]}")
    has_sglang = _OF_SGLANG in flags
    if has_sglang and name in vllm_flags():
        instead = _SGLANG_NAMES.get(bare)
        return ConfigError(f"{name}: a flag of vLLM; {f'give {instead}' if instead else 'leave it out'}")
    if not has_sglang and name in sglang_flags():
        return ConfigError(f"{name}: a flag of SGLang; add --engine sglang, or leave it out")
    for release in RELEASES:
        if name in vllm_flags(release.version):
            return ConfigError(
                f"{name}: is a flag of vLLM {release.version}; give --vllm-version {release.version}"
            )
    near = difflib.get_close_matches(name, list(flags), 1, 0.6)
    return ConfigError(f"{name} is not a flag" + (f"; did you mean {near[0]}?" if near else ""))


def _with_config_file(arguments: list[str], flags: dict[str, Flag]) -> list[str]:
    """Insert the flags of `--config FILE` before the others, which override them."""
    rest: list[str] = []
    from_file: list[str] = []
    place = 0
    while place < len(arguments):
        word = arguments[place]
        place += 1
        if word == "--config" or word.startswith("--config="):
            if word == "--config" and place == len(arguments):
                raise ConfigError("--config needs a file")
            path = arguments[place] if word == "--config" else word.partition("=")[2]
            place += word == "--config"
            from_file = _read_config_file(Path(path), flags)
        else:
            rest.append(word)
    return from_file + rest


def _read_config_file(path: Path, flags: dict[str, Flag]) -> list[str]:
    from understudy.yaml_text import read_yaml

    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected flags by name")
    words: list[str] = []
    for key, value in content.items():
        if key in ("model", "model_tag"):
            words += ["--model", str(value)]
            continue
        name = f"--{str(key).replace('_', '-')}"
        if name not in flags:
            raise _unknown(name, flags)
        if isinstance(value, bool):
            words.append(
                name if value else f"--no-{name[2:]}" if f"--no-{name[2:]}" in flags else f"{name}=false"
            )
        elif isinstance(value, list):
            words += [name, *map(str, value)] if flags[name].many else [name, json.dumps(value)]
        elif isinstance(value, dict):
            words += [name, json.dumps(value)]
        else:
            words += [name, str(value)]
    return words
