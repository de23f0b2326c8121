"""The rules for variables that are made here: those of the LayoutMap whose scope this is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

from pscluster.core.layouts.layout import Layout


class Rules(Protocol):
    """Says how weights lie, by their paths."""

    def layout_for(self, path: str, rank: int) -> Layout:
        """Return the layout of a weight with this path and number of axes."""


_current: ContextVar[Rules | None] = ContextVar("pscluster-layout-map", default=None)


def current_rules() -> Rules | None:
    """Return the rules of the scope that this is in."""
    return _current.get()


@contextlib.contextmanager
def in_scope(rules: Rules) -> Iterator[None]:
    """Make these the rules of the block."""
    token = _current.set(rules)
    try:
        yield
    finally:
        _current.reset(token)
