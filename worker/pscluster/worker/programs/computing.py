"""Calls the functions of a program on blocks, and checks what they return.

A function takes microseconds on small blocks. So what does not depend on the blocks is settled once for a program, and
for a device: how its arguments are filled in, and what it must return. What a ufunc returns follows from the types of
its operands, which do not change: it is checked at the first run. After that the result of simple arithmetic is written
over an operand that nothing else needs, if there is one: the same elements, and memory that is in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import ProtocolError
from pscluster.worker.programs.operations import COMBINES, OPERATIONS
from pscluster.worker.programs.program import Compute, Placeholder

Array = npt.NDArray[Any]

Slots = list[Any] | dict[int, Any]
"""What a task has at the moment: blocks, by numbers."""

_TYPES_DECIDE = np.lib.NumpyVersion(np.__version__) >= "2.0.0"
"""Earlier versions choose types of results by the values of arrays without axes, too."""

_REDUCTIONS = frozenset(f"{name}.reduce" for name in COMBINES)

ARITHMETIC = frozenset(("add", "subtract", "multiply", "divide", "maximum", "minimum", "sqrt", "negative", "square"))
"""Ufuncs whose results are the same to the bit, wherever they are written."""


class Computation:
    """A function of a program, as it is called for one device."""

    __slots__ = ("_call", "_compute", "_dtypes", "_inputs", "_outputs", "_shapes", "is_fresh", "run", "spare")

    def __init__(
        self,
        compute: Compute,
        inputs: Sequence[int],
        outputs: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[np.dtype[Any]],
    ) -> None:
        """Take the slots of its operands and results, and what results are."""
        self._compute, self._inputs, self._outputs = compute, inputs, outputs
        self._shapes, self._dtypes = shapes, dtypes
        function = OPERATIONS[compute.function]
        self._call = _caller(function, *_arguments(compute, inputs, shapes))
        operands = function.nin if isinstance(function, np.ufunc) else 1 if compute.function in _REDUCTIONS else -1
        self.is_fresh = len(compute.args) == operands and "out" not in compute.kwargs
        """Whether its results are new memory, which no operand shares."""
        self.spare: int | None = None
        """The slot of an operand that nothing else needs: new memory of the result's shape and type. It has one."""
        self.run: Callable[[Slots], None] = self._run_first
        """Call it on blocks in slots, and put its results there. ProtocolError if they are not what the program says.
        """

    def _run_first(self, slots: Slots) -> None:
        self._run_checked(slots)
        self.run = self._run_second

    def _run_second(self, slots: Slots) -> None:
        operands = [slots[slot] for slot in self._inputs]
        if self.is_fresh and len(self._outputs) == 1 and (_TYPES_DECIDE or all(operand.ndim for operand in operands)):
            self.run = self._unchecked(operands)
        else:
            self.run = self._run_one if len(self._outputs) == 1 else self._run_checked
        self.run(slots)

    def _run_checked(self, slots: Slots) -> None:
        made = self._call(slots)
        arrays = [np.asarray(result) for result in (made if isinstance(made, list | tuple) else [made])]
        found = [(array.shape, array.dtype) for array in arrays]
        wanted = list(zip(self._shapes, self._dtypes, strict=True))
        if found != wanted:
            raise ProtocolError(f"{self._compute.function} has returned {found}, where the program expects {wanted}")
        for slot, array in zip(self._outputs, arrays, strict=True):
            slots[slot] = _stored(array)

    def _run_one(self, slots: Slots) -> None:
        """Do the same, if it returns one array as it should; what else it returns is hardly ever right."""
        made = self._call(slots)
        if type(made) is np.ndarray and made.shape == self._shapes[0] and made.dtype == self._dtypes[0]:
            slots[self._outputs[0]] = made if made.flags.c_contiguous else _stored(made)
        else:
            self._run_checked(slots)

    def _unchecked(self, operands: Sequence[Array]) -> Callable[[Slots], None]:
        """Return what calls it as quickly as can be, on operands of the same shapes and types as these."""
        compute, (output,), (dtype,) = self._compute, self._outputs, self._dtypes
        function = OPERATIONS[compute.function]
        args, kwargs = _arguments(compute, self._inputs, self._shapes)
        if compute.function in ARITHMETIC and not kwargs:
            types = {operand.dtype for operand in operands}
            if types == {dtype} and dtype.kind == "f":
                args = [arg if isinstance(arg, Placeholder) else _as_array(arg, dtype) for arg in args]
            if self.spare is not None and dtype.kind in "fiu":
                return _in_place(function, args, output, self.spare)
        call = _caller(function, args, kwargs)
        if not self._shapes[0]:

            def run_scalar(slots: Slots) -> None:
                slots[output] = np.asarray(call(slots))

            return run_scalar

        def run(slots: Slots) -> None:
            made = call(slots)
            slots[output] = made if made.flags.c_contiguous else _stored(made)

        return run


