"""Saving a variable shard by shard, and restoring it into one that is cut otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pscluster.coordinator import LocalCluster, ParameterServerStrategy, Variable
from pscluster.core.errors import InvalidUpdateError
from pscluster.ps.states import restore_shards, save_shards


@pytest.fixture(scope="module")
def strategy() -> Iterator[ParameterServerStrategy]:
    with LocalCluster(num_ps=2, num_workers=1) as cluster, ParameterServerStrategy(cluster) as strategy:
        yield strategy


def _variable(strategy: ParameterServerStrategy, value: np.ndarray, cuts: list[int]) -> Variable:
    with strategy.scope():
        return Variable(value, partitioner=lambda shape, dtype: cuts)


@pytest.mark.parametrize(
    ("saved", "restored"), [([2, 1], [3, 1]), ([4, 2], [1, 1]), ([1, 1], [2, 3]), ([3, 3], [3, 3])]
)
def test_shards_are_restored_into_another_cut(
    strategy: ParameterServerStrategy, saved: list[int], restored: list[int]
) -> None:
    """Values survive the way from any number of shards into any other."""
    values = np.arange(35, dtype=np.float32).reshape(7, 5)
    target = _variable(strategy, np.zeros((7, 5), np.float32), restored)

    restore_shards(target, save_shards(_variable(strategy, values, saved)))

    np.testing.assert_array_equal(target.numpy(), values)


def test_a_scalar_is_restored(strategy: ParameterServerStrategy) -> None:
    """A variable without axes has one shard."""
    target = _variable(strategy, np.zeros((), np.float32), [])

    restore_shards(target, save_shards(_variable(strategy, np.full((), 2.5, np.float32), [])))

    assert target.numpy() == 2.5


def test_what_does_not_fit_is_refused(strategy: ParameterServerStrategy) -> None:
    """Another shape, and shards that do not fill the variable, are named."""
    values = np.arange(6, dtype=np.float32)
    source = _variable(strategy, values, [3])

    with pytest.raises(InvalidUpdateError, match=r"has shape \(5,\), but the saved"):
        restore_shards(_variable(strategy, np.zeros(5, np.float32), [2]), save_shards(source))
    with pytest.raises(InvalidUpdateError, match="hold 4 of the 6 elements"):
        restore_shards(_variable(strategy, np.zeros(6, np.float32), [2]), list(save_shards(source))[:2])
