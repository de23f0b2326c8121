"""What a worker may encounter besides a kill: no memory, a step that ends its process, a restart that goes
unnoticed."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.faults.counting import Counting
from tests.faults.steps import Bomb, abort, allocate, exit_hard, first_time, note, segfault, wait_for, where
from tests.faults.support import Job, ready, running_job, status
from tests.waiting import TIMEOUT, until

from pscluster.coordinator.api import experimental_get_current_worker_index
from pscluster.core.errors import FunctionError

# A worker that restarts the moment it dies: a parent that has loaded everything forks it. The process
# ids of both processes are in files, the child's with a number in its name.
RESTARTING = """
import json, os, runpy, signal
from pathlib import Path

task = json.loads(os.environ["TF_CONFIG"])["task"]
role, asked = task["type"], []
if role == "worker":
    import pscluster.worker.main
    import tests.faults.counting

    def end(number, frame):
        asked.append(number)
        os.kill(child, number)

    while child := os.fork():
        signal.signal(signal.SIGTERM, end)
        mark = Path(os.environ["MARKS"], f"worker-{task['index']}")
        mark.with_suffix(".new").write_text(str(child))
        mark.with_suffix(".new").rename(mark)
        status = os.waitpid(child, 0)[1]
        if asked:
            os._exit(os.waitstatus_to_exitcode(status) % 256)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
runpy.run_module(f"pscluster.{role}", run_name="__main__", alter_sys=True)
"""


@contextmanager
def restarting_job(marks: Path, num_workers: int = 2, **options: Any) -> Iterator[Job]:
    """A job on two servers whose workers are back within milliseconds of their deaths."""
    with running_job(2, num_workers, shards=2, command=RESTARTING, env={"MARKS": str(marks)}, **options) as job:
        yield job


def life_of(marks: Path, worker: int) -> int:
    """The process that is this worker now; 0 if there was none yet."""
    mark = marks / f"worker-{worker}"
    return int(mark.read_text()) if mark.exists() else 0


def counted(job: Job, functions: int, counting: Counting) -> None:
    """Check that each function has counted once, on every element of every shard."""
    shards = len(counting.dense.variables)
    assert counting.counts() == {name: [functions] * shards for name in ("dense", "sparse", "trained")}
    assert counting.sgd.iterations == functions


# Memory


def test_an_allocation_that_fails() -> None:
    """With a limit on its address space a step gets a MemoryError, which is its own error; the worker continues."""
    with running_job(num_ps=2, num_workers=1, shards=2) as job:
        counting = Counting(job.strategy)
        step = counting.step()

        def hog() -> int:
            import resource

            step()
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            _, hard = before = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (256 << 20), hard))
            try:
                return allocate()
            finally:
                resource.setrlimit(resource.RLIMIT_AS, before)

        (before,) = {pid for (role, _), pid in job.cluster.pids.items() if role == "worker"}
        hogging = job.coordinator.schedule(hog)
        with pytest.raises(FunctionError) as caught:
            job.join()
        assert isinstance(caught.value, MemoryError)
        assert (caught.value.function, caught.value.worker, caught.value.attempts) == ("hog", 0, 1)
        assert "in allocate" in str(caught.value)
        with pytest.raises(MemoryError):
            hogging.fetch()
        values = [job.coordinator.schedule(step) for _ in range(50)]
        values.append(job.coordinator.schedule(where, args=(7,)))
        job.join()
        assert values[-1].fetch() == (7, 0, before)  # the same process
        counted(job, 51, counting)


@contextmanager
def memory_group(limit: int) -> Iterator[tuple[str, Callable[[], int]] | None]:
    """A control group with this memory limit, and how many processes it has killed; None if there can't be one."""
    name = f"pscluster-test-{os.getpid()}"
    kinds = [
        ("memory.limit_in_bytes", "memory.oom_control", Path("/sys/fs/cgroup/memory")),
        ("memory.max", "memory.events", Path("/sys/fs/cgroup")),
    ]
    for file, events, root in kinds:
        folder = root / name
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            try:
                (folder / file).write_text(str(limit))
                report = folder / events
                assert "oom_kill " in report.read_text()
            except (OSError, AssertionError):
                continue

            def killed(report: Path = report) -> int:
                return int(report.read_text().split("oom_kill ")[1].split()[0])

            yield str(folder / "cgroup.procs"), killed
            return
        finally:
            folder.rmdir()
    yield None


def test_killed_for_its_memory(tmp_path: Path) -> None:
    """A function that is killed for its memory use fails after three workers; the job continues."""
    with memory_group(1 << 28) as group, restarting_job(tmp_path, max_attempts=3) as job:
        counting = Counting(job.strategy)
        step, folder = counting.step(), job.folder
        procs = "" if group is None else group[0]

        def hog() -> int:
            step()
            note(folder, f"hog-{os.getpid()}")
            if procs:
                Path(procs).write_text(str(os.getpid()))  # from here on the kernel counts its memory
            return allocate(1 << 40 if procs else 1 << 26)  # the kernel kills it; otherwise it kills itself

        for _ in range(50):
            job.coordinator.schedule(step)
        job.join()
        job.coordinator.schedule(hog)
        with pytest.raises(
            FunctionError,
            match=r"hog was running on 3 workers that died.*may be what kills them.*worker \d at .*; worker",
        ) as caught:
            job.join()
        assert (caught.value.function, caught.value.attempts) == ("hog", 3)
        assert len(list(Path(folder).glob("hog-*"))) == 3
        if group is not None:
            assert group[1]() == 3
        values = [job.coordinator.schedule(step) for _ in range(50)]
        job.join()
        assert all(value.status.value == "ready" for value in values)
        job.until_up(2)
        counted(job, 101, counting)  # of the hog's three attempts one counts