def _arguments(
    compute: Compute, inputs: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and named arguments, with slots for numbers of inputs."""
    args = [_settled(arg, inputs, shapes) for arg in compute.args]
    return args, {name: _settled(arg, inputs, shapes) for name, arg in compute.kwargs.items()}


def _as_array(number: Any, dtype: np.dtype[Any]) -> Any:
    """Return a number of Python's as what a ufunc makes of it each time, where it meets arrays of a type."""
    if type(number) is float or (type(number) is int and abs(number) < 1 << 24):
        with np.errstate(all="ignore"):
            return np.asarray(number, dtype)
    return number


def _in_place(function: Any, args: Sequence[Any], output: int, spare: int) -> Callable[[Slots], None]:
    """Return what calls a ufunc, and writes its result over an operand."""
    match args:
        case [Placeholder(number=a)]:

            def run(slots: Slots) -> None:
                slots[output] = function(slots[a], out=slots[spare])

        case [Placeholder(number=a), Placeholder(number=b)]:

            def run(slots: Slots) -> None:
                slots[output] = function(slots[a], slots[b], out=slots[spare])

        case [Placeholder(number=a), other]:

            def run(slots: Slots) -> None:
                slots[output] = function(slots[a], other, out=slots[spare])

        case [other, Placeholder(number=b)]:

            def run(slots: Slots) -> None:
                slots[output] = function(other, slots[b], out=slots[spare])

        case _:
            raise AssertionError(f"arithmetic of {args!r:.100}")
    return run


def _caller(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Slots], Any]:
    """Return what calls the function with blocks in place of what stands for them."""
    if any(map(_has_blocks, (*kwargs.values(), *(arg for arg in args if not isinstance(arg, Placeholder))))):
        return lambda slots: function(
            *(_filled(arg, slots) for arg in args),
            **{name: _filled(arg, slots) for name, arg in kwargs.items()},
        )
    match args:  # nearly all functions are of one or two operands
        case [Placeholder(number=a)] if not kwargs:
            return lambda slots: function(slots[a])
        case [Placeholder(number=a)]:
            return lambda slots: function(slots[a], **kwargs)
        case [Placeholder(number=a), Placeholder(number=b)] if not kwargs:
            return lambda slots: function(slots[a], slots[b])
        case [Placeholder(number=a), other] if not kwargs:
            return lambda slots: function(slots[a], other)
        case [other, Placeholder(number=b)] if not kwargs:
            return lambda slots: function(other, slots[b])
    return lambda slots: function(*[slots[arg.number] if type(arg) is Placeholder else arg for arg in args], **kwargs)


def _settled(argument: Any, inputs: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> Any:
    """Return an argument with shapes in place of what stands for them, and slots for numbers of inputs."""
    if isinstance(argument, Placeholder):
        return Placeholder("in", inputs[argument.number]) if argument.kind == "in" else shapes[argument.number]
    if isinstance(argument, list | tuple):
        return type(argument)(_settled(item, inputs, shapes) for item in argument)
    return argument


def _has_blocks(argument: Any) -> bool:
    return isinstance(argument, Placeholder) or (isinstance(argument, list | tuple) and any(map(_has_blocks, argument)))


def _filled(argument: Any, slots: Slots) -> Any:
    """Return an argument with blocks in place of what stands for them."""
    if isinstance(argument, Placeholder):
        return slots[argument.number]
    if isinstance(argument, list | tuple):
        return type(argument)(_filled(item, slots) for item in argument)
    return argument


def _stored(array: Array) -> Array:
    """Return an array as a block: contiguous, or a view of the whole of another one, such as its transpose."""
    whole = isinstance(array.base, np.ndarray) and array.nbytes == array.base.nbytes
    return array if whole or array.flags.c_contiguous else np.ascontiguousarray(array)
