"""The arrays in what a user gives a collective: taken out of their structure, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pscluster.core.dtypes import array_of, is_variable_dtype
from pscluster.core.errors import MisuseError
from pscluster.core.values import describe, map_structure
from pscluster.core.values.records import is_record_class, layout_of
from pscluster.worker.collectives.algorithms import Array


class Leaves:
    """The arrays of a structure, in an order that is the same wherever the structure is: dicts' items by key."""

    def __init__(self, structure: Any, prepare: Callable[[Array], Array]) -> None:
        found: list[Any] = []

        def number(leaf: Any) -> int:
            found.append(leaf)
            return len(found) - 1

        self._numbered = map_structure(number, structure)
        places = list(_places(self._numbered, ""))
        self.arrays = [prepare(as_array(found[at], f"the value{path}")) for path, at in places]
        self._order = [at for _, at in places]
        self._scalars = {at for at, leaf in enumerate(found) if not np.ndim(leaf)}
        layouts = zip(places, map(described_array, self.arrays), strict=True)
        self.layout = "; ".join(f"{path} {layout}".strip() for (path, _), layout in layouts)

    def mapped(self, fn: Callable[[Array], Array]) -> Any:
        """Return the structure of results of `fn`, which takes all arrays of one type as one flat array."""
        results: list[Any] = [None] * len(self.arrays)
        by_type: dict[str, list[int]] = {}
        for at, array in enumerate(self.arrays):
            by_type.setdefault(array.dtype.name, []).append(at)
        for positions in by_type.values():
            flats = [np.ascontiguousarray(self.arrays[at]).reshape(-1) for at in positions]
            result = fn(flats[0] if len(flats) == 1 else np.concatenate(flats))
            start = 0
            for at in positions:
                shape, stop = self.arrays[at].shape, start + self.arrays[at].size
                results[at] = result[start:stop].reshape(shape)
                start = stop
        return self.replaced([result[()] for result in results])

    def replaced(self, results: Sequence[Any]) -> Any:
        """Return the structure with these in place of its arrays, in their order."""
        by_number = dict(zip(self._order, results, strict=True))
        return map_structure(by_number.__getitem__, self._numbered)


def _places(numbered: Any, path: str) -> Iterator[tuple[str, int]]:
    """Yield the path and the number of each leaf of a structure of numbers."""
    cls: type = type(numbered)
    if isinstance(numbered, int):
        yield path, numbered
    elif is_record_class(cls):
        for name in layout_of(cls).fields:
            yield from _places(getattr(numbered, name), f"{path}.{name}")
    elif isinstance(numbered, dict):
        for key in sorted(numbered, key=lambda key: (type(key).__name__, repr(key))):
            yield from _places(numbered[key], f"{path}[{key!r}]")
    else:
        for at, item in enumerate(numbered):
            yield from _places(item, f"{path}[{at}]")


def as_array(value: Any, noun: str) -> Array:
    """Return a user's value as an array in native byte order. Raise MisuseError if it is not numeric."""
    try:
        array = array_of(value)
    except (ValueError, TypeError) as error:  # such as a ragged list
        raise MisuseError(f"{noun} is not an array: {error}") from None
    if not is_variable_dtype(array.dtype):
        raise MisuseError(f"{noun} is {describe(value)}, of {array.dtype.name}: give arrays of numbers, or numbers")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def described_array(array: Array, free: int | None = None) -> str:
    """Return type and shape in words; axis `free` may have any length."""
    lengths = ["*" if axis == free else str(length) for axis, length in enumerate(array.shape)]
    return f"{array.dtype.name}[{', '.join(lengths)}]"
