"""Files that are written: never over what was read, and there as a whole or not at all."""

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
"""As the name of an output: standard output."""

_numbers = count()
_PATHS = (
    "path",
    "timing",
    "tokenizer",
    "model",
    "op_tables",
)  # settings whose value is read where it is a file
_IN_FOLDERS = (
    *("config.json", "generation_config.json", "tokenizer.json", "*.safetensors", "*.safetensors.index.json"),
    "meta.yaml",
    *(
        f"{place}{name}.csv*"
        for place in ("", "tp*/")
        for name in ("dense", "per_sequence", "attention", "moe")
    ),
)
"""What is read where the value is a folder: a model's, or one of op tables."""


@contextmanager
def create(path: FilePath) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `path` when the block ends well; else what was there stays.

    A link is followed; a device or a pipe, `-` (standard output) and what the shell has opened (`/dev/stdout`,
    `>(command)`) are written as they are. InvalidArgument names the file that cannot be written.
    """
    if is_stdout(path):
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target = Path(os.path.realpath(path))
    try:
        if (opened := _descriptor(path)) is not None:
            with os.fdopen(os.dup(opened), "wb") as file:
                yield file
            return
        if _is_special(target):
            with target.open("wb") as file:
                yield file
            return
        with _open_unnamed(target) or _open_beside(target) as (file, name):
            yield file
            file.flush()
            part = name()
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
    """Open a file without a name, which vanishes with this process however it ends; None where there is no such."""
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        opened = os.open(target.parent, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except OSError:  # not on this file system; what else is wrong, the named file meets too
        return None
    return _unnamed(opened, target)


@contextmanager
def _unnamed(opened: int, target: Path) -> Iterator[_Part]:
    with os.fdopen(opened, "wb") as file:

        def name() -> Path:
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                while True:
                    part = _free_name(target)
                    try:  # with a folder, because link(2) alone does not follow the link in /proc
                        os.link(f"/proc/self/fd/{opened}", part, src_dir_fd=folder, follow_symlinks=True)
                    except FileExistsError:  # of another process with our number, or of one that was killed
                        continue
                    return part
            finally:
                os.close(folder)

        yield file, name


@contextmanager
def _open_beside(target: Path) -> Iterator[_Part]:
    """Open a file with a name, and remove it when the block or SIGTERM ends."""
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
    """Remove `part` before SIGTERM ends the process as usual, where no other handler is set."""
    ours = current_thread() is main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    _parts.add(part)
    if ours:
        signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _parts.discard(part)


def _end(number: int, _: object) -> None:
    for part in list(_parts):
        part.unlink(missing_ok=True)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def check_outputs(outputs: Mapping[str, FilePath | None], inputs: Mapping[str, FilePath | None]) -> None:
    """Refuse, before anything is written, outputs that would destroy an input or each other.

    Names are those that the user knows: flags or parameters. ConfigError also where no file can be written.
    """
    taken = {name: path for name, path in inputs.items() if path is not None}
    for name, path in outputs.items():
        if path is None:
            continue
        if not is_stdout(path):
            _check_place(Path(path))
        for other, theirs in taken.items():
            if _same_file(path, theirs):
                verb = "is written" if other in outputs else "is read"
                raise ConfigError(f"{name} would overwrite {path}, which {verb} for {other}: name another")
        taken[name] = path


def files_named(settings: Any, name: str = "") -> dict[str, Path]:
    """The files that settings name, by where they stand: what a run reads is more than its trace.

    A name without a folder or an ending (`kv`) is that of a policy, unless its field may be a path.
    """
    if isinstance(settings, str | os.PathLike):
        text = os.fspath(settings)
        path = Path(text.rpartition(":")[0] if ".py:" in text else text)
        is_path = len(path.parts) > 1 or path.suffix or name.endswith(_PATHS) or not isinstance(settings, str)
        if is_path and _is_file(path):
            return {name: path}
        inside = (
            [file for pattern in _IN_FOLDERS for file in path.glob(pattern)]
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
    return os.fspath(path) == STDOUT or _descriptor(path) == 1


def _descriptor(path: FilePath) -> int | None:
    """The number of a file that this process has open, where the path is a name of it, as `/dev/stdout` is.

    Such a name resolves to the file behind it, which may have more in it than we are about to write, and writers
    besides us; to that of a pipe, which nobody can open.
    """
    place = os.fspath(path)
    for _ in range(40):  # links, before it is a loop
        folder, name = os.path.split(place)
        folder = os.path.realpath(folder)
        if folder in ("/dev/fd", f"/proc/{os.getpid()}/fd") and name.isdecimal():
            return int(name)
        place = os.path.join(folder, name)
        if not os.path.islink(place):
            return None
        place = os.path.join(folder, os.readlink(place))
    return None


def _check_place(path: Path) -> None:
    if _descriptor(path) is not None:
        return
    target = Path(os.path.realpath(path))
    try:
        exists = target.exists()
    except OSError as error:  # a name that no file can have
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    if target.is_dir():
        raise ConfigError(f"{path} is a folder: name a file")
    if not target.parent.is_dir():
        raise ConfigError(f"{path}: there is no such folder")
    if not os.access(target if exists and _is_special(target) else target.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: {os.strerror(errno.EACCES)}")


def _same_file(one: FilePath, other: FilePath) -> bool:
    if is_stdout(one) or is_stdout(other):
        return is_stdout(one) and is_stdout(other)
    if os.path.realpath(one) == os.path.realpath(other):
        return not _is_special(Path(one))
    try:
        return os.path.samefile(one, other)  # by another name: a hard link, or one in capitals
    except OSError:
        return False


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no name that a file could have
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _is_special(path: Path) -> bool:
    """A device or a pipe: it keeps nothing that could be lost."""
    return path.exists() and not path.is_file() and not path.is_dir()
