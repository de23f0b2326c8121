"""Bytes to a place of a file, and from there: all of them, whatever the kernel does at a time."""

from __future__ import annotations

import errno
import os


def write_all(number: int, buffers: list[bytes | memoryview], offset: int) -> int:
    """Write them one behind the other from `offset` on; where they end."""
    left = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while left:
        done = os.pwritev(number, left[:1000], offset)
        offset += done
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]
    return offset


def read_all(number: int, size: int, offset: int) -> bytes:
    """So many bytes from `offset` on.

    Raises:
        OSError: there are fewer.
    """
    pieces = [os.pread(number, size, offset)]
    while missing := size - sum(map(len, pieces)):
        piece = os.pread(number, missing, offset + size - missing)
        if not piece:
            raise OSError(errno.EIO, f"{missing} bytes are missing at {offset + size - missing}")
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
