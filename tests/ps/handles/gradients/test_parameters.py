"""Parameters of a model: all made or none, and updated in one request per server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.conftest import run_strategy

from pscluster.coordinator import IndexedSlices, ParameterServerStrategy, optimizers
from pscluster.core import errors
from pscluster.ps.handles.gradients.parameters import (
    Applied,
    Parameter,
    apply_all,
    assign_all,
    create_variables,
    distinct,
    nonfinite,
)


@pytest.fixture(scope="module")
def strategy() -> Iterator[ParameterServerStrategy]:
    """Two servers and a worker."""
    yield from run_strategy(2, 1)


def test_gradients_of_two_optimizers_and_other_values_are_applied_together(strategy: ParameterServerStrategy) -> None:
    with strategy.scope():
        made = create_variables(
            {
                "w": Parameter(np.ones(3, np.float32)),
                "table": Parameter(np.zeros((4, 2), np.float32)),
                "count": Parameter(np.int64(5), trainable=False),
                "mean": Parameter(np.zeros(2, np.float32), trainable=False),
            },
            "a model",
        )
        dense, rows = optimizers.SGD(0.5), optimizers.SGD(2.0)
    sparse = IndexedSlices(np.ones((2, 2), np.float32), np.array([1, 3]))
    apply_all(
        [Applied(dense, [(np.ones(3, np.float32), made["w"])]), Applied(rows, [(sparse, made["table"])])],
        add=[(2, made["count"])],
        assign=[(np.full(2, 7, np.float32), made["mean"])],
    )
    np.testing.assert_array_equal(made["w"].numpy(), np.full(3, 0.5))
    np.testing.assert_array_equal(made["table"].numpy(), [[0, 0], [-2, -2], [0, 0], [-2, -2]])
    assert int(made["count"]) == 7
    np.testing.assert_array_equal(made["mean"].numpy(), [7, 7])
    # What one of them refuses is not sent by the others.
    with pytest.raises(errors.InvalidUpdateError, match="shape"):
        apply_all([Applied(dense, [(np.ones(3, np.float32), made["w"])]), Applied(rows, [(np.ones(9), made["table"])])])
    np.testing.assert_array_equal(made["w"].numpy(), np.full(3, 0.5))
    apply_all([])
    assign_all({"a": np.zeros(3), "b": 1}, {"a": made["w"], "b": made["count"]})
    np.testing.assert_array_equal(made["w"].numpy(), np.zeros(3))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"a": np.ones(3)}, "no value for b"),
        ({"a": np.ones(3), "b": 1, "c": 1}, "no variable for c"),
        ({"a": np.ones(1), "b": 1}, r"has shape \(3,\), but the value has shape \(1,\)"),
    ]
    for values, message in wrong:
        with pytest.raises(errors.InvalidUpdateError, match=message):
            assign_all(values, {"a": made["w"], "b": made["count"]})
    np.testing.assert_array_equal(made["w"].numpy(), np.zeros(3))


def test_all_are_made_or_none(strategy: ParameterServerStrategy) -> None:
    one = {"first": Parameter(np.zeros(2, np.float32))}
    with strategy.scope(), pytest.raises(errors.PsClusterError):
        create_variables({**one, "second": Parameter(np.array(["text"]))}, "a model")
    assert not [variable for variable in strategy.variables if variable.name == "first"]
    with strategy.scope():
        create_variables(one, "a model")
    with pytest.raises(errors.MisuseError, match="a model was created outside"):
        create_variables(one, "a model")


def test_distinct_ids() -> None:
    for ids in ([5, 1, 5, 0], [0, 1, 2], [2, 0], []):
        unique, inverse = distinct(np.array(ids, np.int64))
        assert unique.tolist() == sorted(set(ids))
        assert unique[inverse].tolist() == ids


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_finite_arrays(dtype: type) -> None:
    """Also where the squares overflow, and of arrays that do not lie in one piece."""
    array: Any = np.full((8, 6), np.finfo(dtype).max, dtype)
    views = {"whole": array, "columns": array[:, ::2], "none": array[:0], "first": array[:5]}
    assert nonfinite(views) == []
    for value in (np.nan, np.inf, -np.inf):
        array[5, 2] = value
        assert nonfinite(views) == ["whole", "columns"]
