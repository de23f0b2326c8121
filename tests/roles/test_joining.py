"""Workers that TF_CONFIG does not name: they join, leave, die and return, and each function counts once."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
from pathlib import Path

import pytest
from tests.faults.arming.faults import CALL_KINDS, environment
from tests.roles.processes import (
    PSCLUSTER,
    Process,
    Roles,
    environ,
    free_addresses,
    make_cluster,
    run,
    run_all,
    tf_config,
)
from tests.roles.test_returning_servers import SOON
from tests.waiting import until

from pscluster.core.security.certificates import make_certificates
from pscluster.core.security.tokens import new_token

# Schedules counted functions until the file `end` exists; says who ran them. Each writes its worker and pid.
COUNTING = """
import os, pathlib, sys, time
import numpy as np
from pscluster.coordinator import (
    ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver, Variable,
    experimental_get_current_worker_index,
)

folder = pathlib.Path(sys.argv[1])
strategy = ParameterServerStrategy(TFConfigClusterResolver(), job_name="counting")
with strategy.scope():
    count = Variable(np.zeros(1), name="count")
coordinator = ClusterCoordinator(strategy)
print("connected", flush=True)

def step():
    index = experimental_get_current_worker_index()
    (folder / f"ran-{index}-{os.getpid()}").touch()
    count.assign_add(np.ones(1))
    while (folder / f"hold-{index}").exists():
        time.sleep(0.002)
    time.sleep(0.001)

scheduled = 0
while not (folder / "end").exists():
    values = [coordinator.schedule(step) for _ in range(20)]
    scheduled += len(values)
    while coordinator.pending() == "" and not coordinator.done() and not (folder / "end").exists():
        time.sleep(0.002)
coordinator.join(60)
assert count.numpy()[0] == scheduled, (count.numpy(), scheduled)
print("each counted once:", scheduled > 0, flush=True)
"""


def has_ipv6() -> bool:
    """Whether this machine has the loopback address of IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


class Elastic(Roles):
    """A cluster with one server and a coordinator, and workers that join."""

    def __init__(self, folder: Path, workers: int = 0) -> None:
        cluster = make_cluster(workers=workers)
        if not workers:
            del cluster["worker"]
        super().__init__(cluster, folder, {"PSCLUSTER_MAX_WORKERS": "8"})

    @property
    def chief(self) -> str:
        """The coordinator's address."""
        address = self.cluster["chief"][0]  # type: ignore[index]
        return str(address)

    def begin(self, **env: str) -> Process:
        """Start the server, and a coordinator that counts."""
        self.ps()
        self.env |= env
        return self.coordinator(COUNTING, str(self.folder))

    def join(self, *options: str, **env: str) -> Process:
        """Start a worker that joins."""
        process = Process(
            [*PSCLUSTER, "worker", *options], environ(PSCLUSTER_COORDINATOR=self.chief, **env), self.folder
        )
        self.started.append(process)
        return process

    def ran(self, index: int, process: Process) -> bool:
        """Whether the process has run a function as this worker."""
        return (self.folder / f"ran-{index}-{process.pid}").exists()

    def until_runs(self, index: int, process: Process) -> None:
        """Wait until the process has run a function as this worker."""
        until(lambda: self.ran(index, process), f"worker {index} gets work", lambda: process.output)

    def end(self, coordinator: Process) -> None:
        """Let the coordinator end, and check that each function has counted once."""
        (self.folder / "end").touch()
        coordinator.wait_for("each counted once: True")
        assert coordinator.wait() == 0


def test_joins_and_leaves(tmp_path: Path) -> None:
    """Workers that nobody named get work at once, under the lowest free indices, and leave in order on SIGTERM."""
    with Elastic(tmp_path) as roles:
        coordinator = roles.begin()
        first = roles.join()
        first.wait_for("as worker 0")
        roles.until_runs(0, first)
        second = roles.join()
        second.wait_for("as worker 1")
        roles.until_runs(1, second)
        first.send(signal.SIGTERM)
        assert first.wait() == 0
        coordinator.wait_for("worker 0 at .* has left the cluster")
        third = roles.join()
        third.wait_for("as worker 0")
        roles.until_runs(0, third)
        roles.end(coordinator)


@pytest.mark.skipif(not has_ipv6(), reason="there is no ::1 here")
def test_joins_over_ipv6(tmp_path: Path) -> None:
    """A worker is dialled on that loopback address on which it listens, not on that from which it has called."""
    with Elastic(tmp_path) as roles:
        port = roles.chief.rpartition(":")[2]
        roles.cluster["chief"] = [f"[::1]:{port}"]  # type: ignore[index]
        coordinator = roles.begin()
        for index, options in enumerate(((), ("--bind", "[::1]:0"))):
            worker = roles.join(*options)
            roles.until_runs(index, worker)
        roles.end(coordinator)


