"""Copying what is moved or cut: in blocks, and at a rate that leaves most of the machines to training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

COPY_RATE = 64 << 20
"""Bytes per second of what is copied while it changes: that takes about a third of a core, of the servers and this
process together, and leaves the rest to training. What is frozen is copied as fast as can be."""


def keep_rate(begin: float, nbytes: int, rate: float = COPY_RATE) -> None:
    """Sleep until this many bytes, whose copy began then (`time.monotonic()`), have taken as long as at the rate."""
    time.sleep(max(begin + nbytes / rate - time.monotonic(), 0.0))


def copied(blocks: Iterable[T], write: Callable[[T], int]) -> int:
    """Write each block, on another thread, while this one reads the next; return how many bytes were written.

    So a link of the coordinator is busy both ways.
    Errors of either come out when nothing is being written any more; what comes after them is not begun.
    """
    total, writing = 0, None
    with ThreadPoolExecutor(1, "cut") as pool:
        for block in blocks:
            total += _result(writing)
            writing = pool.submit(write, block)
        return total + _result(writing)


def _result(writing: Future[int] | None) -> int:
    return 0 if writing is None else writing.result()
