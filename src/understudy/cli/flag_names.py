"""Rewrite error messages so that they name flags instead of settings; reject flags that were renamed."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_FLAG_OF_SETTING = {
    "use_events": "--no-kv-events",
    "gpu.name": "--gpu",
    "tensor_parallel": "--tensor-parallel-size",
    "kv_bytes_per_token": "--kv-cache-bytes-per-token",
    "lease_s": "--kv-lease-duration",
}
"""Flags whose names differ from their settings."""
_SETTING = r"[a-z]\w*(?:\.\w+|: \w+(?=[ :]))*"
_FIRST = re.compile(rf"{_SETTING}(?:, {_SETTING})*")
_NAME = (
    r"(?<![\w./'\"-])(?:[a-z]\w*(?:\.[a-z]\w*)+|[a-z][a-z0-9]*_\w+)"  # not an English word: has a dot or _
)
_LATER = re.compile(rf"(?P<before>\b(?:needs|with|beside|and) )(?P<word>[a-z]+)(?![\w.])|(?P<name>{_NAME})")
_REPEATED = re.compile(r"(?<![\w-])([a-z_]+|--[a-z-]+) \((--[a-z-]+)\)")


class _RenamedFlag(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002
        values: Any,  # noqa: ARG002
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string}: renamed; use {self.const}")


def add_renamed_flag(parser: argparse.ArgumentParser, old: str, new: str) -> None:
    """Add the hidden flag `old`, whose use is an error that names `new`."""
    hidden = argparse.SUPPRESS
    parser.add_argument(
        old, action=_RenamedFlag, nargs="?", const=new, dest=hidden, default=hidden, help=hidden
    )


def replace_settings_by_flags(message: str, words: Sequence[str], known: Collection[str] = ()) -> str:
    """Replace settings by their flags in a message that begins with a setting.

    A flag is the setting's name with dashes, or ends in it: --router-temperature sets `temperature`. The flags that
    were typed (`words`) are tried; if one of them sets the first setting, the verb's other flags (`known`) are tried
    for later settings. A setting that was assigned (--set engine.block_size=0) keeps its name.
    """
    first = _FIRST.match(message)
    if first is None:
        return message
    typed = list(dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--")))
    values = [word.partition("=")[2] if word.startswith("--") else word for word in words]

    def find_flag(setting: str, *flags: Iterable[str]) -> str | None:
        if any(f"{setting.rpartition('.')[2]}=" in value for value in values):
            return None
        found = next(filter(None, (_find_flag_among(setting, some, known) for some in flags)), None)
        name, colon, word = setting.partition(": ")  # the word after the colon may be part of the problem
        if found is not None or not colon:
            return found
        named = find_flag(name, *flags)
        return None if named is None else f"{named}: {word}"

    settings = first[0].split(", ")
    named = [find_flag(setting, typed) for setting in settings]
    begin = ", ".join(flag or setting for flag, setting in zip(named, settings, strict=True))
    rest = message[first.end() :]
    if not any(named) and not all("_" in setting for setting in settings):
        return f"{begin}{rest}"  # the first word need not be a setting: it may be a file name
    if rest.startswith("["):  # an entry of a list: its own fields have no flags
        return f"{begin}{rest}"
    others = known if any(named) and "--config" not in typed else ()

    def replace(found: re.Match[str]) -> str:
        flag = find_flag(found["name"] or found["word"], typed, others)
        return found[0] if flag is None else f"{found['before'] or ''}{flag}"

    return begin + _REPEATED.sub(_drop_repeated_name, _LATER.sub(replace, rest))


def _drop_repeated_name(found: re.Match[str]) -> str:
    """Reduce `name (--name)` to `--name`."""
    return found[2] if found[1].replace("_", "-") in (found[2], found[2][2:]) else found[0]


def _find_flag_among(setting: str, flags: Iterable[str], known: Collection[str]) -> str | None:
    """Return the flag among `flags` that sets `setting`; one that only ends in it, if none of `known` equals it."""
    name = "-".join(re.findall(r"\w+", setting)).replace("_", "-")
    for last in (name, name.rpartition("engine-")[2], name.removeprefix("tiers-")):
        if f"--{last}" in flags:
            return f"--{last}"
    if _FLAG_OF_SETTING.get(setting, setting) in flags:
        return _FLAG_OF_SETTING[setting]
    if f"--no-{name}" in flags:
        return f"--no-{name}"
    if f"--{name}" in known:  # --trace-block-size does not set block_size
        return None
    ends = [flag for flag in flags if flag.endswith(f"-{name}")]
    return ends[0] if len(ends) == 1 else None
