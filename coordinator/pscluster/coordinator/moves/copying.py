"""Copying in blocks: one is written while the next one is read, so that a link of the coordinator is busy both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def copied(blocks: Iterable[T], write: Callable[[T], int]) -> int:
    """Write each block, on another thread, while this one reads the next; return how many bytes were written.

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
