"""A cut at one moment holds no half of a function that may still run again, however the function was interrupted.

There are three ways to begin and not end, each while a cut waits for a moment at which no function runs: the worker
dies or loses its lease; the function raises and has `retries`; it runs longer than its `timeout`. The two variables to
which each function adds 1 in turn, on two servers, are equal in the cut and afterwards.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from tests.faults.steps import first_time, note, wait_for
from tests.faults.support import Job, RawClient, running_job
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import FixedShardsPartitioner, RemoteValue, Variable, callbacks, metrics
from pscluster.coordinator.api import Checkpoint, CheckpointManager, ParameterServerStrategy, RestoredFrom
from pscluster.coordinator.checkpoints import tools
from pscluster.coordinator.checkpoints.index import read_index
from pscluster.coordinator.checkpoints.saved import SavedVariables
from pscluster.core.context import experimental_get_current_worker_index
from pscluster.core.errors import (
    CancelledError,
    CheckpointError,
    FunctionError,
    FunctionTimeoutError,
    PSUnavailableError,
    StaleError,
    UnavailableError,
    WaitTimeoutError,
)

WAYS = ["killed", "raised", "too long"]

T = TypeVar("T")

cut_short = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Two servers and two workers."""
    with running_job(2, 2, worker_lease=3.0) as made:
        made.until_up(2)
        with made.strategy.scope():
            Variable(np.zeros(2), name="on both", partitioner=FixedShardsPartitioner(2))
        yield made


