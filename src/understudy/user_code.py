"""Load user-defined classes from `FILE.py:CLASS`, and find their lines in tracebacks."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOADED: dict[str, str] = {}
"""Loaded user files: path in a traceback, and path as given."""


def names_file_and_class(name: str) -> bool:
    """Return whether this is `FILE.py:CLASS` rather than the name of a policy."""
    return ".py:" in name


def load_class(field: str, place: str, methods: Sequence[str]) -> Any:
    """Run the file and return its class, which must have these methods. ConfigError names `field` and the problem."""
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{field} {place}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{field} {place}: {file} is not Python")
    _LOADED[str(spec.origin)] = file
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses and pickle look up the module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code
        raise describe_user_failure(field, place, error) from error
    made = getattr(module, name, None)
    if made is None or not all(callable(getattr(made, method.partition("(")[0], None)) for method in methods):
        raise ConfigError(f"{field} {place}: {file} has no class {name} with {', '.join(methods)}")
    for method in methods:
        _check_parameters(f"{field} {place}", made, method)
    return made


def _check_parameters(what: str, made: Any, method: str) -> None:
    """Raise ConfigError unless a method can be called with the parameters that its description names."""
    name, _, rest = method.partition("(")
    parameters = [word for word in rest.rstrip(")").split(", ") if word]
    is_bound = isinstance(inspect.getattr_static(made, name), staticmethod | classmethod)
    try:
        inspect.signature(getattr(made, name)).bind(*([] if is_bound else [None]), *parameters)
    except TypeError as error:
        raise ConfigError(f"{what}: {name} must take ({', '.join(parameters)}): {error}") from None
    except ValueError:  # not written in Python
        return


def describe_user_failure(field: str, place: str, error: BaseException) -> ConfigError:
    """Return a ConfigError with file and line of an error in a user's file."""
    return ConfigError(f"{field} {place}: {locate_user_failure(error) or format_in_one_line(error)}")


def locate_user_failure(error: BaseException) -> str | None:
    """Format file, line and error in one line if the error was raised in a loaded user file; else None."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in _LOADED:
            return f"{_LOADED[frame.filename]}:{frame.lineno}: {frame.name}: {format_in_one_line(error)}"
    return None


def format_in_one_line(error: BaseException) -> str:
    """Format an exception's type and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
