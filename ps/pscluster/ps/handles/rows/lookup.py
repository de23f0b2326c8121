"""Embedding lookups: rows of tables by id, alone or combined into bags; each distinct row travels once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pscluster.core.checks import type_of
from pscluster.core.dtypes import as_array, converted
from pscluster.core.errors import InvalidUpdateError
from pscluster.ps.handles.indexing import Array
from pscluster.ps.handles.reads import distinct_rows, rows_if_all_fetched
from pscluster.ps.handles.variables.variable import Variable

Combiner = Literal["sum", "mean", "sqrtn"]
Bags = Sequence[npt.ArrayLike] | npt.NDArray[Any]


def embedding_lookup(params: Variable | Sequence[Variable], ids: Any) -> Any:
    """Read rows of a table by id, in the order of the ids, duplicates included; each distinct row travels once.

    Args:
        params: a table, or several.
        ids: integers of any shape, or strings of a table with such ids; for several tables, one such array per table.

    Returns:
        An array of shape `ids.shape + table.shape[1:]`; for several tables a list, from one request per server.

    Raises:
        InvalidUpdateError: an id is not a row (the message names it), or ids are not integers.

    Examples:
        >>> with strategy.scope():
        ...     table = Variable(np.eye(4, dtype=np.float32), name="eye")
        >>> embedding_lookup(table, [2, 0, 2]).argmax(axis=1)
        array([2, 0, 2])
    """
    if isinstance(params, Variable):
        return _distinct([(params, ids)])[0]
    if not isinstance(params, Sequence):
        raise TypeError(f"embedding_lookup takes a variable or a list of them, not {type_of(params)}")
    if not hasattr(ids, "__len__"):
        raise TypeError(f"{len(params)} tables, but ids that are {type_of(ids)}: give an array of ids for each table")
    if len(params) != len(ids):
        raise InvalidUpdateError(f"{len(params)} tables, but {len(ids)} arrays of ids: give one for each table")
    return _distinct(list(zip(params, ids, strict=True)))


def embedding_bag(params: Variable, bags: Bags, weights: Bags | None = None, combiner: Combiner = "mean") -> Array:
    """Combine the rows of each bag of ids; an empty bag gives zeros.

    Args:
        params: the table, (rows, ...).
        bags: ragged, a sequence of arrays of ids; or a 2-D array with a bag per row.
        weights: of the same lengths; default: 1 each.
        combiner: "sum"; "mean", the sum over the sum of the weights; "sqrtn", over the root of the sum of their
            squares (TensorFlow's `embedding_lookup_sparse`).

    Returns:
        An array of shape (bags, ...), of the table's type; of an integer table float64, or for sums without weights
        int64.

    Raises:
        InvalidUpdateError: an id is not a row, weights have other lengths, or the combiner is unknown.

    Examples:
        >>> with strategy.scope():
        ...     weights = Variable(np.arange(10.0), name="weights")
        >>> embedding_bag(weights, [[1, 2], [], [9]], combiner="sum")
        array([3., 0., 9.])
    """
    if combiner not in ("sum", "mean", "sqrtn"):
        raise InvalidUpdateError(f"combiner is {combiner!r}: give 'sum', 'mean' or 'sqrtn'")
    if not isinstance(params, Variable):
        raise TypeError(f"embedding_bag takes one variable, not {type_of(params)}")
    bags = _listed(bags, params, "bags of ids")
    if params.id_bytes:  # NumPy would make strings of numbers beside them
        ids: list[Array] = [params.row_ids(bag) for bag in bags]
    else:
        ids = [as_array(bag, params.name, "bag of ids", holder=params.holder) for bag in bags]
    lengths = np.array([bag.size for bag in ids], np.int64)
    flat = _flat(ids)
    scale = np.ones(len(flat)) if weights is None else _weights(weights, lengths, params)
    rows = _distinct([(params, flat)])[0]
    shape = (-1, *(1 for _ in params.shape[1:]))
    summed_in = _sums_of(rows.dtype, weighted=weights is not None or combiner != "sum")
    out = np.zeros((len(lengths), *params.shape[1:]), summed_in)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    np.add.at(out, owner, rows.astype(out.dtype) * scale.reshape(shape).astype(out.real.dtype))
    if combiner != "sum":
        total = np.bincount(owner, scale if combiner == "mean" else scale**2, len(lengths))
        total = total if combiner == "mean" else np.sqrt(total)
        out /= np.where(total == 0, 1, total).reshape(shape).astype(out.real.dtype)
    result: Array = out.astype(rows.dtype, copy=False) if rows.dtype.kind in "fcV" else out
    return result


embedding_lookup_sparse = embedding_bag  # TensorFlow's name


def safe_embedding_lookup_sparse(
    embedding_weights: Variable,
    sparse_ids: Bags,
    sparse_weights: Bags | None = None,
    combiner: Combiner = "mean",
    default_id: int | None = None,
) -> Array:
    """Combine the rows of each bag of ids, as `embedding_bag` does, where bags may be empty or padded.

    Negative ids are left out; with "mean" and "sqrtn", so are ids with weights of 0 or less. As in TensorFlow, but bags
    are a list of lists, or an array with a bag per row.

    Args:
        embedding_weights: the table, (rows, ...).
        sparse_ids: the bags of ids.
        sparse_weights: of the same lengths; default: 1 each.
        combiner: as of `embedding_bag`.
        default_id: whose row, with the weight 1, stands for a bag in which nothing is left. None: zeros.

    Returns:
        As `embedding_bag`.

    Raises:
        InvalidUpdateError: an id, or the default, is not a row, weights have other lengths, or the combiner is unknown.
    """
    if not isinstance(embedding_weights, Variable):
        raise TypeError(f"safe_embedding_lookup_sparse takes one variable, not {type_of(embedding_weights)}")
    name, holder = embedding_weights.name, embedding_weights.holder
    if embedding_weights.id_bytes:
        raise InvalidUpdateError(f"{name!r} has ids that are strings, of which none is padding: use embedding_bag")
    listed = _listed(sparse_ids, embedding_weights, "bags of ids")
    bags = [as_array(bag, name, "bag of ids", holder=holder).reshape(-1) for bag in listed]
    weights: list[Array] | None = None
    if sparse_weights is not None:
        each = _listed(sparse_weights, embedding_weights, "weights")
        weights = [as_array(bag, name, "weights", holder=holder).reshape(-1) for bag in each]
        _weights(weights, np.array([bag.size for bag in bags], np.int64), embedding_weights)
    for at, bag in enumerate(bags):
        kept = bag >= 0
        if weights is not None and combiner != "sum":
            kept = kept & (weights[at] > 0)
        bags[at] = bag[kept]
        if weights is not None:
            weights[at] = weights[at][kept]
        if default_id is not None and not bags[at].size:
            bags[at] = np.array([default_id])
            if weights is not None:
                weights[at] = np.ones(1)
    return embedding_bag(embedding_weights, bags, weights, combiner)


def _flat(arrays: Sequence[Array]) -> Array:
    """Return all elements in one array. Its type ignores empty arrays, which NumPy takes for floats."""
    return np.concatenate([array.reshape(-1) for array in arrays if array.size] or [np.empty(0, np.int64)])


def _weights(weights: Bags, lengths: npt.NDArray[np.int64], params: Variable) -> Array:
    name, holder = params.name, params.holder
    arrays = [as_array(bag, name, "weights", holder=holder) for bag in _listed(weights, params, "weights")]
    if [bag.size for bag in arrays] != lengths.tolist():
        raise InvalidUpdateError(f"{holder} {name!r}: weights must have the same lengths as the bags of ids")
    return converted(_flat(arrays), np.dtype(np.float64), name, "weights", holder=holder)


def _listed(bags: Bags, params: Variable, argument: str) -> list[Any]:
    try:
        return list(bags)
    except TypeError:
        raise TypeError(
            f"{params.holder} {params.name!r}: give {argument} as a list of lists, or as an array with a bag per row, "
            f"not {type_of(bags)}"
        ) from None


def _sums_of(dtype: np.dtype[Any], weighted: bool) -> np.dtype[Any]:
    """Return the type in which to sum rows of that type."""
    if dtype.kind == "c" or dtype == np.float64:
        return dtype
    if dtype.kind in "biu":
        return np.dtype(np.float64 if weighted else np.int64)
    return np.dtype(np.float32)


def _distinct(lookups: Sequence[tuple[Variable, npt.ArrayLike]]) -> list[Array]:
    """Gather rows as `gather_rows` does, transferring each distinct one once."""
    for variable, _ in lookups:
        if not isinstance(variable, Variable):
            raise TypeError(f"an embedding table must be a variable, not {type_of(variable)}")
    if (fetched := rows_if_all_fetched(lookups)) is not None:
        return fetched
    wanted, shapes = [], []
    for variable, ids in lookups:
        checked = variable.row_ids(ids)
        wanted.append((variable, checked.reshape(-1)))
        shapes.append((*checked.shape, *variable.shape[1:]))
    return [rows.reshape(shape) for rows, shape in zip(distinct_rows(wanted), shapes, strict=True)]
