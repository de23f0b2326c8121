"""What the script does with the values of replicas, without a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from pscluster.coordinator import PerReplica, errors
from pscluster.coordinator.synchronous.results import gather, local_results, merge, reduce

PRODUCT = np.array([[22.0, 28.0], [49.0, 64.0]])
"""Of (2, 3) x (3, 2), with 1 to 6 in both."""

FOUR = PerReplica([PRODUCT] * 4)


class Pair(NamedTuple):
    """A named tuple."""

    a: Any
    b: Any


@dataclass
class Record:
    """A dataclass."""

    loss: float
    more: Any


def result_of(rank: int) -> dict[str, Any]:
    """A structure with a leaf in each kind of container; the dicts' order differs by rank."""
    items: list[tuple[str, Any]] = [
        ("list", [rank, [], {}]),
        ("pair", Pair(rank + 1, (rank + 2,))),
        ("record", Record(rank / 2, {"none": None})),
    ]
    return dict(items if rank % 2 else reversed(items))


def test_merged_results_have_a_value_of_each_replica_at_each_leaf() -> None:
    merged = merge([result_of(rank) for rank in range(3)])
    assert merged["list"][0].values == (0, 1, 2)
    assert merged["list"][1:] == [[], {}]
    assert isinstance(merged["pair"], Pair)
    assert (merged["pair"].a[2], merged["pair"].b[0].values) == (3, (2, 3, 4))
    assert merged["record"].loss.values == (0, 0.5, 1)
    assert merged["record"].more["none"].values == (None, None, None)
    assert local_results(merged) == tuple(result_of(rank) for rank in range(3))
    assert merge([7]).values == (7,)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            [(1, 2), (1, 2), {"b": 1, "a": 2}],
            "^replica 2 returned a dict with keys 'b', 'a' where replica 0 returned a tuple of 2: all replicas must "
            "return the same structure$",
        ),
        ([[1], [1, 2]], "^replica 1 returned a list of 2 where replica 0 returned a list of 1: "),
        ([[1], (1,)], "replica 1 returned a tuple of 1 where replica 0 returned a list of 1"),
        ([{}, {"a": 1}], "replica 1 returned a dict with keys 'a' where replica 0 returned an empty dict"),
        ([1, None, [1]], "replica 2 returned a list of 1 where replica 0 returned an int"),
        ([Pair(1, 2), (1, 2)], "replica 1 returned a tuple of 2 where replica 0 returned a Pair"),
        (
            [{"a": [Pair(1, {"x": 2})]}, {"a": [Pair(1, 2)]}],
            r"^at \['a'\]\[0\]\.b replica 1 returned an int where replica 0 returned a dict with keys 'x'",
        ),
        ([{str(key): 1 for key in range(20)}, 1], r"dict with keys '0', .*'7', \.\.\.: all replicas"),
    ],
)
def test_different_structures_are_refused_with_the_replica_and_the_path(odd: list[Any], message: str) -> None:
    with pytest.raises(errors.MisuseError, match=message):
        merge(odd)


def test_local_results() -> None:
    assert local_results(3) == (3,)
    assert local_results({"a": [1]}) == ({"a": [1]},)
    assert local_results(PerReplica("ab")) == ("a", "b")
    assert local_results({"a": PerReplica([1, 2]), "b": 3}) == ({"a": 1, "b": 3}, {"a": 2, "b": 3})
    with pytest.raises(ValueError, match="the value is of 2 replicas in one place and of 3 in another"):
        local_results([PerReplica([1, 2]), PerReplica([1, 2, 3])])


@pytest.mark.parametrize(
    ("op", "axis", "expected"),
    [
        ("sum", None, [[88, 112], [196, 256]]),
        ("mean", None, [[22, 28], [49, 64]]),
        ("min", None, [[22, 28], [49, 64]]),
        ("SUM", 0, [284, 368]),
        ("mean", 0, [35.5, 46]),
        ("max", 0, [49, 64]),
        ("min", -1, [22, 49]),
        ("sum", 1, [200, 452]),
    ],
)
def test_reductions_of_four_replicas_are_tensorflows(op: str, axis: int | None, expected: list[Any]) -> None:
    assert reduce(op, {"p": [FOUR]}, axis)["p"][0].tolist() == expected


