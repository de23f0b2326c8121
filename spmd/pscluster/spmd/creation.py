"""Global arrays that are made in place, on their devices."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pscluster.core import checks
from pscluster.core.dtypes import is_variable_dtype
from pscluster.core.errors import MisuseError
from pscluster.core.layouts.layout import Layout
from pscluster.spmd.meshes import session_of
from pscluster.spmd.placing import check_is_layout, distribute, numeric
from pscluster.spmd.tensor import DTensor
from pscluster.spmd.tracing.trace import check_is_function
from pscluster.worker.programs.program import ArrayType

T = TypeVar("T")

Shape = int | tuple[int, ...] | list[int]


def make(shape: Any, dtype: npt.DTypeLike, layout: Layout, maker: str, *numbers: float) -> DTensor:
    """Return an array that a maker fills: see `worker.programs.makers`."""
    check_is_layout(layout)
    lengths, of = checks.per_axis("shape", shape), np.dtype(dtype)
    layout.check_shape(lengths)
    if not is_variable_dtype(of):
        raise MisuseError(f"a global array holds numbers or bools, not {of}")
    if math.prod(lengths) * of.itemsize >= 1 << 63:
        raise ValueError(f"an array of shape {lengths} and type {of} is larger than any memory")
    return DTensor(session_of(layout.mesh).create(ArrayType(lengths, of, layout), maker, numbers))


def full(shape: Shape, fill_value: Any, dtype: npt.DTypeLike | None = None, *, layout: Layout) -> DTensor:
    """Return an array of one value, which may also be an array that is broadcast to the shape."""
    value = numeric(fill_value)
    of = value.dtype if dtype is None else np.dtype(dtype)
    if value.ndim:
        return distribute(np.broadcast_to(value.astype(of), checks.per_axis("shape", shape)), layout)
    with np.errstate(all="ignore"):
        element = value.astype(of).item()
    numbers = (element.real, element.imag) if of.kind == "c" else (element, 0)
    return make(shape, of, layout, "full", *numbers)


def zeros(shape: Shape, dtype: npt.DTypeLike = float, *, layout: Layout) -> DTensor:
    """Return an array of zeros."""
    return make(shape, dtype, layout, "full", 0, 0)


def ones(shape: Shape, dtype: npt.DTypeLike = float, *, layout: Layout) -> DTensor:
    """Return an array of ones."""
    return make(shape, dtype, layout, "full", 1, 0)


def empty(shape: Shape, dtype: npt.DTypeLike = float, *, layout: Layout) -> DTensor:
    """Return an array whose values do not matter: zeros."""
    return zeros(shape, dtype, layout=layout)


def arange(
    start: float, stop: float | None = None, step: float = 1, dtype: npt.DTypeLike | None = None, *, layout: Layout
) -> DTensor:
    """Return the numbers of `numpy.arange`, bit for bit."""
    first, last = (0, start) if stop is None else (start, stop)
    if dtype is None:
        dtype = np.arange(first, first + step, step).dtype
    length = max(0, int(np.ceil((last - first) / step)))
    return make((length,), dtype, layout, "arange", first, step)


def eye(
    N: int,  # noqa: N803  # as in NumPy
    M: int | None = None,  # noqa: N803
    k: int = 0,
    dtype: npt.DTypeLike = float,
    *,
    layout: Layout,
) -> DTensor:
    """Return an array with ones on a diagonal, and zeros elsewhere."""
    return make((N, N if M is None else M), dtype, layout, "eye", k)


def identity(n: int, dtype: npt.DTypeLike = float, *, layout: Layout) -> DTensor:
    """Return the identity matrix."""
    return eye(n, dtype=dtype, layout=layout)


def linspace(
    start: float,
    stop: float,
    num: int = 50,
    endpoint: bool = True,
    dtype: npt.DTypeLike | None = None,
    *,
    layout: Layout,
) -> DTensor:
    """Return evenly spaced numbers; they are made here, and distributed."""
    return distribute(np.linspace(start, stop, num, endpoint, dtype=dtype), layout)


CREATORS: Mapping[Any, Callable[..., DTensor]] = MappingProxyType(
    {
        np.arange: arange,
        np.empty: empty,
        np.eye: eye,
        np.full: full,
        np.identity: identity,
        np.linspace: linspace,
        np.ones: ones,
        np.zeros: zeros,
        **{function: function for function in (arange, empty, eye, full, identity, linspace, ones, zeros)},
    }
)
"""What makes a global array in place of each function."""


def call_with_layout(fn: Callable[..., T], layout: Layout | None, *args: Any, **kwargs: Any) -> T | DTensor:
    """Call a function that makes an array, such as `numpy.ones`, so that the result has this layout.

    NumPy's creation functions make it in place, on the devices, and so do functions that take a `layout`, such as
    `random.normal`, which is passed to them; the arrays of others are distributed. A traced function counts as the one
    that it was made of. With None the function is just called.
    """
    made_by: Callable[..., T] = getattr(fn, "plain", fn)
    check_is_function("call_with_layout", made_by)
    if layout is None:
        return made_by(*args, **kwargs)
    creator: Callable[..., Any] | None = CREATORS.get(made_by, made_by if _takes_layout(made_by) else None)
    result: Any = made_by(*args, **kwargs) if creator is None else creator(*args, **kwargs, layout=layout)
    return distribute(result, layout)


def _takes_layout(fn: Callable[..., Any]) -> bool:
    try:
        return "layout" in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # some of C's have no signature
        return False
