"""Tables as text, the same on a terminal and in a pipe."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, RenderableType


def rendered(table: RenderableType, width: int = 100) -> str:
    """The table, or what else rich shows, as plain text."""
    out = StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(table)
    return out.getvalue().rstrip()
