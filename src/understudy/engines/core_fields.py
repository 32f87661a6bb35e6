"""Settings of the core that have the same name in Python."""

from __future__ import annotations

from typing import Any, Protocol


class CoreSettings(Protocol):
    """A class of the core whose constructor takes settings by name."""

    FIELDS: tuple[str, ...]


def fields_of(core: type[CoreSettings], *sources: object, **others: Any) -> dict[str, Any]:
    """Return the settings of a core class: attributes of the sources with their names, then `others`.

    A later source wins over an earlier one.
    """
    found = {
        name: getattr(source, name) for source in sources for name in core.FIELDS if hasattr(source, name)
    }
    return found | others
