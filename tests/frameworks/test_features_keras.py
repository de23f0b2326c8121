"""The layers of pscluster.coordinator.features beside those of Keras 3: the same numbers."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

with pytest.MonkeyPatch.context() as environment:
    if "KERAS_BACKEND" not in os.environ:  # of no consequence here
        environment.setenv("KERAS_BACKEND", "jax")
    import keras

from pscluster.coordinator import features

RNG = np.random.default_rng(11)
VALUES = RNG.normal(1, 3, (500, 4)).astype(np.float32)


def batches(size: int) -> list[np.ndarray[Any, Any]]:
    """The values in batches."""
    return [VALUES[at : at + size] for at in range(0, len(VALUES), size)]


@pytest.mark.parametrize(("bins", "epsilon"), [(2, 0.01), (10, 0.01), (7, 0.1), (50, 0.005)])
@pytest.mark.parametrize("size", [500, 90, 7])
def test_boundaries_of_adapted_bins(bins: int, epsilon: float, size: int) -> None:
    """The same boundaries, bit for bit, whole and in batches; the same bins."""
    theirs = keras.layers.Discretization(num_bins=bins, epsilon=epsilon)
    ours = features.Discretization(num_bins=bins, epsilon=epsilon)
    for batch in batches(size):
        theirs.update_state(batch)  # its adapt() needs TensorFlow
    theirs.finalize_state()
    ours.adapt(iter(batches(size)))
    assert ours.bin_boundaries is not None
    assert ours.bin_boundaries.tolist() == np.array(theirs.bin_boundaries, np.float32).tolist()
    assert np.array_equal(ours(VALUES), np.asarray(theirs(VALUES)))


@pytest.mark.parametrize("mode", ["int", "one_hot", "multi_hot", "count"])
@pytest.mark.parametrize("shape", [(6,), (6, 1), (3, 4)])
def test_output_modes(mode: str, shape: tuple[int, ...]) -> None:
    """Values, shapes and types of every output mode."""
    values = RNG.normal(0, 2, shape).astype(np.float32)
    theirs = np.asarray(keras.layers.Discretization(bin_boundaries=[-1.0, 0.0, 1.0], output_mode=mode)(values))
    ours = features.Discretization(bin_boundaries=[-1.0, 0.0, 1.0], output_mode=mode)(values)
    assert np.array_equal(ours, theirs)
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("axis", [-1, None, (0, 1), 1])
@pytest.mark.parametrize("invert", [False, True])
def test_normalization(axis: Any, invert: bool) -> None:
    """The same means and variances to float32's precision, and the same numbers."""
    theirs = keras.layers.Normalization(axis=axis, invert=invert)
    ours = features.Normalization(axis=axis, invert=invert).adapt(VALUES)
    theirs.adapt(VALUES)
    mean = ours.get_state()["mean"]
    assert mean == pytest.approx(np.asarray(theirs.mean).reshape(mean.shape), abs=1e-5)
    assert ours(VALUES) == pytest.approx(np.asarray(theirs(VALUES)), abs=1e-4)


@pytest.mark.parametrize(
    ("axis", "mean", "variance", "shape"),
    [
        (-1, [1.0, 2.0, 3.0, 4.0], [1.0, 4.0, 9.0, 0.0], (5, 4)),
        (None, 2.0, 3.0, (7,)),
        ((1, 2), [1.0, 2.0], [3.0, 4.0], (3, 5, 2)),
    ],
)
def test_normalization_by_given_moments(axis: Any, mean: Any, variance: Any, shape: tuple[int, ...]) -> None:
    """Exactly the same numbers, also with fewer axes than are kept, and a variance of 0."""
    values = RNG.normal(size=shape).astype(np.float32)
    theirs = keras.layers.Normalization(axis=axis, mean=mean, variance=variance)
    ours = features.Normalization(axis=axis, mean=mean, variance=variance)
    assert ours(values) == pytest.approx(np.asarray(theirs(values)), rel=1e-6)
