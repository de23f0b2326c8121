"""What is committed of large variables: old values, their change and what is missing make the new values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.worker.collectives.memory_links import MemoryLinks, Network

from pscluster.core.geometry.partition import even_ends
from pscluster.core.transport.frames import view
from pscluster.ps.client.reads.plans import ShardRead
from pscluster.ps.client.synchronous.block_copies import _AT_ONCE, BlockCopies, _difference
from pscluster.ps.client.synchronous.gradient_forms import GradientForm
from pscluster.v1 import ps_pb2
from pscluster.worker.collectives import algorithms


@pytest.mark.parametrize("width", [32, 64])
@given(data=st.data())
def test_the_new_values_are_exact(width: Literal[32, 64], data: st.DataObject) -> None:
    dtype = np.dtype(f"f{width // 8}")
    numbers = st.one_of(
        st.floats(-2, 2, width=width),
        st.floats(-(2.0**60), 2.0**60, width=width),
        st.sampled_from([float("inf"), float("-inf"), 0.0]),
    )
    old = data.draw(hnp.arrays(dtype, st.integers(0, 40), elements=numbers))
    new = data.draw(hnp.arrays(dtype, len(old), elements=numbers))
    new = np.where(np.isinf(old), old, new)  # what is infinite stays so, or becomes NaN
    before, change = old.copy(), np.empty_like(old)
    places, remainder = _difference(new, before, change)
    assert np.array_equal(before, new), "they are the old ones of the next change"
    made = old + change
    made[places] += remainder
    assert np.array_equal(made, new)


def test_places_count_from_the_beginning() -> None:
    new, old = np.zeros(2 * _AT_ONCE + 3), np.zeros(2 * _AT_ONCE + 3)
    old[[5, -1]], new[[5, -1]] = 1.0, 1e-20
    places, remainder = _difference(new, old, np.empty_like(new))
    assert places.tolist() == [5, len(new) - 1]
    assert remainder.tolist() == [1e-20, 1e-20]


def test_what_is_no_number_stays_none() -> None:
    old, new = np.array([1.0, np.nan, 1.0]), np.array([np.nan, np.nan, np.inf])
    change = np.empty(3)
    places, _ = _difference(new, old.copy(), change)
    assert not len(places)
    assert np.array_equal(old + change, new, equal_nan=True)


SIZE = 6
FORM = GradientForm(variable=1, shard=0, server=0, optimizer=9, dtype=np.dtype(np.float64), size=SIZE, weighted=False)
SGD = ps_pb2.OptimizerSpec(id=9, name="sgd", rule="sgd", numbers={"learning_rate": 1.0, "momentum": 0.0})


class Server:
    """One shard, as it is read and updated."""

    def __init__(self) -> None:
        self.values, self.version, self.gradients = np.zeros(SIZE), 100, 0

    def read(self, reads: Sequence[ShardRead]) -> None:
        for read in reads:
            numbers = {"version": [self.version], "gradients": [self.gradients, 7]}.get(
                str(read.item.rows.WhichOneof("kind"))
            )
            read.take(view(self.values if numbers is None else np.array(numbers, "<u8")))

    def add(self, values: Any) -> None:
        self.values = self.values + values
        self.version += 1

    def commit(self, replicas: Sequence[BlockCopies]) -> None:
        change, left = np.zeros(SIZE), np.zeros(SIZE)
        for copies in replicas:
            for _, item, segments in copies.contribution(1):
                if item.rows.all:
                    start = item.offset // 8
                    change[start : start + len(segments[0]) // 8] = np.frombuffer(segments[0])
                else:
                    left[np.frombuffer(segments[0], np.int64)] = np.frombuffer(segments[1])
        self.values = self.values + change + left
        self.version += 1 + len(replicas)
        self.gradients += 1
        for copies in replicas:
            copies.committed()


class Replica:
    """What copies need of a replica."""

    def __init__(self, network: Network, rank: int) -> None:
        self._links = MemoryLinks(network, rank, 2)
        self.replica_id, self.num_replicas = rank, 2

    def all_reduce(self, op: str, array: Any) -> Any:
        assert op == "min"
        return algorithms.all_reduce(self._links, np.minimum, array)

    def gather_parts(self, array: Any, what: str) -> None:
        algorithms.fill_parts(self._links, array, even_ends(len(array), 2))


def at_once(*calls: Callable[[], object]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("between", [False, True])
def test_what_is_added_between_two_replicas_fetches_is_fetched_after_the_commit(between: bool) -> None:
    """One replica has given the others its block without it, and the other one has it in the version of its copies."""
    server, network, reads = Server(), Network(), list[ShardRead]()
    copies = [BlockCopies((FORM,)), BlockCopies((FORM,))]

    def read(asked: Sequence[ShardRead]) -> None:
        reads.extend(asked)
        server.read(asked)

    def fetch(rank: int) -> None:
        assert copies[rank].fetch(read, lambda *_: SGD, rank, 2)

    replicas: list[Any] = [Replica(network, rank) for rank in (0, 1)]
    for step in range(3):
        fetch(0)
        if between and step == 1:
            server.add(100.0)
        fetch(1)
        assert np.array_equal(copies[1].values[1, 0], server.values)
        for rank in (0, 1):
            copies[rank].apply(1, 0, np.ones(3))
        at_once(*(lambda rank=rank: copies[rank].gather(replicas[rank]) for rank in (0, 1)))
        server.commit(copies)
    reads.clear()
    for rank in (0, 1):
        fetch(rank)
        assert np.array_equal(copies[rank].values[1, 0], server.values)
    assert np.array_equal(server.values, np.full(SIZE, 97.0 if between else -3.0))
    assert len(reads) == 4, "only versions and counts: they have what they need since the third step"
