"""Handles for the tests of functions on the wire, and what stands in for the receiver's own."""

from __future__ import annotations

from typing import Any

from pscluster.core.handles import Handle


class Thing(Handle):
    """A handle."""

    handle_kind = "thing"
    handle_key: str

    def __init__(self, key: str) -> None:
        self.handle_key = key


def things(kind: str, key: str) -> Any:
    """Stand in for the receiver's own handles."""
    return f"the receiver's {kind} {key}"
