"""Normalization and Discretization: layers of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core import checks
from pscluster.core.errors import MisuseError
from pscluster.worker.features.encoding import checked_mode, encoded
from pscluster.worker.features.layer import Analysis, Layer, State
from pscluster.worker.features.tokens import array_of

Floats = npt.NDArray[np.float32]

_EPSILON = 1e-7  # Keras': the least standard deviation to divide by
_NOT_FINITE = "replace what is missing, for instance with numpy.nan_to_num"


def numbers_of(label: str, values: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array of numbers in this type. TypeError if it has others."""
    array = array_of(label, values)
    if array.dtype.kind not in "iufb" and array.dtype.name != "bfloat16":
        hint = "convert it, for instance with astype(float)"
        raise TypeError(f"{label} takes numbers, not an array of {array.dtype}: {hint}")
    return array.astype(dtype, copy=False)


@dataclass(frozen=True)
class Moments:
    """Computes mean and variance along all axes but those kept, in float64 (Chan et al. 1979)."""

    label: str
    axis: tuple[int, ...]

    def initial(self) -> State:
        return {"count": np.zeros(()), "mean": np.zeros(()), "squares": np.zeros(())}

    def update(self, learned: State, batch: Any) -> State:
        values = numbers_of(self.label, batch, np.float64)
        kept = _kept(self.label, self.axis, values.ndim)
        others = tuple(axis for axis in range(values.ndim) if axis not in kept)
        count = math.prod(values.shape[axis] for axis in others)
        if not count:
            return learned
        if not np.isfinite(values).all():
            raise ValueError(f"{self.label} was adapted to data with NaN or infinity: {_NOT_FINITE}")
        mean = values.mean(axis=others)
        squares = values.var(axis=others) * count
        return self._sum(learned, {"count": np.array(float(count)), "mean": mean, "squares": squares})

    def packed(self, learned: State) -> State:
        return learned

    def merged(self, states: Sequence[State]) -> State:
        whole = self.initial()
        for state in states:
            whole = self._sum(whole, state)
        return whole

    def _sum(self, one: State, other: State) -> State:
        if not one["count"] or not other["count"]:
            return one if one["count"] else other
        if one["mean"].shape != other["mean"].shape:
            raise ValueError(
                f"{self.label} was adapted to batches with {one['mean'].shape} and {other['mean'].shape} along the "
                f"axes {self.axis}: these must have the same length in all"
            )
        count = one["count"] + other["count"]
        delta = other["mean"] - one["mean"]
        return {
            "count": np.asarray(count),
            "mean": np.asarray(one["mean"] + delta * (other["count"] / count)),
            "squares": one["squares"] + other["squares"] + delta**2 * (one["count"] * other["count"] / count),
        }


