"""Initial values of variables, made block by block where the blocks are stored.

An initializer is a frozen set of numbers and, for the random ones, a seed. It makes any block of the whole array by
itself: bit for bit a slice of the whole, however that is cut. So a variable can be larger than any machine's memory.

`core/numbers/random_blocks.py` draws the random numbers. float16 and bfloat16 values are the float32 ones, rounded.
Names, parameters, defaults and fans are those of Keras' initializers; the values are not, since Keras' depend on its
backend. As in Keras, an initializer gives the same values at every call: two variables with one shape and one seed
start equal.
"""

from __future__ import annotations

import math
import operator
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pscluster.core import checks
from pscluster.core.numbers import random_blocks

__all__ = [
    "Constant",
    "GlorotNormal",
    "GlorotUniform",
    "HeNormal",
    "HeUniform",
    "Initializer",
    "Ones",
    "RandomNormal",
    "RandomUniform",
    "TruncatedNormal",
    "Zeros",
]

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
_Fill = Callable[[Shape, Array], None]  # of the block at an offset

_FLOATS = ("float16", "bfloat16", "float32", "float64")  # by name: NumPy alone does not know bfloat16
_HALF = 1 << 63

_kinds: dict[str, type[Initializer]] = {}
INITIALIZERS: Mapping[str, type[Initializer]] = MappingProxyType(_kinds)
"""The initializers, by name."""


def _seed(name: str, value: object) -> int:
    value = secrets.randbits(63) if value is None else value
    return checks.whole(name, value, "; None draws one when the initializer is made", at_least=0, below=_HALF)


def _number(name: str, value: Any, *, of_constant: bool = False) -> float | int:
    """Return a parameter as an int, if it is an integer, otherwise as a float. Constants may be flags, inf and NaN."""
    if of_constant and isinstance(value, bool | np.bool_):
        return int(value)
    if of_constant and isinstance(value, float | np.floating) and np.isnan(value):
        return math.nan
    try:
        operator.index(value)
    except TypeError:
        return checks.real(name, value, finite=not of_constant)
    return checks.whole(name, value, ", or a float", at_least=-_HALF, below=_HALF)


_SEED = checks.checked(_seed)


