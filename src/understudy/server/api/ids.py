"""Random ids of answers and their parts."""

from __future__ import annotations

import secrets


def new_id() -> str:
    """Generate an id of sixteen hex digits."""
    return secrets.token_hex(8)
