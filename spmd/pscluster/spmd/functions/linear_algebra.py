"""Linear algebra: each device needs whole matrices; the axes before them keep their sharding."""

from __future__ import annotations

from typing import Any

import numpy as np

from pscluster.core.layouts.rule import Label
from pscluster.core.layouts.rule import elementwise as labels_of
from pscluster.spmd.functions.applying import Result, apply, as_tensor, block, implements, mesh_of, numpys
from pscluster.spmd.tensor import DTensor


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
