"""Normalization, Discretization, Hashing and the crossings in one process; beside Keras, see tests/frameworks."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from pscluster.core.errors import MisuseError
from pscluster.worker.features.hashing import CategoryCrossing, HashedCrossing, Hashing
from pscluster.worker.features.layer import Layer, analyzed, shared_layer
from pscluster.worker.features.numeric import Discretization, Moments, Normalization, Quantiles

RNG = np.random.default_rng(3)
DATA = RNG.normal(3, 2, (1000, 4)).astype(np.float32)


def test_normalization() -> None:
    """Mean 0 and variance 1 for each feature, or of all; inverse; whole, in batches, and merged from parts."""
    layer = Normalization().adapt(DATA)
    result = layer(DATA)
    assert result.dtype == np.float32
    assert result.mean(axis=0) == pytest.approx([0] * 4, abs=1e-5)
    assert result.var(axis=0) == pytest.approx([1] * 4, abs=1e-5)
    assert layer.mean is not None
    assert layer.variance is not None
    inverse = Normalization(mean=layer.mean, variance=layer.variance, invert=True)
    assert inverse(result) == pytest.approx(DATA, abs=1e-5)
    batched = Normalization().adapt(DATA[start : start + 90] for start in range(0, 1000, 90))
    assert batched.get_state()["mean"] == pytest.approx(layer.mean, rel=1e-6)
    assert batched.get_state()["variance"] == pytest.approx(layer.variance, rel=1e-6)
    assert Normalization(axis=None).adapt(DATA)(DATA).var() == pytest.approx(1, abs=1e-5)
    assert Normalization(axis=(0, 1)).adapt(DATA[:2, :3])(DATA[:2, :3]).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert Normalization(mean=3, variance=4)([5, 7]).tolist() == [1, 2]
    merged = Moments("it", (-1,)).merged(
        [analyzed(Moments("it", (-1,)), part) for part in ([DATA[:1]], [], [DATA[1:]])]
    )
    assert merged["mean"] == pytest.approx(DATA.mean(axis=0, dtype=np.float64))
    assert merged["squares"] / merged["count"] == pytest.approx(DATA.var(axis=0, dtype=np.float64))


def test_discretization() -> None:
    """By given boundaries, each of which belongs to the bin above; by quantiles, within epsilon."""
    layer = Discretization(bin_boundaries=[0.0, 1.0, 2.0])
    assert layer([[-1.5, 1.0, 3.4, 0.5], [0.0, 3.0, 1.3, 0.0]]).tolist() == [[0, 2, 3, 1], [1, 3, 2, 1]]
    assert layer([1]).dtype == np.int32
    hot = Discretization(bin_boundaries=[0.0, 1.0], output_mode="one_hot")
    assert hot([-1, 0.5, 7]).tolist() == np.eye(3).tolist()
    assert hot([0.0]).dtype == np.float32
    values = RNG.exponential(size=5000)
    adapted = Discretization(num_bins=4, epsilon=0.001).adapt(values[at : at + 100] for at in range(0, 5000, 100))
    shares = np.bincount(adapted(values)) / 5000
    assert shares == pytest.approx([0.25] * 4, abs=0.05)
    parts = [analyzed(Quantiles("it", 0.01), [values[at : at + 1000]]) for at in range(0, 5000, 1000)]
    summary = Quantiles("it", 0.01).merged(parts)["summary"]
    assert np.interp(2500, np.cumsum(summary[1]), summary[0]) == pytest.approx(np.median(values), abs=0.05)


def test_hashing() -> None:
    """In its range, evenly, the same in every process; the mask value alone has bin 0; salts differ."""
    numbers = np.arange(10_000)
    for values in (numbers, np.array([f"user {number}" for number in numbers])):
        bins = Hashing(10)(values)
        assert np.bincount(bins, minlength=10) == pytest.approx([1000] * 10, abs=150)
        assert not np.array_equal(bins, Hashing(10, salt=1)(values))
        masked = Hashing(10, mask_value=values.tolist()[7])(values)
        assert np.flatnonzero(masked == 0).tolist() == [7]
        assert Hashing(10)(values.reshape(-1, 2)).tolist() == bins.reshape(-1, 2).tolist()
    assert Hashing(100)(["a", "b", "ü"]).tolist() == [19, 15, 2]
    assert Hashing(100)([-1, 0, 1 << 62]).tolist() == [36, 35, 75]
    assert Hashing(4, output_mode="count")([["a", "a"], ["b", "a"]]).sum(axis=1).tolist() == [2, 2]
    assert Hashing(4)(np.array([3], np.uint8)).tolist() == Hashing(4)([3]).tolist()


def test_crossings() -> None:
    """Strings of all combinations in a row, as TensorFlow 2 made them; bins of these."""
    cross = CategoryCrossing()
    assert cross([["a", "b"], [1, 2]]).tolist() == ["a_X_1", "b_X_2"]
    several = cross([[["a", "b"], ["c", "d"]], np.array([["x", "y"], ["z", "w"]]), [[1], [2]]])
    assert several.tolist() == [
        ["a_X_x_X_1", "a_X_y_X_1", "b_X_x_X_1", "b_X_y_X_1"],
        ["c_X_z_X_2", "c_X_w_X_2", "d_X_z_X_2", "d_X_w_X_2"],
    ]
    assert CategoryCrossing(separator="-")([["a"], ["b"]]).tolist() == ["a-b"]
    assert cross([np.empty(0, str), np.empty(0, int)]).tolist() == []
    bins = HashedCrossing(7)([["a", "b", "a"], [1, 2, 1]])
    assert bins.tolist() == Hashing(7)(["a_X_1", "b_X_2", "a_X_1"]).tolist()
    assert HashedCrossing(7, output_mode="one_hot")([[["a"]], [[1]]]).shape == (1, 7)
    assert HashedCrossing(7)([[["a"]], [[1]]]).shape == (1, 1)


@pytest.mark.parametrize(
    "layer",
    [
        Normalization().adapt(DATA),
        Normalization(axis=None, mean=1, variance=2, invert=True),
        Discretization(num_bins=5).adapt(DATA),
        Discretization(bin_boundaries=[1, 2], output_mode="count"),
        Hashing(9, mask_value=4, salt=3, output_mode="multi_hot"),
        CategoryCrossing("+"),
        HashedCrossing(5, output_mode="one_hot"),
    ],
    ids=repr,
)
def test_the_same_on_a_worker(layer: Any) -> None:
    """What is sent, and what is pickled, makes a layer that computes the same."""
    inputs: Any = [["a", "b"], ["c", "d"]] if "Crossing" in repr(layer) else (DATA * 3).astype(np.int64)
    state = layer.get_state()
    for again in (pickle.loads(pickle.dumps(layer)), shared_layer(type(layer).__name__, layer.get_config(), state)):
        assert np.array_equal(again(inputs), layer(inputs))
        assert again.as_sent().handle_key == layer.as_sent().handle_key
    assert layer.is_adapted


def call(layer: Any, inputs: Any) -> Any:
    """Call a layer."""
    return layer(inputs)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Normalization()([[1.0]]), MisuseError, "was never adapted: call adapt(data) in the script before it"),
        (lambda: Normalization(mean=1), ValueError, "mean is 1 and variance is None: give both, or adapt it"),
        (lambda: Normalization(mean=[1, 2], variance=[1]), ValueError, "mean has the shape (2,) and variance (1,)"),
        (lambda: Normalization(mean=0, variance=-1), ValueError, "must be finite, and variance at least 0"),
        (lambda: Normalization(axis=None, mean=[1], variance=[1]), ValueError, "mean has 1 axes, and axis is ()"),
        (lambda: Normalization().adapt([["a"]]), TypeError, "takes numbers, not an array of <U1"),
        (lambda: Normalization().adapt([[1.0, np.nan]]), ValueError, "with NaN or infinity: replace what is missing"),
        (lambda: Normalization().adapt(iter(())), ValueError, "was adapted to data without examples"),
        (
            lambda: Normalization(axis=2).adapt([[1.0]]),
            ValueError,
            "keeps the axes (2,), but was given an array with 2",
        ),
        (lambda: Normalization().adapt(iter([DATA, DATA[:, :3]])), ValueError, "with (4,) and (3,) along the axes"),
        (
            lambda: call(Normalization().adapt(DATA), DATA[:, :3]),
            ValueError,
            "means of the shape (4,) for the axes (-1,)",
        ),
        (
            lambda: Normalization(mean=0, variance=1).adapt(DATA),
            MisuseError,
            "was given mean and variance, and can't be",
        ),
        (lambda: Discretization(), ValueError, "bin_boundaries is None and num_bins is None: give one of them"),
        (lambda: Discretization([1.0], 2), ValueError, "bin_boundaries is [1.0] and num_bins is 2: give one of them"),
        (lambda: Discretization([1, 3, 2]), ValueError, "not sorted: 3 comes before 2; give sorted(bin_boundaries)"),
        (lambda: Discretization([[1, 2]]), ValueError, "bin_boundaries have the shape (1, 2)"),  # type: ignore[list-item]
        (lambda: Discretization(num_bins=0), ValueError, "num_bins is 0; it must be a whole number, 1 or more"),
        (lambda: Discretization(num_bins=2, epsilon=1), ValueError, "epsilon is 1; it must be a number, above 0 and"),
        (lambda: Discretization(num_bins=2)([1]), MisuseError, "was never adapted"),
        (lambda: Discretization([1]).adapt([1]), MisuseError, "was given bin_boundaries, and can't be adapted"),
        (lambda: Discretization(num_bins=2).adapt([]), ValueError, "was adapted to data without numbers"),
        (lambda: Discretization(num_bins=2).adapt([np.nan]), ValueError, "was adapted to data with NaN"),
        (lambda: Hashing(0), ValueError, "num_bins is 0; it must be a whole number, 1 or more"),
        (lambda: Hashing(1, mask_value="a"), ValueError, "num_bins is 1, and mask_value has that bin: give at least 2"),
        (lambda: call(Hashing(3), [1.5]), TypeError, "takes strings, not 1.5 of type float"),
        (lambda: Hashing(3).adapt([1]), MisuseError, "Hashing 'hashing' has nothing to learn: use it without adapt()"),
        (lambda: CategoryCrossing()([["a"]]), ValueError, "takes a list of two or more arrays"),
        (lambda: CategoryCrossing()([["a"], ["b", "c"]]), ValueError, "arrays of the shapes [(1,), (2,)]: give (n,)"),
        (lambda: CategoryCrossing(separator=1), TypeError, "separator is 1; it must be a string"),  # type: ignore[arg-type]
        (lambda: HashedCrossing(3)([[["a", "b"]], [["c", "d"]]]), ValueError, "takes one value a row"),
    ],
)
def test_bad_input(make: Any, error: type[Exception], message: str) -> None:
    """One sentence with the layer's name, the value and what to do."""
    with pytest.raises(error) as caught:
        make()
    assert message in str(caught.value)


def test_reprs() -> None:
    """They say whether the layer can be used."""
    layers: list[Layer] = [Normalization(name="age"), Hashing(3)]
    assert list(map(repr, layers)) == ["<Normalization 'age', not adapted>", "<Hashing 'hashing'>"]
