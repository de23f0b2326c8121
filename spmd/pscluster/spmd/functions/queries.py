"""Questions about arrays, and arrays that are made like others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pscluster.core.layouts.layout import Layout
from pscluster.spmd.creation import CREATORS, full
from pscluster.spmd.functions.applying import as_tensor, implements, mesh_of, numpys, refuse_out
from pscluster.spmd.placing import distribute
from pscluster.spmd.tensor import LIKE, DTensor


@implements(np.shape)
def shape(a: Any) -> tuple[int, ...]:
    """See `numpy.shape`."""
    return tuple(a.shape)


@implements(np.ndim)
def ndim(a: Any) -> int:
    """See `numpy.ndim`."""
    return int(a.ndim)


@implements(np.size)
def size(a: Any, axis: int | None = None) -> int:
    """See `numpy.size`."""
    return int(a.size if axis is None else a.shape[axis])


@implements(np.iscomplexobj)
def iscomplexobj(x: Any) -> bool:
    """See `numpy.iscomplexobj`."""
    return bool(x.dtype.kind == "c")


@implements(np.isrealobj)
def isrealobj(x: Any) -> bool:
    """See `numpy.isrealobj`."""
    return bool(x.dtype.kind != "c")


def _dtype_of(value: Any) -> Any:
    return value.dtype if isinstance(value, DTensor) else value


@implements(np.result_type)
def result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    """See `numpy.result_type`."""
    return np.result_type(*map(_dtype_of, arrays_and_dtypes))


@implements(np.can_cast)
def can_cast(from_: Any, to: Any, casting: Any = "safe") -> bool:
    """See `numpy.can_cast`."""
    return bool(np.can_cast(_dtype_of(from_), to, casting))


@implements(np.min_scalar_type)
def min_scalar_type(a: Any) -> np.dtype[Any]:
    """See `numpy.min_scalar_type`."""
    return a.dtype if a.ndim else np.min_scalar_type(a.numpy()[()])


@implements(np.common_type)
def common_type(*arrays: Any) -> Any:
    """See `numpy.common_type`."""
    return np.common_type(*(np.empty(0, array.dtype) for array in arrays))


@implements(np.may_share_memory, np.shares_memory)
def shares_memory(a: Any, b: Any, max_work: Any = None) -> bool:
    """Return False: what is on devices is not in this process' memory."""
    del max_work
    return a is b


@implements(np.array_equal)
def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> bool:
    """See `numpy.array_equal`. Fetches one element."""
    if np.shape(a1) != np.shape(a2):
        return False
    same: Any = np.equal(a1, a2)
    if equal_nan:
        same = np.logical_or(same, np.logical_and(np.not_equal(a1, a1), np.not_equal(a2, a2)))
    return bool(np.all(same))


@implements(np.array_equiv)
def array_equiv(a1: Any, a2: Any) -> bool:
    """See `numpy.array_equiv`. Fetches one element."""
    try:
        np.broadcast_shapes(np.shape(a1), np.shape(a2))
    except ValueError:
        return False
    return bool(np.all(np.equal(a1, a2)))


@implements(np.allclose)
def allclose(a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> bool:
    """See `numpy.allclose`. Fetches one element."""
    return bool(np.all(np.isclose(a, b, rtol, atol, equal_nan)))


@implements(np.array_repr)
def array_repr(arr: Any, *args: Any, **kwargs: Any) -> str:
    """Return the array's own form, whatever is asked for."""
    del args, kwargs
    return repr(arr)


@implements(np.array_str, np.array2string)
def array_str(a: Any, *args: Any, **kwargs: Any) -> str:
    """Return the array's own form, whatever is asked for."""
    del args, kwargs
    return str(a)


# Arrays like others: of the same shape they have the same layout, otherwise they are replicated on the same mesh.


def _like(prototype: DTensor, value: Any, dtype: Any, shape_: Any) -> DTensor:
    lengths = prototype.shape if shape_ is None else tuple(np.atleast_1d(shape_).tolist()) if shape_ != () else ()
    layout = prototype.layout if lengths == prototype.shape else Layout.replicated(prototype.mesh, len(lengths))
    return full(lengths, value, prototype.dtype if dtype is None else dtype, layout=layout)


def _register_like(function: Any, value: int) -> None:
    @implements(function)
    def like(
        a: Any, dtype: Any = None, order: Any = "K", subok: bool = True, shape: Any = None, *, device: Any = None
    ) -> Any:
        del order, subok, device
        return _like(a, value, dtype, shape)


_register_like(np.zeros_like, 0)
_register_like(np.empty_like, 0)
_register_like(np.ones_like, 1)


@implements(np.full_like)
def full_like(
    a: Any,
    fill_value: Any,
    dtype: Any = None,
    order: Any = "K",
    subok: bool = True,
    shape: Any = None,
    *,
    device: Any = None,
) -> Any:
    """See `numpy.full_like`."""
    del order, subok, device
    if type(fill_value) is int:
        np.asarray(fill_value, a.dtype if dtype is None else dtype)  # raises OverflowError, as NumPy does
    if isinstance(fill_value, DTensor):
        wide = np.broadcast_to(fill_value, a.shape if shape is None else shape)
        return wide.astype(a.dtype if dtype is None else dtype)
    return _like(a, fill_value, dtype, shape)


def _register_creator(function: Any, creator: Callable[..., DTensor]) -> None:
    def create(like: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        refuse_out(function.__name__, kwargs)
        return creator(*args, **kwargs, layout=Layout.replicated(like.mesh, _rank(function, args, kwargs)))

    LIKE[function] = create


def _rank(function: Any, args: Any, kwargs: Any) -> int:
    """Return how many axes an array has that a creation function makes of these arguments."""
    if function in (np.arange, np.linspace):
        return 1
    if function in (np.eye, np.identity):
        return 2
    lengths = args[0] if args else kwargs["shape"]
    return len(lengths) if isinstance(lengths, tuple | list) else 1


for _function, _creator in CREATORS.items():
    _register_creator(_function, _creator)


def _register_made_here(function: Any) -> None:
    def create(like: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        if args and isinstance(args[0], DTensor):
            dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
            return args[0] if dtype is None else args[0].astype(dtype)
        made = np.asarray(function(*args, **kwargs))
        return distribute(made, Layout.replicated(like.mesh, made.ndim))

    LIKE[function] = create


for _function in numpys(
    *("array", "asanyarray", "asarray", "ascontiguousarray", "asfortranarray", "frombuffer", "fromfunction"),
    *("fromiter", "fromstring", "require", "tri"),
):
    _register_made_here(_function)


@implements(np.meshgrid)
def meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> Any:
    """See `numpy.meshgrid`."""
    del copy
    mesh = mesh_of(*xi)
    vectors = [np.ravel(as_tensor(x, mesh)) for x in xi]
    places = list(range(len(vectors)))
    if indexing == "xy" and len(places) > 1:
        places[:2] = [1, 0]
    thin = [
        np.reshape(x, tuple(-1 if k == at else 1 for k in range(len(vectors))))
        for x, at in zip(vectors, places, strict=True)
    ]
    return tuple(thin) if sparse else np.broadcast_arrays(*thin)
