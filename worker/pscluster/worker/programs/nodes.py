"""What a planned stretch does beside calling functions: sums and other moves within a task, and the use of threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pscluster.worker.programs.computing import Slots
from pscluster.worker.programs.moves import Settled
from pscluster.worker.programs.thread_pool import thread_pool


class Node(Protocol):
    """What is called with the slots, and changes them."""

    def run(self, slots: Slots) -> None:
        """Do it."""


class Sum:
    """A block that several devices have terms of."""

    __slots__ = ("_dtype", "_inputs", "_move", "_output", "_shape", "is_fresh", "spare")

    def __init__(self, move: Settled, shard: int, inputs: Sequence[int], output: int) -> None:
        self._move, self._inputs, self._output = move, inputs, output
        self._shape, self._dtype = move.shapes[shard], move.dtype
        self.is_fresh = True
        self.spare: int | None = None

    def run(self, slots: Slots) -> None:
        """Add it up, in the order of the devices."""
        combine, (first, second, *more) = self._move.combine, self._inputs
        out = np.empty(self._shape, self._dtype) if self.spare is None else slots[self.spare]
        combine(slots[first], slots[second], out=out)
        for slot in more:
            combine(out, slots[slot], out=out)
        slots[self._output] = out


class Assembly:
    """A block that is made of parts of others', or is one of them."""

    __slots__ = ("_devices", "_inputs", "_move", "_output", "_shard", "is_fresh", "spare")

    def __init__(self, move: Settled, shard: int, devices: Sequence[int], inputs: Sequence[int], output: int) -> None:
        self._move, self._shard, self._devices, self._inputs, self._output = move, shard, devices, inputs, output
        self.is_fresh = False
        self.spare: int | None = None

    def run(self, slots: Slots) -> None:
        """Assemble it."""
        of = {device: slots[slot] for device, slot in zip(self._devices, self._inputs, strict=True)}
        slots[self._output] = self._move.assembled(self._shard, of)


class HandOver:
    """Hands a computation over to another thread."""

    __slots__ = ("_node", "_slot")

    def __init__(self, node: Node, slot: int) -> None:
        self._node, self._slot = node, slot

    def run(self, slots: Slots) -> None:
        """Put what is to be waited for into a slot."""
        node = self._node
        slots[self._slot] = thread_pool().submit(lambda: node.run(slots))


class Wait:
    """Waits for what was handed over."""

    __slots__ = ("_slot",)

    def __init__(self, slot: int) -> None:
        self._slot = slot

    def run(self, slots: Slots) -> None:
        """Wait for it, or do it here if no thread has begun. Raises its error."""
        piece, slots[self._slot] = slots[self._slot], None
        piece.finish()
