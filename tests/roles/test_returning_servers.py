"""Parameter servers that return elsewhere are found again, and every update counts once."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.arming.faults import CALL_KINDS, environment
from tests.roles.processes import PSCLUSTER, Process, Roles, environ, make_cluster, run, run_all, tf_config
from tests.waiting import until

from pscluster.core.ids import make_identity
from pscluster.core.security.certificates import make_certificates
from pscluster.core.security.tokens import load_token
from pscluster.core.transport.channels import PeerAddress, open_peer_channel, say_hello

# Schedules counted functions until the file `end` exists. Each adds 1 to all elements of a variable on all servers.
COUNTING = """
import pathlib, sys, time
import numpy as np
from pscluster.coordinator import (
    ClusterCoordinator, FixedShardsPartitioner, IndexedSlices, ParameterServerStrategy, TFConfigClusterResolver,
    Variable, optimizers,
)

folder = pathlib.Path(sys.argv[1])
strategy = ParameterServerStrategy(
    TFConfigClusterResolver(), job_name="counting", variable_partitioner=FixedShardsPartitioner(2)
)
with strategy.scope():
    count = Variable(np.zeros(40_000), name="count")
    weights = Variable(np.zeros(4), name="weights")
    optimizer = optimizers.SGD(1.0, momentum=0.5)
    scheduled = Variable(np.zeros((), np.int64), name="scheduled")
coordinator = ClusterCoordinator(strategy)

def step():
    count.assign_add(np.ones(40_000))  # in frames
    count.scatter_add(IndexedSlices(np.ones(2), np.array([0, 39_999])))  # in a session
    optimizer.apply_gradients([(np.ones(4), weights)])
    (folder / "ran").touch()

keys = int(scheduled.numpy())
print("connected", keys, flush=True)
while not (folder / "end").exists():
    for _ in range(10):
        coordinator.schedule(step, key=f"step {keys}")
        keys += 1
    while not coordinator.done():
        time.sleep(0.002)
    scheduled.assign(keys)  # what has a key is not applied again under the next coordinator
    if (folder / "add").exists():
        (folder / "add").unlink()
        index = strategy.add_server()
        print("added", index, strategy.move_shard(count.variables[0], index), flush=True)
    if (folder / "remove").exists():
        (folder / "remove").unlink()
        print("removed", strategy.remove_server(), flush=True)
    print("all have ended:", keys, flush=True)
    time.sleep(0.01)  # for those who die, start and register
coordinator.join(60)
values, steps = count.numpy(), optimizer.iterations
assert (values[1:-1] == keys).all(), (set(values[1:-1].tolist()), keys)
assert values[0] == values[-1] == 2 * keys, (values[0], values[-1], keys)
assert steps == keys, (steps, keys)
print("each counted once:", keys > 0, strategy.lost_updates(), flush=True)
"""


# Synchronous steps, each of which adds the mean of the replicas' gradients to a variable on both servers.
STEPS = """
import pathlib, sys
import numpy as np
from pscluster.coordinator import (
    FixedShardsPartitioner, SynchronousStrategy, TFConfigClusterResolver, Variable, optimizers,
)

folder = pathlib.Path(sys.argv[1])
strategy = SynchronousStrategy(
    TFConfigClusterResolver(), job_name="counting", variable_partitioner=FixedShardsPartitioner(2)
)
with strategy.scope():
    w = Variable(np.zeros(40_000), name="w")
    sgd = optimizers.SGD(1.0)

def step():
    sgd.apply_gradients([(-np.ones(40_000), w)])
    (folder / "ran").touch()

print("connected", flush=True)
steps = 0
while not (folder / "end").exists():
    strategy.run(step, steps=5)
    steps += 5
