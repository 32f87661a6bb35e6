"""Collect the parts of an installed vLLM that its schedules do not show: flags, metrics, and event fields."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path
from typing import Any

import msgspec
import vllm
from vllm.distributed import kv_events

FOLDER = Path(vllm.__file__).parent


def find_facts() -> dict[str, Any]:
    """Return flags with their defaults, metric names, event fields, and the folder of the sources.

    A part that this release has elsewhere is empty, and `errors` says why.
    """
    facts: dict[str, Any] = {"folder": str(FOLDER), "flags": {}, "metrics": [], "events": {}, "errors": {}}
    for name, find in (("flags", _flags), ("metrics", _metrics), ("events", _event_fields)):
        try:
            facts[name] = find()
        except Exception as error:
            facts["errors"][name] = f"{type(error).__name__}: {error}"
    return facts


def _flags() -> dict[str, str]:
    """Return the default of each option of `vllm serve` by its names."""
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if not current_platform.device_type:
        current_platform.device_type = "cpu"  # without a device, defaults cannot be computed
    (path,) = (FOLDER / "entrypoints").rglob("cli_args.py")  # releases move it
    module = importlib.import_module(".".join(path.relative_to(FOLDER.parent).with_suffix("").parts))
    parser = module.make_arg_parser(FlexibleArgumentParser())
    return {
        "/".join(action.option_strings): _describe(action)
        for action in parser._actions
        if action.option_strings and not isinstance(action, argparse._HelpAction)
    }


def _describe(action: argparse.Action) -> str:
    choices = f", one of {sorted(map(str, action.choices))}" if action.choices else ""
    return re.sub(r" at 0x[0-9a-f]+", "", f"default {action.default!r}{choices}")


def _metrics() -> list[str]:
    """Return the metric names in the sources; a name with a placeholder is kept as it is written."""
    names: set[str] = set()
    for path in FOLDER.rglob("*.py"):
        text = path.read_text(encoding="utf-8", errors="replace")
        names.update(re.findall(r"""["'](vllm:[A-Za-z0-9_{}]+)["']""", text))
    return sorted(names)


def _event_fields() -> dict[str, list[str]]:
    """Return the fields of each KV event and of a batch, in the order of the wire."""
    return {
        name: [field.encode_name for field in msgspec.structs.fields(kind)]
        for name, kind in sorted(vars(kv_events).items())
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == kv_events.__name__
    }
