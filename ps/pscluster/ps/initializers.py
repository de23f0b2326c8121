"""Initial values of variables, made block by block where the blocks are stored.

An initializer is a frozen set of numbers and, for the random ones, a seed. It makes any block of the whole array by
itself: bit for bit a slice of the whole, however that is cut. So a variable can be larger than any machine's memory.

To that end, the elements of the whole, in C order, are divided into tiles of `_TILE`. Each tile is drawn in full, by
NumPy's `Generator` on a Philox whose key is the seed and whose counter is the tile's index (times 2**64, far more
than a tile can use up). Distributions that reject some draws can do so without affecting other tiles. The values are
those of NumPy's distributions, unchanged since NumPy 1.26; tests would notice a change.

float16 and bfloat16 values are the float32 ones, rounded. Names, parameters, defaults and fans are those of Keras'
initializers; the values are not, since Keras' depend on its backend. As in Keras, an initializer gives the same values
at every call: two variables with one shape and one seed start equal.
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
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from pscluster.core import checks

if TYPE_CHECKING:
    _Draw = Callable[[np.random.Generator, npt.NDArray[Any]], None]  # fills a tile; np.random is slow to import

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

_HALVES = ("float16", "bfloat16")
_FLOATS = (*_HALVES, "float32", "float64")  # by name: NumPy alone does not know bfloat16
_TILE = 2048  # elements; changing it changes the values
_PIECE = 1 << 16  # elements made at a time, which fit in the processor's cache

_HALF = 1 << 63


def _seed(name: str, value: object) -> int:
    value = secrets.randbits(63) if value is None else value
    return checks.whole(name, value, "; None draws one when the initializer is made", at_least=0, below=_HALF)


def _number_or_flag(name: str, value: object) -> float | int:
    return _number(name, int(value) if isinstance(value, bool | np.bool_) else value, finite=False)


def _number(name: str, value: object, *, finite: bool = True) -> float | int:
    """Return a parameter as an int, if it is an integer, otherwise as a float."""
    try:
        operator.index(value)  # type: ignore[arg-type]  # the error is the check
    except TypeError:
        return checks.real(name, value, finite=finite)
    return checks.whole(name, value, ", or a float", at_least=-_HALF, below=_HALF)


_SEED = checks.checked(_seed)


@dataclass(frozen=True)
class Initializer(checks.Parameters, ABC):
    """Initial values of an array. Its parameters, integers and floats, are the fields of the dataclass."""

    def __init_subclass__(cls, name: str = "") -> None:
        super().__init_subclass__()
        if name:
            cls.name = name

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
        size = _shape(shape if partition_shape is None else partition_shape)
        made = np.empty(size, np.float32 if dtype is None else dtype)
        self.generate(shape, made.dtype, [0] * made.ndim if partition_offset is None else partition_offset, made)
        return made

    def generate(self, shape: Sequence[int], dtype: npt.DTypeLike, partition_offset: Sequence[int], out: Array) -> None:
        """Fill a C-contiguous array with the block of the whole, of `shape`, that starts at the offset.

        The block, which has the array's shape, is made in small pieces: additional memory does not grow with its size.

        Raises:
            ValueError: the block is not inside the whole, `out` has another dtype or is not contiguous, or the
                initializer can't make such values (see `check`). Nothing was written.
        """
        whole, dtype, offset = _shape(shape), np.dtype(dtype), _shape(partition_offset)
        ends = tuple(map(operator.add, offset, out.shape))
        if not len(offset) == out.ndim == len(whole) or any(map(operator.gt, ends, whole)):
            raise ValueError(f"a block of shape {out.shape} at offset {offset} is not inside shape {whole}")
        if out.dtype != dtype:
            raise ValueError(f"the array to fill is of {out.dtype}, but {dtype} was asked for: give one of that dtype")
        if not out.flags.c_contiguous:
            raise ValueError(f"the array to fill, of shape {out.shape}, is not C-contiguous: fill a copy instead")
        self.check(whole, dtype)
        if out.size:
            self._fill(whole, offset, out)

    @abstractmethod
    def check(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        """Raise ValueError, which says why and what to do, if the initializer can't make such values; make none."""

    @abstractmethod
    def _fill(self, shape: Shape, offset: Shape, out: Array) -> None:
        """Fill `out` with the block, which is not empty."""

    def to_spec(self) -> tuple[str, dict[str, float | int]]:
        """Return the name, and the parameters by name, for `from_spec`. Integers must not pass through floats."""
        return self.name, self.values_by_name()


def from_spec(name: str, numbers: Mapping[str, float | int]) -> Initializer:
    """Return the initializer that `to_spec` described. ValueError if it is none, or a parameter is wrong or missing."""
    if name not in INITIALIZERS:
        raise ValueError(f"there is no initializer {name!r}; choose one of {', '.join(INITIALIZERS)}")
    initializer = INITIALIZERS[name].made_of(numbers)
    if isinstance(initializer, _Random) and "seed" not in numbers:
        # Each server would draw its own.
        raise ValueError(f"{name}: the seed is missing, and without it the shards would not fit together")
    return initializer


