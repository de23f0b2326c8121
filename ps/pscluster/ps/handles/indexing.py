"""Indices and gradients as users write them, in the forms that `shard_requests` and `variable` take."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pscluster.core.dtypes import array_of, as_array
from pscluster.core.geometry.partition import Block

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]


class IndexedSlices(NamedTuple):
    """A sparse gradient or update: `values[i]` belongs to row `indices[i]`; rows of equal indices are summed.

    Attributes:
        values: (n, ...) rows.
        indices: (n,) integers.
        dense_shape: of the whole, or None.

    Examples:
        >>> gradient = IndexedSlices(np.ones((2, 16), np.float32), [7, 3])
    """

    values: npt.ArrayLike
    indices: npt.ArrayLike
    dense_shape: tuple[int, ...] | None = None


Gradient = npt.ArrayLike | IndexedSlices


def gradient_of(gradient: Any) -> Any:
    """Return a framework's gradient; a sparse one, such as torch's of an embedding, as `IndexedSlices`."""
    if type(gradient) is np.ndarray or not getattr(gradient, "is_sparse", False):
        return gradient
    sparse = gradient.detach().coalesce()
    if sparse.sparse_dim() != 1:
        return sparse.to_dense()
    return IndexedSlices(array_of(sparse.values()), array_of(sparse.indices())[0], tuple(sparse.shape))


def advanced_index(index: Any, name: str) -> Array | tuple[Any, ...] | None:
    """Return an index that contains arrays: the array, or a tuple of several things. None for a basic index."""
    if isinstance(index, list | range) or (isinstance(index, np.ndarray) and index.ndim):
        array = as_array(index, name, "index")
        return array.astype(np.int64) if not array.size and not isinstance(index, np.ndarray) else array
    if isinstance(index, tuple) and any(
        isinstance(item, list | tuple | range) or (isinstance(item, np.ndarray) and item.ndim) for item in index
    ):
        return index
    return None


def wrapped_ids(ids: Array, shape: tuple[int, ...], name: str) -> Array:
    """Count negative row numbers from the end, as NumPy's indexing does. IndexError if one is out of range."""
    if ids.dtype.kind not in "iu":
        raise IndexError(f"variable {name!r}: arrays used as indices must be of integers or booleans, not {ids.dtype}")
    rows = shape[0] if shape else 0
    if ids.size and (ids.min() < -rows or ids.max() >= rows):
        wrong = ids[(ids < -rows) | (ids >= rows)].reshape(-1)[0]
        raise IndexError(f"variable {name!r}: index {wrong} is out of range for axis 0 with {rows} rows")
    if ids.dtype.kind == "u":
        return ids
    ids = ids.astype(np.int64, copy=False)  # the sum may not fit in a narrow type
    wrapped: Array = np.where(ids < 0, ids + rows, ids)
    return wrapped


def whole_index(block: Block) -> Any:
    """Return the index of a block in the whole; the ellipsis makes a scalar's a view, too."""
    return (*block.slices, ...)
