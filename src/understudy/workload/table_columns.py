"""Find the columns of a table of requests: by name as given, or by the usual names of time and lengths."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from understudy.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

ROLES = ("time", "input", "output")
_USUAL = {
    "time": (
        *("timestamp", "time", "requesttime", "starttime", "createdat", "created", "arrivaltime", "arrival"),
        *(
            "requeststarttime",
            "starttimestamp",
            "requestcreatedat",
            "requesttimestamp",
            "datetime",
            "date",
            "ts",
        ),
        "arrivals",
    ),
    "input": (
        *("inputtokens", "prompttokens", "contexttokens", "requesttokens", "inputlength", "promptlength"),
        *("inputlen", "promptlen", "isl", "numinputtokens", "numprompttokens", "tokensin", "intokens"),
    ),
    "output": (
        *(
            "outputtokens",
            "completiontokens",
            "generatedtokens",
            "responsetokens",
            "outputlength",
            "outputlen",
        ),
        *("completionlength", "osl", "numoutputtokens", "numgeneratedtokens", "tokensout", "outtokens"),
    ),
}


def read_columns(text: str | None) -> dict[str, str]:
    """Parse `time=…,input=…,output=…`. ConfigError names an unknown role."""
    given: dict[str, str] = {}
    for part in [] if text is None else text.split(","):
        role, equals, name = part.partition("=")
        if role.strip() not in ROLES or not equals or not name.strip():
            raise ConfigError(
                f"--columns {part}: not a column; write them as time=request_time,input=prompt_tokens,"
                "output=completion_tokens"
            )
        given[role.strip()] = name.strip()
    return given


def find_columns(path: Path, present: Sequence[str], given: dict[str, str]) -> dict[str, str]:
    """Return the column of each role; a table without a time has none. InvalidArgument names a missing one."""
    keys = {_key(name): name for name in reversed(list(present))}
    found: dict[str, str] = {}
    for role in ROLES:
        if role in given:
            if given[role] not in present:
                raise InvalidArgument(f"{path}: column {given[role]} is missing; {_list(present)}")
            found[role] = given[role]
            continue
        usual = next((keys[name] for name in _USUAL[role] if name in keys), None)
        if usual is not None:
            found[role] = usual
        elif role != "time":
            raise InvalidArgument(
                f"{path}: no column looks like the number of {role} tokens; {_list(present)}; name it with "
                f"--columns {role}=NAME"
            )
    return found


def names_lengths(names: Iterable[str]) -> bool:
    """Whether both lengths are among the names, as they are usually called."""
    keys = set(map(_key, names))
    return all(keys & set(_USUAL[role]) for role in ("input", "output"))


def looks_like_header(line: str) -> bool:
    """Whether a line is the header of a table: at least two names, no numbers, with a separator between them."""
    cells = [cell.strip().strip('"') for cell in line.strip().split(find_separator(line))]
    return len(cells) > 1 and all(re.fullmatch(r"[A-Za-z_][\w .()/-]{0,60}", cell) for cell in cells)


def find_separator(header: str) -> str:
    """Return the separator of a header: comma, tab, semicolon or bar."""
    return max((",", "\t", ";", "|"), key=header.count)


def _key(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())


def _list(present: Sequence[str]) -> str:
    shown = ", ".join(present)[:200]
    return f"there are {shown}" if present else "the file is empty"
