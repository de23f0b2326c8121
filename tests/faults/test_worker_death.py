"""Workers die and come back: every function completes, and live workers never wait for dead ones."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults.steps import deadly, die_once, first_time, note, wait_for, where
from tests.faults.support import Job, connections_to, ready, running_job, status, stopped
from tests.waiting import until

from pscluster.coordinator.api import RemoteValueStatus, Variable, experimental_get_current_worker_index
from pscluster.core.errors import CancelledError, WorkerLostError
from pscluster.core.role.options import DATA_PORT_VARIABLE


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable Python's cycle collector, which may run early or late, within the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


LARGE = 100_000
"""Bytes of a result that travels beside the stream of functions."""


def workers_of(job: Job, count: int = 20) -> set[tuple[int, int]]:
    """The worker and process of each of this many functions."""
    values = [job.coordinator.schedule(where, args=(index,)) for index in range(count)]
    job.join()
    return {(worker, pid) for _, worker, pid in job.coordinator.fetch(values)}


def counter(job: Job, name: str = "counter") -> Variable:
    """A variable to count with."""
    with job.strategy.scope():
        return Variable(np.zeros(4, np.float32), name=name)


def test_every_function_completes_while_each_worker_is_killed() -> None:
    """None of 800 functions is lost or counts twice while one worker after the other is killed and returns."""
    with running_job(num_ps=2, num_workers=3, shards=2) as job:
        total = counter(job)

        def count(index: int) -> tuple[int, int, int]:
            total.assign_add(np.ones(4, np.float32))
            return where(index)

        values = [job.coordinator.schedule(count, args=(index,)) for index in range(800)]
        killed = []
        for worker, progress in enumerate((100, 300, 500)):
            job.until_done(values, progress)
            killed.append(job.kill(worker))
        job.join()
        results = job.coordinator.fetch(values)
        assert [index for index, _, _ in results] == list(range(800))
        assert total.numpy().tolist() == [800] * 4
        job.until_up(3)
        assert not set(killed) & set(job.cluster.pids.values())


def test_a_returned_worker_does_not_wait_for_one_that_stays_dead() -> None:
    """Two of three workers die; the one that is restarted gets functions while the other is still down."""
    with running_job(num_workers=3, restart=False) as job:
        job.until_up(3)
        values = [job.coordinator.schedule(where, args=(index,)) for index in range(200)]
        job.kill(0)
        job.kill(1)
        job.join()
        assert ready(values) == 200
        pid = job.cluster.restart("worker", 0)
        until(lambda: (0, pid) in workers_of(job), "the worker that returned gets a function")
        assert not job.cluster.is_alive("worker", 1)
        assert job.coordinator.workers_up == 2


def test_all_workers_die_at_once_and_one_returns() -> None:
    """With every worker killed nothing is lost: one that is restarted runs everything that is left."""
    with running_job(num_workers=3, restart=False) as job:
        total = counter(job)

        def count(index: int) -> tuple[int, int, int]:
            total.assign_add(np.ones(4, np.float32))
            return where(index)

        values = [job.coordinator.schedule(count, args=(index,)) for index in range(800)]
        job.until_done(values, 300)
        for (role, _), pid in job.cluster.pids.items():
            if role == "worker":
                os.kill(pid, signal.SIGKILL)
        job.until_up(0)
        assert ready(values) < 800
        done = ready(values)
        pid = job.cluster.restart("worker", 1)
        job.join()
        results = job.coordinator.fetch(values)
        assert [index for index, _, _ in results] == list(range(800))
        assert sum(result[1:] == (1, pid) for result in results) == 800 - done
        assert total.numpy().tolist() == [800] * 4


def test_a_worker_killed_while_idle_is_noticed_and_used_again() -> None:
    """A worker that dies between two functions costs nothing, and gets functions when it is back."""
    with running_job(num_workers=2) as job:
        job.until_up(2)
        workers_of(job)
        old = job.kill(0)
        new = job.cluster.wait_restarted("worker", 0, old)
        until(lambda: (0, new) in workers_of(job), "the worker that returned gets a function")


def test_a_function_that_kills_every_worker_fails_alone() -> None:
    """After its last attempt such a function fails and says why; later functions run on the same workers."""
    with running_job(num_workers=2, max_attempts=3) as job:
        before = [job.coordinator.schedule(where, args=(index,)) for index in range(20)]
        job.join()
        fatal = job.coordinator.schedule(deadly)
        later = [job.coordinator.schedule(where, args=(index,)) for index in range(20)]
        with pytest.raises(
            WorkerLostError,
            match=r"deadly .*3 workers that died.*may be what kills them.*worker \d at .*; worker \d at ",
        ) as caught:
            job.join()
        assert (caught.value.function, caught.value.attempts) == ("deadly", 3)
        with pytest.raises(WorkerLostError, match="3 workers that died"):
            fatal.fetch()
        assert ready(before) == 20
        for value in later:
            if value.status is not RemoteValueStatus.READY:
                with pytest.raises(CancelledError, match="schedule it again"):
                    value.fetch()
        job.until_up(2)
        assert {worker for worker, _ in workers_of(job, 200)} == {0, 1}
        assert job.coordinator.done()


def test_waiting_for_a_function_that_kills_is_no_attempt() -> None:
    """A function that is sent to workers that die, but never runs there, is not given up."""
    with running_job(num_workers=1, max_attempts=2) as job:
        total = counter(job)
        folder = job.folder

        def count(index: int) -> int:
            if index in (50, 51):  # neighbours: each is at the worker when the previous one kills it
                die_once(folder, f"number-{index}")
            total.assign_add(np.ones(4, np.float32))
            return index

        values = [job.coordinator.schedule(count, args=(index,)) for index in range(100)]
        job.join()
        assert job.coordinator.fetch(values) == list(range(100))
        assert total.numpy().tolist() == [100] * 4


def numbered(kind: str) -> Any:
    """A dataset whose elements say where they were made, and their index."""
    return lambda: ((kind, os.getpid(), element) for element in itertools.count())


def test_datasets_are_rebuilt_before_the_next_function() -> None:
    """A returning worker gets its datasets again, each from its start, before it gets a function."""
    with running_job(num_workers=1) as job:
        iterators = [iter(job.coordinator.create_per_worker_dataset(numbered(kind))) for kind in ("a", "b")]

        folder, (old,) = job.folder, [pid for (role, _), pid in job.cluster.pids.items() if role == "worker"]

        def take(first: Any, second: Any, index: int) -> Any:
            if index == 100:
                die_once(folder, "died")
            return next(first), next(second) if index % 2 else None

        values = [job.coordinator.schedule(take, args=(*iterators, index)) for index in range(100)]
        job.join()  # these have ended; the outcomes of later ones may die with the worker
        values += [job.coordinator.schedule(take, args=(*iterators, index)) for index in range(100, 300)]
        job.join()
        new = job.cluster.pids["worker", 0]
        results = job.coordinator.fetch(values)
        for position, kind in enumerate("ab"):
            elements = [result[position] for result in results if result[position] is not None]
            before = [element for _, pid, element in elements if pid == old]
            after = [element for _, pid, element in elements if pid == new]
            assert {name for name, _, _ in elements} == {kind}
            assert len(before) + len(after) == len(elements)
            assert before == list(range(len(before)))
            assert after == list(range(len(after)))
            assert before
            assert after


def test_a_dataset_made_while_its_worker_is_gone() -> None:
    """A worker also gets the datasets that were made in its absence, and each `iter()` is independent."""
    with running_job(num_workers=1, restart=False) as job:
        job.until_up(1)
        job.kill(0)
        job.until_up(0)
        dataset = job.coordinator.create_per_worker_dataset(numbered("late"))
        iterators = [iter(dataset), iter(dataset)]
        values = [job.coordinator.schedule(next, args=(iterators[index % 2],)) for index in range(6)]
        pid = job.cluster.restart("worker", 0)
        job.join()
        assert job.coordinator.fetch(values) == [("late", pid, index // 2) for index in range(6)]


def test_a_worker_asked_to_stop_ends_what_it_runs() -> None:
    """After SIGTERM the running function ends there, the others go elsewhere, no attempt is lost, and it exits with
    0."""
    with running_job(num_ps=2, num_workers=2, shards=2, max_attempts=1) as job:
        total, folder = counter(job), job.folder

        def hold(index: int) -> Any:
            total.assign_add(np.ones(4, np.float32))
            note(folder, "held", str(experimental_get_current_worker_index()))
            wait_for(folder, "go")
            total.assign_add(np.ones(4, np.float32))
            return np.full(LARGE, index, np.int8), experimental_get_current_worker_index()

        def count(index: int) -> int:
            total.assign_add(np.ones(4, np.float32))
            return index

        held = job.coordinator.schedule(hold, args=(7,))
        leaving = int(wait_for(folder, "held"))
        values = [job.coordinator.schedule(count, args=(index,)) for index in range(300)]
        os.kill(job.cluster.pids["worker", leaving], signal.SIGTERM)
        until(lambda: status(job.cluster, "worker", leaving).state == "stopping", "the worker leaves")
        note(folder, "go")
        job.join()
        large, worker = held.fetch()
        assert worker == leaving
        assert large.tolist() == [7] * LARGE
        assert job.coordinator.fetch(values) == list(range(300))
        assert total.numpy().tolist() == [302] * 4
        until(lambda: f"worker {leaving} finished" in repr(job.cluster), "the worker has exited with 0")


def test_workers_leave_one_after_the_other_under_load() -> None:
    """However many functions are on their way to a worker that stops, none is lost and none loses an attempt."""
    with running_job(num_ps=2, num_workers=3, shards=2, max_attempts=1) as job:
        total = counter(job)

        def count(index: int) -> Any:
            total.assign_add(np.ones(4, np.float32))
            return index if index % 10 else np.full(LARGE, index, np.int16)

        values = [job.coordinator.schedule(count, args=(index,)) for index in range(600)]
        for round_, progress in enumerate(range(50, 530, 80)):
            job.until_done(values, progress)
            job.cluster.restart("worker", round_ % 3)  # SIGTERM first
        job.join()
        for index, value in enumerate(values):
            assert np.all(np.asarray(value.fetch()) == index)
        assert total.numpy().tolist() == [600] * 4


def test_what_outlasts_the_grace_is_given_back_unfinished() -> None:
    """A function that does not end in time runs elsewhere, its updates stay applied once, and the exit code is 0."""
    source = (
        "import json, os, runpy, sys\n"
        "role = json.loads(os.environ['TF_CONFIG'])['task']['type']\n"
        "sys.argv += ['--grace', '0.2']\n"
        "runpy.run_module(f'pscluster.{role}', run_name='__main__', alter_sys=True)\n"
    )
    with running_job(num_workers=2, max_attempts=2, command=source) as job:
        total, folder = counter(job), job.folder

        def hold() -> int:
            total.assign_add(np.ones(4, np.float32))
            if first_time(folder, "first"):
                note(folder, "held", str(experimental_get_current_worker_index()))
                wait_for(folder, "never")
            total.assign_add(np.ones(4, np.float32))
            return experimental_get_current_worker_index()

        held = job.coordinator.schedule(hold)
        leaving = int(wait_for(folder, "held"))
        os.kill(job.cluster.pids["worker", leaving], signal.SIGTERM)
        job.join()
        assert held.fetch() == 1 - leaving
        assert total.numpy().tolist() == [2] * 4
        until(lambda: f"worker {leaving} finished" in repr(job.cluster), "the worker has exited with 0")


def test_a_frozen_worker() -> None:
    """Its functions run elsewhere when its lease expires; its updates after it thaws are refused, and never count."""
    with running_job(num_workers=2, worker_lease=2.0) as job:
        with job.strategy.scope():
            count = Variable(np.zeros(3, np.int64), name="count")
        folder = job.folder

        def step(index: int) -> int:
            if index == 0:
                note(folder, f"pid-{experimental_get_current_worker_index()}", str(os.getpid()))
                wait_for(folder, "go on")
            count.assign_add(np.ones(3, np.int64))
            return index

        values = [job.coordinator.schedule(step, args=(index,)) for index in range(50)]
        until(lambda: list(Path(folder).glob("pid-*")), "one has begun")
        (mark,) = Path(folder).glob("pid-*")
        frozen, pid = int(mark.name[4:]), int(mark.read_text())
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: list(Path(folder).glob(f"pid-{1 - frozen}")), "the other one has begun it again")
        finally:
            note(folder, "go on")
            os.kill(pid, signal.SIGCONT)
        job.join()
        assert job.coordinator.fetch(values) == list(range(50))
        job.until_up(2)  # it is back, with another incarnation
        job.coordinator.schedule(step, args=(1,))
        job.join()
        assert count.numpy().tolist() == [51] * 3


@pytest.mark.parametrize(("tls", "data_port", "before"), [(False, "0", 2), (True, "off", 3)])
def test_freezes_leave_no_connections(tls: bool, data_port: str, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker frozen beyond its lease and thawed several times ends with as many connections as before."""
    monkeypatch.setenv(DATA_PORT_VARIABLE, data_port)
    with running_job(worker_lease=1.0, tls=tls, transport="tcp") as job, no_collection():
        port = int(job.cluster.cluster_spec().task_address("worker", 0).rpartition(":")[2])
        pid = job.coordinator.schedule(os.getpid).fetch()
        # For the attachment, the lease, and, where there is no data plane, the functions.
        until(lambda: connections_to(port) == before, "all are there", lambda: str(connections_to(port)))
        for _ in range(4):
            os.kill(pid, signal.SIGSTOP)
            try:
                until(lambda: stopped(pid), "it stands still")
                until(lambda: not job.coordinator.workers_up, "its lease is over", job.coordinator.describe)
            finally:
                os.kill(pid, signal.SIGCONT)
            assert job.coordinator.schedule(os.getpid).fetch() == pid
        until(lambda: connections_to(port) == before, "as many as before", lambda: str(connections_to(port)))