values = set(w.numpy().tolist())
assert values == {2.0 * steps}, (values, steps)
print("each counted once:", steps > 0, strategy.lost_updates(), flush=True)
"""

MOVING = ("worker.move.after", "coordinator.move.before", "coordinator.move.after")
"""The fault points of a server that returns elsewhere."""

SOON = environment(seconds={"pscluster.core.role.joining.AWAIT_SECONDS": 0.5})
"""The environment of roles that register soon with the next coordinator, when they have lost theirs."""


class Moving(Roles):
    """A cluster of two servers, both of which register from places that nobody was told."""

    def __init__(self, folder: Path, env: dict[str, str] | None = None, workers: int = 1) -> None:
        more = {"PSCLUSTER_MAX_WORKERS": "8", "PSCLUSTER_STATE_DIR": str(folder / "state")}
        super().__init__(make_cluster(ps=2, workers=workers), folder, more | {"PSCLUSTER_DURABILITY": "log"})
        self.env |= SOON | (env or {})

    @property
    def chief(self) -> str:
        """The coordinator's address."""
        return str(self.cluster["chief"][0])  # type: ignore[index]

    def join(self, role: str, *options: str, **env: str) -> Process:
        """Start a role that joins."""
        own = {key: value for key, value in self.env.items() if key != "PSCLUSTER_MAX_WORKERS"}
        variables = environ(PSCLUSTER_COORDINATOR=self.chief, **own | env)
        process = Process([*PSCLUSTER, role, *options], variables, self.folder)
        self.started.append(process)
        return process

    def server(self, index: int, *options: str, **env: str) -> Process:
        """Start a server on any free port."""
        return self.join("ps", "--task", str(index), "--job-name", "counting", *options, **env)

    def count(self) -> Process:
        """Start a coordinator that counts."""
        return self.coordinator(COUNTING, str(self.folder))

    def until_runs(self, what: str) -> None:
        """Wait until a function has run from now on."""
        (self.folder / "ran").unlink(missing_ok=True)
        until((self.folder / "ran").exists, what, lambda: "\n".join(process.output for process in self.started))

    def end(self, coordinator: Process) -> None:
        """Let the coordinator end, and check that each function has counted once and nothing was lost."""
        (self.folder / "end").touch()
        coordinator.wait_for("each counted once: True {}")
        assert coordinator.wait() == 0


def kill(process: Process) -> None:
    """Kill it, and wait for its end."""
    process.send(signal.SIGKILL)
    process.wait()


def test_a_server_returns_elsewhere(tmp_path: Path) -> None:
    """Each server is killed and comes back on another port, twice; training goes on, and each function counts once."""
    with Moving(tmp_path) as roles:
        servers = [roles.server(index) for index in range(2)]
        roles.worker()  # which has other addresses of the servers in its TF_CONFIG
        coordinator = roles.count()
        for index, server in enumerate(servers):
            server.wait_for(f"joined .* as parameter server {index}, at 127.0.0.1:")
        joined = roles.join("worker")
        joined.wait_for("as worker 1")
        for nth, index in ((1, 0), (1, 1), (2, 0), (2, 1)):
            roles.until_runs("training goes on")
            kill(servers[index])
            servers[index] = roles.server(index)
            coordinator.wait_for(f"ps {index} at .* is back after", nth)
        roles.until_runs("training goes on with all of them elsewhere")
        code, said = run("status", "--json", config=tf_config(roles.cluster, "chief"), **roles.env)
        tasks = {(task["task"], task["index"]): task["address"] for task in json.loads(said)["tasks"] if task["up"]}
        assert code == 0
        assert not {tasks["ps", 0], tasks["ps", 1]} & set(roles.cluster["ps"])
        roles.end(coordinator)


