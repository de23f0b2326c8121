"""An IPython session, in a notebook or a terminal: which cell runs, how tables and errors are shown there.

IPython is asked only if the script has imported it: this package does not need it.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from pscluster.core.display.sanitize import shown
from pscluster.core.display.tracebacks import short_traceback

_MAX_ROWS = 100


def _shell() -> Any:
    """Return the IPython shell of this process; None if there is none."""
    module = sys.modules.get("IPython")
    return None if module is None else getattr(module, "get_ipython", lambda: None)()


def current_cell() -> int | None:
    """Return the number of the cell that runs in this process's IPython session; None if there is no session.

    The same cell has another number when it runs again.
    """
    count = getattr(_shell(), "execution_count", None)
    return count if isinstance(count, int) else None


def place_of_cell() -> str:
    """Return what names the cell that runs, the same if it is changed and runs again; "" if nothing does.

    Only front ends that give their cells ids tell the kernel, as JupyterLab does.
    """
    get_parent = getattr(_shell(), "get_parent", None)
    parent = get_parent() if get_parent is not None else None
    metadata = parent.get("metadata", {}) if isinstance(parent, dict) else {}
    place = metadata.get("cellId", "") if isinstance(metadata, dict) else ""
    return place if isinstance(place, str) else ""


def render_traceback(error: BaseException) -> list[str]:
    """Return the lines that IPython shows in place of a traceback: the user's frames, and what the error says."""
    name_of_code = getattr(getattr(_shell(), "compile", None), "format_code_name", None)

    def name_of(file: str) -> str:
        parts = None if name_of_code is None else name_of_code(file)
        return f"File {file}" if parts is None else " ".join(map(str, parts))

    return short_traceback(error, name_of)


def html_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table for a notebook, of the first rows. All text is escaped: names are users', or came from peers."""

    def line(tag: str, cells: Iterable[object]) -> str:
        texts = "".join(f'<{tag} style="text-align: left">{html.escape(shown(cell))}</{tag}>' for cell in cells)
        return f"<tr>{texts}</tr>"

    if (more := len(rows) - _MAX_ROWS) > 0:
        rows = [*rows[:_MAX_ROWS], [f"... and {more:,} more"]]
    body = "".join(line("td", row) for row in rows)
    return f"<table><caption>{html.escape(shown(title))}</caption><thead>{line('th', header)}</thead>{body}</table>"
