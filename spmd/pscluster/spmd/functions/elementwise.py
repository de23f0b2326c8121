"""Functions of corresponding elements: operands are broadcast, and the result is sharded as they are."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.layouts.rule import Label
from pscluster.core.layouts.rule import elementwise as labels_of
from pscluster.spmd.functions.applying import (
    Plan,
    Result,
    apply,
    apply_planned,
    as_tensor,
    block,
    implements,
    is_scalar,
    mesh_of,
    numpys,
    one_mesh,
    planned,
    probe,
    refuse_out,
    types_of_ufunc,
    xp,
)
from pscluster.spmd.tensor import FUNCTIONS, UFUNCS, DTensor, unsupported
from pscluster.worker.programs.operations import OPERATIONS


def elementwise(
    name: str, function: Callable[..., Any], operands: Sequence[Any], rest: Sequence[Any] = (), **kwargs: Any
) -> Any:
    """Apply a function to operands that are broadcast; numbers of Python's, None and texts are passed as they are.

    `rest` are further positional arguments. Return its result, or a tuple of several.
    """
    if isinstance(function, np.ufunc) and not rest:
        return _elementwise_ufunc(name, function, operands, kwargs)
    mesh = mesh_of(*operands)
    given = [value if is_scalar(value) or value is None else as_tensor(value, mesh) for value in operands]
    tensors = [value for value in given if isinstance(value, DTensor)]
    labels, shape, of_result = _broadcast(tuple([tensor.shape for tensor in tensors]))
    dtypes = probe(function, *given, *rest, **kwargs)
    numbers = iter(range(len(tensors)))
    args = [block(next(numbers)) if isinstance(value, DTensor) else value for value in given]
    results = [Result(of_result, shape, dtype) for dtype in dtypes]
    made = apply(name, tensors, labels, results, [*args, *rest], kwargs)
    return made[0] if len(made) == 1 else tuple(made)


def _elementwise_ufunc(name: str, ufunc: np.ufunc, operands: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply a ufunc: what does not depend on which arrays these are is looked up."""
    tensors: list[DTensor] = []
    args: list[Any] = []
    key: list[tuple[Any, ...]] = []
    for value in operands:
        if is_scalar(value) or value is None:
            args.append(value)
            key.append((type(value), value))
            continue
        tensor = value if isinstance(value, DTensor) else as_tensor(value, mesh_of(*operands))
        args.append(block(len(tensors)))
        key.append((DTensor, tensor.shape, tensor.dtype, tensor.layout))
        tensors.append(tensor)
    made = apply_planned(name, tensors, _plan_of_ufunc(ufunc, tuple(key), tuple(kwargs.items())), args, kwargs)
    return made[0] if len(made) == 1 else tuple(made)


@functools.lru_cache(maxsize=1024)
def _plan_of_ufunc(ufunc: np.ufunc, operands: tuple[tuple[Any, ...], ...], kwargs: tuple[tuple[str, Any], ...]) -> Plan:
    """Plan a ufunc, given DTensor, shape, type and layout of each array; and type and value of each number."""
    arrays = [of[1:] for of in operands if of[0] is DTensor]
    one_mesh([layout.mesh for _, _, layout in arrays])
    labels, shape, of_result = _broadcast(tuple([own for own, _, _ in arrays]))
    probed = tuple([(DTensor, of[2], len(of[1])) if of[0] is DTensor else (*of, 0) for of in operands])
    results = tuple([Result(of_result, shape, dtype) for dtype in types_of_ufunc(ufunc, probed, kwargs)])
    sizes = [math.prod(own) * dtype.itemsize for own, dtype, _ in arrays]
    of_arrays = zip(labels, arrays, sizes, strict=True)
    return planned(tuple([(tuple(of), own, layout, size) for of, (own, _, layout), size in of_arrays]), results)


@functools.lru_cache(maxsize=1024)
def _broadcast(
    shapes: tuple[tuple[int, ...], ...],
) -> tuple[list[tuple[Label, ...]], tuple[int, ...], tuple[Label, ...]]:
    """Return the labels of operands of these shapes, and the shape and the labels of the result."""
    shape = np.broadcast_shapes(*shapes)
    return labels_of(shapes), shape, tuple(range(-len(shape), 0))


def call_ufunc(ufunc: np.ufunc, *inputs: Any, **kwargs: Any) -> Any:
    """Apply a ufunc."""
    name = ufunc.__name__
    if ufunc.signature is not None:
        if (handler := FUNCTIONS.get(ufunc)) is None:
            raise unsupported(name)
        refuse_out(name, kwargs)
        return handler(*inputs, **kwargs)
    if OPERATIONS.get(name) is not ufunc:
        raise unsupported(name)
    if not kwargs:  # as nearly always
        return _elementwise_ufunc(name, ufunc, inputs, kwargs)
    refuse_out(name, kwargs)
    if unknown := kwargs.keys() - {"dtype", "casting"}:
        raise unsupported(name, f"with {min(unknown)}=")
    if kwargs.get("dtype", ...) is None:
        del kwargs["dtype"]
    if "dtype" in kwargs:
        kwargs["dtype"] = np.dtype(kwargs["dtype"]).name
    return elementwise(name, ufunc, inputs, **kwargs)


