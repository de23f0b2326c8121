"""Per-worker objects: one on each worker, shared by all functions, made anew after its death, freed with its handle."""

from __future__ import annotations

import contextvars
import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import NUM_WORKERS, Everywhere
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    LocalCluster,
    ParameterServerStrategy,
    PerWorker,
    PerWorkerVariable,
    Variable,
    errors,
    experimental_get_current_worker_index,
)


class Model:
    """An object that can't be sent, and that the workers can count."""

    def __init__(self, weights: int = 0) -> None:
        self.lock, self.uses, self.weights = threading.Lock(), 0, weights
        self.made_by = threading.get_ident()

    def use(self) -> int:
        """Count a use."""
        self.uses += 1
        return self.uses


def count_models() -> int:
    """How many there are in this process."""
    gc.collect()
    return sum(type(thing).__name__ == "Model" for thing in gc.get_objects())


def use(model: PerWorker[Model]) -> tuple[int, bool]:
    """A step that is passed the model."""
    made = model.get()
    return made.use(), made.made_by == threading.get_ident()


def user_of(model: PerWorker[Model]) -> Callable[[], int]:
    """A step that captures the model."""
    return lambda: model.get().use()


def test_one_for_all_functions_of_a_worker(coordinator: ClusterCoordinator, everywhere: Everywhere) -> None:
    """As an argument, captured, and in a per-worker dataset: the same object; made at first use, where it is used."""
    before = everywhere(coordinator, count_models)
    model = coordinator.per_worker(Model)
    assert everywhere(coordinator, count_models) == before, "nothing is made until a step asks"
    assert everywhere(coordinator, use, model) == [(1, True)] * NUM_WORKERS
    assert everywhere(coordinator, lambda: use(model)) == [(2, True)] * NUM_WORKERS
    elements = iter(coordinator.create_per_worker_dataset(lambda: iter(lambda: model.get().use(), None)))
    assert everywhere(coordinator, next, elements) == [3] * NUM_WORKERS
    assert everywhere(coordinator, count_models) == [count + 1 for count in before]
    assert coordinator.schedule(lambda: model).fetch(TIMEOUT) is model
    assert repr(model) == "<PerWorker 'Model'>"
    del elements


