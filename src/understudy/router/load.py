"""Routers that are named by where they are: `FILE.py:CLASS`."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.router.router import Router

_LOADED: dict[str, str] = {}
"""Files of users' code, as a traceback names them, and as they were named to us."""


def is_place(name: str) -> bool:
    """Whether this names a class in a file, rather than a policy."""
    return ".py:" in name


def load_router(place: str) -> Router:
    """A router of the class in the file. ConfigError says what is wrong with either."""
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"--routing {place}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--routing {place}: {file} is not Python")
    _LOADED[str(spec.origin)] = file
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
        made = getattr(module, name, None)
        if made is None or not callable(getattr(made, "choose", None)):
            raise ConfigError(f"--routing {place}: {file} has no class {name} with choose(request, view)")
        router: Router = made()
    except ConfigError:
        raise
    except Exception as error:  # the user's code
        raise ConfigError(f"--routing {place}: {failure_of_yours(error) or in_a_line(error)}") from error
    return router


def failure_of_yours(error: BaseException) -> str | None:
    """File, line and error in one line, where it came out of a file that was loaded here; else None."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in _LOADED:
            return f"{_LOADED[frame.filename]}:{frame.lineno}: {frame.name}: {in_a_line(error)}"
    return None


def in_a_line(error: BaseException) -> str:
    """Its kind and what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