UFUNCS["__call__"] = call_ufunc


def _of_one(function: Any) -> None:
    """Register an elementwise function of one array, and of numbers that are passed as they are."""
    name = function.__name__

    @implements(function)
    def handler(array: Any, *rest: Any, **kwargs: Any) -> Any:
        refuse_out(name, kwargs)
        return elementwise(name, function, [array], rest, **kwargs)


for _function in numpys(
    "angle", "imag", "iscomplex", "isneginf", "isposinf", "isreal", "nan_to_num", "real", "sinc", "i0"
):
    _of_one(_function)


@implements(np.round, np.around)
def around(a: Any, decimals: int = 0, out: Any = None) -> Any:
    """See `numpy.round`."""
    refuse_out("round", {"out": out})
    return elementwise("around", np.around, [a], (decimals,))


@implements(np.fix)
def fix(x: Any, out: Any = None) -> Any:
    """See `numpy.fix`."""
    refuse_out("fix", {"out": out})
    return np.trunc(x)


@implements(np.isclose)
def isclose(a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> Any:
    """See `numpy.isclose`."""
    return elementwise("isclose", np.isclose, [a, b, rtol, atol], equal_nan=equal_nan)


_NOT_GIVEN = object()


@implements(np.clip)
def clip(
    a: Any,
    a_min: Any = _NOT_GIVEN,
    a_max: Any = _NOT_GIVEN,
    out: Any = None,
    *,
    min: Any = _NOT_GIVEN,  # noqa: A002  # as in NumPy
    max: Any = _NOT_GIVEN,  # noqa: A002
    **kwargs: Any,
) -> Any:
    """See `numpy.clip`."""
    refuse_out("clip", {"out": out, **kwargs})
    low = next((value for value in (a_min, min) if value is not _NOT_GIVEN and value is not np._NoValue), None)
    high = next((value for value in (a_max, max) if value is not _NOT_GIVEN and value is not np._NoValue), None)
    return elementwise("clip", np.clip, [a, low, high])


@implements(np.where)
def where(condition: Any, *choices: Any) -> Any:
    """See `numpy.where`."""
    if len(choices) != 2:
        raise unsupported("where", "with a condition only, since the shape of its result depends on values")
    if is_scalar(condition):
        condition = np.asarray(condition)
    return elementwise("where", np.where, [condition, *choices])


@implements("astype", *numpys("astype"))
def astype(x: Any, dtype: npt.DTypeLike, *, copy: bool = True, device: Any = None) -> Any:
    """See `numpy.astype`."""
    del copy, device
    of = np.dtype(dtype)
    if of == x.dtype:
        return x
    labels = tuple(range(x.ndim))
    return apply("astype", [x], [labels], [Result(labels, x.shape, of)], [block(0), of.name])[0]


@implements(np.copy)
def copy(a: Any, order: Any = "K", subok: bool = False) -> Any:
    """Return the array itself: it does not change, and has no order in memory."""
    del order, subok
    return a


@implements(np.select)
def select(condlist: Sequence[Any], choicelist: Sequence[Any], default: Any = 0) -> Any:
    """See `numpy.select`."""
    if len(condlist) != len(choicelist) or not condlist:
        raise ValueError("list of cases must be same length as list of conditions")  # NumPy's words
    mesh = mesh_of(*condlist, *choicelist, default)
    choices = [value if type(value) in (int, float, complex) else as_tensor(value, mesh) for value in choicelist]
    of = xp.result_type(*choices, default)
    result = np.asarray(default, of) if is_scalar(default) else as_tensor(default, mesh).astype(of)
    for condition, choice in reversed(list(zip(condlist, choices, strict=True))):
        result = where(condition, choice.astype(of) if isinstance(choice, DTensor) else np.asarray(choice, of), result)
    return result


@implements(np.interp)
def interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None) -> Any:
    """See `numpy.interp`."""
    mesh = mesh_of(x, xp, fp)
    tensors = [as_tensor(value, mesh) for value in (x, xp, fp)]
    labels = tuple(range(tensors[0].ndim))
    dtype = np.dtype(np.complex128 if tensors[2].dtype.kind == "c" else np.float64)
    result = Result(labels, tensors[0].shape, dtype)
    kwargs = {"left": left, "right": right, "period": period}
    args = [block(0), block(1), block(2)]
    return apply("interp", tensors, [labels, ("points",), ("points",)], [result], args, kwargs)[0]


@implements(np.polyval)
def polyval(p: Any, x: Any) -> Any:
    """See `numpy.polyval`: by Horner's rule, as NumPy does."""
    coefficients = p if isinstance(p, DTensor) else np.asarray(p)
    result = xp.zeros_like(x)
    for at in range(len(coefficients)):
        result = result * x + coefficients[at]
    return result