def test_a_mean_along_an_axis_is_one_of_all_elements() -> None:
    uneven = PerReplica([np.array([1.0, 2.0, 3.0]), np.array([10.0]), np.array([])])
    assert reduce("mean", uneven, 0) == 4
    assert (reduce("min", uneven, 0), reduce("max", uneven, 0), reduce("sum", uneven, 0)) == (1, 10, 16)
    none = PerReplica([np.zeros((0, 2))] * 2)
    assert reduce("sum", none, 0).tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"reduce\('mean', axis=0\): no replica has an element along axis 0"):
        reduce("mean", none, 0)


@pytest.mark.parametrize(
    ("op", "values", "axis", "expected"),
    [
        ("sum", [1, 2], None, np.int64(3)),
        ("mean", [1, 2], None, np.float64(1.5)),
        ("sum", [True, True], None, np.int64(2)),
        ("max", [True, False], None, np.True_),
        ("sum", [np.int8(100), np.int8(100)], None, np.int8(-56)),
        ("sum", [np.full(2, 100, np.int8)], 0, np.int8(-56)),
        ("mean", [np.float32(1), np.float32(2)], None, np.float32(1.5)),
        ("sum", [np.float32(1), 2.0], None, np.float64(3)),
        ("mean", [np.ones(70_000, np.float16)] * 2, 0, np.float16(1)),
    ],
)
def test_types_are_those_of_all_reduce(op: str, values: list[Any], axis: int | None, expected: np.generic) -> None:
    result = reduce(op, PerReplica(values), axis)
    assert (result, result.dtype) == (expected, expected.dtype)


def test_gathered_arrays_are_joined_by_rank() -> None:
    def rows(rank: int) -> npt.NDArray[Any]:
        return np.full((rank, 2), rank)

    gathered = gather({"rows": PerReplica(list(map(rows, range(3)))), "count": PerReplica([5, 6])}, 0)
    assert gathered["rows"].tolist() == [[1, 1], [2, 2], [2, 2]]
    assert gathered["count"].tolist() == [5, 6]
    assert gather(FOUR, -1).shape == (2, 8)


@pytest.mark.parametrize(
    ("op", "value", "axis", "error", "message"),
    [
        ("sum", 3.0, None, TypeError, r"reduce\('sum', axis=None\) takes PerReplica values, .* not a float: give"),
        ("sum", PerReplica(["a"]), None, TypeError, "the value of replica 0 is a str: it takes arrays of numbers"),
        ("sum", PerReplica([1, None]), None, TypeError, "the value of replica 1 is None"),
        ("sum", PerReplica([[[1], [1, 2]]]), None, TypeError, "the value of replica 0 is not an array"),
        ("sum", PerReplica([]), None, ValueError, "a PerReplica value has no values"),
        ("sum", FOUR, 2, ValueError, r"value of replica 0 has the shape \(2, 2\), without that axis"),
        ("sum", FOUR, -3, ValueError, "without that axis"),
        ("sum", FOUR, "0", TypeError, r"reduce\('sum', axis='0'\): an axis is a whole number, or None, which"),
        ("sum", FOUR, True, TypeError, "an axis is a whole number"),
        ("sum", PerReplica([PRODUCT, PRODUCT[:1]]), None, ValueError, r"replica 1 has .* \(1, 2\), but replica 0"),
        ("sum", PerReplica([PRODUCT, PRODUCT[:1]]), 1, ValueError, "only that axis may differ"),
        ("sum", PerReplica([PRODUCT, PRODUCT[0]]), 0, ValueError, "only that axis may differ"),
        ("median", FOUR, None, ValueError, "no operation 'median': give one of 'sum', 'mean', 'min', 'max'"),
        ("gather", FOUR, None, TypeError, r"gather\(axis=None\): an axis is a whole number$"),
        ("gather", PerReplica([PRODUCT, PRODUCT[:1]]), 1, ValueError, "only that axis may differ"),
    ],
)
def test_what_can_not_be_combined(op: str, value: Any, axis: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gather(value, axis) if op == "gather" else reduce(op, value, axis)
