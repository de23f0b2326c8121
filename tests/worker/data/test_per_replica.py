"""Each replica's share of batches, without a cluster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pscluster.coordinator import InputContext
from pscluster.worker.data.per_replica import made_in_sync, sliced


def context_of(rank: int, replicas: int) -> InputContext:
    return InputContext(rank, replicas, rank, replicas, seed=rank)


def slices(batches: Any, replicas: int, *, uneven: bool = False) -> list[list[Any]]:
    """The slices of each replica."""
    return [list(sliced(lambda: batches, uneven, context_of(rank, replicas))) for rank in range(replicas)]


@pytest.mark.parametrize("size", [1, 8, 9, 10, 11, 200, 201])
@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_the_shares_are_those_of_array_split(size: int, replicas: int) -> None:
    contexts = [InputContext(rank, replicas, rank, replicas, 0, replicas) for rank in range(replicas)]
    shares = np.array_split(np.arange(size), replicas)
    sizes = [context.get_per_replica_batch_size(size, uneven=True) for context in contexts]
    assert sizes == list(map(len, shares))
    own = slices([np.arange(size)], replicas, uneven=True)
    assert [slice_.tolist() for (slice_,) in own] == [share.tolist() for share in shares]


def test_a_global_batch_must_divide_unless_told_otherwise() -> None:
    context = made_in_sync(lambda context: [context], context_of(3, 8))[0]
    assert (context.num_replicas_in_sync, context.num_input_pipelines, context.input_pipeline_id) == (8, 8, 3)
    assert context.get_per_replica_batch_size(200) == 25
    with pytest.raises(
        ValueError,
        match=r"^a global batch of 201 examples does not divide evenly among 8 replicas: make it a multiple of 8, or "
        r"give uneven=True, for shares of 26 and 25$",
    ):
        context.get_per_replica_batch_size(201)
    with pytest.raises(ValueError, match="global_batch_size is 0; it must be a whole number, 1 or more"):
        context.get_per_replica_batch_size(0)
    assert context_of(0, 8).get_per_replica_batch_size(201) == 201, "without replicas in step a worker takes it all"


def test_nested_batches_are_sliced_throughout() -> None:
    batch = {"x": np.arange(8).reshape(4, 2), "y": (np.arange(4.0), [np.array(["a", "b", "c", "d"])])}
    first, second = slices([batch, batch], 2)
    assert len(first) == len(second) == 2
    assert first[1]["x"].tolist() == [[0, 1], [2, 3]]
    assert second[0]["y"][0].tolist() == [2, 3]
    assert second[0]["y"][1][0].tolist() == ["c", "d"]


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([np.ones(4), np.ones(3)], ValueError, "batch 1 of 3 examples does not divide evenly among 2 replicas: make"),
        ([[1, 2]], ValueError, "batch 0 has an int in it: distribute_dataset takes batches of arrays"),
        ([np.ones(())], ValueError, "batch 0 has an ndarray in it"),
        ([(np.ones(2), np.ones(4))], ValueError, "batch 0 has arrays of 2 and of 4 examples in it"),
        ([{}], ValueError, "batch 0 has no array in it"),
        (3, TypeError, "the function given to distribute_dataset returned an int: it must return global batches"),
    ],
)
def test_what_is_no_global_batch(batches: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        slices(batches, 2)
