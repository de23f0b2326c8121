"""The replicas' copies of large variables: when they are made, kept and dropped, what a step may do with arrays that it
reads, and changes that are larger than a gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.coordinator.synchronous.support import joint, numbers_of

from pscluster.coordinator import LocalCluster, SynchronousStrategy, Variable, errors, optimizers
from pscluster.ps.spec import SESSION_BYTES

SIZE = SESSION_BYTES // 4 + 1000  # elements, of a shard that is pulled in frames and may be cached


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1, 2, log_level="ERROR", env={"PSCLUSTER_IN_FLIGHT_MIB": "1"}) as cluster:
        yield cluster


def test_changes_of_many_slots_are_more_than_the_values(strategy: SynchronousStrategy) -> None:
    """Half of the values, and of three slots, and what is left of their signs' changes, is more than all values."""
    with strategy.scope():
        ws = [Variable(np.full(SIZE, 0.5, np.float32), name=f"w{n}") for n in (0, 1)]
        adams = [optimizers.Adam(0.7, amsgrad=True) for _ in ws]

    def step(iterator: Iterator[int], which: int) -> bool:
        value = ws[which].read_value()
        adams[which].apply_gradients([(np.sin(value * next(iterator) * 7), ws[which])])
        return joint()

    for which, calls in ((0, (4, 4)), (1, (1,) * 8)):
        numbers = numbers_of(strategy, 8)
        together: list[Any] = []
        for steps in calls:
            results = strategy.run(step, (numbers, which), steps=steps, collect="all")
            together += strategy.local_results(results)[1]
        assert together == ([False] + [True] * 7 if not which else [False] * 8)
    assert np.array_equal(ws[0].numpy(), ws[1].numpy())


def test_a_step_may_do_anything_with_what_it_reads(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        w = Variable(np.zeros((20_000, 2)), name="w")
        sgd = optimizers.SGD(1.0)
    odd = itertools.cycle(["read-only", "another shape", "a view"])

    def step(iterator: Iterator[int]) -> tuple[bool, Any, bool]:
        number = next(iterator)
        value = w.read_value()
        expected = np.array_equal(value, np.full((20_000, 2), -2.0 * number))
        sgd.apply_gradients([(np.ones((20_000, 2)), w)])
        kind, result = next(odd), value
        if kind == "read-only":
            value.flags.writeable = False
        elif kind == "another shape":
            value.shape = (40_000,)
        else:
            result = value[5:]
        return expected, result[:3].copy(), joint()

    numbers = numbers_of(strategy, 20)
    for _ in range(2):
        results = strategy.run(step, (numbers,), steps=10, collect="all")
        for of_replica in strategy.local_results(results):
            assert all(expected for expected, *_ in of_replica)
            assert all(together for *_, together in of_replica[1:])


def test_what_a_step_reads_again_takes_no_more_memory(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        w = Variable(np.zeros(20_000), name="w")
        sgd = optimizers.SGD(1.0)

    def step() -> tuple[int, bool]:
        addresses = {w.read_value().ctypes.data for _ in range(9)}
        sgd.apply_gradients([(np.ones(20_000), w)])
        return len(addresses), joint()

    results = strategy.local_results(strategy.run(step, steps=5, collect="all"))
    assert [of_replica[1:] for of_replica in results] == [[(1, True)] * 4] * 2


def test_the_read_cache_has_no_part_in_it(strategy: SynchronousStrategy) -> None:
    """A shard's version, which the cache asks for before a large read, is nothing that a step has read."""
    with strategy.scope():
        w = Variable(np.zeros(SIZE, np.float32), name="w")
        sgd = optimizers.SGD(1.0)

    def step() -> tuple[float, bool]:
        value = float(w.read_value()[-1])
        sgd.apply_gradients([(np.ones(SIZE, np.float32), w)])
        return value, joint()

    for call in range(3):
        results = strategy.local_results(strategy.run(step, steps=4, collect="all"))
        assert results[0] == [(-8.0 * call - 2 * number, bool(call or number)) for number in range(4)]


def test_a_call_that_fails_leaves_no_copies(strategy: SynchronousStrategy) -> None:
    """What other replicas were sending may still arrive in their memory."""
    with strategy.scope():
        w = Variable(np.zeros(20_000), name="w")
        sgd = optimizers.SGD(1.0)

    def step(iterator: Iterator[int]) -> bool:
        number = next(iterator)
        if number == 6:
            raise ValueError("six")
        sgd.apply_gradients([(np.ones(20_000), w)])
        return joint()

    numbers = numbers_of(strategy, 40)
    assert strategy.local_results(strategy.run(step, (numbers,), steps=4)) == (True, True)
    with pytest.raises(errors.FunctionError, match="six"):
        strategy.run(step, (numbers,), steps=4)
    assert np.array_equal(w.numpy(), np.full(20_000, -12.0)), "what was taken before it is committed"
    numbers = iter(strategy.distribute_datasets_from_function(lambda: range(7, 40)))
    results = strategy.local_results(strategy.run(step, (numbers,), steps=4, collect="all"))
    assert results == ([False, True, True, True],) * 2
    assert np.array_equal(w.numpy(), np.full(20_000, -20.0))
