"""Tables as text, the same in a terminal and in a pipe."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, RenderableType


def rendered(table: RenderableType, width: int = 100) -> str:
    """Return a table, or anything else that rich can render, as plain text."""
    out = StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(table)
    return out.getvalue().rstrip()
