"""Print the flags of an installed vLLM as the table that `understudy serve` reads, one JSON object per line.

    .venv-vllm-0.33.0/bin/python tools/write_flags_table.py > src/understudy/server/flags/vllm-0.33.0.jsonl

Runs in an environment that has vLLM; needs no GPU. The flags come from vLLM's own argument parser.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

KINDS = {
    "int": "int",
    "float": "float",
    "str": "str",
    "parse_reasoning_parser": "str",
    "human_readable_int": "size",
    "human_readable_int_or_auto": "size",
    "loads": "json",
    "parse_dataclass": "json",
    "union_dict_and_str": "json",
}
INTEGERS = {"--prefix-cache-retention-interval"}
"""Flags whose type hides that they take a whole number."""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `vllm serve`; its module moves between releases."""
    import vllm
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if not current_platform.device_type:
        current_platform.device_type = "cpu"  # without a device, defaults cannot be computed
    folder = Path(vllm.__file__).parent
    (path,) = (folder / "entrypoints").rglob("cli_args.py")
    module = importlib.import_module(".".join(path.relative_to(folder.parent).with_suffix("").parts))
    parser: argparse.ArgumentParser = module.make_arg_parser(FlexibleArgumentParser())
    return parser


def describe(action: argparse.Action) -> dict[str, Any]:
    """Describe one option: every name, also hidden ones, its kind, and its choices."""
    names = list(action.option_strings)
    names += sorted(set(getattr(action, "negative_option_strings", ())) - set(names))
    kind = KINDS.get(getattr(action.type, "__name__", ""), "any")
    if action.nargs == 0:
        kind = "bool"
    elif names[0] in INTEGERS:
        kind = "int"
    row: dict[str, Any] = {"names": names, "kind": kind}
    if action.nargs == "+":
        row["many"] = True
    if action.nargs == "?":
        row["optional"] = True
    if action.choices:
        row["choices"] = list(map(str, action.choices))
    return row


def main() -> None:
    """Print the table."""
    for action in build_parser()._actions:
        if action.option_strings and not isinstance(action, argparse._HelpAction):
            sys.stdout.write(json.dumps(describe(action)) + "\n")


if __name__ == "__main__":
    main()
