"""Blocks of examples: cut, joined, and made into batches.

A block is a structure (dict, tuple) of arrays whose first axis is that of the examples, or a list of examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.dtypes import array_of


def map_leaves(fn: Callable[[Any], Any], structure: Any) -> Any:
    """Return the same structure of dicts and tuples (including named ones), with `fn(leaf)` for each leaf."""
    if isinstance(structure, np.ndarray):  # nearly always, and checking for a mapping takes ten times as long
        return fn(structure)
    if isinstance(structure, tuple):
        mapped = [map_leaves(fn, item) for item in structure]
        return type(structure)(*mapped) if hasattr(structure, "_fields") else tuple(mapped)
    if isinstance(structure, Mapping):
        return {key: map_leaves(fn, item) for key, item in structure.items()}
    return fn(structure)


def leaves(structure: Any) -> list[Any]:
    """Return the leaves, in order."""
    collected: list[Any] = []
    map_leaves(collected.append, structure)
    return collected


def size_of(block: Any) -> int:
    """Return the number of examples in a block. Raise ValueError if its arrays differ in length."""
    if isinstance(block, list):
        return len(block)
    sizes = {len(leaf) for leaf in leaves(block)}
    if len(sizes) != 1:
        raise ValueError(f"a block whose arrays have {sorted(sizes)} examples: they must have the same number")
    return sizes.pop()


def check_block(block: Any, size: int) -> None:
    """Raise ValueError if a block does not have `size` examples."""
    if (actual := size_of(block)) != size:
        raise ValueError(f"the reader returned {actual:,} examples for a range of {size:,}")


def take(block: Any, indices: Any) -> Any:
    """Return a block of the examples at these indices, from 0, of another one."""
    if isinstance(block, list):
        return [block[index] for index in indices]
    return map_leaves(lambda leaf: take_rows(leaf, indices), block)


def take_rows(array: Any, indices: Any) -> npt.NDArray[Any]:
    """Return a copy of an array's rows at these indices, from 0."""
    # Twice as fast as indexing, and without a check of each index, which has no meaning here, up to twice again.
    rows: npt.NDArray[Any] = array_of(array).take(indices, 0, mode="wrap")
    return rows


def cut(block: Any, start: int, stop: int) -> Any:
    """Return a block of the examples [start, stop) of another one, which shares its memory."""
    if type(block) is dict and all(type(leaf) is np.ndarray for leaf in block.values()):  # columns: in half the time
        return {name: leaf[start:stop] for name, leaf in block.items()}
    return map_leaves(itemgetter(slice(start, stop)), block)


def joined(blocks: Sequence[Any]) -> Any:
    """Concatenate blocks. Raise ValueError if their structures or shapes do not match."""
    if len(blocks) == 1:
        return blocks[0]
    if all(isinstance(block, list) for block in blocks):
        return [example for block in blocks for example in block]
    return _together(np.concatenate, blocks)


def unstacked(block: Any) -> list[Any]:
    """Return the examples of a block."""
    if isinstance(block, list):
        return block
    return [map_leaves(itemgetter(index), block) for index in range(size_of(block))]


def stacked(block: Any) -> Any:
    """Return a batch: arrays with one more axis than the examples. Raise ValueError if those differ in shape."""
    return _together(np.stack, block) if isinstance(block, list) else block


def _together(how: Callable[[Any], Any], items: Sequence[Any]) -> Any:
    first = items[0]
    if isinstance(first, Mapping):
        if any(not isinstance(item, Mapping) or item.keys() != first.keys() for item in items):
            raise ValueError(f"examples with keys other than the first one's, {sorted(first)}")
        return {key: _together(how, [item[key] for item in items]) for key in first}
    if isinstance(first, tuple):
        if any(not isinstance(item, tuple) or len(item) != len(first) for item in items):
            raise ValueError(f"examples that are not tuples of {len(first)}, as the first one is")
        columns = [_together(how, column) for column in zip(*items, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if isinstance(first, bytes):  # of an array of bytes, zero bytes at the end would be lost
        objects = np.empty(len(items), object)
        objects[:] = items
        return objects
    arrays = [array_of(item) for item in items]
    if how is np.stack and len({array.shape for array in arrays}) > 1:
        other = next(index for index, array in enumerate(arrays) if array.shape != arrays[0].shape)
        raise ValueError(
            f"example {other} of the batch has the shape {arrays[other].shape}, and the first one {arrays[0].shape}: "
            "pad them in a map(), or leave batch() out"
        )
    return how(arrays)