# The end of the process


@pytest.mark.parametrize("end", [exit_hard, abort, segfault])
def test_a_step_that_ends_its_process(end: Callable[[], None], tmp_path: Path) -> None:
    """Done once it costs an attempt, and the function runs elsewhere; done always, it fails alone, with its history."""
    with restarting_job(tmp_path, max_attempts=2) as job:
        counting = Counting(job.strategy)
        step, folder = counting.step(), job.folder

        def once(index: int) -> int:
            step()
            if index == 30 and first_time(folder, "ended"):
                end()
            return index

        values = [job.coordinator.schedule(once, args=(index,)) for index in range(100)]
        job.join()
        assert job.coordinator.fetch(values) == list(range(100))
        counted(job, 100, counting)

        def always() -> None:
            step()
            end()

        job.coordinator.schedule(always)
        with pytest.raises(FunctionError, match="always was running on 2 workers that died"):
            job.join()
        job.coordinator.schedule(step)
        job.join()
        counted(job, 102, counting)


def test_a_step_that_says_exit() -> None:
    """sys.exit() in a step, or in a thread of it, is an error of the step and does not end its worker."""
    with running_job() as job:
        pids = job.cluster.pids

        def leave() -> None:
            sys.exit("enough")

        job.coordinator.schedule(leave)
        with pytest.raises(FunctionError, match="enough") as caught:
            job.join()
        assert caught.value.function == "leave"
        assert job.coordinator.schedule(where, args=(1,)).fetch(timeout=TIMEOUT)[2] == pids["worker", 0]
        assert job.cluster.pids == pids


# Restarts


def test_workers_that_are_back_at_once(tmp_path: Path) -> None:
    """Killed and back in milliseconds, thirty times in a row, at the same address, it counts as a new worker each
    time."""
    with restarting_job(tmp_path, max_attempts=40) as job:
        counting = Counting(job.strategy)
        step = counting.step()

        def count(index: int) -> tuple[int, int, int]:
            step()
            return where(index)

        values = [job.coordinator.schedule(count, args=(index,)) for index in range(400)]
        job.until_done(values, 20)
        links = job.coordinator._dispatcher.state.workers
        seen = {link.connection.incarnation for link in links if link.connection is not None}
        killed: set[int] = set()
        for round_ in range(30):
            worker = round_ % 2
            until(lambda: life_of(tmp_path, worker) not in killed, "it is back")  # noqa: B023  (called here and now)
            killed.add(pid := life_of(tmp_path, worker))
            os.kill(pid, signal.SIGKILL)
            if round_ % 6 == 5:  # otherwise it dies as it starts, is dialled, or is prepared
                job.until_done(values, min(len(values), ready(values) + 20))
        job.join()
        results = job.coordinator.fetch(values)
        assert [index for index, _, _ in results] == list(range(400))
        assert len({pid for _, _, pid in results}) > 4
        job.until_up(2)
        assert seen.isdisjoint(link.connection.incarnation for link in links if link.connection is not None)
        counted(job, 400, counting)


def test_a_second_signal_to_a_worker_that_drains() -> None:
    """SIGTERM waits for the running function; a second one does not, and that runs elsewhere, as after any death."""
    with running_job(num_ps=2, num_workers=2, shards=2, max_attempts=2) as job:
        counting = Counting(job.strategy)
        step, folder = counting.step(), job.folder

        def hold() -> int:
            step()
            if first_time(folder, "first"):
                note(folder, "held", str(experimental_get_current_worker_index()))
                wait_for(folder, "never")
            return experimental_get_current_worker_index()

        held = job.coordinator.schedule(hold)
        leaving = int(wait_for(folder, "held"))
        values = [job.coordinator.schedule(step) for _ in range(150)]
        pid = job.cluster.pids["worker", leaving]
        os.kill(pid, signal.SIGTERM)
        until(lambda: status(job.cluster, "worker", leaving).state == "stopping", "the worker leaves")
        os.kill(pid, signal.SIGTERM)
        job.join()
        assert held.fetch() == 1 - leaving
        assert ready(values) == 150
        job.cluster.wait_restarted("worker", leaving, pid, timeout=TIMEOUT)  # its code was not 0
        counted(job, 151, counting)


def test_killed_while_it_is_prepared(tmp_path: Path) -> None:
    """A worker that dies while its datasets are built, or a function is loaded, is prepared again when it is back."""
    with restarting_job(tmp_path, max_attempts=10) as job:
        counting = Counting(job.strategy)
        step, folder = counting.step(), job.folder

        def examples() -> Iterator[int]:
            index = experimental_get_current_worker_index()
            for life in range(2):
                if first_time(folder, f"built-{index}-{life}"):
                    exit_hard()
            return itertools.count()

        data = iter(job.coordinator.create_per_worker_dataset(examples))
        bomb = Bomb(folder, 2)

        def take(iterator: Any) -> int:
            assert bomb is not None
            step()
            return int(next(iterator))

        values = [job.coordinator.schedule(take, args=(data,)) for _ in range(100)]
        job.join()
        assert len(list(Path(folder).glob("built-*"))) == 4
        assert len(list(Path(folder).glob("bomb-*"))) == 2
        assert all(value.status.value == "ready" for value in values)
        job.until_up(2)
        counted(job, 100, counting)
