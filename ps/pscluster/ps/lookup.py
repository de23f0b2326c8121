"""Embedding lookups: rows of tables by id, alone or combined into bags; each distinct row travels once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import InvalidUpdateError
from pscluster.core.geometry import check_ids
from pscluster.ps.variables import Array, Variable, gather_rows

Combiner = Literal["sum", "mean", "sqrtn"]
Bags = Sequence[npt.ArrayLike] | npt.NDArray[Any]


def embedding_lookup(params: Variable | Sequence[Variable], ids: Any) -> Any:
    """Rows of a table by id, in the order of the ids, duplicates included; each distinct row travels once.

    Args:
        params: a table, or several.
        ids: integers of any shape; for several tables, one such array a table.

    Returns:
        An array of shape `ids.shape + table.shape[1:]`; for several tables a list, from one request a server.

    Raises:
        InvalidUpdateError: an id that is no row is named, or the ids are no integers.
    """
    if isinstance(params, Variable):
        return _distinct([(params, ids)])[0]
    if len(params) != len(ids):
        raise InvalidUpdateError(f"{len(params)} tables, but {len(ids)} arrays of ids: give one for each table")
    return _distinct(list(zip(params, ids, strict=True)))


def embedding_bag(
    params: Variable,
    bags: Bags,
    weights: Bags | None = None,
    combiner: Combiner = "mean",
) -> Array:
    """For each bag of ids, its rows combined; an empty bag gives zeros.

    Args:
        params: the table, (rows, ...).
        bags: ragged, a sequence of arrays of ids; or a 2-D array, a bag a row.
        weights: of the same lengths; default: 1 each.
        combiner: "sum"; "mean", the sum over the sum of the weights; "sqrtn", over the root of the sum of their
            squares (TensorFlow's `embedding_lookup_sparse`).

    Returns:
        An array of shape (bags, ...), of the table's type.

    Raises:
        InvalidUpdateError: ids that are no rows, weights of other lengths, an unknown combiner.
    """
    if combiner not in ("sum", "mean", "sqrtn"):
        raise InvalidUpdateError(f"combiner is {combiner!r}: give 'sum', 'mean' or 'sqrtn'")
    lengths = np.array([np.size(bag) for bag in bags], np.int64)
    flat = _flat(bags, np.int64) if lengths.sum() else np.empty(0, np.int64)
    scale = np.ones(len(flat)) if weights is None else _flat(weights, np.float64)
    if weights is not None and [np.size(w) for w in weights] != lengths.tolist():
        raise InvalidUpdateError("weights must have the same lengths as the bags of ids")
    rows = _distinct([(params, flat)])[0]
    kept = rows.dtype if rows.dtype.kind == "f" else np.dtype(np.float32)
    shape = (-1, *(1 for _ in params.shape[1:]))
    out = np.zeros((len(lengths), *params.shape[1:]), np.float64 if kept == np.float64 else np.float32)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    np.add.at(out, owner, rows.astype(out.dtype) * scale.reshape(shape).astype(out.dtype))
    if combiner != "sum":
        total = np.bincount(owner, scale if combiner == "mean" else scale**2, len(lengths))
        total = total if combiner == "mean" else np.sqrt(total)
        out /= np.where(total == 0, 1, total).reshape(shape).astype(out.dtype)
    result: Array = out.astype(rows.dtype if rows.dtype.kind in "fV" else kept, copy=False)
    return result


embedding_lookup_sparse = embedding_bag  # the peer's name


def _flat(parts: Bags, dtype: npt.DTypeLike) -> Array:
    arrays = [np.asarray(part).reshape(-1) for part in parts]
    joined = np.concatenate([array for array in arrays if array.size] or [np.empty(0, dtype)])
    return joined if np.dtype(dtype) == np.int64 else joined.astype(dtype)  # ids of a wrong type are refused later


def _distinct(lookups: Sequence[tuple[Variable, npt.ArrayLike]]) -> list[Array]:
    """`gather_rows`, with every distinct row read once."""
    wanted, inverses = [], []
    for variable, ids in lookups:
        checked = check_ids(ids, variable.shape[0] if variable.shape else 0, variable.name)
        # With the counts NumPy takes a much faster way than without.
        unique, inverse, _ = np.unique(checked.reshape(-1), return_inverse=True, return_counts=True)
        wanted.append((variable, unique))
        inverses.append(inverse.reshape(checked.shape))
    return [rows[inverse] for rows, inverse in zip(gather_rows(wanted), inverses, strict=True)]
