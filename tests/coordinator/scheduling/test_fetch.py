"""RemoteValues: from not ready to ready, failed or cancelled; fetched alone or in any structure."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.conftest import Gate, wait_for_file
from tests.waiting import TIMEOUT

from pscluster.coordinator import (
    ClusterCoordinator,
    LocalCluster,
    ParameterServerStrategy,
    RemoteValueStatus,
    Variable,
    errors,
)


class Metrics(NamedTuple):
    """A structure with a name."""

    loss: Any
    accuracy: Any


@dataclass
class Report:
    """A structure with fields."""

    metrics: Any
    steps: int


def square(x: float) -> float:
    """A step."""
    return x * x


def test_any_nesting(coordinator: ClusterCoordinator) -> None:
    """fetch replaces the RemoteValues in any structure, and keeps the structure (row 43)."""
    one, four, nine = (coordinator.schedule(square, args=(i,)) for i in (1, 2, 3))
    ordered: Any = OrderedDict(b=four, a=one)
    lists: Any = defaultdict(list, {"k": [one]})
    structure = {
        "list": [one, (four, [nine])],
        "named": Metrics(one, {"deep": Metrics(four, None)}),
        "record": Report(nine, 5),
        "ordered": ordered,
        "defaults": lists,
        ("a", "tuple"): one,
        7: (),
    }
    fetched = coordinator.fetch(structure, TIMEOUT)
    assert fetched == {
        "list": [1, (4, [9])],
        "named": Metrics(1, {"deep": Metrics(4, None)}),
        "record": Report(9, 5),
        "ordered": OrderedDict(b=4, a=1),
        "defaults": {"k": [1]},
        ("a", "tuple"): 1,
        7: (),
    }
    assert [type(fetched[key]) for key in ("named", "record", "ordered", "defaults")] == [
        Metrics,
        Report,
        OrderedDict,
        defaultdict,
    ]
    assert structure["list"][0] is one, "what was given is as it was"


@pytest.mark.parametrize("value", [None, 3, "text", b"bytes", [1, (2,)], {"a": {}}, (), {1, 2}, 2.5, Metrics(1, 2)])
def test_what_is_no_remote_value(coordinator: ClusterCoordinator, value: Any) -> None:
    """fetch leaves everything else as it is (row 43)."""
    assert coordinator.fetch(value) == value
    assert type(coordinator.fetch(value)) is type(value)


def test_arrays_and_objects_are_left_alone(coordinator: ClusterCoordinator) -> None:
    """What fetch does not know is given back as the same object."""
    array, lock = np.arange(3), threading.Lock()
    fetched = coordinator.fetch([array, {"lock": lock}, coordinator.schedule(square, args=(2,))], TIMEOUT)
    assert fetched[0] is array
    assert fetched[1]["lock"] is lock
    assert fetched[2] == 4


def test_fetched_without_join(coordinator: ClusterCoordinator) -> None:
    """A value may be fetched alone, without a join, in any order, by `fetch` and by `get`."""
    values = [coordinator.schedule(square, args=(i,)) for i in range(30)]
    for i in (29, 0, 15, 15, 7):
        assert values[i].fetch(TIMEOUT) == values[i].get(TIMEOUT) == i * i


def test_the_same_object_at_every_fetch(coordinator: ClusterCoordinator) -> None:
    """A value is decoded once: who fetches it again gets the same object."""
    value = coordinator.schedule(np.arange, args=(5,))
    assert value.fetch(TIMEOUT) is value.get() is coordinator.fetch(value)
    assert value.fetch().flags.writeable


def test_states(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """A RemoteValue says how far it is, and for which function, without waiting (row 52)."""

    def fails(path: str) -> None:
        wait_for_file(path)
        raise ValueError("it failed")

    ready = coordinator.schedule(square, args=(3,))
    assert ready.fetch(TIMEOUT) == 9
    failing = coordinator.schedule(fails, args=(gate.path,))
    waiting = coordinator.schedule(square, args=(failing,))
    assert [value.status for value in (ready, failing, waiting)] == [
        RemoteValueStatus.READY,
        RemoteValueStatus.NOT_READY,
        RemoteValueStatus.NOT_READY,
    ]
    gate.open()
    with pytest.raises(ValueError, match="it failed"):
        coordinator.join(TIMEOUT)
    assert [value.status.value for value in (ready, failing, waiting)] == ["ready", "failed", "cancelled"]
    assert repr(ready) == "<RemoteValue of square: ready>"
    assert repr(failing) == "<RemoteValue of fails: failed>"
    assert ready.fetch() == 9, "what was ready stays so"


def test_none_and_nothing(coordinator: ClusterCoordinator) -> None:
    """A function that returns None, or nothing, has None as its value, and is ready."""
    for function in (lambda: None, lambda: print(end="")):
        value = coordinator.schedule(function)
        assert value.fetch(TIMEOUT) is None
        assert value.status is RemoteValueStatus.READY


def test_several_threads_fetch_one_value(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """Threads that wait for one value all get it."""

    def step(path: str) -> Any:
        wait_for_file(path)
        return np.arange(50_000)

    value = coordinator.schedule(step, args=(gate.path,))
    sums: list[int] = []
    threads = [threading.Thread(target=lambda: sums.append(int(value.fetch(TIMEOUT).sum()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate.open()
    for thread in threads:
        thread.join(TIMEOUT)
    assert sums == [sum(range(50_000))] * 8


def test_an_error_stops_a_fetch_of_many(coordinator: ClusterCoordinator) -> None:
    """fetch of a structure raises the first error in it."""

    def fails() -> None:
        raise KeyError("it failed")

    good = coordinator.schedule(square, args=(2,))
    assert good.fetch(TIMEOUT) == 4
    bad = coordinator.schedule(fails)
    with pytest.raises(KeyError, match="it failed"):
        coordinator.fetch({"good": good, "bad": [bad]}, TIMEOUT)
    with pytest.raises(KeyError, match="it failed"):
        coordinator.join(TIMEOUT)


def test_a_structure_that_contains_itself(coordinator: ClusterCoordinator) -> None:
    """fetch refuses it instead of following it forever."""
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="contain itself"):
        coordinator.fetch(loop)


def test_values_outlive_their_strategy(cluster: LocalCluster) -> None:
    """What was ready is here, not on the cluster: large arrays too, fetched for the first time afterwards."""
    with ParameterServerStrategy(cluster) as strategy:
        coordinator = ClusterCoordinator(strategy)
        values = [coordinator.schedule(np.full, args=(size, 7.0)) for size in (3, 300_000)]
        coordinator.join(TIMEOUT)
    assert [array.sum() for array in coordinator.fetch(values)] == [21, 2_100_000]


def test_a_handle_of_a_variable_that_is_gone(cluster: LocalCluster) -> None:
    """A function that returned a variable: once the strategy is closed, to use it is refused with a sentence."""
    with ParameterServerStrategy(cluster) as strategy, strategy.scope():
        coordinator = ClusterCoordinator(strategy)
        w = Variable(1.0, name="w")
        value = coordinator.schedule(lambda: w)
        assert value.fetch(TIMEOUT).read_value() == 1.0
    with pytest.raises(errors.StaleError, match="this job is over"):
        value.fetch().read_value()
