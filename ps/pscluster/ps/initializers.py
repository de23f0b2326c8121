"""Initial values of variables, made block by block, where the blocks lie.

An initializer is a frozen set of numbers and, for the random ones, a seed. It gives any block of the whole
array on its own, and the block's values do not depend on how the whole is cut: they are, bit for bit, the
slice of the whole. So a variable larger than any one machine's memory is born on its servers, and stays the
same variable when it is cut another way.

How that is done:

- Element i of the whole, counted in C order, is made of the i-th number of a counter-based generator, which
  can begin anywhere: Philox-4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with
  the seed as its key. It is drawn as NumPy's raw stream, which NumPy promises not to change (NEP 19), unlike
  its distributions. 64 bits an element for float64 and integers; 32 for other floats, low half first.
- Each value takes one such number: normal ones by the inverse of their distribution function (Wichura 1988,
  algorithm AS 241), not by rejection, which takes now more and now less.
- All arithmetic is +, -, *, / and sqrt, which IEEE 754 rounds in one way only. Logarithms and the like come
  out otherwise on another processor or with another build of NumPy, and servers need not be alike.

float16 and bfloat16 values are the float32 ones, rounded. Names, parameters, defaults and fans are those of
Keras' initializers; the values are not, since Keras' depend on its backend. As in Keras an initializer gives
the same values whenever it is asked: two variables of one shape and one seed start equal.
"""

from __future__ import annotations

import itertools
import math
import operator
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pscluster.core.geometry import Block

__all__ = [
    "INITIALIZERS",
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
    "from_spec",
]

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Transform = Callable[[Array, Array, Sequence[Array]], None]
"""Makes values of random numbers.

The arguments, all of one length: the numbers, as unsigned integers, which are used up; the values, as wide as
the numbers; three buffers of the values' dtype.
"""

_FLOATS = ("float16", "bfloat16", "float32", "float64")  # by name: NumPy alone does not know bfloat16

# What is made at a time, small enough to stay in the processor's cache with all intermediate results. These
# have their buffers for a whole array: to allocate them for each piece would take longer than the arithmetic.
_PIECE_BYTES = 1 << 18

# Random numbers that are cheaper drawn and thrown away than skipped.
_GAP = 2048

