"""Quicker imports, for the start of a process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Import modules within the block, before the process does anything else.

    Nearly all that imports make stays: looking for garbage among it took a fifth of a role's start (0.5 s). So it is
    not looked at after the block either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # before the next collection, which would begin at once
        gc.enable()
