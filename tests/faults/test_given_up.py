"""A local cluster that has given up its processes, or is stopped: everything that waits for them is told the cause."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.faults.support import ones, running_job
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import LocalCluster, ParameterServerStrategy, Variable
from pscluster.coordinator.local.local_cluster import LocalClusterError
from pscluster.core import errors

SPENT = r"was killed by SIGKILL; giving it up because max_restarts is 0"


def test_all_workers_and_a_server_are_given_up() -> None:
    """Functions fail with the workers' deaths until a restart is requested; a read fails with its server's death."""
    with running_job(num_workers=2, max_restarts=0, durability="none") as job:
        with job.strategy.scope():
            w = Variable(np.zeros(4, np.float32), name="w")
        gate = Path(job.folder, "gate")

        def held() -> None:
            while not gate.exists():
                pass

        values = [job.coordinator.schedule(held) for _ in range(4)]
        first = job.kill(0)
        job.until_up(1)
        assert not job.coordinator.done(), "the other goes on"
        second = job.kill(1)
        deaths = rf"no worker is left: worker 0 \(pid {first}\) {SPENT}; worker 1 \(pid {second}\) {SPENT}"
        with pytest.raises(LocalClusterError, match=deaths):
            job.join()
        with pytest.raises(errors.CancelledError):
            values[-1].fetch(TIMEOUT)
        for _ in range(2):
            with pytest.raises(LocalClusterError, match=deaths):
                job.coordinator.schedule(held)
        gate.touch()
        job.cluster.restart("worker", 1)
        job.coordinator.schedule(lambda: w.assign_add(ones(w)))
        job.join()
        np.testing.assert_array_equal(w.read_value(), ones(w))

        pid = job.cluster.kill("ps", 0)
        until(lambda: job.cluster.why_gone("ps", 0) != "", "the server is given up")
        lost = rf"ps 0 at .* is lost, and with it its shards of all variables: ps 0 \(pid {pid}\) {SPENT}"
        with pytest.raises(errors.PSUnavailableError, match=lost):
            w.read_value()
        with pytest.raises(errors.PSUnavailableError, match=lost):
            until(lambda: bool(job.coordinator.schedule(held)) and False, "the job fails")


def test_stopped_under_a_job() -> None:
    """Stopping a cluster ends its jobs: later requests say so, immediately."""
    with running_job() as job:
        with job.strategy.scope():
            w = Variable(1.0, name="w")
        value = job.coordinator.schedule(lambda: 7)
        job.join()
        job.cluster.stop()
        with pytest.raises(
            errors.StaleError, match="this job is over: the local cluster was stopped, and its variable"
        ):
            w.read_value()
        for asked in (lambda: job.coordinator.schedule(len), job.coordinator.join):
            with pytest.raises(errors.CancelledError, match="the job is over: the local cluster was stopped"):
                asked()
        assert value.fetch() == 7
        assert job.cluster not in LocalCluster.running()


def test_workers_that_never_come_up() -> None:
    """A strategy does not wait for a worker that was given up before it had answered."""
    source = (
        "import json, os, runpy\nif json.loads(os.environ['TF_CONFIG'])['task']['type'] == 'worker':\n    os._exit(1)"
    )
    command = [sys.executable, "-c", f"{source}\nrunpy.run_module('pscluster.ps', run_name='__main__')"]
    with LocalCluster(1, 1, max_restarts=1, log_level="ERROR", _command=command) as cluster:
        address = re.escape(cluster.cluster_spec().task_address("worker", 0))
        given_up = r"worker 0 \(pid \d+\) exited with code 1; giving it up after 1 restart in a row"
        with pytest.raises(errors.PsClusterError, match=f"not waiting for worker 0 at {address}: {given_up}"):
            ParameterServerStrategy(cluster, connect_timeout=TIMEOUT)
