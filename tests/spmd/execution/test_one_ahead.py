"""A program that is with its workers while another one runs there: it runs after that one, whatever becomes of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults.support import Job, running_job, stopped
from tests.waiting import TIMEOUT, until

from pscluster import spmd
from pscluster.core.context import current_function
from pscluster.core.errors import CancelledError
from pscluster.spmd import Layout
from pscluster.spmd.execution import sent_programs
from pscluster.spmd.meshes import session_of

ROWS = np.arange(8.0).reshape(2, 4)
TOTAL = 2 * ROWS.sum(axis=0)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Three workers, of which a mesh has two. They are restarted when they die, and lost when they are frozen."""
    with running_job(num_workers=3, worker_lease=2.0) as job:
        yield job


def in_flight(job: Job) -> int:
    """How many members of programs have not ended."""
    return job.coordinator._dispatcher.status.stats().in_flight


def mesh_of(job: Job) -> spmd.Mesh:
    """A mesh of the first two workers, which have run programs before."""
    mesh = spmd.create_mesh({"x": 2}, coordinator=job.coordinator, tasks=[0, 1])
    np.testing.assert_array_equal(summed(doubled(mesh)).full(TIMEOUT), TOTAL)
    return mesh


def doubled(mesh: spmd.Mesh) -> Any:
    """A program of a host array, for which workers need nothing of each other."""
    return spmd.distribute(ROWS, Layout(["x", None], mesh)) * 2


@spmd.function
def summed(rows: Any) -> Any:
    """A program that they run together."""
    return rows.sum(axis=0)


@contextlib.contextmanager
def frozen(job: Job, worker: int) -> Iterator[None]:
    """Freeze a worker; afterwards it goes on, if it is there."""
    pid = job.cluster.pids["worker", worker]
    os.kill(pid, signal.SIGSTOP)
    until(lambda: stopped(pid), "it is frozen")
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("how", ["goes on", "dies", "stays away"])
def test_one_worker_is_slower(job: Job, how: str) -> None:
    """The other one begins the second program meanwhile. If the slow one is lost, both run again, in their order."""
    mesh = mesh_of(job)
    with frozen(job, 1):
        total = summed(doubled(mesh))
        until(
            lambda: in_flight(job) == 3, "one worker has returned, and has begun the second", job.coordinator.describe
        )
        if how == "dies":
            job.kill(1)
        elif how == "stays away":
            job.until_up(2)
            job.kill(1)
    np.testing.assert_array_equal(total.full(TIMEOUT), TOTAL)
    job.until_up(3)


def test_the_worker_dies_that_is_ahead(job: Job) -> None:
    """The first one ends all the same; what the second needs of it is lost, which is said."""
    mesh = mesh_of(job)
    with frozen(job, 1):
        total = summed(doubled(mesh))
        until(
            lambda: in_flight(job) == 3, "one worker has returned, and has begun the second", job.coordinator.describe
        )
        job.kill(0)
        job.until_up(2)
    with pytest.raises(spmd.TensorLostError, match=r"shape \(2, 4\) and type float64, the result of multiply, is lost"):
        total.full(TIMEOUT)
    mesh_of(job)
    job.until_up(3)


@pytest.mark.parametrize("large", [False, True])
def test_what_the_first_one_needs_is_not_forgotten_while_it_runs(
    job: Job, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have to run again. If that is too large to be kept, the second one waits until it need not."""
    monkeypatch.setattr(sent_programs, "HELD_BYTES", 0 if large else sent_programs.HELD_BYTES)
    mesh = mesh_of(job)
    rows = doubled(mesh)
    spmd.barrier(mesh, TIMEOUT)
    number = rows._ref.number
    with frozen(job, 1):
        first = summed(rows)
        del rows
        second = summed(spmd.distribute(ROWS, Layout(["x", None], mesh)))
        assert (number in session_of(mesh).dropped) is not large
        until(lambda: job.coordinator._dispatcher.status.stats().waiting == 2 * large, "it is sent, or waits")
    for total, wanted in ((second, TOTAL / 2), (first, TOTAL)):
        np.testing.assert_array_equal(total.full(TIMEOUT), wanted)
    mesh_of(job)  # later programs
    assert number not in session_of(mesh).dropped


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_the_first_one_does_not_return(job: Job, tmp_path: Path, how: str) -> None:
    """The second does not run before that is settled; then all goes on."""
    mesh, hold = mesh_of(job), tmp_path / "hold"

    def held(block: Any) -> Any:
        function = current_function()
        assert function is not None
        hold.with_name(f"held-{spmd.axis_index('x')}").touch()
        while hold.exists():
            function.check()
            time.sleep(0.01)
        raise ZeroDivisionError("after a while")

    hold.touch()
    rows = spmd.distribute(ROWS, Layout(["x", None], mesh))
    first = spmd.local_map(held, None, ["x", None], out_types=((2, 4), "float64"))(rows)
    total = summed(first)
    until(lambda: len(list(tmp_path.glob("held-*"))) == 2 and in_flight(job) == 4, "both are there")
    if how == "fails":
        hold.unlink()
        with pytest.raises(ZeroDivisionError, match="after a while"):
            total.full(TIMEOUT)
    else:
        job.coordinator.schedule(int, args=("no number",))  # on the third worker
        with pytest.raises(CancelledError, match="since a scheduled function has failed"):
            total.full(TIMEOUT)
        with pytest.raises(ValueError, match="no number"):
            job.join()
        with contextlib.suppress(CancelledError):  # of the first one
            spmd.barrier(mesh, TIMEOUT)
    mesh_of(job)
