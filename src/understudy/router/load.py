"""Routers that are named by where they are: `FILE.py:CLASS`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.router.router import Router


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
        raise ConfigError(f"--routing {place}: {type(error).__name__}: {error}") from error
    return router
