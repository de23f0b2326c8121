"""Operators of variables: they read the value, and the rest is NumPy's."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import MisuseError

_CPU = 1, 0  # DLPack's word for memory


def _value(operand: Any) -> Any:
    return operand.read_value() if isinstance(operand, Arithmetic) else operand


def _binary(name: str) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)
    return lambda self, other: function(self.read_value(), _value(other))


def _reflected(name: str) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)
    return lambda self, other: function(other, self.read_value())


def _by_function(function: Callable[[Any, Any], Any]) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    def forward(self: Any, other: Any) -> Any:
        return function(self.read_value(), _value(other))

    def reflected(self: Any, other: Any) -> Any:
        return function(_value(other), self.read_value())

    return forward, reflected


def _in_place(sign: str, method: str = "assign") -> Callable[[Any, Any], Any]:
    def refuse(self: Any, other: Any) -> Any:
        del other
        raise MisuseError(f"{self!r} can't be changed with {sign}: use its {method}(...)")

    return refuse


class Arithmetic:
    """Mixin of whatever has `read_value`."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """`np.exp(v)`, `array + v` and the like: on the value."""
        if any(isinstance(out, Arithmetic) for out in kwargs.get("out", ())):
            raise MisuseError(f"{self!r} can't be passed as `out=`: use its assign(...)")
        if method == "at" and isinstance(inputs[0], Arithmetic):
            raise MisuseError(f"{self!r} can't be changed by np.{ufunc.__name__}.at: use its scatter methods")
        return getattr(ufunc, method)(*map(_value, inputs), **kwargs)

    def read_value(self) -> npt.NDArray[Any]:
        """The value."""
        raise NotImplementedError

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
        """Hand the value over, read at once: PyTorch would ask for it row by row otherwise.

        Raises:
            BufferError: it is asked for without a copy, or elsewhere than in memory, or is of a type that can't be.
        """
        if copy is False:
            raise BufferError("a variable's values live on the parameter servers: reading them always makes a copy")
        value: Any = self.read_value()
        if value.dtype.name == "bfloat16":
            raise BufferError(
                f"{self!r} can't be exported as it is, since NumPy's DLPack has no bfloat16: for PyTorch use "
                "torch.from_numpy(v.numpy().view(np.int16)).view(torch.bfloat16)"
            )
        if not value.flags.writeable:
            value = value.copy()  # who has not heard of arrays that are read only takes none
        wanted = {"stream": stream, "max_version": max_version, "dl_device": dl_device}
        asked = {name: each for name, each in wanted.items() if each is not None}
        try:
            return value.__dlpack__(**asked)
        except TypeError:  # NumPy 2.0 and those before it know a stream only
            return value.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU

    # Element by element, as NumPy and the peer have it; `is` tells whether two are the same variable.
    __eq__, __ne__ = _binary("eq"), _binary("ne")

    __hash__ = object.__hash__

    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("sub"), _reflected("sub")
    __mul__, __rmul__ = _binary("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _binary("truediv"), _reflected("truediv")
    __floordiv__, __rfloordiv__ = _binary("floordiv"), _reflected("floordiv")
    __mod__, __rmod__ = _binary("mod"), _reflected("mod")
    __divmod__, __rdivmod__ = _by_function(divmod)
    __pow__, __rpow__ = _binary("pow"), _reflected("pow")
    __matmul__, __rmatmul__ = _binary("matmul"), _reflected("matmul")
    __and__, __rand__ = _binary("and_"), _reflected("and_")
    __or__, __ror__ = _binary("or_"), _reflected("or_")
    __xor__, __rxor__ = _binary("xor"), _reflected("xor")
    __lshift__, __rlshift__ = _binary("lshift"), _reflected("lshift")
    __rshift__, __rrshift__ = _binary("rshift"), _reflected("rshift")
    __lt__, __le__, __gt__, __ge__ = _binary("lt"), _binary("le"), _binary("gt"), _binary("ge")

    # Else `v += 1` would make `v` an array, and leave the variable as it is.
    __iadd__, __isub__ = _in_place("+=", "assign_add"), _in_place("-=", "assign_sub")
    __imul__, __itruediv__, __ifloordiv__ = _in_place("*="), _in_place("/="), _in_place("//=")
    __imod__, __ipow__, __imatmul__ = _in_place("%="), _in_place("**="), _in_place("@=")
    __iand__, __ior__, __ixor__ = _in_place("&="), _in_place("|="), _in_place("^=")
    __ilshift__, __irshift__ = _in_place("<<="), _in_place(">>=")

    def __neg__(self) -> npt.NDArray[Any]:
        return -self.read_value()

    def __pos__(self) -> npt.NDArray[Any]:
        return +self.read_value()

    def __invert__(self) -> npt.NDArray[Any]:
        return ~self.read_value()

    def __abs__(self) -> npt.NDArray[Any]:
        return abs(self.read_value())

    def __round__(self, ndigits: int | None = None) -> Any:
        value = self.read_value()
        return value.round(ndigits or 0) if value.ndim else round(value.item(), ndigits)

    def __float__(self) -> float:
        return float(self.read_value())

    def __int__(self) -> int:
        return int(self.read_value())

    def __bool__(self) -> bool:
        return bool(self.read_value())