class Half:
    """A function that adds 1 to a variable, is interrupted the first time, and adds 1 to another one."""

    def __init__(self, job: Job, way: str, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.job, self.way, self.folder = job, way, str(folder)
        made = []
        for name, shard in zip(("first", "second"), job.strategy.variables[0].variables, strict=True):
            with job.strategy.colocate_vars_with(shard):
                made.append(Variable(np.zeros(4), name=f"{folder.name}-{name}"))
        self.first, self.second = made
        assert self.first.device != self.second.device

    def values(self) -> tuple[float, float]:
        """The values of the two variables."""
        return self.first.numpy()[0], self.second.numpy()[0]

    def step(self) -> Callable[..., float]:
        """Run as the step."""
        first, second, way, folder = self.first, self.second, self.way, self.folder

        def step(arrays: Any = ()) -> float:
            total = float(sum(np.sum(array) for array in arrays))
            first.assign_add(np.ones(4))
            if first_time(folder, "begun"):
                note(folder, "where", str(experimental_get_current_worker_index()))
                while way == "too long":
                    first.numpy()
                wait_for(folder, "raise")
                raise ValueError("after its first update")
            second.assign_add(np.ones(4))
            return total

        return step

    def begin(self) -> RemoteValue:
        """Schedule the function, and wait until it has begun."""
        timeout = 1.5 if self.way == "too long" else None
        value = self.job.coordinator.schedule(self.step(), retries=5, timeout=timeout)
        wait_for(self.folder, "where")
        return value

    def fall(self) -> None:
        """Interrupt it, or wait until it is interrupted."""
        if self.way == "killed":
            self.job.kill(int(wait_for(self.folder, "where")))
        elif self.way == "frozen":
            pid = self.job.cluster.pids["worker", int(wait_for(self.folder, "where"))]
            os.kill(pid, signal.SIGSTOP)
            until(lambda: self.job.coordinator.workers_up < 2, "its lease is over")
            os.kill(pid, signal.SIGCONT)
            note(self.folder, "raise")  # it continues, and is refused
        elif self.way == "raised":
            note(self.folder, "raise")

    def meanwhile(self, cut: Callable[[], T]) -> T:
        """Return the result of `cut`, which waits for the function while that is interrupted."""
        with ThreadPoolExecutor(1) as pool:
            future: Future[T] = pool.submit(cut)
            stats = self.job.coordinator._dispatcher.status.stats
            until(lambda: future.done() or stats().paused, "somebody waits for all functions to end")
            self.fall()
            return future.result(TIMEOUT)


@pytest.fixture
def half(job: Job, way: str, tmp_path: Path) -> Half:
    """A function on this test's own variables."""
    until(lambda: job.coordinator.workers_up, "a worker is up")
    return Half(job, way, tmp_path)


def saved(half: Half, path: str) -> tuple[float, float]:
    """The values of the two variables in a checkpoint."""
    variables = SavedVariables(path)
    return variables[half.first.name][0], variables[half.second.name][0]


@cut_short
def test_a_checkpoint(half: Half, tmp_path: Path) -> None:
    """A checkpoint has the whole function, and so has what is restored from it."""
    with CheckpointManager(str(tmp_path / "checkpoints"), strategy=half.job.strategy) as manager:
        half.begin()
        path = half.meanwhile(manager.save).result()
        assert saved(half, path) == (1, 1)
        half.job.join()
        half.job.coordinator.schedule(half.step()).fetch(TIMEOUT)
        assert half.values() == (2, 2)
        manager.restore(partial=True)
        assert half.values() == (1, 1)


@cut_short
def test_a_restore(half: Half, tmp_path: Path) -> None:
    """After a restore nothing of the function is left, on any server, and later functions count."""
    with CheckpointManager(str(tmp_path / "checkpoints"), strategy=half.job.strategy) as manager:
        manager.save()
        half.begin()
        half.meanwhile(lambda: manager.restore(partial=True))
        half.job.join()
        assert half.values() == (0, 0)
        half.job.coordinator.schedule(half.step()).fetch(TIMEOUT)
        assert half.values() == (1, 1)


@cut_short
def test_a_concurrent_evaluation(half: Half) -> None:
    """The evaluation reads the whole function."""
    first, second = half.first, half.second

    def step(_: Any) -> tuple[Any]:
        return (first.numpy()[0] + 1000 * second.numpy()[0],)

    data = half.job.coordinator.distribute_dataset(np.arange(1.0), name=half.folder)
    half.begin()
    results = half.meanwhile(
        lambda: half.job.coordinator.evaluate(step, data, [metrics.Sum()], shards=1, concurrent=True, timeout=TIMEOUT)
    )
    assert results == {"sum": 1001}
    half.job.join()


@cut_short
def test_cancelling_what_waits(half: Half) -> None:
    """Functions that have begun end; those that are cancelled have not begun."""
    begun = half.begin()
    waiting = half.job.coordinator.schedule(max, args=(begun, 0))
    assert half.meanwhile(lambda: half.job.coordinator.cancel_waiting([begun, waiting])) == 1
    assert (begun.status.value, waiting.status.value) == ("ready", "cancelled")
    half.job.join()
    assert half.values() == (1, 1)


@pytest.mark.parametrize("way", ["killed", "frozen", "raised"])  # its functions have no timeout
def test_the_end_of_a_training(half: Half) -> None:
    """A training that is to stop ends with whole functions only, and its position says so."""
    coordinator, folder = half.job.coordinator, half.folder
    half.job.until_up(2)  # one is interrupted, the other continues

    class Stop(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.training.stop_training = True

    data = coordinator.distribute_dataset(np.arange(100.0), name=folder, retries=1, on_error="raise").batch(1)
    step = half.step()
    if half.way == "raised":
        inner = step

        def step(batch: Any) -> float:
            from pscluster.core.errors import DatasetError

            try:
                return inner(batch)
            except ValueError as error:
                raise DatasetError("its examples can't be read") from error

    half.meanwhile(lambda: coordinator.fit(step, data, steps_per_execution=1, callbacks=[Stop()], verbose=0))
    visited, (first, second) = data.visited, half.values()
    assert 0 < visited < 100
    assert first == second == visited


@cut_short
def test_an_example_counts_once(half: Half, tmp_path: Path) -> None:
    """An example counts once, even after restoring a checkpoint made while its function was interrupted."""
    coordinator = half.job.coordinator
    data = coordinator.distribute_dataset(np.arange(6.0), name=half.folder).batch(1)

    def train(count: int | None = None) -> None:
        timeout = 1.5 if half.way == "too long" else None
        step = half.step()
        for index, part in enumerate(data):
            coordinator.schedule(step, args=(part,), retries=5, timeout=timeout)
            if index + 1 == count:
                break

    with CheckpointManager(str(tmp_path / "checkpoints"), strategy=half.job.strategy) as manager:
        train(2)
        until(lambda: Path(half.folder, "where").exists() or half.job.coordinator.done(), "it begins")
        path = half.meanwhile(manager.save).result()
        first, second = saved(half, path)
        assert first == second > 0
        half.job.join()
        train()
        half.job.join()
        assert half.values() == (6, 6)
        manager.restore(partial=True)
        train()
        half.job.join()
        assert half.values() == (6, 6)


def test_what_does_not_end_is_named(job: Job, tmp_path: Path) -> None:
    """A cut that cannot be made names the functions that have begun and where they run, or that they need a worker."""
    job.until_up(2)
    folder = str(tmp_path)

    def held() -> None:
        note(folder, f"where-{first_time(folder, 'first')}", str(experimental_get_current_worker_index()))
        wait_for(folder, "go")

    value = job.coordinator.schedule(held)
    worker = int(wait_for(folder, "where-True"))
    with CheckpointManager(str(tmp_path / "checkpoints"), strategy=job.strategy, barrier_timeout=0.3) as manager:
        with pytest.raises(WaitTimeoutError, match=rf"after 0\.3 s functions still run: held on worker {worker}"):
            manager.save()
        before = [(link, link.restarts) for link in job.coordinator._dispatcher.state.workers]
        for index in range(2):
            job.kill(index)
        until(lambda: all(not link.up or link.restarts > count for link, count in before), "both are gone, or back")
        with pytest.raises(WaitTimeoutError, match=r"held(, begun)? on worker \d"):
            manager.save()
        assert manager.checkpoints == []
        note(folder, "go")
        value.fetch(TIMEOUT)
        manager.save()


def test_nothing_that_has_begun_ends_without_workers(tmp_path: Path) -> None:
    """If a training is to end and no worker returns, it does not wait but says why it can't end."""
    with running_job(1, 1, restart=False) as job:
        folder = str(tmp_path)

        def held() -> None:
            note(folder, "begun")
            wait_for(folder, "go")

        job.coordinator.schedule(held)
        wait_for(folder, "begun")
        stranded = job.coordinator._dispatcher.status.stranded
        assert stranded(0.1) == ""
        job.kill(0)
        until(lambda: stranded(0.1), "it is known that there is no worker")
        assert "interrupted functions wait to be run again: held, begun on worker 0" in stranded(0.1)
        assert stranded(60.0) == ""


@pytest.mark.parametrize("how", ["too long", "cancelled", "all cancelled"])
def test_what_is_ended_and_goes_on(job: Job, how: str, tmp_path: Path) -> None:
    """Updates of a function that was ended but still runs are refused: a cut keeps what it did before, for good."""
    coordinator, folder = job.coordinator, str(tmp_path)
    job.until_up(2)
    half = Half(job, how, tmp_path)
    first, second = half.first, half.second

    def goes_on() -> None:
        first.assign_add(np.ones(4))
        note(folder, "begun")
        wait_for(folder, "go")
        note(folder, "refused", "")
        second.assign_add(np.ones(4))

    value = coordinator.schedule(goes_on, timeout=1.0 if how == "too long" else None)
    waiting = coordinator.schedule(max, args=(value, 0))
    others = [coordinator.schedule(abs, args=(-n,)) for n in range(5)]
    wait_for(folder, "begun")
    with CheckpointManager(str(tmp_path / "checkpoints"), strategy=job.strategy, barrier_timeout=TIMEOUT) as manager:
        before = job.strategy.context.partly_applied.count
        if how == "cancelled":
            coordinator.fetch(others, TIMEOUT)
            assert value.cancel()
            assert not value.cancel(), "it has ended"
        elif how == "all cancelled":
            coordinator.fetch(others, TIMEOUT)
            assert coordinator.cancel() == 2
        expected = FunctionTimeoutError if how == "too long" else CancelledError
        with pytest.raises(expected, match="may have been applied"):
            value.fetch(TIMEOUT)
        with pytest.raises(CancelledError):
            waiting.fetch(TIMEOUT)
        if how == "too long":
            with pytest.raises(FunctionTimeoutError):
                coordinator.join(TIMEOUT)
        coordinator.join(TIMEOUT)
        path = manager.save().result()
        assert saved(half, path) == (1, 0)
        assert read_index(path).partly_applied == before + 1
        note(folder, "go")
        wait_for(folder, "refused")
        until(lambda: "still runs" not in coordinator.explain(), "it has ended")
        coordinator.fetch([coordinator.schedule(abs, args=(-n,)) for n in range(5)], TIMEOUT)
        assert half.values() == (1, 0)


def test_a_function_that_never_stops_costs_its_worker_process(job: Job, tmp_path: Path) -> None:
    """As a last resort its process is killed and restarted; the function does not run again, others do."""
    coordinator, folder = job.coordinator, str(tmp_path)
    job.until_up(2)

    def hangs() -> None:
        note(folder, f"where-{first_time(folder, 'first')}", str(experimental_get_current_worker_index()))
        wait_for(folder, "never")

    value = coordinator.schedule(hangs, timeout=0.3)
    worker = int(wait_for(folder, "where-True"))
    with pytest.raises(FunctionTimeoutError):
        coordinator.join(TIMEOUT)
    pid = job.cluster.pids["worker", worker]
    assert not value.cancel(kill_after=0), "it has ended, and its process is ended now"
    others = [coordinator.schedule(abs, args=(-n,)) for n in range(20)]
    job.cluster.wait_restarted("worker", worker, pid, timeout=TIMEOUT)
    assert coordinator.fetch(others, TIMEOUT) == list(range(20))
    job.until_up(2)
    assert not Path(folder, "where-False").exists()
    coordinator.join(TIMEOUT)


def test_what_was_applied_in_part_for_good_is_named(job: Job, tmp_path: Path) -> None:
    """A function that fails, is stopped or is cancelled after an update says so, and the checkpoint names it."""
    coordinator, folder = job.coordinator, str(tmp_path)
    job.until_up(2)
    with job.strategy.scope():
        count = Variable(np.zeros(4), name="applied in part")

    def fails(applies: bool) -> None:
        if applies:
            count.assign_add(np.ones(4))
        raise ValueError("the reason")

    def endless(name: str) -> None:
        count.assign_add(np.ones(4))
        note(folder, name)
        while True:
            count.numpy()

    manager = CheckpointManager(str(tmp_path / "checkpoints"), strategy=job.strategy)
    manager.restore(manager.save().result())  # forget what other tests have left
    with pytest.raises(ValueError, match="reason") as caught:
        coordinator.schedule(fails, args=(False,)).fetch(TIMEOUT)
    assert isinstance(caught.value, FunctionError)
    assert "have been applied" not in str(caught.value)
    assert not caught.value.partly_applied
    with pytest.raises(ValueError, match="reason"):
        coordinator.join(TIMEOUT)
    assert read_index(manager.save().result()).partly_applied == 0

    stopped = coordinator.schedule(endless, args=("running",))
    wait_for(folder, "running")
    with pytest.raises(ValueError, match=r"the reason\nSome of its updates may have been applied: they stay") as caught:
        coordinator.schedule(fails, args=(True,)).fetch(TIMEOUT)
    assert isinstance(caught.value, FunctionError)
    assert caught.value.partly_applied
    with pytest.raises(CancelledError, match=r"endless was cancelled because another .* may have been applied"):
        stopped.fetch(TIMEOUT)
    with pytest.raises(ValueError, match="reason"):
        coordinator.join(TIMEOUT)
    with pytest.raises(TimeoutError, match=r"endless ran longer .*\nSome of its updates may have been applied"):
        coordinator.schedule(endless, args=("again",), timeout=0.1).fetch(TIMEOUT)
    with pytest.raises(TimeoutError):
        coordinator.join(TIMEOUT)
    path = manager.save().result()
    index = read_index(path)
    assert index.partly_applied == 3
    heads = ["fails failed on worker", "endless was cancelled because", "endless ran longer than its timeout of 0.1 s"]
    assert [any(entry.startswith(head) for entry in index.partly_applied_last) for head in heads] == [True] * 3
    shown = tools.inspect(path)
    assert "may have left some of their updates: 3" in shown
    assert "ValueError: the reason" in shown
    manager.restore(path)
    assert read_index(manager.save().result()).partly_applied == 0
    manager.close()


# Terms


def test_what_was_sent_before_a_restore(tmp_path: Path) -> None:
    """A late update is refused, whether all of it or a part was in transit, even by a restarted server."""
    with running_job(2, 1, durability="log") as job:
        with job.strategy.scope():
            variables = [Variable(np.zeros(4), name=name, partitioner=FixedShardsPartitioner(1)) for name in "ab"]

        def values() -> list[float]:
            return [variable.numpy()[0] for variable in variables]

        def step() -> None:
            for variable in variables:
                variable.assign_add(np.ones(4))

        def late(function: int) -> None:
            for index in range(2):
                with RawClient(job, index) as client:
                    mine = next(variable for variable in variables if variable.owners == (index,))
                    request, payload = client.add(mine, 100.0, function=function)
                    with pytest.raises(StaleError, match="a checkpoint was restored since this update was sent"):
                        client.session(request, payload)

        manager = CheckpointManager(str(tmp_path), strategy=job.strategy)
        manager.save()
        job.coordinator.schedule(step).fetch(TIMEOUT)
        with RawClient(job, 0) as client, ThreadPoolExecutor(1) as pool:
            mine = next(variable for variable in variables if variable.owners == (0,))
            request, payload = client.add(mine, 100.0, function=10**6)
            begun, go_on = threading.Event(), threading.Event()

            def frames() -> Iterator[bytes]:
                for index, frame in enumerate(client.frames(request, payload, 3)):
                    if index == 1:  # the server learns from the first what follows
                        begun.set()
                        go_on.wait(TIMEOUT)
                    yield frame

            pushed = pool.submit(client.send_frames, frames())
            assert begun.wait(TIMEOUT)
            manager.restore()
            go_on.set()
            with pytest.raises(StaleError, match="a checkpoint was restored"):
                pushed.result(TIMEOUT)
        assert values() == [0, 0]
        late(10**6 + 1)
        job.coordinator.schedule(step).fetch(TIMEOUT)
        variables[0].assign_add(np.ones(4))
        assert values() == [2, 1]
        for index in range(2):
            job.cluster.wait_restarted("ps", index, job.cluster.kill("ps", index, timeout=TIMEOUT), timeout=TIMEOUT)
        assert values() == [2, 1]
        late(10**6 + 2)
        job.coordinator.schedule(step).fetch(TIMEOUT)
        assert values() == [3, 2]


@contextmanager
def broken_off(tmp_path: Path) -> Iterator[tuple[Job, CheckpointManager, list[Variable]]]:
    """A job whose restore was interrupted: one of the two servers was restarted just before its last step."""
    with running_job(2, 1, shards=2, durability="snapshot") as job:
        with job.strategy.scope():
            count = Variable(np.zeros(4), name="count")
        manager = CheckpointManager(str(tmp_path), strategy=job.strategy)
        manager.save()
        job.coordinator.schedule(count.assign_add, args=(np.ones(4),)).fetch(TIMEOUT)
        paused = Checkpoint._paused

        @contextmanager
        def restarted(self: Checkpoint) -> Iterator[None]:
            with paused(self):
                old = job.cluster.kill("ps", 1, timeout=TIMEOUT)
                job.cluster.wait_restarted("ps", 1, old, timeout=TIMEOUT)
                yield

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpoint, "_paused", restarted)
            with pytest.raises(
                UnavailableError, match=r"ps 1 was restarted and has nothing to restore any more: restore again"
            ) as caught:
                manager.restore()
        assert not isinstance(caught.value, PSUnavailableError), "the job is not lost"
        with pytest.raises(
            CheckpointError, match=r"nothing is saved, because the restore of .*ckpt-000001 was broken off"
        ):
            manager.save()
        assert len(manager.checkpoints) == 1
        job.coordinator.schedule(count.assign_add, args=(np.ones(4),)).fetch(TIMEOUT)
        yield job, manager, [count]


def test_a_restore_that_was_broken_off(tmp_path: Path) -> None:
    """It says that a server must be waited for; nothing mixed is saved until it is repeated or given up."""
    with broken_off(tmp_path) as (job, manager, (count,)):
        manager.restore()
        assert count.numpy().tolist() == [0] * 4
        job.coordinator.schedule(count.assign_add, args=(np.ones(4),)).fetch(TIMEOUT)
        assert SavedVariables(manager.save().result())["count"].tolist() == [1] * 4
    with broken_off(tmp_path / "given up") as (job, manager, (count,)):
        manager.checkpoint.give_up_restore()
        mixed = count.numpy().tolist()
        assert mixed != [0] * 4
        path = manager.save().result()
        assert SavedVariables(path)["count"].tolist() == mixed
        assert "broken off in its last step, and given up" in read_index(path).partly_applied_last[-1]


def test_the_next_coordinator_of_a_restore_that_was_broken_off(tmp_path: Path) -> None:
    """It continues from the checkpoint, not with mixed values."""
    with broken_off(tmp_path) as (job, manager, _):
        partitioner = FixedShardsPartitioner(2)
        with ParameterServerStrategy(
            job.cluster, partitioner, take_over=True, connect_timeout=TIMEOUT, job_name="job"
        ) as strategy:
            assert strategy.resumed
            with strategy.scope():
                count = Variable(np.ones(4), name="count")
            mine = CheckpointManager(manager.directory, strategy=strategy)
            with pytest.raises(CheckpointError, match="the coordinator that died has restored a checkpoint on only"):
                mine.save()
            assert mine.restore_or_initialize() is RestoredFrom.CHECKPOINT
            assert count.numpy().tolist() == [0] * 4
            assert mine.restore_or_initialize() is RestoredFrom.LIVE
            mine.save()