_LOWEST_INT, _HIGHEST_INT = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class Initializer(ABC):
    """Initial values of an array; its parameters are the fields of the dataclass: integers and floats.

    Attributes:
        name: what the initializer is called on the wire and in `INITIALIZERS`.
    """

    name: ClassVar[str]

    def __call__(
        self,
        shape: Sequence[int],
        dtype: npt.DTypeLike | None = None,
        partition_shape: Sequence[int] | None = None,
        partition_offset: Sequence[int] | None = None,
    ) -> Array:
        """The values of the whole, or of one block of it.

        Args:
            shape: of the whole.
            dtype: of the elements; default: float32.
            partition_shape: of the block; default: the whole.
            partition_offset: where in the whole the block starts, one index an axis; given with the shape.

        Returns:
            A new array, C-contiguous.

        Raises:
            ValueError: as `generate`, or only one of the block's shape and offset was given.
        """
        if (partition_shape is None) is not (partition_offset is None):
            raise ValueError(f"{self.name}: a block needs both partition_shape and partition_offset: give both or none")
        made = np.empty(
            _shape(shape if partition_shape is None else partition_shape),
            np.dtype(np.float32 if dtype is None else dtype),
        )
        self.generate(shape, made.dtype, [0] * made.ndim if partition_offset is None else partition_offset, made)
        return made

    def generate(self, shape: Sequence[int], dtype: npt.DTypeLike, partition_offset: Sequence[int], out: Array) -> None:
        """Fill an array with the block of the whole that starts at the offset and has the array's shape.

        It is made in small pieces: the memory needed beside the array does not grow with it.

        Args:
            shape: of the whole.
            dtype: of the elements, thus of `out`.
            partition_offset: where the block starts, one index an axis.
            out: C-contiguous.

        Raises:
            ValueError: the block is not inside the whole, `out` has another dtype or is not contiguous, or
                the initializer can't make such values (see `check`). Nothing was written.
        """
        whole, dtype = _shape(shape), np.dtype(dtype)
        offset = _shape(partition_offset)
        if not len(offset) == out.ndim == len(whole) or any(
            start + length > limit for start, length, limit in zip(offset, out.shape, whole, strict=True)
        ):
            raise ValueError(f"a block of shape {out.shape} at offset {offset} is not inside shape {whole}")
        if out.dtype != dtype:
            raise ValueError(f"the array to fill is of {out.dtype}, but {dtype} was asked for: give one of that dtype")
        if not out.flags.c_contiguous:
            raise ValueError(f"the array to fill, of shape {out.shape}, is not C-contiguous: fill a copy instead")
        self.check(whole, dtype)
        if out.size:
            block = Block(offset, tuple(map(operator.add, offset, out.shape)))
            self._fill(whole, block, out.reshape(-1))

    @abstractmethod
    def check(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        """Find out without any work whether there are such values.

        Raises:
            ValueError: not of this dtype; the message says why and what to do.
        """

    @abstractmethod
    def _fill(self, shape: Shape, block: Block, flat: Array) -> None:
        """Write the block, which is not empty, to `flat`, its elements in C order."""

    def to_spec(self) -> tuple[str, dict[str, float | int]]:
        """The name, and the parameters by name, for `from_spec`.

        Integers, the seed among them, are ints within 64 bits (signed) and must not pass through floats: a
        float does not hold them.
        """
        return self.name, {item.name: getattr(self, item.name) for item in fields(self)}


def from_spec(name: str, numbers: Mapping[str, float | int]) -> Initializer:
    """The initializer that `to_spec` described.

    Raises:
        ValueError: no such initializer or parameter, no seed where one is needed, or a value out of its limits.
    """
    if name not in INITIALIZERS:
        raise ValueError(f"there is no initializer {name!r}: there are {', '.join(INITIALIZERS)}")
    kind = INITIALIZERS[name]
    known = [item.name for item in fields(kind)]
    for given in numbers:
        if given not in known:
            raise ValueError(f"{name} has no parameter {given!r}: it has {', '.join(known) or 'none'}")
    if "seed" in known and "seed" not in numbers:
        # Each server would draw its own.
        raise ValueError(f"{name}: the seed is missing, and without it the shards would not fit together")
    made: Initializer = kind(**numbers)
    return made


# --- The same everywhere ----------------------------------------------------------------------------------


class _Same(Initializer):
    """All elements are one value."""

    @property
    @abstractmethod
    def _value(self) -> float | int: ...

    def check(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        """Any shape; any dtype that can hold the value."""
        del shape
        dtype, value = np.dtype(dtype), self._value
        if dtype.name in _FLOATS or dtype.kind == "c":
            if math.isfinite(value) and not _is_finite_in(value, dtype):
                raise ValueError(
                    f"{self.name}: {value!r} is too large for {dtype}: give a smaller value or a wider type"
                )
            return
        if dtype.kind == "b":
            lowest, highest = 0, 1
        elif dtype.kind in "iu":
            lowest, highest = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        else:
            raise ValueError(f"{self.name} makes numbers and bools, not elements of type {dtype}")
        # A float is compared exactly, NaN with no success.
        if not lowest <= value <= highest or value != int(value):
            raise ValueError(
                f"{self.name}: {value!r} is no element of {dtype}: give a whole number from {lowest} to {highest}"
            )

    def _fill(self, shape: Shape, block: Block, flat: Array) -> None:
        del shape, block
        flat[:] = np.asarray(self._value).astype(flat.dtype)


@dataclass(frozen=True)
class Zeros(_Same):
    """All elements are 0; False for bool."""

    name: ClassVar[str] = "zeros"

    @property
    def _value(self) -> int:
        return 0


@dataclass(frozen=True)
class Ones(_Same):
    """All elements are 1; True for bool."""

    name: ClassVar[str] = "ones"

    @property
    def _value(self) -> int:
        return 1


@dataclass(frozen=True)
class Constant(_Same):
    """All elements are `value`, which may be infinite or NaN where the elements are floats."""

    name: ClassVar[str] = "constant"

    value: float | int = 0.0

    def __post_init__(self) -> None:
        value = int(self.value) if isinstance(self.value, bool | np.bool_) else self.value
        _set(self, "value", _number(self, "value", value, finite=False))

    @property
    def _value(self) -> float | int:
        return self.value


# --- Random -----------------------------------------------------------------------------------------------


class _Random(Initializer):
    """Every element is made of a random number of its own."""

    seed: int | None

    def __post_init__(self) -> None:
        if self.seed is None:
            _set(self, "seed", secrets.randbits(63))
            return
        try:
            seed = operator.index(self.seed)
        except TypeError:
            seed = -1
        if not 0 <= seed <= _HIGHEST_INT or isinstance(self.seed, bool):
            raise ValueError(
                f"{self.name}: seed is {self.seed!r}, but must be an integer from 0 to 2**63 - 1; "
                "None draws one when the initializer is made"
            )
        _set(self, "seed", seed)

    def check(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        """Any shape; floats, if they are wide enough for the values."""
        dtype = np.dtype(dtype)
        if dtype.name not in _FLOATS:
            raise ValueError(f"{self.name} makes {', '.join(_FLOATS)}, not {dtype}: choose one of these dtypes")
        for extreme in self._extremes(_shape(shape)):
            if not _is_finite_in(extreme, dtype):
                raise ValueError(
                    f"{self.name}: values may be as large as {abs(extreme):.3g}, which {dtype} can't hold: "
                    "give smaller parameters or a wider type"
                )

    @abstractmethod
    def _extremes(self, shape: Shape) -> tuple[float, ...]:
        """What must be finite in the dtype."""

    @abstractmethod
    def _transform(self, shape: Shape, dtype: np.dtype[Any]) -> Transform:
        """What makes elements of the dtype, though in `_work_dtype` of it."""

    def _fill(self, shape: Shape, block: Block, flat: Array) -> None:
        assert self.seed is not None
        dtype, work = flat.dtype, _work_dtype(flat.dtype)
        draws = _Draws(self.seed, work.itemsize)
        transform = self._transform(shape, dtype)
        size = min(_PIECE_BYTES // work.itemsize, flat.size)
        values, *scratch = np.empty((4, size), work)
        done = 0
        for drawn in _pieces(draws, shape, block, size):
            n = drawn.size
            piece = flat[done : done + n]
            buffers = [buffer[:n] for buffer in scratch]
            if dtype == work:
                transform(drawn, piece, buffers)
            else:
                transform(drawn, values[:n], buffers)
                np.copyto(piece, values[:n], casting="unsafe")
            done += n


@dataclass(frozen=True)
class RandomUniform(_Random):
    """Uniform in [minval, maxval): for floats and, with whole limits, for integers.

    float64 values are multiples of 2**-53 of the range, other floats of 2**-24, then rounded, and kept below
    `maxval` also where the rounding would reach it. Integers are floor(d * range / 2**64) of a 64-bit number
    d: no value is likelier than another by more than range / 2**64 of its share.
    """

    name: ClassVar[str] = "random_uniform"

    minval: float | int = -0.05
    maxval: float | int = 0.05
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for item in ("minval", "maxval"):
            _set(self, item, _number(self, item, getattr(self, item)))
        if self.minval >= self.maxval:
            raise ValueError(
                f"{self.name}: minval is {self.minval!r}, but must be below maxval, which is {self.maxval!r} "
                "and itself never reached: for one value everywhere take Constant"
            )

    def check(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        """Any shape; floats and integers, if the range is theirs."""
        dtype = np.dtype(dtype)
        if dtype.kind not in "iu":
            super().check(shape, dtype)
            lowest = float(np.asarray(self.minval).astype(dtype))
            if _highest_below(self.maxval, dtype) < lowest:
                raise ValueError(
                    f"{self.name}: no {dtype} lies in [{self.minval!r}, {self.maxval!r}): "
                    "give limits further apart or a wider type"
                )
            return
        lowest, highest = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        for item, value, limit in (("minval", self.minval, highest), ("maxval", self.maxval, highest + 1)):
            if not lowest <= value <= limit or value != int(value):
                raise ValueError(
                    f"{self.name}: {item} is {value!r}, but for elements of {dtype} it must be a whole number "
                    f"from {lowest} to {limit}"
                )

    def _extremes(self, shape: Shape) -> tuple[float, ...]:
        del shape
        return self.minval, self.maxval, self.maxval - self.minval

    def _transform(self, shape: Shape, dtype: np.dtype[Any]) -> Transform:
        del shape
        if dtype.kind in "iu":
            return partial(_integers, minval=int(self.minval), maxval=int(self.maxval))
        return _uniform_in(self.minval, self.maxval, dtype)


class _Normal(_Random):
    """Normal values, of any mean and standard deviation."""

    mean: float
    stddev: float
    truncated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, "mean", float(_number(self, "mean", self.mean)))
        _set(self, "stddev", float(_number(self, "stddev", self.stddev, at_least=0)))

    def _extremes(self, shape: Shape) -> tuple[float, ...]:
        del shape
        reach = 10 * self.stddev  # further than the inverse of any number drawn
        return self.mean - reach, self.mean + reach

    def _transform(self, shape: Shape, dtype: np.dtype[Any]) -> Transform:
        del shape, dtype
        return partial(_normal, mean=self.mean, stddev=self.stddev, truncated=self.truncated)


@dataclass(frozen=True)
class RandomNormal(_Normal):
    """Normal with this mean and standard deviation.

    float64 values reach 9.2 standard deviations to either side, others 6.3, which one value in 4e9 would pass.
    """

    name: ClassVar[str] = "random_normal"

    mean: float = 0.0
    stddev: float = 0.05
    seed: int | None = None


@dataclass(frozen=True)
class TruncatedNormal(_Normal):
    """Normal, but within two standard deviations of the mean.

    As in Keras `stddev` is that of the distribution before it is truncated; afterwards it is 0.88 of that.
    """

    name: ClassVar[str] = "truncated_normal"
    truncated: ClassVar[bool] = True

    mean: float = 0.0
    stddev: float = 0.05
    seed: int | None = None


class _Scaled(_Random):
    """Values around 0 whose variance depends on how many units the array connects: scale / fan.

    The fans are Keras' (`compute_fans`): shape (..., inputs, outputs), all axes before these two being the
    receptive field of a convolution, whose size multiplies both; of one axis both fans are its length; of a
    scalar they are 1. They are those of the whole array, however it is cut.
    """

    scale: ClassVar[float]

    @staticmethod
    @abstractmethod
    def _fan(fan_in: int, fan_out: int) -> float: ...

    def _variance(self, shape: Shape) -> float:
        return self.scale / max(1.0, self._fan(*_fans(shape)))


class _ScaledUniform(_Scaled):
    def _limit(self, shape: Shape) -> float:
        return math.sqrt(3.0 * self._variance(shape))

    def _extremes(self, shape: Shape) -> tuple[float, ...]:
        return (2 * self._limit(shape),)

    def _transform(self, shape: Shape, dtype: np.dtype[Any]) -> Transform:
        limit = self._limit(shape)
        return _uniform_in(-limit, limit, dtype)


class _ScaledNormal(_Scaled):
    def _stddev(self, shape: Shape) -> float:
        # Before the truncation, which leaves this part of it.
        return math.sqrt(self._variance(shape)) / 0.87962566103423978

    def _extremes(self, shape: Shape) -> tuple[float, ...]:
        return (2 * self._stddev(shape),)

    def _transform(self, shape: Shape, dtype: np.dtype[Any]) -> Transform:
        del dtype
        return partial(_normal, mean=0.0, stddev=self._stddev(shape), truncated=True)


class _Glorot(_Scaled):
    scale: ClassVar[float] = 1.0

    @staticmethod
    def _fan(fan_in: int, fan_out: int) -> float:
        return (fan_in + fan_out) / 2.0


class _He(_Scaled):
    scale: ClassVar[float] = 2.0

    @staticmethod
    def _fan(fan_in: int, fan_out: int) -> float:
        del fan_out
        return fan_in


@dataclass(frozen=True)
class GlorotUniform(_Glorot, _ScaledUniform):
    """Uniform within sqrt(6 / (fan_in + fan_out)) of 0 (Glorot and Bengio 2010)."""

    name: ClassVar[str] = "glorot_uniform"

    seed: int | None = None


@dataclass(frozen=True)
class GlorotNormal(_Glorot, _ScaledNormal):
    """Truncated normal of standard deviation sqrt(2 / (fan_in + fan_out)) (Glorot and Bengio 2010)."""

    name: ClassVar[str] = "glorot_normal"

    seed: int | None = None


@dataclass(frozen=True)
class HeUniform(_He, _ScaledUniform):
    """Uniform within sqrt(6 / fan_in) of 0 (He et al. 2015)."""

    name: ClassVar[str] = "he_uniform"

    seed: int | None = None


@dataclass(frozen=True)
class HeNormal(_He, _ScaledNormal):
    """Truncated normal of standard deviation sqrt(2 / fan_in) (He et al. 2015)."""

    name: ClassVar[str] = "he_normal"

    seed: int | None = None


INITIALIZERS: Mapping[str, type[Initializer]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            *(Zeros, Ones, Constant, RandomUniform, RandomNormal, TruncatedNormal),
            *(GlorotUniform, GlorotNormal, HeUniform, HeNormal),
        )
    }
)
"""The initializers, by name."""


def _fans(shape: Shape) -> tuple[int, int]:
    """Numbers of input and output units; see `_Scaled`."""
    if len(shape) < 2:
        return (shape[0], shape[0]) if shape else (1, 1)
    *field, inputs, outputs = shape
    size = math.prod(field)
    return inputs * size, outputs * size


# --- Parameters -------------------------------------------------------------------------------------------


def _set(initializer: Initializer, item: str, value: object) -> None:
    object.__setattr__(initializer, item, value)  # the dataclass is frozen


def _number(
    initializer: Initializer, item: str, value: object, *, finite: bool = True, at_least: float | None = None
) -> float | int:
    """A parameter as Python's int, if it is an integer, or float."""
    must = "a number" + (", finite" if finite else "") + ("" if at_least is None else f", at least {at_least:g}")
    refusal = f"{initializer.name}: {item} is {value!r}, but must be {must}"
    if isinstance(value, bool | np.bool_ | str | bytes):
        raise ValueError(refusal)
    number: float | int
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # the error is the check
        if not _LOWEST_INT <= number <= _HIGHEST_INT:
            raise ValueError(f"{refusal} within 64 bits: give a float instead")
    except TypeError:
        try:
            number = float(value)  # type: ignore[arg-type]  # the error is the check
        except (TypeError, ValueError):
            raise ValueError(refusal) from None
    if (finite and not math.isfinite(number)) or (at_least is not None and number < at_least):
        raise ValueError(refusal)
    return number


def _shape(lengths: Sequence[int]) -> Shape:
    shape = tuple(map(operator.index, lengths))
    if any(length < 0 for length in shape):
        raise ValueError(f"lengths and offsets must not be negative, but are {shape}")
    return shape


def _is_finite_in(value: float, dtype: np.dtype[Any]) -> bool:
    """Does rounding to the dtype leave this finite?"""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.asarray(value, np.float64).astype(dtype)))