class _Constant(Initializer):
    """All elements are one value."""

    value: float | int

    def check(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        """Accept any shape, and any dtype that can hold the value."""
        del shape
        dtype, value = np.dtype(dtype), self.value
        if dtype.name in _FLOATS or dtype.kind == "c":
            if math.isfinite(value) and not _is_finite_in(value, dtype):
                raise ValueError(f"{self.name}: {value!r} is too large for {dtype}: give a smaller one or a wider type")
        elif dtype.kind in "biu":
            low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
            checks.whole(f"{self.name}: value", value, f", for elements of {dtype}", at_least=low, at_most=high)
        else:
            raise ValueError(f"{self.name} makes numbers and bools, not elements of type {dtype}")

    def _fill(self, shape: Shape, offset: Shape, out: Array) -> None:
        del shape, offset
        out[...] = np.asarray(self.value).astype(out.dtype)


class Zeros(_Constant, name="zeros"):
    """All elements are 0; False for bool."""

    value = 0


class Ones(_Constant, name="ones"):
    """All elements are 1; True for bool."""

    value = 1


@dataclass(frozen=True)
class Constant(_Constant, name="constant"):
    """All elements are `value`, which may be infinite or NaN if they are floats."""

    value: float | int = field(default=0.0, metadata=checks.checked(_number_or_flag))


def _uniform(generator: np.random.Generator, tile: Array) -> None:
    generator.random(out=tile, dtype=tile.dtype.type)


def _normal(generator: np.random.Generator, tile: Array) -> None:
    generator.standard_normal(out=tile, dtype=tile.dtype.type)


def _truncated_normal(generator: np.random.Generator, tile: Array) -> None:
    _normal(generator, tile)
    beyond = np.flatnonzero(np.abs(tile) > 2)
    while beyond.size:
        tile[beyond] = again = generator.standard_normal(beyond.size, tile.dtype.type)
        beyond = beyond[np.abs(again) > 2]


class _Random(Initializer):
    """Every element is a random number."""

    seed: int | None

    def check(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        """Accept any shape, and floats that are wide enough for the values."""
        dtype = np.dtype(dtype)
        if dtype.name not in _FLOATS:
            raise ValueError(f"{self.name} makes {', '.join(_FLOATS)}, not {dtype}: choose one of these dtypes")
        _, shift, factor, below = self._distribution(_shape(shape))
        # NumPy draws no normal number beyond 13.
        extreme = abs(shift) + 13 * factor if below is None else max(abs(shift), abs(below), factor)
        if not _is_finite_in(extreme, dtype):
            raise ValueError(
                f"{self.name}: values may be as large as {extreme:.3g}, which {dtype} can't hold: "
                "give smaller parameters or a wider type"
            )

    @abstractmethod
    def _distribution(self, shape: Shape) -> tuple[_Draw, float, float, float | None]:
        """Return (draw, shift, factor, below): an element is a drawn number times the factor, plus the shift.

        If `below` is not None, it is also less than that.
        """

    def _fill(self, shape: Shape, offset: Shape, out: Array) -> None:
        if not shape:
            shape, offset, out = (1,), (0,), out.reshape(1)
        dtype = out.dtype.newbyteorder("=")
        draw, shift, factor, below = self._distribution(shape)
        highest = None if below is None or dtype.kind in "iu" else _highest_below(below, dtype)
        bits = np.random.Philox(key=self.seed)
        generator, state = np.random.Generator(bits), bits.state
        # Pieces are cut along the first axis with at most a tile per index: that tile is made in full, though the
        # block may not need all of it. The axes before it are iterated over.
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        axis = next(axis for axis, stride in enumerate(strides) if stride <= _TILE)
        stride, inner = strides[axis], shape[axis + 1 :]
        needed = tuple(map(slice, offset, map(operator.add, offset, out.shape)))[axis + 1 :]
        rows = max(1, _PIECE // stride)
        tiles = np.empty(rows * stride + 2 * _TILE, np.float32 if dtype.name in _HALVES else dtype)
        for index in np.ndindex(out.shape[:axis]):
            base = sum(map(operator.mul, map(operator.add, (*index, 0), offset), strides))
            for row in range(0, out.shape[axis], rows):
                piece = out[index][row : row + rows]
                start = base + row * stride
                stop = start + len(piece) * stride
                first = start // _TILE
                for tile in range(first, -(-stop // _TILE)):
                    state["state"]["counter"][1] = tile
                    bits.state = state
                    draw(generator, tiles[(tile - first) * _TILE :][:_TILE])
                values = tiles[start - first * _TILE : stop - first * _TILE].reshape(-1, *inner)[:, *needed]
                if dtype.kind not in "iu":
                    values *= factor
                    values += shift
                    if highest is not None:
                        np.minimum(values, highest, out=values)
                piece[...] = values


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

    def check(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        """Accept any shape, and floats and integers that can hold the range."""
        dtype = np.dtype(dtype)
        if dtype.kind in "iu":
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
            for item, value, limit in (("minval", self.minval, high), ("maxval", self.maxval, high + 1)):
                checks.whole(f"{self.name}: {item}", value, f", for elements of {dtype}", at_least=low, at_most=limit)
            return
        super().check(shape, dtype)
        if _highest_below(self.maxval, dtype) < float(np.asarray(self.minval).astype(dtype)):
            raise ValueError(
                f"{self.name}: no {dtype} lies in [{self.minval!r}, {self.maxval!r}): "
                "give limits further apart or a wider type"
            )

    def _distribution(self, shape: Shape) -> tuple[_Draw, float, float, float | None]:
        del shape
        return self._draw, self.minval, self.maxval - self.minval, self.maxval

    def _draw(self, generator: np.random.Generator, tile: Array) -> None:
        if tile.dtype.kind in "iu":
            tile[:] = generator.integers(int(self.minval), int(self.maxval), tile.size, tile.dtype.type)
        else:
            _uniform(generator, tile)


@dataclass(frozen=True)
class RandomNormal(_Random, name="random_normal"):
    """Normal with this mean and standard deviation."""

    truncated: ClassVar[bool] = False

    mean: float = 0.0
    stddev: float = field(default=0.05, metadata=checks.checked(partial(checks.real, at_least=0)))
    seed: int | None = field(default=None, metadata=_SEED)

    def _distribution(self, shape: Shape) -> tuple[_Draw, float, float, float | None]:
        del shape
        return _truncated_normal if self.truncated else _normal, self.mean, self.stddev, None


class TruncatedNormal(RandomNormal, name="truncated_normal"):
    """Normal, but within two standard deviations of the mean.

    As in Keras, `stddev` is that of the distribution before truncation, which reduces it to 0.88 of that.
    """

    truncated: ClassVar[bool] = True


@dataclass(frozen=True)
class _Scaled(_Random):
    """Values around 0 whose variance depends on the number of units that the array connects.

    The fans are Keras' (`compute_fans`): the shape is (..., inputs, outputs), and the size of all axes before these
    two, the receptive field of a convolution, multiplies both. With one axis, both fans are its length; for a scalar
    they are 1. They are those of the whole array, however it is cut.
    """

    seed: int | None = field(default=None, metadata=_SEED)

    def _distribution(self, shape: Shape) -> tuple[_Draw, float, float, float | None]:
        fan_in, fan_out = _fans(shape)
        stddev = math.sqrt(2 / (max(1, fan_in) if isinstance(self, HeUniform | HeNormal) else max(2, fan_in + fan_out)))
        if isinstance(self, GlorotUniform | HeUniform):
            limit = math.sqrt(3) * stddev
            return _uniform, -limit, 2 * limit, limit
        return _truncated_normal, 0.0, stddev / 0.87962566103423978, None  # truncation leaves `stddev`


class GlorotUniform(_Scaled, name="glorot_uniform"):
    """Uniform within sqrt(6 / (fan_in + fan_out)) of 0 (Glorot and Bengio 2010)."""


class GlorotNormal(_Scaled, name="glorot_normal"):
    """Truncated normal of standard deviation sqrt(2 / (fan_in + fan_out)) (Glorot and Bengio 2010)."""


class HeUniform(_Scaled, name="he_uniform"):
    """Uniform within sqrt(6 / fan_in) of 0 (He et al. 2015)."""


class HeNormal(_Scaled, name="he_normal"):
    """Truncated normal of standard deviation sqrt(2 / fan_in) (He et al. 2015)."""


_KINDS = (Zeros, Ones, Constant, RandomUniform, RandomNormal, TruncatedNormal)
_SCALED = (GlorotUniform, GlorotNormal, HeUniform, HeNormal)
INITIALIZERS: Mapping[str, type[Initializer]] = MappingProxyType({kind.name: kind for kind in (*_KINDS, *_SCALED)})
"""The initializers, by name."""


def _fans(shape: Shape) -> tuple[int, int]:
    """Count input and output units; see `_Scaled`."""
    *field, inputs, outputs = shape if len(shape) > 1 else (shape or (1,)) * 2
    size = math.prod(field)
    return inputs * size, outputs * size


def _shape(lengths: Sequence[int]) -> Shape:
    shape = tuple(map(operator.index, lengths))
    if any(length < 0 for length in shape):
        raise ValueError(f"lengths and offsets must not be negative, but are {shape}")
    return shape


def _is_finite_in(value: float, dtype: np.dtype[Any]) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.asarray(value, np.float64).astype(dtype)))


def _highest_below(limit: float, dtype: np.dtype[Any]) -> float:
    """Return the largest number of the float dtype that is below the limit."""
    rounded = np.asarray(limit).astype(dtype)
    return float(rounded if float(rounded) < limit else np.nextafter(rounded, np.asarray(-np.inf).astype(dtype)))