def _kept(label: str, axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Return axes, counted from the first one, in order. ValueError if the array does not have them."""
    if any(not -ndim <= axis < ndim for axis in axes):
        raise ValueError(f"{label} keeps the axes {axes}, but was given an array with {ndim}: give axis= others")
    return tuple(sorted(axis % ndim for axis in axes))


class Normalization(Layer):
    """Shift and scale numbers to mean 0 and variance 1, for each position along some axes.

    Args:
        axis: the axes that have a mean and variance for each position, such as -1 for those of each feature; an
            integer, several, or None for one mean and variance of all.
        mean, variance: as they are known, in place of `adapt`: a number each, or arrays, which are broadcast.
        invert: undo it.
        name: what errors call it.
    """

    default_name = "normalization"

    def __init__(
        self,
        axis: int | Sequence[int] | None = -1,
        mean: Any = None,
        variance: Any = None,
        *,
        invert: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        axes = () if axis is None else tuple(axis) if isinstance(axis, Sequence) else (axis,)
        self.axis = tuple(checks.whole(f"{self._label}: axis", each) for each in axes)
        self.invert = bool(invert)
        self.mean: Floats | None = None
        self.variance: Floats | None = None
        self._given = False
        if (mean is None) != (variance is None):
            raise ValueError(f"{self._label}: mean is {mean!r} and variance is {variance!r}: give both, or adapt it")
        if mean is not None:
            self._set(numbers_of(self._label, mean, np.float32), numbers_of(self._label, variance, np.float32))
            self._given = True

    def _set(self, mean: Floats, variance: Floats) -> None:
        label = self._label
        if mean.shape != variance.shape:
            raise ValueError(f"{label}: mean has the shape {mean.shape} and variance {variance.shape}: give the same")
        if mean.ndim > len(self.axis):
            raise ValueError(f"{label}: mean has {mean.ndim} axes, and axis is {self.axis}: give at most {mean.ndim}")
        if not np.isfinite(mean).all() or not np.isfinite(variance).all() or np.any(variance < 0):
            raise ValueError(f"{label}: mean and variance must be finite, and variance at least 0")
        self.mean, self.variance = mean, variance

    @property
    def is_adapted(self) -> bool:
        return self.mean is not None

    def _analysis(self) -> Analysis:
        if self._given:
            raise MisuseError(f"{self._label} was given mean and variance, and can't be adapted: make it without them")
        return Moments(self._label, self.axis)

    def _learn(self, state: State) -> None:
        if not state["count"]:
            raise ValueError(f"{self._label} was adapted to data without examples: give it some")
        self._set(state["mean"].astype(np.float32), (state["squares"] / state["count"]).astype(np.float32))

    def get_config(self) -> dict[str, Any]:
        return {"axis": list(self.axis), "invert": self.invert, "name": self.name}

    def get_state(self) -> State:
        if self.mean is None or self.variance is None:
            raise self._unadapted("mean= and variance=")
        return {"mean": self.mean, "variance": self.variance, "given": np.array(self._given)}

    def _take(self, state: State) -> None:
        self._set(state["mean"].astype(np.float32), state["variance"].astype(np.float32))
        self._given = bool(state["given"])

    def __call__(self, inputs: Any) -> Floats:
        """Return the numbers, normalized, as float32, in the same shape.

        Raises:
            MisuseError: it was never adapted.
            ValueError: the array has other lengths along the axes than the data had.
        """
        if self.mean is None or self.variance is None:
            raise self._unadapted("mean= and variance=")
        values = numbers_of(self._label, inputs, np.float32)
        mean, variance = (self._broadcast(each, values.shape) for each in (self.mean, self.variance))
        deviation = np.maximum(np.sqrt(variance), np.float32(_EPSILON))
        return np.asarray(mean + values * deviation if self.invert else (values - mean) / deviation, np.float32)

    def _broadcast(self, values: Floats, shape: tuple[int, ...]) -> Floats:
        """Return values for the axes kept, the last ones if there are fewer, in a shape that broadcasts."""
        if not values.ndim:
            return values
        kept = _kept(self._label, self.axis, len(shape))[-values.ndim :]
        if any(length not in (1, shape[axis]) for axis, length in zip(kept, values.shape, strict=True)):
            raise ValueError(
                f"{self._label} has means of the shape {values.shape} for the axes {self.axis}, and was given an array "
                f"of the shape {shape}"
            )
        target = [1] * len(shape)
        for axis, length in zip(kept, values.shape, strict=True):
            target[axis] = length
        return values.reshape(target)


@dataclass(frozen=True)
class Quantiles:
    """Summarizes numbers by about 1 / epsilon values, with how many each stands for: the algorithm of Keras 3.

    A summary has two rows: values in order, and weights. Its quantiles are off by at most epsilon of the ranks, which
    adds up with each merge.
    """

    label: str
    epsilon: float

    def initial(self) -> State:
        return {"summary": np.empty((2, 0), np.float32)}

    def update(self, learned: State, batch: Any) -> State:
        values = numbers_of(self.label, batch, np.float32).ravel()
        if not values.size:
            return learned
        if np.isnan(values).any():
            raise ValueError(f"{self.label} was adapted to data with NaN: {_NOT_FINITE}")
        values = np.sort(values)
        step = max(values.size / (1.0 / self.epsilon), 1)
        boundaries = values[int(step - 1) :: int(step)]
        summary = np.stack([boundaries, np.ones_like(boundaries) * step])
        return {"summary": self._merged(summary, learned["summary"])}

    def packed(self, learned: State) -> State:
        return learned

    def merged(self, states: Sequence[State]) -> State:
        whole = states[0]["summary"] if states else self.initial()["summary"]
        for state in states[1:]:
            whole = self._merged(state["summary"], whole)
        return {"summary": whole}

    def _merged(self, one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[Any]:
        both = np.concatenate((one, other), axis=1)
        return compressed(np.take(both, np.argsort(both[0]), axis=1), self.epsilon)


def compressed(summary: npt.NDArray[Any], epsilon: float) -> npt.NDArray[Any]:
    """Return a summary with at most about 1 / epsilon values, interpolated by weight."""
    if summary.shape[1] * epsilon < 1:
        return summary
    percents = epsilon + np.arange(0.0, 1.0, epsilon)
    cumulated = summary[1].cumsum()
    shares = cumulated / cumulated[-1]
    values = np.interp(percents, shares, summary[0])
    cumulated = np.interp(percents, shares, cumulated)
    weights = cumulated - np.concatenate((np.array([0]), cumulated[:-1]))
    return np.stack((values, weights)).astype(np.float32)


class Discretization(Layer):
    """Turn numbers into the indices of bins: of x the number of boundaries that are at most x.

    Args:
        bin_boundaries: in order; there is one bin more than boundaries.
        num_bins: in place of boundaries: `adapt` finds boundaries between which there are about as many numbers each.
        epsilon: how far these may be off, as a share of the numbers; smaller takes longer.
        output_mode: "int": int32 indices; "one_hot", "multi_hot", "count": float32, with an entry for each bin.
        name: what errors call it.
    """

    default_name = "discretization"

    def __init__(
        self,
        bin_boundaries: Sequence[float] | None = None,
        num_bins: int | None = None,
        epsilon: float = 0.01,
        output_mode: str = "int",
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        label = self._label
        if (num_bins is None) == (bin_boundaries is None):
            raise ValueError(
                f"{label}: bin_boundaries is {bin_boundaries!r:.80} and num_bins is {num_bins!r}: give one of them"
            )
        self.num_bins = None if num_bins is None else checks.whole(f"{label}: num_bins", num_bins, at_least=1)
        self.epsilon = checks.real(f"{label}: epsilon", epsilon, above=0, below=1)
        self.output_mode = checked_mode(label, output_mode)
        self.bin_boundaries: Floats | None = None
        if bin_boundaries is not None:
            self._set(numbers_of(label, bin_boundaries, np.float32))

    def _set(self, boundaries: Floats) -> None:
        if boundaries.ndim != 1 or (not boundaries.size and self.num_bins is None):
            raise ValueError(f"{self._label}: bin_boundaries have the shape {boundaries.shape}: give a list of numbers")
        falls = np.flatnonzero(~(boundaries[1:] >= boundaries[:-1]))
        if falls.size or np.isnan(boundaries).any():
            at = int(falls[0]) if falls.size else 0
            raise ValueError(
                f"{self._label}: bin_boundaries are not sorted: {boundaries[at]:g} comes before "
                f"{boundaries[min(at + 1, boundaries.size - 1)]:g}; give sorted(bin_boundaries)"
            )
        self.bin_boundaries = boundaries

    @property
    def is_adapted(self) -> bool:
        return self.bin_boundaries is not None

    def _analysis(self) -> Analysis:
        if self.num_bins is None:
            raise MisuseError(f"{self._label} was given bin_boundaries, and can't be adapted: give num_bins instead")
        return Quantiles(self._label, self.epsilon)

    def _learn(self, state: State) -> None:
        assert self.num_bins is not None  # see _analysis
        if not state["summary"].size:
            raise ValueError(f"{self._label} was adapted to data without numbers: give it some")
        self._set(compressed(state["summary"], 1.0 / self.num_bins)[0, :-1].astype(np.float32))

    def get_config(self) -> dict[str, Any]:
        given = None if self.num_bins is not None or self.bin_boundaries is None else self.bin_boundaries.tolist()
        return {
            "bin_boundaries": given,
            "num_bins": self.num_bins,
            "epsilon": self.epsilon,
            "output_mode": self.output_mode,
            "name": self.name,
        }

    def get_state(self) -> State:
        return {"boundaries": self._ready()}

    def _take(self, state: State) -> None:
        self._set(state["boundaries"].astype(np.float32))

    def _ready(self) -> Floats:
        if self.bin_boundaries is None:
            raise self._unadapted("bin_boundaries=[...]")
        return self.bin_boundaries

    def __call__(self, inputs: Any) -> npt.NDArray[Any]:
        """Return the bin of each number, in the output mode. NaN is in the last bin.

        Raises:
            MisuseError: it was never adapted.
            TypeError: it has other values than numbers.
        """
        boundaries = self._ready()
        indices = np.digitize(numbers_of(self._label, inputs, np.float32), boundaries)
        dtype = np.int32 if self.output_mode == "int" else np.float32
        return encoded(np.asarray(indices), self.output_mode, boundaries.size + 1, dtype)
