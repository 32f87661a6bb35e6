"""Set varied flags on a parsed command line: `--vary FLAG=VALUES` of `understudy sweep`."""

from __future__ import annotations

import argparse
from copy import copy
from typing import TYPE_CHECKING, Any

from understudy.cli.parser import suggest
from understudy.errors import ConfigError
from understudy.sweep.space import SPLIT

if TYPE_CHECKING:
    from collections.abc import Collection

    from understudy.sweep.space import Space

_SWITCHES = {"yes": True, "true": True, "no": False, "false": False}


class VariedFlags:
    """The flags of a verb that a sweep can vary; `fixed` are the names of the others."""

    def __init__(self, verb: argparse.ArgumentParser, fixed: Collection[str]) -> None:
        shown = [
            action for action in verb._actions if action.option_strings and action.help != argparse.SUPPRESS
        ]
        self._actions = {
            flag.removeprefix("--"): action
            for action in shown
            for flag in action.option_strings
            if action.dest not in fixed and not flag.startswith("--no-")
        }

    @property
    def names(self) -> list[str]:
        """Names of the flags, with dashes."""
        return [f"--{flag}" for flag in self._actions]

    def check(self, space: Space, args: argparse.Namespace) -> None:
        """Raise ConfigError for a varied flag that is unknown, also given once for all, or has an invalid value."""
        for dimension in space.dimensions:
            flag = dimension.flag
            if "." in flag or flag == SPLIT:  # a setting, as for --set; or a split, which was read before
                continue
            action = self._actions.get(flag)
            if action is None:
                hint = suggest(flag, self._actions) or "; `understudy sweep --help-all` lists the flags"
                raise ConfigError(f"--vary {flag}: not a flag that a sweep can vary{hint}")
            if getattr(args, action.dest) != action.default:
                raise ConfigError(f"--{flag}: contradicts --vary {flag}; give one")
            for text in dimension.texts:
                _convert(flag, action, text)

    def apply(self, args: argparse.Namespace, texts: dict[str, str]) -> argparse.Namespace:
        """Return a copy of `args` with these values; an empty text leaves the flag out."""
        changed = copy(args)
        changed.set = list(args.set)
        for flag, text in texts.items():
            if "." in flag:
                if text:
                    changed.set.append(f"{flag}={text}")
                continue
            action = self._actions[flag]
            setattr(changed, action.dest, _convert(flag, action, text))
        return changed


def _convert(flag: str, action: argparse.Action, text: str) -> Any:
    if not text:
        return action.default
    if action.nargs == 0:  # a flag without a value
        if text not in _SWITCHES:
            raise ConfigError(f"--vary {flag}: {text!r} is neither yes nor no; write yes,no")
        has_negation = isinstance(action, argparse.BooleanOptionalAction)
        return _SWITCHES[text] if has_negation or _SWITCHES[text] else action.default
    try:
        value = action.type(text) if callable(action.type) else text
    except (ValueError, argparse.ArgumentTypeError) as error:
        reason = str(error) if isinstance(error, argparse.ArgumentTypeError) else f"{text!r} is not a number"
        raise ConfigError(f"--vary {flag}: {reason}; give another value") from None
    if action.choices is not None and value not in action.choices:
        choices = [str(choice) for choice in action.choices]
        raise ConfigError(f"--vary {flag}: {text!r} is not known; choose {' or '.join(choices)}")
    return value
