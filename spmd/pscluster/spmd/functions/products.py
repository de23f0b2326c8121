"""Products: matrices, tensors, Einstein sums. Sums over a sharded axis leave terms, which are combined."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from pscluster.core.layouts.rule import Label
from pscluster.core.layouts.rule import elementwise as labels_of
from pscluster.spmd.functions.applying import (
    Result,
    apply,
    as_tensor,
    block,
    implements,
    is_scalar,
    mesh_of,
    normal_axis,
    numpys,
    probe,
    refuse_out,
    xp,
)
from pscluster.spmd.tensor import UFUNCS, DTensor, unsupported


def _tensors(*values: Any) -> list[DTensor]:
    mesh = mesh_of(*values)
    return [as_tensor(value, mesh) for value in values]


def _conjugate(a: DTensor) -> Any:
    return xp.conj(a) if a.dtype.kind == "c" else a  # of bools NumPy makes small integers


def _combine(dtype: np.dtype[Any]) -> str:
    return "logical_or" if dtype.kind == "b" else "add"


def _mismatch(name: str, a: DTensor, b: DTensor) -> ValueError:
    return ValueError(
        f"{name}: shapes {a.shape} and {b.shape} not aligned: the axes to be summed over differ in length"
    )


@implements(np.matmul, *numpys("linalg.matmul"))
def matmul(x1: Any, x2: Any, **kwargs: Any) -> Any:
    """See `numpy.matmul`."""
    if unknown := kwargs.keys() - {"dtype", "casting"}:
        raise unsupported("matmul", f"with {min(unknown)}=")
    if is_scalar(x1) or is_scalar(x2):
        raise ValueError("matmul: Input operand does not have enough dimensions")  # NumPy's words
    a, b = _tensors(x1, x2)
    if not a.ndim or not b.ndim:
        raise ValueError("matmul: Input operand does not have enough dimensions")
    rows, columns = (() if a.ndim == 1 else ("m",)), (() if b.ndim == 1 else ("n",))
    if a.shape[-1] != b.shape[-2 if columns else -1]:
        raise _mismatch("matmul", a, b)
    batches = [a.shape[:-2], b.shape[:-2]]
    batch = np.broadcast_shapes(*batches)
    of_a, of_b = labels_of(batches)
    shape = (*batch, *a.shape[-2:-1], *b.shape[b.ndim - len(columns) :])
    if dtype := kwargs.pop("dtype", None):
        kwargs["dtype"] = np.dtype(dtype).name
    (of,) = probe(np.matmul, a, b, **kwargs)
    result = Result((*range(-len(batch), 0), *rows, *columns), shape, of)
    labels: list[Sequence[Label]] = [(*of_a, *rows, "k"), (*of_b, "k", *columns)]
    return apply("matmul", [a, b], labels, [result], [block(0), block(1)], kwargs, combine=_combine(of))[0]


@implements(np.tensordot, *numpys("linalg.tensordot"))
def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    """See `numpy.tensordot`."""
    x, y = _tensors(a, b)
    if isinstance(axes, tuple | list):
        chosen = [list(side) if isinstance(side, tuple | list) else [side] for side in axes]
    else:
        chosen = [list(range(x.ndim - axes, x.ndim)), list(range(axes))]
    of_x, of_y = ([normal_axis(axis, t.ndim) for axis in side] for side, t in zip(chosen, (x, y), strict=True))
    if len(of_x) != len(of_y) or [x.shape[at] for at in of_x] != [y.shape[at] for at in of_y]:
        raise ValueError("shape-mismatch for sum")  # NumPy's words
    labels_x: list[Label] = [("x", at) for at in range(x.ndim)]
    labels_y: list[Label] = [("y", at) for at in range(y.ndim)]
    for nth, (at_x, at_y) in enumerate(zip(of_x, of_y, strict=True)):
        labels_x[at_x] = labels_y[at_y] = ("sum", nth)
    kept_x = [at for at in range(x.ndim) if at not in of_x]
    kept_y = [at for at in range(y.ndim) if at not in of_y]
    shape = (*(x.shape[at] for at in kept_x), *(y.shape[at] for at in kept_y))
    (of,) = probe(np.tensordot, x, y, axes=(of_x, of_y))
    labels = (*(labels_x[at] for at in kept_x), *(labels_y[at] for at in kept_y))
    args = [block(0), block(1), (of_x, of_y)]
    combine = _combine(of)
    return apply("tensordot", [x, y], [labels_x, labels_y], [Result(labels, shape, of)], args, combine=combine)[0]


@implements(np.dot)
def dot(a: Any, b: Any, out: Any = None) -> Any:
    """See `numpy.dot`."""
    refuse_out("dot", {"out": out})
    if is_scalar(a) or is_scalar(b):
        return xp.multiply(a, b)
    x, y = _tensors(a, b)
    if not x.ndim or not y.ndim:
        return xp.multiply(x, y)
    if x.shape[-1] != y.shape[-2 if y.ndim > 1 else -1]:
        raise _mismatch("dot", x, y)
    return tensordot(x, y, ([x.ndim - 1], [max(y.ndim - 2, 0)]))


@implements(np.inner)
def inner(a: Any, b: Any) -> Any:
    """See `numpy.inner`."""
    if is_scalar(a) or is_scalar(b):
        return xp.multiply(a, b)
    x, y = _tensors(a, b)
    if not x.ndim or not y.ndim:
        return xp.multiply(x, y)
    if x.shape[-1] != y.shape[-1]:
        raise _mismatch("inner", x, y)
    return tensordot(x, y, ([x.ndim - 1], [y.ndim - 1]))


@implements(np.vdot)
def vdot(a: Any, b: Any, /) -> Any:
    """See `numpy.vdot`."""
    x, y = _tensors(a, b)
    return dot(_conjugate(xp.ravel(x)), xp.ravel(y))


@implements(np.outer, *numpys("linalg.outer"))
def outer(a: Any, b: Any, out: Any = None) -> Any:
    """See `numpy.outer`."""
    refuse_out("outer", {"out": out})
    x, y = (xp.ravel(tensor) for tensor in _tensors(a, b))
    return outer_ufunc(np.multiply, x, y)


def outer_ufunc(ufunc: np.ufunc, a: Any, b: Any, **kwargs: Any) -> Any:
    """Apply a ufunc to all pairs of elements, as `ufunc.outer` does."""
    x, y = _tensors(a, b)
    columns = xp.reshape(x, x.shape + (1,) * y.ndim)
    return ufunc(columns, y, **kwargs)


UFUNCS["outer"] = outer_ufunc


@implements(*numpys("vecdot", "linalg.vecdot"))
def vecdot(x1: Any, x2: Any, /, *, axis: int = -1, **kwargs: Any) -> Any:
    """See `numpy.vecdot`."""
    if kwargs:
        raise unsupported("vecdot", f"with {min(kwargs)}=")
    a, b = _tensors(x1, x2)
    a, b = (xp.moveaxis(tensor, axis, -1) for tensor in (a, b))
    if a.shape[-1] != b.shape[-1]:
        raise _mismatch("vecdot", a, b)
    return einsum("...k,...k->...", _conjugate(a), b)


@implements(*numpys("matvec"))
def matvec(x1: Any, x2: Any, /) -> Any:
    """See `numpy.matvec`."""
    return einsum("...mk,...k->...m", x1, x2)


@implements(*numpys("vecmat"))
def vecmat(x1: Any, x2: Any, /) -> Any:
    """See `numpy.vecmat`."""
    vectors, matrices = _tensors(x1, x2)
    return einsum("...k,...kn->...n", _conjugate(vectors), matrices)


@implements(np.linalg.multi_dot)
def multi_dot(arrays: Sequence[Any], *, out: Any = None) -> Any:
    """See `numpy.linalg.multi_dot`; multiplied from the left."""
    refuse_out("multi_dot", {"out": out})
    result = arrays[0]
    for array in arrays[1:]:
        result = dot(result, array)
    return result


@implements(np.cross)
def cross(a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> Any:
    """See `numpy.cross`, of vectors with three elements."""
    if axis is not None:
        axisa = axisb = axisc = axis
    x, y = _tensors(a, b)
    x, y = xp.moveaxis(x, axisa, -1), xp.moveaxis(y, axisb, -1)
    if x.shape[-1] != 3 or y.shape[-1] != 3:
        raise unsupported("cross", "of vectors that have not three elements")
    shape = np.broadcast_shapes(x.shape, y.shape)
    labels = tuple(range(-len(shape), 0))
    (of,) = probe(np.multiply, x, y)
    operands = labels_of([x.shape, y.shape])
    result = apply("cross", [x, y], operands, [Result(labels, shape, of)], [block(0), block(1)], whole=[-1])[0]
    return xp.moveaxis(result, -1, axisc)


@implements(*numpys("linalg.cross"))
def cross_along(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """See `numpy.linalg.cross`."""
    return cross(x1, x2, axis=axis)


@implements(np.einsum)
def einsum(*operands: Any, out: Any = None, optimize: Any = False, **kwargs: Any) -> Any:
    """See `numpy.einsum`: the labels are those of the rule for layouts."""
    refuse_out("einsum", {"out": out})
    if unknown := kwargs.keys() - {"dtype", "order", "casting"}:
        raise unsupported("einsum", f"with {min(unknown)}=")
    if not isinstance(operands[0], str):
        operands = _with_text(operands)
    tensors = _tensors(*operands[1:])
    inputs, output = parsed(operands[0], [tensor.ndim for tensor in tensors])
    lengths: dict[str, int] = {}
    for letters, tensor in zip(inputs, tensors, strict=True):
        for letter, length in zip(letters, tensor.shape, strict=True):
            known = lengths.get(letter, 1)
            if known != length and 1 not in (known, length):
                raise ValueError(f"operands could not be broadcast together: {letter!r} is {known} and {length}")
            lengths[letter] = max(known, length) if 0 not in (known, length) else 0
    labels = [
        tuple(
            letter if length == lengths[letter] else None for letter, length in zip(letters, tensor.shape, strict=True)
        )
        for letters, tensor in zip(inputs, tensors, strict=True)
    ]
    text = f"{','.join(inputs)}->{output}"
    options = {} if kwargs.get("dtype") is None else {"dtype": np.dtype(kwargs["dtype"]).name}
    (of,) = probe(np.einsum, text, *tensors, **options)
    result = Result(tuple(output), tuple(lengths[letter] for letter in output), of)
    args = [text, *map(block, range(len(tensors)))]
    return apply(
        "einsum", tensors, labels, [result], args, {**options, "optimize": bool(optimize)}, combine=_combine(of)
    )[0]


def _with_text(operands: Sequence[Any]) -> tuple[Any, ...]:
    """Return operands that alternate with lists of labels, in einsum's other form."""
    pairs = len(operands) // 2
    sides = [_letters(operands[2 * at + 1]) for at in range(pairs)]
    text = ",".join(sides) + (f"->{_letters(operands[-1])}" if len(operands) % 2 else "")
    return text, *(operands[2 * at] for at in range(pairs))


