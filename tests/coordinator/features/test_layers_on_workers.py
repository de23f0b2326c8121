"""Layers on a real cluster: sent once, shared by all functions of a worker, adapted to datasets that workers read."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.conftest import NUM_WORKERS, Everywhere, Gate, leave_mark, marks, wait_for_file
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy, errors
from pscluster.coordinator.features import (
    CategoryCrossing,
    Discretization,
    Hashing,
    IntegerLookup,
    Normalization,
    StringLookup,
)

WORDS = np.array(["b", "a", "c", "a", "b", "a", "d", ""] * 50)


def layers_here() -> int:
    """How many lookups there are in this process."""
    gc.collect()
    return sum(type(thing).__name__ == "StringLookup" for thing in gc.get_objects())


def look_up(layer: Any, inputs: Any) -> Any:
    """A step that gets the layer as an argument."""
    return layer(inputs)


def test_one_for_all_functions_of_a_worker(coordinator: ClusterCoordinator, everywhere: Everywhere) -> None:
    """Captured, as an argument, in a structure, in the function of a dataset: the same layer, made once."""
    before = everywhere(coordinator, layers_here)
    words = [f"word {number}" for number in range(30_000)]  # large enough to travel beside its message
    layer = StringLookup(vocabulary=words)
    batch = np.array(["word 7", "no word", "word 29999"])
    expected = [8, 0, 30_000]
    assert [each.tolist() for each in everywhere(coordinator, look_up, layer, batch.tolist())] == [
        expected
    ] * NUM_WORKERS
    assert everywhere(coordinator, lambda: layer(batch).tolist()) == [expected] * NUM_WORKERS
    assert everywhere(coordinator, lambda x: x["by"][0](batch).tolist(), {"by": [layer]}) == [expected] * NUM_WORKERS
    data = coordinator.distribute_dataset(batch.tolist()).batch(3).map(layer)
    assert [coordinator.schedule(list, args=(part,)).fetch(TIMEOUT)[0].tolist() for part in data] == [expected]
    assert everywhere(coordinator, layers_here) == [count + 1 for count in before]
    again = StringLookup(vocabulary=words)  # the same state is the same definition
    assert everywhere(coordinator, lambda: again.vocabulary_size()) == [30_001] * NUM_WORKERS
    assert everywhere(coordinator, layers_here) == [count + 1 for count in before]


def test_as_it_was_when_it_was_captured(coordinator: ClusterCoordinator) -> None:
    """A function keeps the layer that it was captured with; as an argument it is as it is now."""
    layer = StringLookup(vocabulary=["a"])

    def captured() -> int:
        return int(layer("b"))

    assert coordinator.schedule(captured).fetch(TIMEOUT) == 0
    layer.set_vocabulary(["a", "b"])
    assert coordinator.schedule(captured).fetch(TIMEOUT) == 0
    assert coordinator.schedule(look_up, args=(layer, "b")).fetch(TIMEOUT) == 2


def test_adapt_to_a_distributed_dataset(coordinator: ClusterCoordinator) -> None:
    """The same as on an array in one process, for every layer that learns."""
    numbers = np.random.default_rng(5).normal(2, 3, (400, 3)).astype(np.float32)
    ids = (numbers[:, 0] * 2).astype(np.int64)
    data = coordinator.distribute_dataset({"word": WORDS, "id": ids, "x": numbers}).batch(16)
    words = data.map(word_of)
    assert (
        StringLookup(mask_token="").adapt(words).get_vocabulary()
        == StringLookup(mask_token="").adapt(WORDS).get_vocabulary()
        == ["", "[UNK]", "a", "b", "d", "c"]
    )
    rare = StringLookup(output_mode="tf_idf").adapt(words)
    assert rare.get_state()["idf"] == pytest.approx(StringLookup(output_mode="tf_idf").adapt(WORDS).get_state()["idf"])
    assert IntegerLookup().adapt(data.map(id_of)).get_vocabulary() == IntegerLookup().adapt(ids).get_vocabulary()
    normalized, whole = Normalization().adapt(data.map(x_of)), Normalization().adapt(numbers)
    assert normalized.get_state()["mean"] == pytest.approx(whole.get_state()["mean"], rel=1e-6)
    assert normalized.get_state()["variance"] == pytest.approx(whole.get_state()["variance"], rel=1e-6)
    bins = Discretization(num_bins=4).adapt(data.map(x_of))
    assert np.bincount(bins(numbers).ravel()) / numbers.size == pytest.approx([0.25] * 4, abs=0.05)
    assert data.visited == 0
    assert coordinator.schedule(look_up, args=(bins, [[-99.0]])).fetch(TIMEOUT).tolist() == [[0]]


def word_of(batch: Any) -> Any:
    """The words of a batch."""
    return batch["word"]


def id_of(batch: Any) -> Any:
    """The ids of a batch."""
    return batch["id"]


def x_of(batch: Any) -> Any:
    """The numbers of a batch."""
    return batch["x"]


def test_errors_on_workers(coordinator: ClusterCoordinator) -> None:
    """Of the data, of an inverse, of adapting there, of returning a layer: one sentence each; the job goes on."""
    numbers = coordinator.distribute_dataset(np.arange(10)).batch(5)
    fresh = StringLookup(name="film")
    with pytest.raises(
        errors.FunctionError, match=r"StringLookup 'film' takes strings, not \d of type int: use an Inte"
    ):
        fresh.adapt(numbers)
    with pytest.raises(errors.MisuseError, match="StringLookup 'film' was never adapted: call adapt"):
        coordinator.schedule(look_up, args=(fresh, ["a"]))
    with pytest.raises(errors.MisuseError, match="StringLookup 'film' was never adapted: call adapt"):
        coordinator.schedule(lambda: fresh(["a"]))
    inverse = StringLookup(vocabulary=["a"], invert=True)
    for step, message in (
        (lambda: inverse([2]), "was given the indices 2; they must be at least 0 and below 2"),
        (lambda: inverse.set_vocabulary(["b"]), "can't be changed on a worker, whose functions share it"),
    ):
        coordinator.schedule(step)
        with pytest.raises(errors.FunctionError, match=message):
            coordinator.join(TIMEOUT)
    with pytest.raises(errors.MisuseError, match=r"returned a layer: return what its get_state\(\) does"):
        coordinator.schedule(lambda: inverse).fetch(TIMEOUT)
    assert coordinator.schedule(lambda: inverse([1]).tolist()).fetch(TIMEOUT) == ["a"]


def test_where_nothing_is_pickled() -> None:
    """Layers are data, and adapting names only functions of the library."""
    options: dict[str, Any] = {"log_level": "ERROR", "allow_pickle": False}
    with LocalCluster(num_ps=1, num_workers=1, **options) as cluster, ParameterServerStrategy(cluster) as strategy:
        coordinator = ClusterCoordinator(strategy)
        layer = IntegerLookup().adapt(coordinator.distribute_dataset(np.array([3, 5, 5])).batch(2))
        assert coordinator.schedule(look_up, args=(layer, np.array([5, 3, 1]))).fetch(TIMEOUT).tolist() == [1, 2, 0]
        hashing = Hashing(7, mask_value=1)
        assert coordinator.schedule(look_up, args=(hashing, np.array([1]))).fetch(TIMEOUT).tolist() == [0]
        crossing = CategoryCrossing()
        assert coordinator.schedule(crossed, args=(crossing,)).fetch(TIMEOUT) == ["a_X_1"]


def crossed(layer: Any) -> Any:
    """A step that crosses."""
    return layer([["a"], [1]]).tolist()


class HeldWords:
    """A source that waits at a gate, once a worker has read some of it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return len(WORDS)

    def __getitem__(self, index: int) -> str:
        leave_mark(self.path, str(os.getpid()))
        wait_for_file(self.path)
        return str(WORDS[index])


