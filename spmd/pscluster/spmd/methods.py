"""The methods and operators that NumPy's arrays have, for global arrays: each calls the function of that name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

xp: Any = np
"""NumPy, for calls with global arrays, of which its types know nothing."""


_IN_PLACE = {
    "fill": "np.full_like(array, value)",
    "partition": "np.partition(array, kth)",
    "put": "array.at[index].set(value)",
    "resize": "np.resize(array, shape)",
    "sort": "np.sort(array)",
}
"""Methods of NumPy's arrays that change them, and what makes another array instead."""


class ArrayMethods(np.lib.mixins.NDArrayOperatorsMixin):
    """Methods of arrays. Results are global arrays."""

    __slots__ = ()
    shape: tuple[int, ...]
    item: Callable[[], Any]

    @property
    def T(self) -> Any:  # noqa: N802  # as in NumPy
        return xp.transpose(self)

    @property
    def mT(self) -> Any:  # noqa: N802  # as in NumPy
        if len(self.shape) < 2:
            raise ValueError("matrix transpose with ndim < 2 is undefined")  # NumPy's words
        return xp.swapaxes(self, -1, -2)

    @property
    def real(self) -> Any:
        return xp.real(self)

    @property
    def imag(self) -> Any:
        return xp.imag(self)

    def __contains__(self, item: Any) -> bool:
        return bool((self == item).any())

    def __round__(self, ndigits: int | None = None) -> Any:
        if self.shape:
            raise TypeError(f"round() takes a number, and this is an array of shape {self.shape}: use np.round()")
        return round(self.item(), ndigits)

    def __format__(self, spec: str) -> str:
        """Format a number, such as a loss, by what is after the colon: that of an array without axes is fetched."""
        if not spec:
            return str(self)
        if self.shape:
            raise TypeError(f"{spec!r} formats a number, and this is an array of shape {self.shape}: choose an element")
        return format(self.item(), spec)

    def reshape(self, *shape: Any) -> Any:
        """Return it with another shape: see `numpy.reshape`."""
        return xp.reshape(self, shape[0] if len(shape) == 1 else shape)

    def transpose(self, *axes: Any) -> Any:
        """Return it with its axes in another order, by default reversed."""
        return xp.transpose(self, axes[0] if len(axes) == 1 else axes or None)

    def flatten(self) -> Any:
        """Return it with one axis."""
        return xp.ravel(self)

    # As functions of NumPy, with the same arguments

    def all(self, *args: Any, **kwargs: Any) -> Any:
        return xp.all(self, *args, **kwargs)

    def any(self, *args: Any, **kwargs: Any) -> Any:
        return xp.any(self, *args, **kwargs)

    def argmax(self, *args: Any, **kwargs: Any) -> Any:
        return xp.argmax(self, *args, **kwargs)

    def argmin(self, *args: Any, **kwargs: Any) -> Any:
        return xp.argmin(self, *args, **kwargs)

    def argpartition(self, *args: Any, **kwargs: Any) -> Any:
        return xp.argpartition(self, *args, **kwargs)

    def argsort(self, *args: Any, **kwargs: Any) -> Any:
        return xp.argsort(self, *args, **kwargs)

    def clip(self, *args: Any, **kwargs: Any) -> Any:
        return xp.clip(self, *args, **kwargs)

    def conj(self, *args: Any, **kwargs: Any) -> Any:
        return xp.conj(self, *args, **kwargs)

    def conjugate(self) -> Any:
        return xp.conj(self)

    def cumprod(self, *args: Any, **kwargs: Any) -> Any:
        return xp.cumprod(self, *args, **kwargs)

    def cumsum(self, *args: Any, **kwargs: Any) -> Any:
        return xp.cumsum(self, *args, **kwargs)

    def diagonal(self, *args: Any, **kwargs: Any) -> Any:
        return xp.diagonal(self, *args, **kwargs)

    def dot(self, *args: Any, **kwargs: Any) -> Any:
        return xp.dot(self, *args, **kwargs)

    def max(self, *args: Any, **kwargs: Any) -> Any:
        return xp.max(self, *args, **kwargs)

    def mean(self, *args: Any, **kwargs: Any) -> Any:
        return xp.mean(self, *args, **kwargs)

    def min(self, *args: Any, **kwargs: Any) -> Any:
        return xp.min(self, *args, **kwargs)

    def prod(self, *args: Any, **kwargs: Any) -> Any:
        return xp.prod(self, *args, **kwargs)

    def ravel(self, *args: Any, **kwargs: Any) -> Any:
        return xp.ravel(self, *args, **kwargs)

    def repeat(self, *args: Any, **kwargs: Any) -> Any:
        return xp.repeat(self, *args, **kwargs)

    def round(self, *args: Any, **kwargs: Any) -> Any:
        return xp.round(self, *args, **kwargs)

    def searchsorted(self, *args: Any, **kwargs: Any) -> Any:
        return xp.searchsorted(self, *args, **kwargs)

    def squeeze(self, *args: Any, **kwargs: Any) -> Any:
        return xp.squeeze(self, *args, **kwargs)

    def std(self, *args: Any, **kwargs: Any) -> Any:
        return xp.std(self, *args, **kwargs)

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        return xp.sum(self, *args, **kwargs)

    def swapaxes(self, *args: Any, **kwargs: Any) -> Any:
        return xp.swapaxes(self, *args, **kwargs)

    def take(self, *args: Any, **kwargs: Any) -> Any:
        return xp.take(self, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        return xp.trace(self, *args, **kwargs)

    def var(self, *args: Any, **kwargs: Any) -> Any:
        return xp.var(self, *args, **kwargs)

    def nonzero(self) -> Any:
        return xp.nonzero(self)

    if not TYPE_CHECKING:  # which knows what is missing

        def __getattr__(self, name: str) -> NoReturn:
            if (instead := _IN_PLACE.get(name)) is not None:
                raise AttributeError(f"a global array has no {name}(), since it does not change: use {instead}")
            also = "; NumPy's arrays do, and full() gathers one" if hasattr(np.ndarray, name) else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{also}", name=name, obj=self)

    # Those of the mixin would change the array in place.
    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other

    def __imul__(self, other: Any) -> Any:
        return self * other

    def __itruediv__(self, other: Any) -> Any:
        return self / other

    def __ifloordiv__(self, other: Any) -> Any:
        return self // other

    def __imod__(self, other: Any) -> Any:
        return self % other

    def __ipow__(self, other: Any) -> Any:
        return self**other

    def __imatmul__(self, other: Any) -> Any:
        return self @ other

    def __iand__(self, other: Any) -> Any:
        return self & other

    def __ior__(self, other: Any) -> Any:
        return self | other

    def __ixor__(self, other: Any) -> Any:
        return self ^ other

    def __ilshift__(self, other: Any) -> Any:
        return self << other

    def __irshift__(self, other: Any) -> Any:
        return self >> other