def test_servers_that_nobody_lists(tmp_path: Path) -> None:
    """A cluster whose TF_CONFIG has only the coordinator's address, and the number of servers; also the next one."""
    with Moving(tmp_path, {"PSCLUSTER_NUM_PS": "2"}) as roles:
        roles.cluster = {"chief": roles.cluster["chief"]}
        coordinator = roles.count()
        coordinator.wait_for("waiting for ps 0, which has not registered, ps 1, which has not registered")
        servers = [roles.server(index) for index in range(2)]
        worker = roles.join("worker")
        coordinator.wait_for("all have ended")
        kill(servers[0])
        servers[0] = roles.server(0)
        coordinator.wait_for("ps 0 at .* is back after")
        roles.until_runs("training goes on")
        code, said = run("status", "--json", config=tf_config(roles.cluster, "chief"), **roles.env)
        tasks = {(task["task"], task["index"]) for task in json.loads(said)["tasks"] if task["up"]}
        assert (code, tasks) == (0, {("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0)})
        kill(coordinator)
        coordinator = roles.count()
        coordinator.wait_for("connected [1-9]")
        roles.until_runs("the next coordinator goes on")
        assert worker.is_running
        roles.end(coordinator)


def test_a_number_of_servers_that_does_not_fit(tmp_path: Path) -> None:
    """It is refused at once, with what to change."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pscluster.coordinator import ParameterServerStrategy, TFConfigClusterResolver\n"
        "ParameterServerStrategy(TFConfigClusterResolver())\n"
    )
    listed, alone = make_cluster(ps=2, workers=1), {"chief": ["127.0.0.1:2222"]}
    for arguments, config, sentence in (
        (
            ["--num-ps", "3"],
            tf_config(listed, "chief"),
            "the number of parameter servers is 3 .* cluster.ps lists 2: leave one",
        ),
        (["--num-ps", "0"], tf_config(alone, "chief"), "the number of parameter servers is '0'; give one from 1"),
        (["--num-ps", "2"], json.dumps({"cluster": {"worker": ["127.0.0.1:2222"]}}), "has no address for that"),
        (["--max-workers", "4"], tf_config(alone, "chief"), "a strategy needs at least one ps"),
    ):
        code, said = run("coordinator", *arguments, str(script), config=config)
        assert code != 0
        assert re.search(sentence, said), said


def test_coordinator_and_servers_return(tmp_path: Path) -> None:
    """The next coordinator finds servers that are elsewhere than TF_CONFIG says, also those that moved meanwhile."""
    with Moving(tmp_path) as roles:
        servers = [roles.server(index) for index in range(2)]
        roles.worker()
        coordinator = roles.count()
        coordinator.wait_for("all have ended")
        kill(servers[0])
        kill(coordinator)
        kill(servers[1])
        servers[1] = roles.server(1)
        coordinator = roles.count()
        servers[0] = roles.server(0)
        coordinator.wait_for("connected [1-9]")
        roles.until_runs("training goes on")
        roles.end(coordinator)


def test_who_is_refused(tmp_path: Path) -> None:
    """A process is not taken for a server that is there, or whose state it does not have; the right one still is."""
    with Moving(tmp_path) as roles:
        servers = [roles.server(index) for index in range(2)]
        roles.worker()
        coordinator = roles.count()
        roles.until_runs("training has begun")

        def refused(index: int, *options: str) -> str:
            process = roles.server(index, "--connect-timeout", "0.5", *options)
            assert process.wait() in (1, 2)
            return next(line for line in process.output.splitlines() if line.startswith("pscluster: "))

        elsewhere = ("--state-dir", str(tmp_path / "other"))
        assert "another parameter server (pid" in refused(0)
        assert "but the process that registers as this task holds nothing" in refused(0, *elsewhere)
        assert "the task is 40, but the cluster has 2 parameter servers" in refused(40)
        assert "the ps is for the job 'another'" in refused(0, "--job-name", "another")
        assert "advertises 10.1.2.3, but calls from 127.0.0.1" in refused(0, *elsewhere, "--advertise", "10.1.2.3")
        kill(servers[0])
        assert "holds nothing: start it with the disk" in refused(0, *elsewhere)
        roles.server(0)
        coordinator.wait_for("ps 0 at .* is back after")
        roles.end(coordinator)


@pytest.mark.parametrize("point", MOVING)
def test_a_death_in_a_move(point: str, tmp_path: Path) -> None:
    """The coordinator or a worker dies while a server is found at its new place; the next one finds it, too."""
    with Moving(tmp_path) as roles:
        servers = [roles.server(index) for index in range(2)]
        env, role = dict(roles.env), point.partition(".")[0]
        # Both servers move once before the job begins, which the workers are told when they are attached.
        roles.env |= environment(text=f"{point}=kill@{3 if role == 'coordinator' else 1}")
        dies = roles.worker() if role == "worker" else None
        roles.env = env if dies else roles.env
        coordinator = roles.count()
        roles.env = env
        if dies is None:
            roles.worker()
        coordinator.wait_for("all have ended")
        kill(servers[1])
        servers[1] = roles.server(1)
        if dies is not None:
            assert dies.wait() == -signal.SIGKILL
            roles.worker()
        else:
            assert coordinator.wait() == -signal.SIGKILL
            coordinator = roles.count()
            coordinator.wait_for("connected [1-9]")
        roles.until_runs("training goes on")
        roles.end(coordinator)


@pytest.mark.parametrize("point", ["ps.restore.after", "node.attach.before", "node.attach.after"])
def test_a_server_dies_again_where_it_returns(point: str, tmp_path: Path) -> None:
    """It is found at the third place, and everything counts once."""
    with Moving(tmp_path) as roles:
        servers = [roles.server(index) for index in range(2)]
        roles.worker()
        coordinator = roles.count()
        coordinator.wait_for("all have ended")
        kill(servers[0])
        again = roles.server(0, **environment(text=f"{point}=kill@1"))
        assert again.wait() == -signal.SIGKILL
        roles.server(0)
        coordinator.wait_for("ps 0 at .* is back after")
        roles.until_runs("training goes on")
        roles.end(coordinator)


def test_faults_at_calls(tmp_path: Path) -> None:
    """A registration, or what the worker is told, may be lost, answered in vain, late or repeated."""
    register, move = "/pscluster.v1.Coordinator/Register", "/pscluster.v1.Worker/MoveServers"
    with Moving(tmp_path) as roles:
        servers = [roles.server(index) for index in range(2)]
        env = dict(roles.env)
        faults = [f"worker/rpc:{move}={kind}@{nth}" for nth, kind in enumerate(CALL_KINDS, 1)]
        faults += [f"chief/rpc:{register}={kind}@{nth}" for nth, kind in enumerate(CALL_KINDS, 1)]
        roles.env |= environment(text=";".join(faults))
        roles.worker()
        coordinator = roles.count()
        roles.env = env
        coordinator.wait_for("all have ended")
        for nth in range(1, len(CALL_KINDS) + 1):
            kill(servers[0])
            servers[0] = roles.server(0)
            coordinator.wait_for("ps 0 at .* is back after", nth)
            roles.until_runs("training goes on")
        roles.end(coordinator)


def test_certificates(tmp_path: Path) -> None:
    """A server is verified by its role: no certificate names its address. A worker's certificate is not enough."""
    certificates = tmp_path / "certificates"
    make_certificates(certificates)
    with Moving(tmp_path, {"PSCLUSTER_TLS": str(certificates), "PSCLUSTER_NUM_PS": "2"}) as roles:
        roles.cluster = {"chief": [roles.chief]}
        elsewhere = ("--bind", "127.0.0.2:0", "--advertise", "127.0.0.2")
        servers = [roles.server(index, *elsewhere) for index in range(2)]
        roles.join("worker")
        coordinator = roles.count()
        coordinator.wait_for("all have ended")
        kill(servers[0])
        as_worker = roles.server(0, "--state-dir", str(tmp_path / "other"), PSCLUSTER_TLS=str(certificates / "worker"))
        assert as_worker.wait() == 1
        assert "a worker's certificate does not allow registering as a ps" in as_worker.output
        roles.server(0, *elsewhere)
        coordinator.wait_for("ps 0 at 127.0.0.2:.* is back after")
        roles.until_runs("training goes on")
        roles.end(coordinator)


def test_a_server_that_the_job_gets(tmp_path: Path) -> None:
    """It registers with the next index, waits, is added, dies and returns elsewhere, is removed, and waits again."""
    certificates = tmp_path / "certificates"
    make_certificates(certificates)
    with Moving(tmp_path, {"PSCLUSTER_TLS": str(certificates), "PSCLUSTER_NUM_PS": "1"}) as roles:
        roles.cluster = {"chief": [roles.chief]}
        elsewhere = ("--bind", "127.0.0.2:0", "--advertise", "127.0.0.2")
        roles.server(0)
        roles.join("worker")
        coordinator = roles.count()
        coordinator.wait_for("all have ended")
        new = roles.server(1, *elsewhere)
        new.wait_for("waiting at 127.0.0.2:.* to add parameter server 1: strategy.add_server")
        coordinator.wait_for("ps 1 at .* has registered, and waits until the script adds it")
        other = roles.server(1, "--state-dir", str(tmp_path / "other"), "--connect-timeout", "0.1")
        assert other.wait() == 1
        assert "ps 1 is another process, at 127.0.0.2:" in other.output
        (tmp_path / "add").touch()
        coordinator.wait_for("added 1 Moved")
        roles.until_runs("training goes on with the new one")
        kill(new)
        new = roles.server(1, *elsewhere)
        coordinator.wait_for("ps 1 at 127.0.0.2:.* is back after")
        roles.until_runs("training goes on")
        (tmp_path / "remove").touch()
        coordinator.wait_for(r"removed \[Moved")
        new.wait_for("waiting at 127.0.0.2:.* to add parameter server 1")
        roles.end(coordinator)


def test_unix_sockets(tmp_path: Path) -> None:
    """Servers and workers that join over Unix sockets have their own in the coordinator's folder."""
    short = tempfile.TemporaryDirectory(prefix="psc-test-", dir="/tmp")  # a path short enough for sockets
    with short as folder, Moving(tmp_path, {"PSCLUSTER_NUM_PS": "2"}) as roles:
        roles.cluster = {"chief": [f"unix:{folder}/chief-0"]}
        servers = [roles.server(index, "--bind", f"unix:{folder}/ps-{index}") for index in range(2)]
        roles.join("worker", "--bind", f"unix:{folder}/worker-0")
        coordinator = roles.count()
        coordinator.wait_for("all have ended")
        kill(servers[1])
        roles.server(1, "--bind", f"unix:{folder}/ps-1-again")
        coordinator.wait_for("ps 1 at unix:.*/ps-1-again is back after")
        roles.until_runs("training goes on")
        roles.end(coordinator)


def test_a_server_that_listens_everywhere(tmp_path: Path) -> None:
    """It says where its data plane is before anybody may ask: its clients do not stay on gRPC."""
    with Moving(tmp_path, {"PSCLUSTER_INSECURE": "1"}) as roles:
        for index in range(2):
            roles.server(index, "--bind", "0.0.0.0:0")
        roles.worker()
        coordinator = roles.count()
        coordinator.wait_for("all have ended")
        code, said = run("status", "--json", config=tf_config(roles.cluster, "chief"), **roles.env)
        assert code == 0, said
        for task in json.loads(said[said.index("{") :])["tasks"]:
            if task["task"] == "ps":
                peer = PeerAddress("ps", task["index"], task["address"], token=load_token(None))
                with open_peer_channel(peer) as channel:
                    reply = say_hello(channel, peer, make_identity("tool", 0))
                assert reply.address == task["address"]
        roles.end(coordinator)


def test_synchronous_steps(tmp_path: Path) -> None:
    """Server 0, which decides steps, and server 1 return elsewhere in the middle of steps: each is applied once."""
    with Moving(tmp_path, workers=2) as roles:
        servers = [roles.server(index) for index in range(2)]
        for index in range(2):
            roles.worker(index)
        coordinator = roles.coordinator(STEPS, str(tmp_path))
        for index in (0, 1):
            roles.until_runs("steps are taken")
            kill(servers[index])
            roles.server(index)
            coordinator.wait_for(f"ps {index} at .* is back after")
        roles.until_runs("steps are taken with both elsewhere")
        roles.end(coordinator)


def test_bad_options() -> None:
    """Wrong options end the process with one line that names the value, before anything else."""
    server = tf_config({"ps": ["127.0.0.1:2222"]}, "ps")
    cases: list[tuple[list[str], dict[str, str], str]] = [
        (["ps", "--join", "nowhere"], {}, '--join is "nowhere", but it has no port'),
        (["ps", "--join", "127.0.0.1:1"], {}, "--task is ''; a parameter server that joins is one of the cluster's"),
        (["ps", "--task", "first"], {"PSCLUSTER_COORDINATOR": "127.0.0.1:1"}, "--task is 'first'; a parameter server"),
        (["ps", "--join", "127.0.0.1:1", "--task", "1234567"], {}, "--task is 1234567; give an index from 0 to 999999"),
        (["ps", "--join", "c:1", "--task", "0"], {"TF_CONFIG": server}, "TF_CONFIG names a task, and --join or"),
        (["ps", "--task", "0"], {"TF_CONFIG": server}, "--task is given, but no coordinator to join"),
    ]
    done = run_all([(arguments, {"TF_CONFIG": "{}", **env}) for arguments, env, _ in cases])
    for (_, _, sentence), (code, said) in zip(cases, done, strict=True):
        assert (code, said.count("\n")) == (2, 1), said
        assert sentence in said, said


@pytest.mark.timeout(180)
def test_all_come_and_go(tmp_path: Path) -> None:
    """Servers, workers and the coordinator are killed in any order, several at once, and return elsewhere."""
    chance = random.Random(int(os.environ.get("PSCLUSTER_TEST_SEED", "31415")))
    with Moving(tmp_path, {"PSCLUSTER_NUM_PS": "2"}) as roles:
        roles.cluster = {"chief": roles.cluster["chief"]}
        start: dict[str, Callable[[], Process]] = {
            "ps 0": lambda: roles.server(0),
            "ps 1": lambda: roles.server(1),
            "worker a": lambda: roles.join("worker", "--task", "a"),
            "worker b": lambda: roles.join("worker", "--task", "b"),
            "coordinator": roles.count,
        }
        there = {name: begin() for name, begin in start.items()}
        there["coordinator"].wait_for("all have ended")
        for _ in range(8):
            dead = chance.sample(sorted(start), chance.choice([1, 1, 2, 3]))
            for name in dead:
                kill(there[name])
            for name in chance.sample(dead, len(dead)):
                there[name] = start[name]()
            roles.until_runs(f"training goes on after the deaths of {', '.join(dead)}")
        roles.end(there["coordinator"])
