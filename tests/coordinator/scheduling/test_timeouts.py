"""`schedule(timeout=)`: functions that run too long are stopped, run again, or cost their worker."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import NUM_WORKERS, Gate, wait_for_file
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, RemoteValueStatus, Variable, errors
from pscluster.coordinator.scheduling.decisions import scheduler


@pytest.fixture
def counter(strategy: ParameterServerStrategy) -> Variable:
    """Counts what functions do."""
    with strategy.scope():
        return Variable(0, name="counter")


def reads_for_ever(variable: Variable) -> None:
    """It would be stopped at any of its reads."""
    variable.assign_add(1)
    while True:
        variable.read_value()
        time.sleep(0.01)


def test_it_is_stopped_at_its_next_call(coordinator: ClusterCoordinator, counter: Variable) -> None:
    """The error names the function, the limit and the worker; it is a TimeoutError, and the worker goes on."""
    until(lambda: coordinator.workers_up == NUM_WORKERS, "all workers are up")
    value = coordinator.schedule(reads_for_ever, args=(counter,), timeout=0.3)
    with pytest.raises(errors.FunctionTimeoutError, match=r"reads_for_ever ran longer than its timeout of 0.3 s on w"):
        coordinator.join(TIMEOUT)
    with pytest.raises(TimeoutError):
        value.fetch(TIMEOUT)
    assert coordinator.workers_up == NUM_WORKERS
    assert coordinator.schedule(lambda: 3, timeout=TIMEOUT).fetch(TIMEOUT) == 3


def test_it_is_run_again(coordinator: ClusterCoordinator, counter: Variable, tmp_path: Path) -> None:
    """Each time it may run as long; what it did counts once. (A slow machine may need another run than the third.)"""
    folder = str(tmp_path)

    def slow_at_first() -> str:
        counter.assign_add(1)
        marks = len(list(Path(folder).iterdir()))
        (Path(folder) / str(marks)).touch()
        while marks < 2:
            counter.read_value()
            time.sleep(0.01)
        return "done"

    assert coordinator.schedule(slow_at_first, timeout=0.3, retries=20).fetch(TIMEOUT) == "done"
    assert len(list(tmp_path.iterdir())) >= 3
    assert counter.numpy() == 1


def test_those_after_it_wait_for_nothing(coordinator: ClusterCoordinator, counter: Variable) -> None:
    """The time of a function begins when those before it on its worker have ended."""

    def naps() -> None:
        counter.assign_add(1)
        time.sleep(0.2)

    for _ in range(8 * NUM_WORKERS):
        coordinator.schedule(naps, timeout=1.5)
    coordinator.join(TIMEOUT)
    assert counter.numpy() == 8 * NUM_WORKERS


def test_one_that_does_not_stop(coordinator: ClusterCoordinator, counter: Variable, gate: Gate) -> None:
    """It fails in time though it reaches no call of ours, and what it still does is refused, or dropped.

    Others run elsewhere meanwhile, and its worker is used again when it has ended.
    """

    def stubborn(path: str, updates: bool) -> int:
        wait_for_file(path)
        if updates:
            counter.assign_add(100)
        return 1

    values = [coordinator.schedule(stubborn, args=(gate.path, False), timeout=0.2)]
    with pytest.raises(errors.FunctionTimeoutError, match=r"stubborn ran longer than its timeout of 0\.2 s"):
        values[0].fetch(TIMEOUT)
    with pytest.raises(errors.FunctionTimeoutError, match="may have been applied"):
        coordinator.join(TIMEOUT)
    for _ in range(20):
        coordinator.schedule(counter.assign_add, args=(1,))
    coordinator.join(TIMEOUT)
    assert coordinator.workers_up == NUM_WORKERS
    values.append(coordinator.schedule(stubborn, args=(gate.path, True), timeout=0.2))
    with pytest.raises(errors.FunctionTimeoutError):
        coordinator.join(TIMEOUT)
    assert coordinator.explain().count("stubborn has ended but is still running there") == NUM_WORKERS
    workers = coordinator._dispatcher.status.stats().workers
    assert [(worker.has, worker.running.rpartition(".")[2]) for worker in workers] == [(1, "stubborn")] * NUM_WORKERS
    waits = coordinator.schedule(lambda: 3)
    with pytest.raises(errors.WaitTimeoutError):
        waits.fetch(0.1)
    gate.open()
    assert waits.fetch(TIMEOUT) == 3
    until(lambda: "still runs" not in coordinator.explain(), "the workers are used again")
    assert counter.numpy() == 20, "what it did after its time was refused"
    assert [value.status for value in values] == [RemoteValueStatus.FAILED] * 2


def test_a_result_that_comes_too_late(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    """With retries, too, nothing counts that a run returns after its time."""
    folder = str(tmp_path)

    def slow_at_first() -> int:
        marks = len(list(Path(folder).iterdir()))
        (Path(folder) / str(marks)).touch()
        time.sleep(1.0 if not marks else 0.0)
        return marks

    assert coordinator.schedule(slow_at_first, timeout=0.2, retries=20).fetch(TIMEOUT) > 0


def test_a_stubborn_one_is_run_elsewhere(
    coordinator: ClusterCoordinator, counter: Variable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With retries another worker gets it."""
    monkeypatch.setattr(scheduler, "STOP_SECONDS", 0.2)
    folder = str(tmp_path)

    def stubborn_at_first() -> str:
        here = Path(folder)
        if not (here / "begun").exists():
            (here / "begun").touch()
            while not (here / "go-on").exists():
                time.sleep(0.01)
        counter.assign_add(1)
        return "done"

    assert coordinator.schedule(stubborn_at_first, timeout=0.5, retries=20).fetch(TIMEOUT) == "done"
    (tmp_path / "go-on").touch()
    until(lambda: coordinator.workers_up == NUM_WORKERS, "the worker is back")
    assert counter.numpy() == 1


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), True, "3", [1]])
def test_bad_timeouts(coordinator: ClusterCoordinator, wrong: Any) -> None:
    """They are refused where they are given."""
    with pytest.raises(ValueError, match=r"timeout is .*; it must be a number of seconds, above 0, or None"):
        coordinator.schedule(reads_for_ever, timeout=wrong)
    assert coordinator.done()
