"""Calls the functions of a program on blocks, and checks what they return.

A function takes microseconds on small blocks. So what does not depend on the blocks is settled once for a program, and
for a device: how its arguments are filled in, and what it must return.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import ProtocolError
from pscluster.worker.programs.operations import OPERATIONS
from pscluster.worker.programs.program import Compute, Placeholder, Program

Array = npt.NDArray[Any]

Registers = Mapping[int, Array]
"""One device's blocks."""


class Computation:
    """A function of a program, as it is called for one device."""

    __slots__ = ("_call", "_dtypes", "_function", "_only", "outputs", "shapes")

    def __init__(self, program: Program, compute: Compute, device: int) -> None:
        self.outputs, self._function = compute.outputs, compute.function
        self.shapes = [program.local_shape(register, device) for register in compute.outputs]
        self._dtypes = [program.arrays[register].dtype for register in compute.outputs]
        self._only = (self.outputs[0], self.shapes[0], self._dtypes[0]) if len(self.outputs) == 1 else (-1, (), None)
        self._call = _caller(compute, self.shapes)

    def run(self, registers: dict[int, Array]) -> None:
        """Call it, and add its results. Raise ProtocolError if it does not return what the program says."""
        made, (output, shape, dtype) = self._call(registers), self._only
        if type(made) is np.ndarray and made.shape == shape and made.dtype == dtype:
            registers[output] = made if made.flags.c_contiguous else _stored(made)
        else:  # hardly ever: it costs as much as small arrays
            registers.update(zip(self.outputs, self._checked(made), strict=True))

    def _checked(self, made: Any) -> list[Array]:
        arrays = [np.asarray(result) for result in (made if isinstance(made, list | tuple) else [made])]
        found = [(array.shape, array.dtype) for array in arrays]
        wanted = list(zip(self.shapes, self._dtypes, strict=True))
        if found != wanted:
            raise ProtocolError(f"{self._function} has returned {found}, where the program expects {wanted}")
        return list(map(_stored, arrays))


def _caller(compute: Compute, shapes: Sequence[tuple[int, ...]]) -> Callable[[Registers], Any]:
    """Return what calls the function with blocks in place of what stands for them."""
    function, inputs = OPERATIONS[compute.function], compute.inputs
    args = [_settled(arg, inputs, shapes) for arg in compute.args]
    kwargs = {name: _settled(arg, inputs, shapes) for name, arg in compute.kwargs.items()}
    if any(map(_has_blocks, (*kwargs.values(), *(arg for arg in args if not isinstance(arg, Placeholder))))):
        return lambda registers: function(
            *(_filled(arg, registers) for arg in args),
            **{name: _filled(arg, registers) for name, arg in kwargs.items()},
        )
    match args:  # nearly all functions are of one or two operands
        case [Placeholder(number=a)] if not kwargs:
            return lambda registers: function(registers[a])
        case [Placeholder(number=a), Placeholder(number=b)] if not kwargs:
            return lambda registers: function(registers[a], registers[b])
        case [Placeholder(number=a), other] if not kwargs:
            return lambda registers: function(registers[a], other)
        case [other, Placeholder(number=b)] if not kwargs:
            return lambda registers: function(other, registers[b])
    return lambda registers: function(
        *[registers[arg.number] if type(arg) is Placeholder else arg for arg in args], **kwargs
    )


def _settled(argument: Any, inputs: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> Any:
    """Return an argument with shapes in place of what stands for them, and registers for numbers of inputs."""
    if isinstance(argument, Placeholder):
        return Placeholder("in", inputs[argument.number]) if argument.kind == "in" else shapes[argument.number]
    if isinstance(argument, list | tuple):
        return type(argument)(_settled(item, inputs, shapes) for item in argument)
    return argument


def _has_blocks(argument: Any) -> bool:
    return isinstance(argument, Placeholder) or (isinstance(argument, list | tuple) and any(map(_has_blocks, argument)))


def _filled(argument: Any, registers: Registers) -> Any:
    """Return an argument with blocks in place of what stands for them."""
    if isinstance(argument, Placeholder):
        return registers[argument.number]
    if isinstance(argument, list | tuple):
        return type(argument)(_filled(item, registers) for item in argument)
    return argument


def _stored(array: Array) -> Array:
    """Return an array as a block: contiguous, or a view of the whole of another one, such as its transpose."""
    whole = isinstance(array.base, np.ndarray) and array.nbytes == array.base.nbytes
    return array if whole or array.flags.c_contiguous else np.ascontiguousarray(array)
