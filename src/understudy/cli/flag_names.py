"""Messages speak of settings; on the command line each is called by its flag."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_OTHER_FLAGS = {
    "use_events": "--no-kv-events",
    "gpu.name": "--gpu",
    "tensor_parallel": "--tensor-parallel-size",
}
"""Settings whose flags are called otherwise."""
_SETTING = r"[a-z]\w*(?:\.\w+|: \w+(?=[ :]))*"
_FIRST = re.compile(rf"{_SETTING}(?:, {_SETTING})*")
_NAME = r"(?<![\w./'\"-])(?:[a-z]\w*(?:\.[a-z]\w*)+|[a-z][a-z0-9]*_\w+)"  # no word of English
_LATER = re.compile(rf"(?P<before>\b(?:needs|with|beside|and) )(?P<word>[a-z]+)(?![\w.])|(?P<name>{_NAME})")
_TWICE = re.compile(r"(?<![\w-])([a-z_]+|--[a-z-]+) \((--[a-z-]+)\)")


def by_flag(message: str, words: Sequence[str], known: Collection[str] = ()) -> str:
    """The message with flags in place of the settings that it speaks of, if it begins with one.

    A flag is the setting's name with dashes, or ends in it: `temperature` is what --router-temperature sets. Those
    that were typed (`words`) count; where the first one was, those that the verb has (`known`), too, for what is to be
    given. An assignment (--set engine.block_size=0) wins over flags, so that the setting may be its own.
    """
    first = _FIRST.match(message)
    if first is None:
        return message
    typed = list(dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--")))
    values = [word.partition("=")[2] if word.startswith("--") else word for word in words]

    def flag_of(setting: str, *flags: Iterable[str]) -> str | None:
        if any(f"{setting.rpartition('.')[2]}=" in value for value in values):
            return None
        return next(filter(None, (_among(setting, some) for some in flags)), None)

    settings = first[0].split(", ")
    named = [flag_of(setting, typed) for setting in settings]
    begin = ", ".join(flag or setting for flag, setting in zip(named, settings, strict=True))
    rest = message[first.end() :]
    if not any(named) and not all("_" in setting for setting in settings):
        return f"{begin}{rest}"  # it may begin with anything: the name of a file
    others = known if any(named) and "--config" not in typed else ()

    def replaced(found: re.Match[str]) -> str:
        flag = flag_of(found["name"] or found["word"], typed, others)
        return found[0] if flag is None else f"{found['before'] or ''}{flag}"

    return begin + _TWICE.sub(_once, _LATER.sub(replaced, rest))


def _once(found: re.Match[str]) -> str:
    """A name that its flag stands behind says nothing more."""
    return found[2] if found[1].replace("_", "-") in (found[2], found[2][2:]) else found[0]


def _among(setting: str, flags: Iterable[str]) -> str | None:
    """The one that sets it."""
    name = "-".join(re.findall(r"\w+", setting)).replace("_", "-")
    for last in (name, name.rpartition("engine-")[2], name.removeprefix("tiers-")):
        if f"--{last}" in flags:
            return f"--{last}"
    if _OTHER_FLAGS.get(setting, setting) in flags:
        return _OTHER_FLAGS[setting]
    ends = [flag for flag in flags if flag.endswith(f"-{name}")]
    return ends[0] if len(ends) == 1 else None