def _letters(labels: Sequence[Any]) -> str:
    return "".join("..." if label is Ellipsis else string.ascii_letters[label] for label in labels)


def parsed(subscripts: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result; `...` becomes letters that the text has not.

    Raise ValueError if they do not fit operands of these ranks.
    """
    text = subscripts.replace(" ", "")
    left, arrow, right = text.partition("->")
    sides = left.split(",")
    if len(sides) != len(ranks):
        raise ValueError(f"einsum({subscripts!r}) is for {len(sides)} operands, but {len(ranks)} were given")
    free = [letter for letter in string.ascii_letters if letter not in text]
    longest = max(
        (rank - len(side.replace("...", "")) for side, rank in zip(sides, ranks, strict=True) if "..." in side),
        default=0,
    )
    dots = "".join(free[:longest]) if longest > 0 else ""

    def written(side: str, rank: int) -> str:
        count = rank - len(side.replace("...", ""))
        filled = side.replace("...", dots[len(dots) - count :] if count > 0 else "")
        if len(filled) != rank or not all(letter in string.ascii_letters for letter in filled):
            raise ValueError(f"einsum({subscripts!r}): {side!r} does not fit an operand with {rank} axes")
        return filled

    inputs = [written(side, rank) for side, rank in zip(sides, ranks, strict=True)]
    if arrow:
        output = right.replace("...", dots)
    else:
        every = "".join(inputs)
        output = dots + "".join(sorted(x for x in set(every) if every.count(x) == 1 and x not in dots))
    if len(set(output)) < len(output) or not set(output) <= set("".join(inputs)):
        raise ValueError(f"einsum({subscripts!r}): each label of the result occurs once there, and in an operand")
    return inputs, output


@implements(np.kron)
def kron(a: Any, b: Any) -> Any:
    """See `numpy.kron`."""
    x, y = _tensors(a, b)
    ndim = max(x.ndim, y.ndim)
    x, y = (xp.reshape(t, (1,) * (ndim - t.ndim) + t.shape) for t in (x, y))
    wide = xp.reshape(x, tuple(n for length in x.shape for n in (length, 1)))
    narrow = xp.reshape(y, tuple(n for length in y.shape for n in (1, length)))
    return xp.reshape(wide * narrow, tuple(math.prod(pair) for pair in zip(x.shape, y.shape, strict=True)))
