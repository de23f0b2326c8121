"""Batches of a block of examples that was read at once."""

from __future__ import annotations

from typing import Any

from pscluster.worker.data.sources import cut


class Batches:
    """Successive batches of a block. Each shares the block's memory, and is made when it is taken.

    So the thread that reads hands a block over to the function once, not batch by batch.

    Args:
        block: the examples, in their order, in memory that nothing else writes to.
        size: of a batch; the last one may be smaller.
        stop: how many examples to take; those after them are left out.
    """

    def __init__(self, block: Any, size: int, stop: int) -> None:
        self._block = block
        self._size = size
        self._stop = stop
        self._at = 0

    def __len__(self) -> int:
        """Return how many batches are left."""
        return -(-(self._stop - self._at) // self._size)

    @property
    def begun(self) -> bool:
        """Whether a batch was taken."""
        return self._at > 0

    def take(self) -> Any:
        """Return the next batch, of which there must be one."""
        start, self._at = self._at, min(self._at + self._size, self._stop)
        return cut(self._block, start, self._at)
