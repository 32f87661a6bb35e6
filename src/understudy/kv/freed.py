"""Listeners that learn when requests give blocks back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class FreedBlocks:
    """Notifies listeners when a request gave blocks back, in the thread that closed or preempted it."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[], None]] = []

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` from now on; return a function that ends it."""
        self._listeners.append(listener)

        def end() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return end

    def notify(self) -> None:
        """Call all listeners, in the order in which they subscribed."""
        for listener in tuple(self._listeners):
            listener()
