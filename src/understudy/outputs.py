"""Write output files atomically, and reject outputs that would overwrite an input."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from stat import S_IMODE
from threading import current_thread, main_thread
from typing import IO, TYPE_CHECKING, Any

from understudy.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    FilePath = str | os.PathLike[str]
    _Part = tuple[IO[bytes], Callable[[], Path]]

STDOUT = "-"
"""Name of an output that means standard output."""

_numbers = count()
_PATH_SETTINGS = ("path", "timing", "tokenizer", "model", "op_tables")
"""Settings whose value may be the path of an input."""
_FILES_IN_FOLDERS = (
    *("config.json", "generation_config.json", "tokenizer.json", "*.safetensors", "*.safetensors.index.json"),
    "meta.yaml",
    *(
        f"{place}{name}.csv*"
        for place in ("", "tp*/")
        for name in ("dense", "per_sequence", "attention", "moe")
    ),
)
"""Files that are read from a folder: a model's, or one of op tables."""


@contextmanager
def create(path: FilePath) -> Iterator[IO[bytes]]:
    """Open a new file that replaces `path` when the block succeeds; on an error `path` is unchanged.

    Symbolic links are followed. Devices, pipes, `-` (standard output) and files that the shell has opened
    (`/dev/stdout`, `>(command)`) are written directly. InvalidArgument names a file that cannot be written.
    """
    if is_stdout(path):
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target = Path(os.path.realpath(path))
    try:
        if (opened := _find_descriptor(path)) is not None:
            with os.fdopen(os.dup(opened), "wb") as file:
                yield file
            return
        if _is_special(target):
            with target.open("wb") as file:
                yield file
            return
        with _open_unnamed(target) or _open_named(target) as (file, link):
            yield file
            file.flush()
            part = link()
            try:
                if target.exists():
                    part.chmod(S_IMODE(target.stat().st_mode))
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror or error}") from error


def _free_name(target: Path) -> Path:
    """Return a hidden name next to `target`."""
    return target.with_name(f".understudy-{os.getpid()}-{next(_numbers)}.part")


