"""Files of a plan: commands for a shell, a Kubernetes manifest, a page and JSON."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from understudy.errors import InvalidArgument
from understudy.outputs import create
from understudy.planning.page import build_page
from understudy.sweep.commands import make_commands
from understudy.sweep.manifest import write_manifest
from understudy.text import plural

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.planning.replays import Fleet
    from understudy.planning.result import Plan

STORE = "replays.jsonl"
"""Results of all replays, so that a plan that was stopped continues."""


def make_folder(folder: Path) -> Path:
    """Make the folder of a plan, and return the path of its store. InvalidArgument if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(
            f"--out {folder}: cannot be made: {error.strerror}; name another folder"
        ) from error
    return folder / STORE


def write_files(plan: Plan, folder: Path) -> list[Path]:
    """Write the files of a plan and return their paths; without an answer, only the page and JSON."""
    contents = {"plan.json": plan.to_json(), "plan.html": build_page(plan).encode()}
    if plan.best is not None:
        contents["commands.sh"] = list_commands(plan.best).encode()
        contents["fleet.yaml"] = write_manifest(plan.best.candidate, "understudy plan").encode()
    written = []
    for name, content in contents.items():
        with create(folder / name) as file:
            file.write(content)
        written.append(folder / name)
    return written


def list_commands(fleet: Fleet) -> str:
    """Return a shell script with the command of every group of equal engines, and of the router."""
    commands = make_commands(fleet.candidate)
    lines = ["#!/bin/sh", f"# {fleet.shape.describe(fleet.size)}; {plural(fleet.gpus, 'GPU')}"]
    for engine in commands.engines:
        lines += [f"# {engine.describe()}: run this once for each", shlex.join(engine.words)]
    if commands.router is not None:
        lines += ["# in front of the engines", shlex.join(commands.router)]
    lines += [f"# not part of these commands: {setting}" for setting in commands.not_expressed]
    return "\n".join(lines) + "\n"