@dataclass(frozen=True)
class Initializer(checks.Parameters, ABC):
    """Initial values of an array. Its parameters, integers and floats, are the fields of the dataclass."""

    def __init_subclass__(cls, name: str = "") -> None:
        if name:
            cls.name, _kinds[name] = name, cls

    def __call__(
        self,
        shape: Sequence[int],
        dtype: npt.DTypeLike | None = None,
        partition_shape: Sequence[int] | None = None,
        partition_offset: Sequence[int] | None = None,
    ) -> Array:
        """Return the whole array of `shape`, or the block of it that has this shape and starts at this offset.

        It is a new C-contiguous array, of float32 by default. Raises ValueError as `generate`, and if only one of the
        block's shape and offset is given.
        """
        if (partition_shape is None) is not (partition_offset is None):
            raise ValueError(f"{self.name}: a block needs both partition_shape and partition_offset: give both or none")
        size = checks.per_axis(f"{self.name}: shape", shape if partition_shape is None else partition_shape)
        made = np.empty(size, np.float32 if dtype is None else dtype)
        self.generate(shape, [0] * made.ndim if partition_offset is None else partition_offset, made)
        return made

    def generate(self, shape: Sequence[int], partition_offset: Sequence[int], out: Array) -> None:
        """Fill an array with the block of the whole, of `shape`, that has the array's shape and starts at the offset.

        The block is made in small pieces: additional memory does not grow with its size. Raises ValueError if it is not
        inside the whole, or as `check`; then nothing was written.
        """
        whole = checks.per_axis(f"{self.name}: shape", shape)
        offset = checks.per_axis(f"{self.name}: partition_offset", partition_offset)
        ends = map(operator.add, offset, out.shape)
        if not len(offset) == out.ndim == len(whole) or any(map(operator.gt, ends, whole)):
            raise ValueError(f"a block of shape {out.shape} at offset {offset} is not inside shape {whole}")
        fill = self._filler(whole, out.dtype)
        if out.size:
            fill(offset, out)

    def check(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        """Raise ValueError, which says why and what to do, if the initializer can't make such values; make none."""
        self._filler(checks.per_axis(f"{self.name}: shape", shape), np.dtype(dtype))

    @abstractmethod
    def _filler(self, shape: Shape, dtype: np.dtype[Any]) -> _Fill:
        """Return what fills an array with the block, which is not empty, at an offset. ValueError as `check`."""


def takes_seed(name: str) -> bool:
    """Return whether the initializer of this name draws random numbers."""
    return issubclass(INITIALIZERS[name], _Random)


def numbers_to_seed(initializer: Initializer) -> dict[str, Any]:
    """Return the parameters by name, without the seed if none was given: another one may take its place."""
    numbers = initializer.values_by_name()
    if getattr(initializer, "seed_was_drawn", False):
        del numbers["seed"]
    return numbers


def from_spec(name: str, numbers: Mapping[str, float | int]) -> Initializer:
    """Return the initializer of this name and parameters. ValueError if there is none, or one is wrong or missing."""
    if name not in INITIALIZERS:
        raise ValueError(f"there is no initializer {name!r}; choose one of {', '.join(INITIALIZERS)}")
    initializer = INITIALIZERS[name].made_of(numbers)
    if isinstance(initializer, _Random) and "seed" not in numbers:
        # Each server would draw its own.
        raise ValueError(f"{name}: the seed is missing, and without it the shards would not fit together")
    return initializer


class _Constant(Initializer):
    """All elements are one value, of any type that can hold it."""

    value: float | int

    def _filler(self, shape: Shape, dtype: np.dtype[Any]) -> _Fill:
        del shape
        if dtype.kind in "biu":
            low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
            checks.whole(f"{self.name}: value", self.value, f", for elements of {dtype}", at_least=low, at_most=high)
        elif dtype.name not in _FLOATS and dtype.kind != "c":
            raise ValueError(f"{self.name} makes numbers and bools, not elements of type {dtype}")
        elif math.isfinite(self.value):
            _check_held(f"{self.name}: value is {self.value!r}", self.value, dtype)
        return lambda _, out: np.copyto(out, np.asarray(self.value).astype(dtype))


class Zeros(_Constant, name="zeros"):
    """All elements are 0; False for bool."""

    value = 0


class Ones(_Constant, name="ones"):
    """All elements are 1; True for bool."""

    value = 1


@dataclass(frozen=True)
class Constant(_Constant, name="constant"):
    """All elements are `value`, which may be infinite or NaN if they are floats."""

    value: float | int = field(default=0.0, metadata=checks.checked(partial(_number, of_constant=True)))


class _Random(Initializer):
    """Every element is a random number, of a float type that is wide enough."""

    seed: int | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed_was_drawn", self.seed is None)
        super().__post_init__()

    @abstractmethod
    def _distribution(self, shape: Shape) -> tuple[random_blocks.Draw, float, float, float]:
        """Return (draw, shift, factor, below): an element is a drawn number times the factor, plus the shift.

        It is also less than `below`, which may be infinite.
        """

    def _filler(self, shape: Shape, dtype: np.dtype[Any]) -> _Fill:
        if dtype.name not in _FLOATS:
            raise ValueError(f"{self.name} makes {', '.join(_FLOATS)}, not {dtype}: choose one of these dtypes")
        draw, shift, factor, below = self._distribution(shape)
        # NumPy draws no normal number beyond 13.
        extreme = abs(shift) + 13 * factor if below == math.inf else max(abs(shift), abs(below), factor)
        _check_held(f"{self.name}: values may be as large as {extreme:.3g}", extreme, dtype)
        highest = dtype.type(below)
        if float(highest) >= below:
            highest = np.nextafter(highest, dtype.type(-np.inf))
        if highest < dtype.type(shift):
            raise ValueError(
                f"{self.name}: no {dtype} lies in [{shift!r}, {below!r}): give limits further apart or a wider type"
            )
        return self._fill(draw, shape, (factor, shift, float(highest)))

    def _fill(self, draw: random_blocks.Draw, shape: Shape, scale: random_blocks.Scale | None = None) -> _Fill:
        seed = cast(int, self.seed)  # `_seed` has drawn one where it was None
        return partial(random_blocks.fill_block, seed, draw, shape, scale=scale)


@dataclass(frozen=True)
class RandomUniform(_Random, name="random_uniform"):
    """Uniform in [minval, maxval): for floats and, with whole limits, for integers.

    float64 values are multiples of 2**-53 of the range, other floats of 2**-24; they are then rounded, but kept below
    `maxval` even if rounding would reach it.
    """

    minval: float | int = field(default=-0.05, metadata=checks.checked(_number))
    maxval: float | int = field(default=0.05, metadata=checks.checked(_number))
    seed: int | None = field(default=None, metadata=_SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minval >= self.maxval:
            raise ValueError(
                f"{self.name}: minval is {self.minval!r}; it must be below maxval, which is {self.maxval!r} "
                "and itself never reached: for one value everywhere use Constant"
            )

    def _distribution(self, shape: Shape) -> tuple[random_blocks.Draw, float, float, float]:
        del shape
        return random_blocks.uniform, self.minval, self.maxval - self.minval, self.maxval

    def _filler(self, shape: Shape, dtype: np.dtype[Any]) -> _Fill:
        if dtype.kind not in "iu":
            return super()._filler(shape, dtype)
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        for item, value, limit in (("minval", self.minval, high), ("maxval", self.maxval, high + 1)):
            checks.whole(f"{self.name}: {item}", value, f", for elements of {dtype}", at_least=low, at_most=limit)
        return self._fill(random_blocks.integers(int(self.minval), int(self.maxval)), shape)


@dataclass(frozen=True)
class RandomNormal(_Random, name="random_normal"):
    """Normal with this mean and standard deviation.

        table = Variable(initializers.RandomNormal(stddev=0.01, seed=1), shape=(1_000_000, 64))

    Args:
        mean: of the distribution.
        stddev: its standard deviation, at least 0.
        seed: with the same one, the same values, however the variable is cut; None: one is drawn here.
    """

    mean: float = 0.0
    stddev: float = field(default=0.05, metadata=checks.checked(partial(checks.real, at_least=0)))
    seed: int | None = field(default=None, metadata=_SEED)

    def _distribution(self, shape: Shape) -> tuple[random_blocks.Draw, float, float, float]:
        del shape
        draw = random_blocks.truncated_normal if isinstance(self, TruncatedNormal) else random_blocks.normal
        return draw, self.mean, self.stddev, math.inf


class TruncatedNormal(RandomNormal, name="truncated_normal"):
    """Normal, but within two standard deviations of the mean.

    As in Keras, `stddev` is that of the distribution before truncation, which reduces it to 0.88 of that.

    Args:
        mean, stddev, seed: as in `RandomNormal`.
    """


@dataclass(frozen=True)
class _Scaled(_Random):
    """Values around 0 whose variance depends on the number of units that the array connects.

    The fans are Keras' (`compute_fans`): the shape is (..., inputs, outputs), and the size of all axes before these
    two, the receptive field of a convolution, multiplies both. With one axis, both fans are its length; for a scalar
    they are 1. They are those of the whole array, however it is cut.
    """

    seed: int | None = field(default=None, metadata=_SEED)

    def _distribution(self, shape: Shape) -> tuple[random_blocks.Draw, float, float, float]:
        fan_in, fan_out = _fans(shape)
        stddev = math.sqrt(2 / (max(1, fan_in) if isinstance(self, HeUniform | HeNormal) else max(2, fan_in + fan_out)))
        if isinstance(self, GlorotUniform | HeUniform):
            limit = math.sqrt(3) * stddev
            return random_blocks.uniform, -limit, 2 * limit, limit
        return random_blocks.truncated_normal, 0.0, stddev / 0.87962566103423978, math.inf  # truncation leaves `stddev`


class GlorotUniform(_Scaled, name="glorot_uniform"):
    """Uniform within sqrt(6 / (fan_in + fan_out)) of 0 (Glorot and Bengio 2010).

    Of an array of shape (..., inputs, outputs) the fans are Keras': those of the whole, however it is cut.

    Args:
        seed: as in `RandomNormal`.
    """


class GlorotNormal(_Scaled, name="glorot_normal"):
    """Truncated normal of standard deviation sqrt(2 / (fan_in + fan_out)) (Glorot and Bengio 2010).

    Of an array of shape (..., inputs, outputs) the fans are Keras': those of the whole, however it is cut.

    Args:
        seed: as in `RandomNormal`.
    """


class HeUniform(_Scaled, name="he_uniform"):
    """Uniform within sqrt(6 / fan_in) of 0 (He et al. 2015).

    Of an array of shape (..., inputs, outputs) the fans are Keras': those of the whole, however it is cut.

    Args:
        seed: as in `RandomNormal`.
    """


class HeNormal(_Scaled, name="he_normal"):
    """Truncated normal of standard deviation sqrt(2 / fan_in) (He et al. 2015).

    Of an array of shape (..., inputs, outputs) the fans are Keras': those of the whole, however it is cut.

    Args:
        seed: as in `RandomNormal`.
    """


def _fans(shape: Shape) -> tuple[int, int]:
    """Count input and output units; see `_Scaled`."""
    *field, inputs, outputs = shape if len(shape) > 1 else (shape or (1,)) * 2
    size = math.prod(field)
    return inputs * size, outputs * size


def _check_held(subject: str, value: float, dtype: np.dtype[Any]) -> None:
    with np.errstate(over="ignore"):
        if not np.isfinite(dtype.type(float(value))):
            raise ValueError(f"{subject}, which {dtype} can't hold: give smaller parameters or a wider type")
