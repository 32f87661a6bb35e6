"""The flag of policies for the KV of sleeping sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from understudy.run.session_kv import SessionKv

EXAMPLES = """\
  understudy replay agents.jsonl --lanes 8 --session-kv hold_s=60,release=end
"""


def add_session_flags(verb: argparse.ArgumentParser) -> None:
    """Add `--session-kv`."""
    verb.add_argument(
        "--session-kv",
        metavar="SETTING=VALUE[,…]",
        help="KV of sessions between their requests: hold_s=S, release=end, release_after_s=S, offload_after_s=S, "
        "prefetch=predicted or told, prefetch_lead_s=S; or FILE.py:CLASS",
    )


def read_session_kv(args: argparse.Namespace) -> SessionKv | None:
    """Return the policies that the flag gives, if any. ConfigError names a wrong setting."""
    from understudy.checks import read_as
    from understudy.errors import ConfigError
    from understudy.run.session_kv import SessionKv
    from understudy.user_code import names_file_and_class

    text = args.session_kv
    if text is None:
        return None
    if args.online or args.engine == "qwen3":
        raise ConfigError(
            f"--session-kv does not work with {'--online' if args.online else '--engine qwen3'}; leave one out"
        )
    if names_file_and_class(text):
        return SessionKv(policy=text)
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, separator, value = part.partition("=")
        if not separator or not name or not value:
            raise ConfigError(f"--session-kv: {part!r} is no SETTING=VALUE, such as hold_s=60")
        if name in given:
            raise ConfigError(f"--session-kv: {name} is given twice; give one")
        given[name] = _read_value(name, value)
    return read_as(SessionKv, given)


def _read_value(name: str, value: str) -> float | str:
    from understudy.errors import ConfigError

    if not name.endswith("_s"):
        return value
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"--session-kv: {name} must be a number of seconds, got {value!r}") from None
