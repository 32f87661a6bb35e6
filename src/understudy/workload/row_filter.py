"""Keep the rows of a log whose keys have given values: `status=200`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class RowFilter:
    """Conditions `KEY=VALUE` or `KEY!=VALUE`; a key with dots is looked up in nested objects. All must hold.

    ConfigError for a condition without a key or without `=`.
    """

    def __init__(self, conditions: Sequence[str]) -> None:
        self._conditions: list[tuple[str, str, bool]] = []
        self.dropped = 0
        """Rows that were left out."""
        self._seen: dict[str, int] = {}
        for text in conditions:
            key, equals, value = text.partition("=")
            is_equal = not key.endswith("!")
            key = key.removesuffix("!").strip()
            if not equals or not key:
                raise ConfigError(f"--where {text}: no condition; write it as status=200 or model!=test")
            self._conditions.append((key, value.strip(), is_equal))

    def keeps(self, row: Mapping[str, Any]) -> bool:
        """Whether a row meets all conditions; counts it otherwise."""
        for key, wanted, is_equal in self._conditions:
            value = find_value(row, key)
            if value is not None:
                self._seen[key] = self._seen.get(key, 0) + 1
            if (_as_text(value) == wanted) != is_equal:
                self.dropped += 1
                return False
        return True

    def check(self, rows: int) -> None:
        """Raise ConfigError for a key that no row has, after all rows were read."""
        for key, _, _ in self._conditions:
            if rows and key not in self._seen:
                raise ConfigError(f"--where {key}: no row has this key; name one that the log has")

    def notes(self) -> tuple[str, ...]:
        """Return a note on the rows that were left out."""
        if not self.dropped:
            return ()
        listed = " ".join(
            f"{key}{'=' if is_equal else '!='}{value}" for key, value, is_equal in self._conditions
        )
        return (f"{self.dropped:,} rows are left out by --where {listed}",)


def find_value(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, or of a path of keys with dots; None without one."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)
