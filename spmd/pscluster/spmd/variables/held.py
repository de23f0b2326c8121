"""Variables of a mesh of this process' own devices: their blocks are here, and so is what optimizers keep beside them.

Blocks do not change: an update replaces them. So what has read one keeps the value that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pscluster.core.geometry.partition import Block
from pscluster.core.layouts.layout import Layout
from pscluster.ps.optim.kernels import apply_dense, new_slots
from pscluster.ps.optim.rules import UpdateRule
from pscluster.spmd.execution.recording import Stored
from pscluster.worker.programs.program import Update
from pscluster.worker.programs.variables import Write

Array = npt.NDArray[Any]

_OPERATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType({"add": np.add, "sub": np.subtract})


@dataclass(slots=True)
class _State:
    """What an optimizer keeps of a block."""

    slots: dict[str, Array]
    step: int = 0


class HeldVariable:
    """A variable in this process, in the blocks of its layout. Not thread-safe: its mesh runs one program at a time."""

    def __init__(self, value: Array, layout: Layout) -> None:
        self.layout, self.shape, self.dtype = layout, value.shape, value.dtype
        self._blocks = {
            block: np.array(value[block.slices], order="C", ndmin=value.ndim)
            for block in layout.partition(value.shape).blocks
        }
        self._states: dict[tuple[int, Block], _State] = {}  # by optimizer

    def whole(self) -> Array:
        """Return a copy of the value."""
        out = np.empty(self.shape, self.dtype)
        for block, values in self._blocks.items():
            out[block.slices] = values
        return out

    def read(self, block: Block) -> Array:
        """Return a block."""
        if block in self._blocks:
            return self._blocks[block]
        part: Array = self.whole()[block.slices]  # in another layout
        return part

    def update(self, kind: str, block: Block, values: Array, optimizer: HeldOptimizer | None) -> None:
        """Replace a block by what an update makes of it."""
        if kind == "assign":
            self._blocks[block] = values
        elif optimizer is None:
            self._blocks[block] = np.asarray(_OPERATIONS[kind](self._blocks[block], values), self.dtype)
        else:
            self._apply(block, values, optimizer)

    def _apply(self, block: Block, gradient: Array, optimizer: HeldOptimizer) -> None:
        new = self._blocks[block].copy()
        state = self._states.get((optimizer.id, block))
        if state is None:
            state = self._states[optimizer.id, block] = _State(new_slots(optimizer.rule, new.shape, new.dtype))
        state.step += 1
        with np.errstate(all="ignore"):
            apply_dense(optimizer.rule, new, gradient, state.slots, state.step)
        self._blocks[block] = new
        optimizer.iterations = max(optimizer.iterations, state.step)


class HeldOptimizer:
    """An optimizer in this process: a rule, and how many gradients it has applied, on the block with the most."""

    def __init__(self, number: int, rule: UpdateRule) -> None:
        self.id, self.rule = number, rule
        self.iterations = 0


class HeldHere:
    """The variables that a program names by number, of this process."""

    def __init__(self, variables: Sequence[Stored], optimizers: Sequence[Any]) -> None:
        self._variables = [cast(HeldVariable, variable.handle) for variable in variables]
        self._optimizers = optimizers

    def read(self, wanted: Sequence[tuple[int, Block]]) -> list[Array]:
        """Return blocks."""
        return [self._variables[number].read(block) for number, block in wanted]

    def write(self, updates: Sequence[Update], writes: Sequence[Write]) -> None:
        """Update variables."""
        del updates
        for write in writes:
            of = write.update
            optimizer = None if of.optimizer is None else self._optimizers[of.optimizer]
            self._variables[of.variable].update(of.kind, write.block, write.values, optimizer)