@pytest.fixture(scope="module")
def own_coordinator() -> Iterator[tuple[LocalCluster, ClusterCoordinator]]:
    """One on a cluster whose workers may be killed."""
    with (
        LocalCluster(num_ps=1, num_workers=2, log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        yield cluster, ClusterCoordinator(strategy)


def test_each_example_once_when_a_worker_dies(
    own_coordinator: tuple[LocalCluster, ClusterCoordinator], gate: Gate
) -> None:
    """A worker killed while it counts: its shards are counted by others, and once; layers are sent to it again."""
    cluster, coordinator = own_coordinator
    data = coordinator.distribute_dataset(HeldWords(gate.path)).batch(8)
    layer = StringLookup(vocabulary=["a"])
    assert coordinator.schedule(look_up, args=(layer, ["a"])).fetch(TIMEOUT).tolist() == [1]

    def kill() -> None:
        until(lambda: len(marks(gate)) == 2, "both workers count")
        os.kill(cluster.pids["worker", 0], signal.SIGKILL)
        gate.open()

    counted = StringLookup(output_mode="tf_idf", mask_token="")
    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill)
        counted.adapt(data)
        killed.result(TIMEOUT)
    expected = StringLookup(output_mode="tf_idf", mask_token="").adapt(WORDS)
    assert counted.get_vocabulary() == expected.get_vocabulary()
    assert np.array_equal(counted.get_state()["idf"], expected.get_state()["idf"])
    values = [coordinator.schedule(look_up, args=(layer, ["a", "z"])) for _ in range(40)]
    assert {tuple(value.tolist()) for value in coordinator.fetch(values, TIMEOUT)} == {(1, 0)}
