"""The flag of policies for the KV of sleeping sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    from understudy.errors import ConfigError
    from understudy.run.session_kv import SessionKv

    if args.session_kv is None:
        return None
    if args.engine == "qwen3":
        raise ConfigError("--session-kv does not work with --engine qwen3; leave one out")
    return SessionKv.read(args.session_kv)
