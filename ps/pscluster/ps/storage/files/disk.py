"""Complete writes at an offset of a file."""

from __future__ import annotations

import os


def write_all(descriptor: int, buffers: list[bytes | memoryview], offset: int) -> int:
    """Write all buffers to a file descriptor, one after another from `offset`; return where they end."""
    remaining = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while remaining:
        done = os.pwritev(descriptor, remaining[:1000], offset)  # at most IOV_MAX, 1024, in one call
        offset += done
        while remaining and done >= len(remaining[0]):
            done -= len(remaining.pop(0))
        if done:
            remaining[0] = remaining[0][done:]
    return offset
