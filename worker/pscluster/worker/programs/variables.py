"""Variables that a program reads, and updates at its end.

All that a program reads is read before anything else, each block by those tasks that need it, and what it updates is
sent when all else is done, each block by one task. It reads no variable after it has updated it. With variables on
parameter servers such a program is one step of the job's synchronous run: all of its updates are applied, or none, and
what runs again after a worker has died reads what the first attempt has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy.typing as npt

from pscluster.core.checks import type_of
from pscluster.core.context import current_function
from pscluster.core.errors import ProtocolError
from pscluster.core.geometry.partition import Block
from pscluster.ps.handles.optimizers import Optimizer
from pscluster.ps.handles.variables.blocks import BlockUpdate, read_blocks, shard_updates
from pscluster.ps.handles.variables.variable import Variable
from pscluster.v1 import ps_pb2
from pscluster.worker.programs.program import Program, Update

Array = npt.NDArray[Any]

KINDS = MappingProxyType(
    {"assign": ps_pb2.ASSIGN, "add": ps_pb2.ADD, "sub": ps_pb2.SUB, "gradient": ps_pb2.APPLY_GRADIENT}
)


@dataclass(frozen=True, slots=True)
class Write:
    """What a task does to one block of a variable."""

    update: Update
    block: Block
    values: Array


class Variables(Protocol):
    """The variables that a program names by number."""

    def read(self, wanted: Sequence[tuple[int, Block]]) -> list[Array]:
        """Return blocks of variables. They must not be changed."""

    def write(self, updates: Sequence[Update], writes: Sequence[Write]) -> None:
        """Update variables: this task's part of all updates of a program."""


class NoVariables:
    """There are none."""

    def read(self, wanted: Sequence[tuple[int, Block]]) -> list[Array]:
        """Return nothing."""
        assert not wanted
        return []

    def write(self, updates: Sequence[Update], writes: Sequence[Write]) -> None:
        """Do nothing."""
        del writes
        assert not updates


class OnServers:
    """Variables on the parameter servers, and optimizers that are applied there."""

    def __init__(self, program: Program, variables: Sequence[Any], optimizers: Sequence[Any]) -> None:
        """Raise ProtocolError if they are not those of the program."""
        given = [len(handles) if isinstance(handles, list | tuple) else -1 for handles in (variables, optimizers)]
        if given != [len(program.variables), program.optimizers]:
            raise ProtocolError(
                f"a program of {len(program.variables)} variables and {program.optimizers} optimizers was given "
                f"others: {type_of(variables)} of {given[0]}, and {type_of(optimizers)} of {given[1]}"
            )
        for variable, of in zip(variables, program.variables, strict=True):
            if not isinstance(variable, Variable) or (variable.shape, variable.dtype) != (of.shape, of.dtype):
                raise ProtocolError(f"a program needs a variable {of}, but was given {type_of(variable)}: {variable!r}")
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise ProtocolError(f"a program needs an optimizer, but was given {type_of(optimizer)}")
        self._variables, self._optimizers = variables, optimizers

    def read(self, wanted: Sequence[tuple[int, Block]]) -> list[Array]:
        """Read them: one request per server."""
        return read_blocks([(self._variables[number], block) for number, block in wanted])

    def write(self, updates: Sequence[Update], writes: Sequence[Write]) -> None:
        """Have them sent when the step ends. Raise ProtocolError if this is none."""
        function = current_function()
        if function is None or function.steps is None:
            raise ProtocolError("a program updates variables, but was not sent as a synchronous step")
        sent = shard_updates(
            [
                BlockUpdate(
                    KINDS[write.update.kind],
                    self._variables[write.update.variable],
                    write.block,
                    write.values,
                    0 if write.update.optimizer is None else self._optimizers[write.update.optimizer].id,
                )
                for write in writes
            ]
        )
        variables = [self._variables[update.variable] for update in updates]
        function.steps.add_blocks(sent, [(variable.id, variable.name) for variable in variables])
