"""Fakes that several tests use."""

from __future__ import annotations

from collections.abc import Callable


class FakeCall:
    """The context of a call that is open until `end`."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._active = True

    def is_active(self) -> bool:
        """Whether the call is active."""
        return self._active

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """No metadata."""
        return ()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Add a callback for the end."""
        self._callbacks.append(callback)
        return self._active

    def auth_context(self) -> dict[str, list[bytes]]:
        """No certificate."""
        return {}

    def cancel(self) -> bool:
        """End it."""
        self.end()
        return True

    def end(self) -> None:
        """End it, as if the caller had gone."""
        self._active = False
        for callback in self._callbacks:
            callback()