def _highest_below(limit: float, dtype: np.dtype[Any]) -> float:
    """The largest number of the float dtype that is below the limit."""
    rounded = np.asarray(limit).astype(dtype)
    return float(rounded if float(rounded) < limit else np.nextafter(rounded, np.asarray(-np.inf).astype(dtype)))


def _work_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """In which dtype elements of this one are made: 64 bits each take a number of 64 bits, 32 one of 32."""
    if dtype.kind in "iu":
        return np.dtype(np.int64)
    return np.dtype(np.float64 if dtype.name == "float64" else np.float32)


# --- Random numbers, one an element -----------------------------------------------------------------------


class _Draws:
    """The random numbers of a seed: unsigned integers of `width` bytes, 4 or 8, numbered from 0.

    Not for several threads.
    """

    def __init__(self, seed: int, width: int) -> None:
        self._philox = np.random.Philox(key=seed, counter=0)
        self._counter = 0  # where the generator stands; each count gives 32 bytes
        self.dtype = np.dtype(f"<u{width}")
        self._per_count = 32 // width

    def read(self, first: int, count: int) -> Array:
        """The numbers from `first` on."""
        counter, skipped = divmod(first, self._per_count)
        counts = -(-(skipped + count) // self._per_count)
        # Whole counts only, so that nothing is left over in the generator's buffer.
        if counter != self._counter:
            self._philox.advance(counter - self._counter)
        raw = self._philox.random_raw(4 * counts)
        self._counter = counter + counts
        return raw.astype("<u8", copy=False).view(self.dtype)[skipped : skipped + count]


def _pieces(draws: _Draws, shape: Shape, block: Block, size: int) -> Iterator[Array]:
    """The numbers of a block's elements, in C order, at most `size` at a time."""
    starts_of, runs, run = _runs(shape, block)
    if run >= size or runs == 1:
        for number in range(runs):
            start = int(starts_of(number, number + 1)[0])
            for done in range(0, run, size):
                yield draws.read(start + done, min(size, run - done))
        return
    at_once = size // run
    for number in range(0, runs, at_once):
        yield _gather(draws, starts_of(number, min(number + at_once, runs)), run, size)


def _runs(shape: Shape, block: Block) -> tuple[Callable[[int, int], npt.NDArray[np.int64]], int, int]:
    """The runs of the block's elements that follow one another in the whole too, in C order.

    Returns:
        What gives the positions in the whole where the runs of these numbers start; how many runs there are;
        how long each is.
    """
    # The last axis that is cut: what lies behind it is whole.
    cut = max((axis for axis, length in enumerate(shape) if block.shape[axis] != length), default=0)
    outer = block.shape[:cut]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    base = sum(map(operator.mul, block.start, strides))

    def starts(first: int, stop: int) -> npt.NDArray[np.int64]:
        positions = np.full(stop - first, base, np.int64)
        left = np.arange(first, stop, dtype=np.int64)
        for length, stride in zip(reversed(outer), reversed(strides[:cut]), strict=True):
            left, index = np.divmod(left, length)
            positions += index * stride
        return positions

    return starts, math.prod(outer), math.prod(block.shape[cut:])


def _gather(draws: _Draws, starts: npt.NDArray[np.int64], run: int, size: int) -> Array:
    """The numbers of several short runs, one behind the other.

    What lies between two of them is drawn too and left out, unless it is long.
    """
    steps = np.diff(starts)
    # Where not to draw through: before a long gap, and when the drawn numbers would become too many.
    window = (starts - starts[0]) // size
    breaks = np.flatnonzero((steps > run + _GAP) | (np.diff(window) > 0)) + 1
    gathered = np.empty((len(starts), run), draws.dtype)
    for first, stop in itertools.pairwise((0, *breaks.tolist(), len(starts))):
        start = int(starts[first])
        step = int(steps[first]) if stop - first > 1 else run
        if (steps[first : stop - 1] == step).all():
            drawn = draws.read(start, (stop - first) * step)
            gathered[first:stop] = drawn.reshape(-1, step)[:, :run]
        else:
            drawn = draws.read(start, int(starts[stop - 1]) + run - start)
            gathered[first:stop] = drawn[(starts[first:stop] - start)[:, np.newaxis] + np.arange(run)]
    return gathered.reshape(-1)


# --- From random numbers to values ------------------------------------------------------------------------


def _uniform_in(low: float, high: float, dtype: np.dtype[Any]) -> Transform:
    return partial(_uniform, low=low, span=high - low, highest=_highest_below(high, dtype))


def _uniform(drawn: Array, out: Array, scratch: Sequence[Array], *, low: float, span: float, highest: float) -> None:
    """low + span * u, u in [0, 1), but not more than `highest`."""
    del scratch
    real = out.dtype.type
    digits = np.finfo(out.dtype).nmant + 1
    np.right_shift(drawn, drawn.dtype.type(8 * drawn.itemsize - digits), out=drawn)
    np.copyto(out, drawn, casting="unsafe")  # exact
    np.multiply(out, real(span * 0.5**digits), out=out)
    np.add(out, real(low), out=out)
    np.minimum(out, real(highest), out=out)


def _integers(drawn: Array, out: Array, scratch: Sequence[Array], *, minval: int, maxval: int) -> None:
    """minval + floor(drawn * (maxval - minval) / 2**64): the upper half of a product of 128 bits."""
    word = np.uint64
    half, low_half = word(32), word(0xFFFFFFFF)
    range_high, range_low = (word(part) for part in divmod(maxval - minval, 1 << 32))
    low, middle, product = (buffer.view(word) for buffer in scratch)
    offset = out.view(word)
    np.bitwise_and(drawn, low_half, out=low)
    high = np.right_shift(drawn, half, out=drawn)
    np.multiply(low, range_low, out=product)
    np.right_shift(product, half, out=product)
    np.multiply(high, range_low, out=middle)
    np.add(middle, product, out=middle)
    np.right_shift(middle, half, out=offset)
    if range_high:
        np.bitwise_and(middle, low_half, out=middle)
        np.multiply(low, range_high, out=product)
        np.add(middle, product, out=middle)
        np.right_shift(middle, half, out=middle)
        np.add(offset, middle, out=offset)
        np.multiply(high, range_high, out=product)
        np.add(offset, product, out=offset)
    # Modulo 2**64, since minval may be negative.
    np.add(offset, word(minval % (1 << 64)), out=offset)


@dataclass(frozen=True)
class _Inverse:
    """The coefficients of AS 241 for one precision, constant term first, and of a logarithm for it.

    Attributes:
        centre: numerator and denominator, of 0.180625 - q * q, where q = p - 0.5 is within 0.425 of 0.
        tail: of sqrt(-log p) - 1.6, where that root is at most 5.
        far: of sqrt(-log p) - 5, beyond.
        artanh: of the powers of s * s in artanh(s) / s, as many as matter.
    """

    centre: tuple[tuple[float, ...], tuple[float, ...]]
    tail: tuple[tuple[float, ...], tuple[float, ...]]
    far: tuple[tuple[float, ...], tuple[float, ...]]
    artanh: tuple[float, ...]


# PPND7 and PPND16, right to about 7 and 16 digits.
_INVERSES = {
    np.dtype(np.float32): _Inverse(
        centre=(
            (3.3871327179e00, 5.0434271938e01, 1.5929113202e02, 5.9109374720e01),
            (1.0, 1.7895169469e01, 7.8757757664e01, 6.7187563600e01),
        ),
        tail=(
            (1.4234372777e00, 2.7568153900e00, 1.3067284816e00, 1.7023821103e-01),
            (1.0, 7.3700164250e-01, 1.2021132975e-01),
        ),
        far=(
            (6.6579051150e00, 3.0812263860e00, 4.2868294337e-01, 1.7337203997e-02),
            (1.0, 2.4197894225e-01, 1.2258202635e-02),
        ),
        artanh=tuple(1 / power for power in range(1, 11, 2)),
    ),
    np.dtype(np.float64): _Inverse(
        centre=(
            (
                *(3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4),
                *(4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
            ),
            (
                *(1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3),
                *(2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
            ),
        ),
        tail=(
            (
                *(1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0),
                *(3.64784832476320460504e0, 1.27045825245236838258e0, 2.41780725177450611770e-1),
                *(2.27238449892691845833e-2, 7.74545014278341407640e-4),
            ),
            (
                *(1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1),
                *(1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4),
                1.05075007164441684324e-9,
            ),
        ),
        far=(
            (
                *(6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0),
                *(2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3),
                *(2.71155556874348757815e-5, 2.01033439929228813265e-7),
            ),
            (
                *(1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2),
                *(7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7),
                2.04426310338993978564e-15,
            ),
        ),
        artanh=tuple(1 / power for power in range(1, 23, 2)),
    ),
}

_BELOW_TWO_STDDEVS = 0.022750131948179207  # of the normal distribution


def _normal(drawn: Array, out: Array, scratch: Sequence[Array], *, mean: float, stddev: float, truncated: bool) -> None:
    real = out.dtype.type
    _inverse_normal(drawn, out, scratch, _BELOW_TWO_STDDEVS if truncated else 0.0)
    if truncated:  # what rounding adds
        np.minimum(out, real(2.0), out=out)
        np.maximum(out, real(-2.0), out=out)
    np.multiply(out, real(stddev), out=out)
    np.add(out, real(mean), out=out)


def _inverse_normal(drawn: Array, out: Array, scratch: Sequence[Array], below: float) -> None:
    """The normal quantiles of p = below + (1 - 2 * below) * (drawn + 1/2) / 2**bits.

    Args:
        drawn: unsigned integers of as many bits as the floats of `out`; overwritten.
        out: float32 or float64.
        scratch: three buffers like `out`.
        below: the probability that is cut off on either side.
    """
    real, unsigned = out.dtype.type, drawn.dtype.type
    bits = 8 * drawn.itemsize
    inverse = _INVERSES[out.dtype]
    unit = (1 - 2 * below) * 0.5**bits
    q, r, t = scratch

    # The centre's formula for all: beyond the centre it is merely wrong, and is replaced.
    spare = t.view(drawn.dtype)
    np.bitwise_xor(drawn, unsigned(1 << (bits - 1)), out=spare)
    np.copyto(q, spare.view(f"i{drawn.itemsize}"), casting="unsafe")
    np.multiply(q, real(unit), out=q)
    np.add(q, real(unit / 2), out=q)
    np.multiply(q, q, out=r)
    np.subtract(real(0.180625), r, out=r)
    # The tails, where p is counted from the nearer end: 1 - p would lose its digits.
    np.invert(drawn, out=spare)
    np.minimum(drawn, spare, out=drawn)
    at = np.flatnonzero(drawn < unsigned(math.ceil((0.075 - below) / unit)))

    _quotient(r, inverse.centre, out, t)
    np.multiply(out, q, out=out)

    p = drawn[at].astype(out.dtype)
    np.add(p, real(0.5), out=p)
    np.multiply(p, real(unit), out=p)
    np.add(p, real(below), out=p)
    tail = _tail(p, inverse, r[: p.size], t[: p.size])
    out[at] = np.copysign(tail, q[at])


def _tail(p: Array, inverse: _Inverse, r: Array, t: Array) -> Array:
    """How far below 0 the normal quantiles of p are, p below 0.075. Overwrites all its arrays."""
    real = p.dtype.type
    _minus_log(p, inverse.artanh, r, t)
    root = np.sqrt(r, out=p)
    far = np.flatnonzero(root > real(5.0))
    x = root[far] - real(5.0)
    np.subtract(root, real(1.6), out=root)
    _quotient(root, inverse.tail, r, t)
    if far.size:
        values = np.empty_like(x)
        _quotient(x, inverse.far, values, np.empty_like(x))
        r[far] = values
    return r


def _minus_log(x: Array, artanh: tuple[float, ...], out: Array, scratch: Array) -> None:
    """-log(x) of normal positive numbers, by IEEE arithmetic alone.

    x = m * 2**e with m in [1/2, 1), and log(m) = 2 * artanh((m - c) / (m + c)) + log(c), where c = sqrt(1/2)
    keeps the quotient small: at most 0.172. The other constant is log(2).
    """
    real = x.dtype.type
    m, e = np.frexp(x)
    c = real(0.7071067811865476)
    s = np.subtract(m, c, out=scratch)
    np.add(m, c, out=m)
    np.divide(s, m, out=s)
    np.multiply(s, s, out=m)
    _polynomial(m, artanh, out)
    np.multiply(out, s, out=out)
    np.multiply(out, real(-2.0), out=out)
    np.copyto(m, e, casting="unsafe")
    np.subtract(m, real(0.5), out=m)
    np.multiply(m, real(0.6931471805599453), out=m)
    np.subtract(out, m, out=out)


def _quotient(x: Array, terms: tuple[tuple[float, ...], tuple[float, ...]], out: Array, scratch: Array) -> None:
    _polynomial(x, terms[0], out)
    _polynomial(x, terms[1], scratch)
    np.divide(out, scratch, out=out)


def _polynomial(x: Array, coefficients: tuple[float, ...], out: Array) -> None:
    """By Horner's rule, constant term first; `out` must not be `x`."""
    real = x.dtype.type
    *lower, before, last = coefficients
    np.multiply(x, real(last), out=out)
    np.add(out, real(before), out=out)
    for coefficient in reversed(lower):
        np.multiply(out, x, out=out)
        np.add(out, real(coefficient), out=out)