def test_killed_and_returns_elsewhere(tmp_path: Path) -> None:
    """A worker with a name that is killed in a function, and returns on another port, is the same task."""
    with Elastic(tmp_path) as roles:
        coordinator = roles.begin()
        other = roles.join()
        roles.until_runs(0, other)
        (tmp_path / "hold-1").touch()
        worker = roles.join("--task", "trainer-1")
        roles.until_runs(1, worker)
        worker.send(signal.SIGKILL)
        worker.wait()
        (tmp_path / "hold-1").unlink()
        again = roles.join(PSCLUSTER_TASK="trainer-1")
        again.wait_for("as worker 1")
        roles.until_runs(1, again)
        coordinator.wait_for("worker 1 at .* is gone")
        roles.end(coordinator)


def test_coordinator_comes_later_and_again(tmp_path: Path) -> None:
    """A worker waits for its coordinator, says so, and joins the next one under the index that it had."""
    with Elastic(tmp_path) as roles:
        worker = roles.join(**SOON)
        worker.wait_for(f"waiting for the coordinator at {re.escape(roles.chief)}: nothing is listening there")
        coordinator = roles.begin()
        roles.until_runs(0, worker)
        coordinator.send(signal.SIGKILL)
        coordinator.wait()
        (tmp_path / f"ran-0-{worker.pid}").unlink()
        script = COUNTING.replace("assert count.numpy()[0] == scheduled", "assert count.numpy()[0] >= scheduled")
        coordinator = roles.coordinator(script, str(tmp_path))
        roles.until_runs(0, worker)
        roles.end(coordinator)
        assert worker.is_running, "it waits for the next coordinator"


def test_joins_a_cluster_with_workers(tmp_path: Path) -> None:
    """A worker joins those that TF_CONFIG names, gets the next index, and `status` shows it."""
    with Elastic(tmp_path, workers=1) as roles:
        named = roles.worker()
        coordinator = roles.begin()
        worker = roles.join()
        worker.wait_for("as worker 1")
        roles.until_runs(0, named)
        roles.until_runs(1, worker)
        code, said = run("status", "--json", config=tf_config(roles.cluster, "chief"))
        tasks = {(task["task"], task["index"]): task["up"] for task in json.loads(said)["tasks"]}
        assert (code, tasks) == (0, {(role, 0): True for role in ("chief", "ps", "worker")} | {("worker", 1): True})
        roles.end(coordinator)


def test_come_and_go(tmp_path: Path) -> None:
    """Workers join, leave and are killed in any order, some come back under their names; each function counts once."""
    chance = random.Random(2718)
    with Elastic(tmp_path) as roles:
        coordinator = roles.begin()
        there: dict[str, Process] = {}
        index: dict[str, str] = {}
        for _ in range(12):
            name = chance.choice(["a", "b", "c"])
            worker = there.pop(name, None)
            if worker is None:
                worker = there[name] = roles.join("--task", name)
                said = worker.wait_for("joined .* as worker")
                joined = re.findall(r"as worker (\d)", said)[0]
                assert index.setdefault(name, joined) == joined, "a name keeps its index"
                roles.until_runs(int(joined), worker)
            elif chance.random() < 0.5:
                worker.send(signal.SIGTERM)
                assert worker.wait() == 0
            else:
                worker.send(signal.SIGKILL)
                worker.wait()
        if not there:
            roles.join()
        roles.end(coordinator)


def test_faults_at_registration(tmp_path: Path) -> None:
    """A registration that is lost, answered in vain, delayed or repeated takes one index, which the worker gets."""
    path = "/pscluster.v1.Coordinator/Register"
    faults = ";".join(f"chief/rpc:{path}={kind}@{nth}" for nth, kind in enumerate(CALL_KINDS, 1))
    with Elastic(tmp_path) as roles:
        coordinator = roles.begin(**environment(text=faults))
        for expected in range(len(CALL_KINDS)):
            worker = roles.join()
            worker.wait_for(f"joined .* as worker {expected},")
            roles.until_runs(expected, worker)
        roles.end(coordinator)