def test_objects_of_objects_and_variables(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
    """A function that makes one may use another one, read variables, and knows its worker."""
    with strategy.scope():
        w = Variable(7, name="w")
    inner = coordinator.per_worker(lambda: [int(w.read_value())])
    outer = coordinator.per_worker(lambda: (inner.get(), experimental_get_current_worker_index()))
    seen, worker = coordinator.schedule(lambda: outer.get()).fetch(TIMEOUT)
    assert seen == [7]
    assert worker in range(NUM_WORKERS)


def test_an_error_and_then_none(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    """It fails the step that asks, with its class, object and worker; other steps run; the next one tries again."""
    weights = tmp_path / "weights"

    def load() -> Model:
        return Model(int(weights.read_text()))

    model = coordinator.per_worker(load)
    assert coordinator.schedule(lambda: 3).fetch(TIMEOUT) == 3
    coordinator.schedule(lambda: model.get().weights)
    with pytest.raises(FileNotFoundError, match="weights") as caught:
        coordinator.join(TIMEOUT)
    assert isinstance(caught.value, errors.FunctionError)
    assert "raised by the function that makes per-worker object" in caught.value.remote_traceback
    assert ".load' on worker:" in caught.value.remote_traceback or "'load' on worker:" in caught.value.remote_traceback
    weights.write_text("5")
    assert coordinator.schedule(lambda: model.get().weights).fetch(TIMEOUT) == 5


def test_freed_with_its_handle(coordinator: ClusterCoordinator, everywhere: Everywhere) -> None:
    """Workers drop it once neither the script nor a function of the script's has its handle."""
    before = everywhere(coordinator, count_models)
    model = coordinator.per_worker(Model)

    step = user_of(model)
    assert everywhere(coordinator, step) == [1] * NUM_WORKERS
    del model
    gc.collect()
    assert everywhere(coordinator, step) == [2] * NUM_WORKERS, "the function keeps it"
    del step

    def is_freed() -> bool:
        gc.collect()
        return everywhere(coordinator, count_models) == before

    until(is_freed, "the workers have dropped it")


def test_freed_with_the_job(cluster: LocalCluster, everywhere: Everywhere) -> None:
    """The next job of the same workers has none of the objects of the last one."""
    with ParameterServerStrategy(cluster) as strategy:
        coordinator = ClusterCoordinator(strategy)
        before = everywhere(coordinator, count_models)
        model = coordinator.per_worker(Model)
        assert everywhere(coordinator, use, model) == [(1, True)] * NUM_WORKERS
    with ParameterServerStrategy(cluster) as strategy:
        coordinator = ClusterCoordinator(strategy)
        until(lambda: everywhere(coordinator, count_models) == before, "they are gone")


def test_bad_uses(coordinator: ClusterCoordinator) -> None:
    """Each is refused at once, with what to do instead."""
    wrong: Any = Model()
    with pytest.raises(TypeError, match="per_worker takes a function that makes the object, not a Model"):
        coordinator.per_worker(wrong)
    with pytest.raises(TypeError, match=r"its variable 'wrong.lock' is a _thread.lock, which can't be pickled"):
        coordinator.per_worker(lambda: wrong)
    with pytest.raises(errors.MisuseError, match=r"'Model' is on the workers: pass it to schedule\(\), or use it in a"):
        coordinator.per_worker(Model).get()
    leaves = coordinator.per_worker(lambda: sys.exit("no GPU"))
    coordinator.schedule(lambda: leaves.get())
    with pytest.raises(errors.FunctionError, match="no GPU"):
        coordinator.join(TIMEOUT)


def test_variables_of_each_worker(coordinator: ClusterCoordinator, everywhere: Everywhere) -> None:
    """Each worker has its own value, also in arithmetic, from the initial one; all are read in the script."""
    count = coordinator.per_worker_variable(0, name="count")
    sums = coordinator.per_worker_variable([0.5, 1.0])

    def step(variable: PerWorkerVariable) -> tuple[int, list[float], str]:
        worker = experimental_get_current_worker_index()
        variable.assign_add(1)
        sums.assign(np.add(sums, [worker, 0.0])).assign_sub(0.5)
        return int(variable), sums.numpy().tolist(), variable.device

    expected = [(1, [float(worker), 0.5], f"/job:worker/task:{worker}") for worker in range(NUM_WORKERS)]
    assert everywhere(coordinator, step, count) == expected
    assert [value.tolist() for value in sums.read_all(TIMEOUT)] == [own for _, own, _ in expected]
    assert [(value.dtype, value.shape) for value in count.read_all(TIMEOUT)] == [(count.dtype, ())] * NUM_WORKERS
    assert (sums.dtype.name, sums.shape, repr(count)) == ("float32", (2,), "<PerWorkerVariable 'count': int64 ()>")

    def add(times: int) -> None:
        for _ in range(times):
            count.assign_add(1)

    with_threads = functools.partial(_in_threads, add)
    coordinator.schedule(with_threads, args=(4, 500)).fetch(TIMEOUT)
    assert sum(count.read_all(TIMEOUT)) == NUM_WORKERS + 2000


def _in_threads(function: Callable[..., Any], threads: int, *args: Any) -> None:
    running = [threading.Thread(target=contextvars.copy_context().run, args=(function, *args)) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def test_wrong_uses_of_a_worker_s_variable(coordinator: ClusterCoordinator) -> None:
    """Each says what is wrong, and leaves the value as it is."""
    v = coordinator.per_worker_variable(np.zeros(2), name="v")
    for use_here in (v.read_value, lambda: v.assign(1), lambda: v + 1):
        with pytest.raises(errors.MisuseError, match="'v' has a value on each worker, and none here: use it in"):
            use_here()
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: v.assign([1.0, 2.0, 3.0]), r"'v' has shape \(2,\), but the value has shape \(3,\)"),
        (lambda: v.assign_add(1j), "'v' is float64, but the value is complex128"),
        (lambda: v.read_all(), "read_all of per-worker variable 'v' was called on a worker"),
    ]
    for step, message in wrong:
        with pytest.raises((errors.InvalidUpdateError, errors.MisuseError), match=message):
            coordinator.schedule(step).fetch(TIMEOUT)
        with pytest.raises((errors.InvalidUpdateError, errors.MisuseError)):
            coordinator.join(TIMEOUT)
    assert [value.tolist() for value in v.read_all(TIMEOUT)] == [[0, 0]] * NUM_WORKERS
    with pytest.raises(TypeError, match=r"takes an array or a number, not .*: for values .* use per_worker\(fn\)"):
        coordinator.per_worker_variable(Model)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidUpdateError, match=r"'u' is int8, which holds -128\.\.127"):
        coordinator.per_worker_variable(300, dtype=np.int8, name="u")
    with pytest.raises(errors.MisuseError, match="'u' can't have elements of type <U1"):
        coordinator.per_worker_variable("a", name="u")


def test_made_anew_after_a_death() -> None:
    """A worker that was killed makes its own again, at the next use; every function ends."""
    with (
        LocalCluster(num_ps=1, num_workers=1, log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        coordinator = ClusterCoordinator(strategy)
        model = coordinator.per_worker(Model)
        count = coordinator.per_worker_variable(10)

        def step() -> tuple[int, int]:
            count.assign_add(1)
            return os.getpid(), model.get().use()

        first, uses = coordinator.schedule(step).fetch(TIMEOUT)
        assert (first, uses) == (cluster.pids["worker", 0], 1)
        os.kill(first, signal.SIGKILL)
        values = [coordinator.schedule(step) for _ in range(3)]
        again = coordinator.fetch(values, TIMEOUT)
        assert [uses for _, uses in again] == [1, 2, 3]
        assert {pid for pid, _ in again} == {cluster.pids["worker", 0]} != {first}
        assert count.read_all(TIMEOUT) == [13]
