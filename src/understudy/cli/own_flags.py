"""`OwnFlags`: engine flags of a kind that has names of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from understudy.cli.engine_flags import MOCKER_NAMES, SETTINGS, Flag
from understudy.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class OwnFlags:
    """Flags of one kind of engine, with its own names and defaults."""

    engine: str
    """Name of the kind."""
    title: str
    """Name in prose."""
    settings: tuple[Flag, ...]
    """Flags that are settings of the engine."""
    others: tuple[Flag, ...] = ()
    """Flags of the memory and of the GPUs."""
    instead: Mapping[str, str]
    """Settings of vLLM and of the mocker with a counterpart here."""
    underscores: bool = False
    """Whether names are written with underscores; both spellings are read."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Second names of flags."""
    shared: tuple[str, ...] = ()
    """Settings that vLLM has by the same name; only the spelling with underscores is added."""

    def add_to(self, verb: argparse.ArgumentParser) -> None:
        """Add the flags to a verb, in one group."""
        group = verb.add_argument_group(f"engine {self.engine} (with --engine {self.engine})")
        for flag in (*self.settings, *self.others):
            names = [f"--{flag.name}"] if self.underscores else []
            if flag.name not in self.shared:
                names.append(f"--{flag.name.replace('_', '-')}")
            if flag.name in self.aliases:
                names.append(f"--{self.aliases[flag.name]}")
            if flag.kind is bool:
                group.add_argument(*names, dest=flag.name, action="store_true", default=None, help=flag.help)
            else:
                group.add_argument(
                    *names, dest=flag.name, type=flag.kind, metavar=flag.metavar, help=flag.help
                )

    def read_settings(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the given settings of the engine, by name. ConfigError for flags of another engine."""
        given = _list_given(args, self.settings)
        if args.engine != self.engine:
            others = {**given, **_list_given(args, self.others)}
            first = next((name for name in others if name not in self.shared), None)
            if first is not None:
                raise ConfigError(
                    f"{self.spell(first)}: a setting of {self.title}; add --engine {self.engine}, or leave it out"
                )
            return {}
        for name in _list_given(args, SETTINGS + MOCKER_NAMES):
            if name in self.shared:
                continue
            instead = f"give {self.instead[name]}" if name in self.instead else "leave it out"
            raise ConfigError(f"--{name.replace('_', '-')}: no setting of {self.title}; {instead}")
        return given

    def spell(self, name: str) -> str:
        """Return the flag of a setting."""
        return f"--{name}" if self.underscores else f"--{name.replace('_', '-')}"


def names_gpu(args: argparse.Namespace) -> bool:
    """Whether a command line may size an engine by the memory of a GPU."""
    sources = (args.gpu, args.gpu_bandwidth_gbps, args.gpu_memory, args.config)
    return any(source is not None for source in sources)


def _list_given(args: argparse.Namespace, flags: tuple[Flag, ...]) -> dict[str, Any]:
    values = {flag.name: getattr(args, flag.name) for flag in flags}
    return {name: value for name, value in values.items() if value is not None}
