"""Operators of variables: they read the value and leave the rest to NumPy."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import MisuseError

_CPU = 1, 0  # DLPack's code for main memory


def _value(operand: Any) -> Any:
    return operand.read_value() if isinstance(operand, Arithmetic) else operand


def _unary(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: function(self.read_value())


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: function(self.read_value(), _value(other))


def _both(function: Callable[[Any, Any], Any]) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """Return the operator and its reflected form."""
    return _binary(function), lambda self, other: function(other, self.read_value())


def _in_place(sign: str, method: str = "assign") -> Callable[[Any, Any], Any]:
    def refuse(self: Any, other: Any) -> Any:
        del other
        raise MisuseError(f"{self!r} can't be changed with {sign}: use its {method}(...)")

    return refuse


class Arithmetic:
    """Mixin of classes with `read_value` whose values live on servers: variables and shards."""

    shape: Any
    dtype: Any
    owners: Any

    @property
    def size(self) -> int:
        return int(math.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.size * int(self.dtype.itemsize)

    @property
    def device(self) -> str:
        """The server that holds it, such as `/job:ps/task:1`; the first shard's if it is cut."""
        return f"/job:ps/task:{self.owners[0]}"

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Compute `np.exp(v)`, `array + v` and the like on the value."""
        if any(isinstance(out, Arithmetic) for out in kwargs.get("out", ())):
            raise MisuseError(f"{self!r} can't be passed as `out=`: use its assign(...)")
        if method == "at" and isinstance(inputs[0], Arithmetic):
            raise MisuseError(f"{self!r} can't be changed by np.{ufunc.__name__}.at: use its scatter methods")
        return getattr(ufunc, method)(*map(_value, inputs), **kwargs)

    def read_value(self) -> npt.NDArray[Any]:
        """Read the value."""
        raise NotImplementedError

    def numpy(self) -> npt.NDArray[Any]:
        """Read the whole value, as `read_value` does."""
        return self.read_value()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("a variable's values live on the parameter servers: reading them always makes a copy")
        value = self.read_value()
        return value if dtype is None else value.astype(dtype, copy=False)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Export the value, read as a whole: otherwise PyTorch would read it row by row. BufferError if refused."""
        if copy is False:
            raise BufferError("a variable's values live on the parameter servers: reading them always makes a copy")
        value: Any = self.read_value()
        if value.dtype.name == "bfloat16":
            raise BufferError(
                f"{self!r} can't be exported as it is, since NumPy's DLPack has no bfloat16: for PyTorch use "
                "torch.from_numpy(v.numpy().view(np.int16)).view(torch.bfloat16)"
            )
        if not value.flags.writeable:
            value = value.copy()  # old consumers refuse read-only arrays
        arguments = {"stream": stream, "max_version": max_version, "dl_device": dl_device}
        try:
            return value.__dlpack__(**{name: argument for name, argument in arguments.items() if argument is not None})
        except TypeError:  # up to 2.0, NumPy takes only a stream
            return value.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU

    # Element by element, as in NumPy and TensorFlow; `is` compares identity.
    __eq__, __ne__ = _binary(operator.eq), _binary(operator.ne)

    __hash__ = object.__hash__

    __add__, __radd__ = _both(operator.add)
    __sub__, __rsub__ = _both(operator.sub)
    __mul__, __rmul__ = _both(operator.mul)
    __truediv__, __rtruediv__ = _both(operator.truediv)
    __floordiv__, __rfloordiv__ = _both(operator.floordiv)
    __mod__, __rmod__ = _both(operator.mod)
    __divmod__, __rdivmod__ = _both(divmod)
    __pow__, __rpow__ = _both(operator.pow)
    __matmul__, __rmatmul__ = _both(operator.matmul)
    __and__, __rand__ = _both(operator.and_)
    __or__, __ror__ = _both(operator.or_)
    __xor__, __rxor__ = _both(operator.xor)
    __lshift__, __rlshift__ = _both(operator.lshift)
    __rshift__, __rrshift__ = _both(operator.rshift)
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)

    __neg__, __pos__ = _unary(operator.neg), _unary(operator.pos)
    __invert__, __abs__ = _unary(operator.invert), _unary(abs)
    __bool__, __int__, __float__ = _unary(bool), _unary(int), _unary(float)

    # Otherwise `v += 1` would make `v` an array, and leave the variable unchanged.
    __iadd__, __isub__ = _in_place("+=", "assign_add"), _in_place("-=", "assign_sub")
    __imul__, __itruediv__, __ifloordiv__ = _in_place("*="), _in_place("/="), _in_place("//=")
    __imod__, __ipow__, __imatmul__ = _in_place("%="), _in_place("**="), _in_place("@=")
    __iand__, __ior__, __ixor__ = _in_place("&="), _in_place("|="), _in_place("^=")
    __ilshift__, __irshift__ = _in_place("<<="), _in_place(">>=")

    def __round__(self, ndigits: int | None = None) -> Any:
        value = self.read_value()
        return value.round(ndigits or 0) if value.ndim else round(value.item(), ndigits)
