"""Batches of a block of examples that was read at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pscluster.worker.data.blocks import cut


class Batches:
    """Successive batches of a block. Each shares the block's memory, and is made when it is taken.

    So the thread that reads hands a block over to the function once, not batch by batch. A block may still have to be
    arranged: brought into its order. Whichever thread has the time does that; see `prefetch`.

    Args:
        block: the examples.
        size: of a batch; the last one may be smaller.
        stop: how many examples to take; those after them are left out.
        arrange: returns the block's examples in their order, in memory that nothing else writes to, or raises a
            DatasetError; None: they are.
    """

    def __init__(self, block: Any, size: int, stop: int, arrange: Callable[[Any], Any] | None = None) -> None:
        self._block = block
        self._size = size
        self._stop = stop
        self._arrange = arrange
        self._at = 0

    def __len__(self) -> int:
        """Return how many batches are left."""
        return -(-(self._stop - self._at) // self._size)

    @property
    def begun(self) -> bool:
        """Whether a batch was taken."""
        return self._at > 0

    @property
    def is_arranged(self) -> bool:
        """Whether batches can be taken at once."""
        return self._arrange is None

    def arrange(self) -> None:
        """Arrange the block, if that was not done. If it raises, the block is lost."""
        if self._arrange is not None:
            arrange, block, self._arrange, self._block = self._arrange, self._block, None, None
            self._block = arrange(block)

    def take(self) -> Any:
        """Return the next batch, of which there must be one."""
        self.arrange()
        start, self._at = self._at, min(self._at + self._size, self._stop)
        batch = cut(self._block, start, self._at)
        if self._at == self._stop:
            self._block = None  # freed with its batches, even if this is kept
        return batch
