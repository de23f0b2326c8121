"""Linear algebra: each device needs whole matrices; the axes before them keep their sharding."""

from __future__ import annotations

from typing import Any

import numpy as np

from pscluster.core.layouts.rule import Label
from pscluster.core.layouts.rule import elementwise as labels_of
from pscluster.spmd.functions.applying import Result, apply, as_tensor, block, implements, mesh_of, numpys, xp
from pscluster.spmd.tensor import DTensor, unsupported


def of_matrices(name: str, a: DTensor, *args: Any, **kwargs: Any) -> Any:
    """Apply a function to stacks of matrices; the shapes of what it makes of one are asked of NumPy."""
    if a.ndim < 2:
        raise _too_few_axes(a)
    function = getattr(np.linalg, name)
    batch: tuple[Label, ...] = tuple(range(a.ndim - 2))
    rows, columns = a.shape[-2:]
    with np.errstate(all="ignore"):
        made = function(np.eye(rows, columns, dtype=a.dtype), *args, **kwargs)
    several = isinstance(made, tuple)
    samples = [np.asarray(sample) for sample in (made if several else (made,))]
    results = [
        Result((*batch, *(None,) * sample.ndim), (*a.shape[:-2], *sample.shape), sample.dtype) for sample in samples
    ]
    tensors = apply(f"linalg.{name}", [a], [(*batch, "rows", "columns")], results, [block(0), *args], kwargs)
    return type(made)(*tensors) if several and hasattr(made, "_fields") else (tuple(tensors) if several else tensors[0])


def _too_few_axes(a: DTensor) -> np.linalg.LinAlgError:
    return np.linalg.LinAlgError(f"{a.ndim}-dimensional array given. Array must be at least two-dimensional")


def _register(name: str) -> None:
    @implements(getattr(np.linalg, name))
    def handler(a: Any, *args: Any, **kwargs: Any) -> Any:
        return of_matrices(name, a, *args, **kwargs)


for _name in (
    *("cholesky", "cond", "det", "eigh", "eigvalsh", "inv", "matrix_power", "matrix_rank", "pinv", "qr", "slogdet"),
    "svd",
):
    _register(_name)


@implements(*numpys("linalg.svdvals"))
def svdvals(x: Any, /) -> Any:
    """See `numpy.linalg.svdvals`."""
    return of_matrices("svd", x, compute_uv=False)


@implements(np.linalg.solve)
def solve(a: Any, b: Any) -> Any:
    """See `numpy.linalg.solve`; columns of `b` keep their sharding."""
    mesh = mesh_of(a, b)
    matrix, right = as_tensor(a, mesh), as_tensor(b, mesh)
    if matrix.ndim < 2:
        raise _too_few_axes(matrix)
    columns = () if right.ndim == 1 else ("columns",)
    batches = [matrix.shape[:-2], right.shape[: right.ndim - 1 - len(columns)]]
    batch = np.broadcast_shapes(*batches)
    of_matrix, of_right = labels_of(batches)
    dtype = np.linalg.solve(np.eye(1, dtype=matrix.dtype), np.ones((1, 1), right.dtype)).dtype
    shape = (*batch, matrix.shape[-1], *right.shape[right.ndim - len(columns) :])
    result = Result((*range(-len(batch), 0), None, *columns), shape, dtype)
    operands: list[tuple[Label, ...]] = [(*of_matrix, "rows", "of"), (*of_right, "rows of b", *columns)]
    return apply("linalg.solve", [matrix, right], operands, [result], [block(0), block(1)])[0]


@implements(np.cov)
def cov(
    m: Any,
    y: Any = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
    fweights: Any = None,
    aweights: Any = None,
    *,
    dtype: Any = None,
) -> Any:
    """See `numpy.cov`; without weights."""
    if fweights is not None or aweights is not None:
        raise unsupported("numpy.cov", "with weights")
    mesh = mesh_of(m, y)
    given = [as_tensor(value, mesh) for value in (m, y) if value is not None]
    if any(values.ndim > 2 for values in given):
        raise ValueError("m and y have at most 2 dimensions")
    of = np.result_type(*(values.dtype for values in given), np.float64) if dtype is None else np.dtype(dtype)
    rows = [
        xp.reshape(values, (1, -1)) if values.ndim < 2 else values if rowvar else values.T
        for values in (values.astype(of) for values in given)
    ]
    variables = xp.concatenate(rows) if len(rows) > 1 else rows[0]
    count = variables.shape[1] - (int(not bias) if ddof is None else ddof)
    centred = variables - variables.mean(axis=1, keepdims=True)
    # As in NumPy it is nan, or infinite, if there are too few.
    return xp.squeeze(centred @ xp.conj(centred).T * (1 / count if count > 0 else np.inf))


@implements(np.corrcoef)
def corrcoef(x: Any, y: Any = None, rowvar: bool = True, *, dtype: Any = None) -> Any:
    """See `numpy.corrcoef`; of real numbers."""
    of = cov(x, y, rowvar, dtype=dtype)
    if of.dtype.kind == "c":
        raise unsupported("numpy.corrcoef", "of complex numbers")
    if not of.ndim:
        return of / of
    deviations = xp.sqrt(xp.diagonal(of))
    return xp.clip(of / deviations[:, None] / deviations, -1, 1)
