"""`array.at[index]`: arrays with some elements replaced, or added to, since arrays do not change."""

from __future__ import annotations

from typing import Any

import numpy as np

from pscluster.core.errors import MisuseError
from pscluster.core.layouts.rule import Label
from pscluster.spmd.functions.applying import Result, apply, as_tensor, block, is_scalar, xp
from pscluster.spmd.functions.indexing import picked
from pscluster.spmd.tensor import FUNCTIONS, DTensor


class At:
    """What there is to index: `array.at`."""

    __slots__ = ("_array",)

    def __init__(self, array: DTensor) -> None:
        self._array = array

    def __getitem__(self, index: Any) -> Elements:
        return Elements(self._array, index)


class Elements:
    """Elements of an array, by an index like NumPy's: each method returns the array with these changed.

    The result has the array's layout. If an index names an element twice, `set` keeps the last value; the others apply
    every one. The index may also be a mask that is a global array; then there is one value, or one row, for all
    elements.
    """

    __slots__ = ("_array", "_index")

    def __init__(self, array: DTensor, index: Any) -> None:
        self._array, self._index = array, index

    def set(self, value: Any) -> Any:
        """Return the array with the elements replaced: `array[index] = value`."""
        return self._updated("set", value)

    def add(self, value: Any) -> Any:
        """Return the array with something added to the elements: `numpy.add.at`."""
        return self._updated("add", value)

    def subtract(self, value: Any) -> Any:
        """Return the array with something subtracted from the elements: `numpy.subtract.at`."""
        return self._updated("subtract", value)

    def multiply(self, value: Any) -> Any:
        """Return the array with the elements multiplied: `numpy.multiply.at`."""
        return self._updated("multiply", value)

    def min(self, value: Any) -> Any:
        """Return the array with each element replaced by the smaller of it and a value: `numpy.minimum.at`."""
        return self._updated("minimum", value)

    def max(self, value: Any) -> Any:
        """Return the array with each element replaced by the larger of it and a value: `numpy.maximum.at`."""
        return self._updated("maximum", value)

    def _updated(self, kind: str, value: Any) -> Any:
        array = self._array
        values: Any = value if is_scalar(value) else as_tensor(value, array.mesh)
        if np.iscomplexobj(values) and array.dtype.kind != "c":
            raise TypeError(f"elements of type {array.dtype} can't be complex: convert the array with astype()")
        if kind != "set" and array.dtype.kind in "biu" and np.result_type(getattr(values, "dtype", values)).kind == "f":
            raise TypeError(
                f"at[].{kind}() of floats on elements of type {array.dtype}: convert the array with astype()"
            )
        if is_scalar(value):
            number = np.empty((), array.dtype)
            number[...] = value  # or NumPy's errors for what the type can't hold
            values = as_tensor(number, array.mesh)
        else:
            values = values.astype(array.dtype)
        if isinstance(self._index, DTensor) and self._index.dtype.kind == "b":
            return self._masked(kind, values)
        labels, shape, arrays, of_arrays, index = picked(array, self._index)
        if values.shape != shape:
            values = xp.broadcast_to(values, shape)
        # Each device writes whole axes, but for those of which everything is taken.
        kept: set[Label] = {label for label in labels if isinstance(label, int)}
        own: tuple[Label, ...] = tuple(axis if axis in kept else None for axis in range(array.ndim))
        whole: tuple[Label, ...] = tuple(axis if axis in kept else ("whole", axis) for axis in range(array.ndim))
        operands = [whole, *of_arrays, labels]
        args = [block(0), index, block(len(arrays) + 1), kind]
        result = Result(own, array.shape, array.dtype)
        made = apply("update_at", [array, *arrays, values], operands, [result], args)[0]
        return made.relayout(array.layout)

    def _masked(self, kind: str, values: Any) -> Any:
        array, mask = self._array, self._index
        rest = array.ndim - mask.ndim
        if mask.shape != array.shape[: mask.ndim]:
            raise IndexError(f"a mask of shape {mask.shape} does not fit an array of shape {array.shape}")
        if values.ndim > rest:
            raise MisuseError(
                f"at[mask] takes one value for all elements, of at most {rest} axes, not values of shape "
                f"{values.shape}, since how many elements there are is not known: write np.where(mask, values, array)"
            )
        values = xp.broadcast_to(values, array.shape[mask.ndim :])
        new = values if kind == "set" else getattr(xp, kind)(array, values)
        made = xp.where(xp.reshape(mask, mask.shape + (1,) * rest), new, array)
        return made.relayout(array.layout)


FUNCTIONS["at"] = At