def _open_unnamed(target: Path) -> AbstractContextManager[_Part] | None:
    """Open a file without a name, which the kernel removes when the process ends; None if unsupported."""
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        opened = os.open(target.parent, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except OSError:  # unsupported by this file system; the named file reports other errors
        return None
    return _write_unnamed(opened, target)


@contextmanager
def _write_unnamed(opened: int, target: Path) -> Iterator[_Part]:
    with os.fdopen(opened, "wb") as file:

        def link() -> Path:
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                while True:
                    part = _free_name(target)
                    try:  # with src_dir_fd, because link(2) alone does not follow the link in /proc
                        os.link(f"/proc/self/fd/{opened}", part, src_dir_fd=folder, follow_symlinks=True)
                    except FileExistsError:  # left by another process with this process id
                        continue
                    return part
            finally:
                os.close(folder)

        yield file, link


@contextmanager
def _open_named(target: Path) -> Iterator[_Part]:
    """Open a file with a name; remove it at the end of the block or on SIGTERM."""
    while True:
        part = _free_name(target)
        try:
            opened = part.open("xb")
        except FileExistsError:
            continue
        break
    with opened as file, _unlinked_by_sigterm(part):
        try:
            yield file, lambda: part
        finally:
            part.unlink(missing_ok=True)


_parts: set[Path] = set()


@contextmanager
def _unlinked_by_sigterm(part: Path) -> Iterator[None]:
    """Remove `part` before SIGTERM ends the process, unless another handler is set."""
    installs = current_thread() is main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    _parts.add(part)
    if installs:
        signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    finally:
        if installs:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _parts.discard(part)


def _on_sigterm(number: int, _: object) -> None:
    for part in list(_parts):
        part.unlink(missing_ok=True)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def check_outputs(outputs: Mapping[str, FilePath | None], inputs: Mapping[str, FilePath | None]) -> None:
    """Raise ConfigError for outputs that would overwrite an input or each other, or cannot be written.

    Names are flags or parameters. Call it before anything is written.
    """
    taken = {name: path for name, path in inputs.items() if path is not None}
    for name, path in outputs.items():
        if path is None:
            continue
        if not is_stdout(path):
            _check_writable(Path(path))
        for other, theirs in taken.items():
            if _same_file(path, theirs):
                verb = "is written" if other in outputs else "is read"
                raise ConfigError(
                    f"{name} would overwrite {path}, which {verb} for {other}; name another file"
                )
        taken[name] = path


def files_named(settings: Any, name: str = "") -> dict[str, Path]:
    """Find the existing files that settings name, by the dotted name of their setting.

    A plain word (`kv`) is the name of a policy, unless its setting may be a path.
    """
    settings = getattr(settings, "place", settings)  # a class of a file
    if isinstance(settings, str | os.PathLike):
        text = os.fspath(settings)
        path = Path(text.rpartition(":")[0] if ".py:" in text else text)
        is_path = (
            len(path.parts) > 1
            or path.suffix
            or name.endswith(_PATH_SETTINGS)
            or not isinstance(settings, str)
        )
        if is_path and _is_file(path):
            return {name: path}
        inside = (
            [file for pattern in _FILES_IN_FOLDERS for file in path.glob(pattern)]
            if is_path and _is_folder(path)
            else []
        )
        return {f"{name} ({file})": file for file in inside}
    if names := getattr(settings, "__struct_fields__", None):
        settings = {field: getattr(settings, field) for field in names}
    elif isinstance(settings, list | tuple):
        settings = {str(place): value for place, value in enumerate(settings)}
    if not isinstance(settings, Mapping):
        return {}
    found: dict[str, Path] = {}
    for key, value in settings.items():
        found |= files_named(value, f"{name}.{key}" if name else str(key))
    return found


def is_stdout(path: FilePath) -> bool:
    """Whether an output of that name goes to standard output."""
    return os.fspath(path) == STDOUT or _find_descriptor(path) == 1


def _find_descriptor(path: FilePath) -> int | None:
    """Return the descriptor of an open file that the path names, such as `/dev/stdout`; None for other paths.

    Such a path must not be resolved: the file behind it may have other content and other writers, and a pipe cannot
    be opened by name.
    """
    place = os.fspath(path)
    for _ in range(40):  # limit on links, in case they form a loop
        folder, name = os.path.split(place)
        folder = os.path.realpath(folder)
        if folder in ("/dev/fd", f"/proc/{os.getpid()}/fd") and name.isdecimal():
            return int(name)
        place = os.path.join(folder, name)
        if not os.path.islink(place):
            return None
        place = os.path.join(folder, os.readlink(place))
    return None


def _check_writable(path: Path) -> None:
    if _find_descriptor(path) is not None:
        return
    target = Path(os.path.realpath(path))
    try:
        exists = target.exists()
    except OSError as error:  # not a valid file name
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    if target.is_dir():
        raise ConfigError(f"{path} is a folder; name a file")
    if not target.parent.is_dir():
        raise ConfigError(f"{path}: the folder does not exist; create it")
    if not os.access(target if exists and _is_special(target) else target.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: {os.strerror(errno.EACCES)}")


def _same_file(one: FilePath, other: FilePath) -> bool:
    if is_stdout(one) or is_stdout(other):
        return is_stdout(one) and is_stdout(other)
    if os.path.realpath(one) == os.path.realpath(other):
        return not _is_special(Path(one))
    try:
        return os.path.samefile(one, other)  # a hard link, or another spelling on this file system
    except OSError:
        return False


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _is_special(path: Path) -> bool:
    """Whether the path is a device or a pipe, which has no content to lose."""
    return path.exists() and not path.is_file() and not path.is_dir()