def test_tls(tmp_path: Path) -> None:
    """With certificates a worker is verified by its role: its address need not be in them. Other roles can't join."""
    certificates = tmp_path / "certificates"
    make_certificates(certificates)
    with Elastic(tmp_path) as roles:
        roles.env["PSCLUSTER_TLS"] = str(certificates)
        coordinator = roles.begin()
        elsewhere = ("--bind", "127.0.0.2:0", "--advertise", "127.0.0.2")
        workers = [roles.join(*elsewhere, PSCLUSTER_TLS=str(certificates)) for _ in range(2)]
        for worker in workers:
            worker.wait_for("joined .* at 127.0.0.2:")
        until(lambda: len(list(tmp_path.glob("ran-*"))) == 2, "both get work", lambda: coordinator.output)
        sentence = refused(roles, PSCLUSTER_TLS=str(certificates / "ps"))
        assert "a ps's certificate does not allow registering as a worker" in sentence
        code, said = run("status", config=tf_config(roles.cluster, "chief"), PSCLUSTER_TLS=str(certificates))
        assert code == 0, said
        roles.end(coordinator)


def test_another_index_under_the_next_coordinator(tmp_path: Path) -> None:
    """If the next coordinator has a worker in its place, one that had joined goes on under another index."""
    with Elastic(tmp_path) as roles:
        coordinator = roles.begin()
        worker = roles.join(**SOON)
        roles.until_runs(0, worker)
        coordinator.send(signal.SIGKILL)
        coordinator.wait()
        roles.cluster = {**roles.cluster, "worker": free_addresses(1)}
        named = roles.worker()
        script = COUNTING.replace("assert count.numpy()[0] == scheduled", "assert count.numpy()[0] >= scheduled")
        coordinator = roles.coordinator(script, str(tmp_path))
        worker.wait_for("another worker now has index 0; continuing as worker 1")
        roles.until_runs(1, worker)
        roles.until_runs(0, named)
        roles.end(coordinator)


def test_bad_options() -> None:
    """Wrong options and variables end the process with one line that names the value, before anything else."""
    worker = tf_config({"worker": ["127.0.0.1:2222"]}, "worker")
    cases = [
        (["worker", "--join", "nowhere"], {}, '--join is "nowhere", but it has no port'),
        (["worker"], {"PSCLUSTER_COORDINATOR": "a:b"}, '--join is "a:b", but a port is a whole number'),
        (["worker", "--join", "c:1", "--advertise", "h:x"], {}, '--advertise is "h:x"'),
        (["worker", "--join", "c:1", "--advertise", "a b"], {}, "--advertise is"),
        (["worker", "--join", "c:1", "--task", "1234567"], {}, "--task is 1234567; give an index from 0 to 999999"),
        (["worker", "--join", "c:1"], {"TF_CONFIG": worker}, "TF_CONFIG names a task, and --join or"),
        (["worker", "--task", "1"], {"TF_CONFIG": worker}, "--task is given, but no coordinator to join"),
        (["worker", "--join", "unix:/tmp/x/chief"], {}, "needs one of its own: give --bind unix:PATH"),
        (["worker", "--join", "c:1"], {}, "refusing to listen on 0.0.0.0:"),
        (["worker", "--join", "c:1", "--bind", "192.0.2.1:0"], {}, "can't listen on 192.0.2.1"),
        (["coordinator", "--max-workers", "0", "x.py"], {}, "the maximum number of workers is '0'; give one from 1"),
        (["coordinator", "x.py"], {"PSCLUSTER_MAX_WORKERS": "many"}, "the maximum number of workers is 'many'"),
    ]
    for (_, _, sentence), (code, said) in zip(
        cases, run_all([(arguments, {"TF_CONFIG": "{}", **env}) for arguments, env, _ in cases]), strict=True
    ):
        assert (code, said.count("\n")) == (2, 1), said
        assert sentence in said, said


def refused(roles: Elastic, *options: str, **env: str) -> str:
    """The sentence with which a worker that may not join ends."""
    process = roles.join("--connect-timeout", "0.5", *options, **env)
    assert process.wait() in (1, 2)
    lines = [line for line in process.output.splitlines() if line.startswith("pscluster: ")]
    assert len(lines) == 1, process.output
    return lines[0]


def test_refusals(tmp_path: Path) -> None:
    """Each worker that may not join ends with one sentence that says why, and those that are there go on."""
    with Elastic(tmp_path) as roles:
        coordinator = roles.begin()
        worker = roles.join("--task", "0")
        roles.until_runs(0, worker)
        assert "worker 0 is another process, which is in the cluster now" in refused(roles, "--task", "0")
        assert "the worker is for the job 'other'" in refused(roles, "--job-name", "other")
        assert "the task is 12, but the cluster takes workers up to 7" in refused(roles, "--task", "12")
        assert "advertises 10.1.2.3, but calls from 127.0.0.1" in refused(roles, "--advertise", "10.1.2.3")
        assert "does not accept this process's token" in refused(roles, PSCLUSTER_TOKEN=new_token())
        assert "speaks no" not in coordinator.output
        roles.end(coordinator)
