"""`RayCluster` on a real Ray cluster of two nodes: trains, and survives the death of actors and of a node."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from tests.launchers.ray.ray_cluster import FOURTH, OTHER, THIRD, Nodes, missing, ray_nodes
from tests.waiting import until, write_whole

from pscluster.core.errors import ConfigurationError
from pscluster.core.ids import VERSION
from pscluster.launch import RayCluster, RayClusterError
from pscluster.launch.ray.role_actor import RoleActor

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(300),  # Ray starts an interpreter for each actor: a minute on a machine that others use, too
]

SCRIPTS = str(Path(__file__).with_name("ray_scripts.py"))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as nodes:
        yield nodes


class Script:
    """A script that runs."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.path = folder / "log"
        # Scripts flush each line as a whole. Unbuffered, print() writes it in pieces, between which others may write.
        env = {**os.environ, "RAY_DEDUP_LOGS": "0"}
        env.pop("PYTHONUNBUFFERED", None)
        with self.path.open("wb") as log:
            command = [sys.executable, SCRIPTS, name, *arguments]
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def log(self) -> str:
        return self.path.read_text()

    def until(self, pattern: str, after: int = 0) -> re.Match[str]:
        """Wait for a line in the log, and return the match."""
        until(
            lambda: re.search(pattern, self.log[after:]) or self.process.poll() is not None,
            f"the log has {pattern!r}",
            lambda: self.log[-5000:],
        )
        found = re.search(pattern, self.log[after:])
        assert found, self.log[-5000:]
        return found

    def tasks(self) -> list[tuple[str, int, str]]:
        """Name, pid and address of each task, as they were at first."""
        return [(name, pid, address) for name, pid, address in json.loads(self.until(r"tasks (\[.*\])")[1])]

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        return self.process.wait(100)


Run: TypeAlias = Callable[..., Script]


@pytest.fixture
def run(tmp_path: Path, nodes: Nodes) -> Iterator[Run]:
    """Start a script, and leave nothing of it."""
    scripts: list[Script] = []

    def start(name: str, *arguments: str) -> Script:
        scripts.append(Script(tmp_path, name, nodes.address, *arguments))
        return scripts[-1]

    yield start
    for script in scripts:
        script.process.kill()
        script.process.communicate()


def parent_of(pid: int) -> int:
    """The process that has started this one: of a role, its actor's."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def left() -> list[str]:
    """The folders of tasks that are left."""
    return [str(path) for path in Path(tempfile.gettempdir()).glob("pscluster-ray-*")]


def pids(folders: Iterable[str]) -> list[int]:
    """The processes of roles whose tasks have these folders."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environ = (path / "environ").read_bytes()
        except OSError:
            continue
        if any(folder.encode() in environ for folder in folders):
            found.append(int(path.name))
    return found


def test_actors_and_roles_are_killed_and_a_node_is_removed(run: Run, nodes: Nodes) -> None:
    """Each task comes back: a worker at another port, or on another node, a server with its state where it was.

    What is left of the cluster trains the example as accurately as everywhere. Afterwards nothing of it is left.
    """
    before = left()
    script = run("train")
    tasks = {name: (pid, address) for name, pid, address in script.tasks()}
    script.until("step 100/")
    on_first = next(name for name in tasks if name.startswith("worker") and OTHER not in tasks[name][1])
    away = [name for name in tasks if OTHER in tasks[name][1]]
    assert len(away) >= 1
    assert not [name for name in away if name.startswith("ps")]
    for killed, names in (("actor", (on_first, "ps 1")), ("role", (away[0], "ps 0"))):
        at = len(script.log)
        for pid, _ in map(tasks.__getitem__, names):
            os.kill(parent_of(pid) if killed == "actor" else pid, signal.SIGKILL)
        how = "was lost with its actor" if killed == "actor" else "was killed by SIGKILL"
        for name in names:
            pid, address = tasks[name]
            script.until(rf"{name} \(pid {pid}\) {how}.*; restarted as pid \d+", at)
            if name.startswith("ps"):
                script.until(rf"{name} at {address} is back after .* with the state saved", at)
            else:
                assert script.until(rf"joined chief .* as {name}, at (\S+)", at)[1] != address
        script.until(r"steps/s  4 workers up", len(script.log))
    nodes.remove()
    at = len(script.log)
    for name in away:
        assert OTHER not in script.until(rf"joined chief .* as {name}, at (\S+)", at)[1]
    script.until(r"steps/s  4 workers up", len(script.log))
    assert "Traceback" not in script.log
    script.process.send_signal(signal.SIGINT)
    assert script.wait() == 0, script.log[-5000:]
    assert float(script.until(r"test accuracy (\S+)")[1]) > 0.96
    assert left() == before


def test_a_server_whose_node_is_removed_comes_back_elsewhere_and_empty(run: Run, nodes: Nodes, tmp_path: Path) -> None:
    """The job fails and says why; the next one on this cluster goes on from a checkpoint.

    In the end the script is killed, and its actors end; their folders stay.
    """
    before = left()
    nodes.add(OTHER)
    script = run("away", str(tmp_path / "checkpoints"))
    (address,) = (address for name, _, address in script.tasks() if name == "ps 0")
    script.until("counted 10")
    nodes.remove()
    script.until(
        r"actor for ps 0 yet, which needs CPU 1 \(\S+ free of 8\), away 1 \(0 free of 0\), and there are 1 nodes"
    )
    nodes.add(THIRD)
    assert script.process.stdin is not None
    script.process.stdin.write(b"\n")
    script.process.stdin.flush()
    lost = script.until(r"lost: .*")[0]
    assert f"ps 0 at {address} is lost" in lost
    assert f"ps 0 came back at {THIRD}:" in lost
    assert "make another strategy on this cluster, and restore a checkpoint" in lost
    script.until("total 40.0")
    assert "it begins with 10.0" in script.log
    script.process.kill()
    folders = [folder for folder in left() if folder not in before]
    assert folders
    until(lambda: not pids(folders), "its processes end", lambda: (pids(folders), script.log[-3000:]))
    for folder in folders:
        shutil.rmtree(folder)


def test_a_server_with_a_disk_of_all_nodes_is_found_where_it_comes_back(run: Run, nodes: Nodes, tmp_path: Path) -> None:
    """The job goes on, and has lost nothing."""
    nodes.add(OTHER)
    script = run("follows", str(tmp_path))
    (address,) = (address for name, _, address in script.tasks() if name == "ps 0")
    script.until("counted 10")
    nodes.remove()
    nodes.add(FOURTH)
    assert script.process.stdin is not None
    script.process.stdin.write(b"\n")
    script.process.stdin.flush()
    assert script.wait() == 0, script.log[-5000:]
    assert "total 40.0" in script.log
    before, after = re.findall(r'\["ps 0", \d+, "(\S+):', script.log)
    assert (before, after) == (address.split(":")[0], FOURTH)


def test_a_driver_that_is_a_task_of_ray(run: Run, nodes: Nodes, tmp_path: Path) -> None:
    """It uses the connection that it has, and leaves it open; synchronous steps and a trainer run there."""
    nodes.add(OTHER)
    script = run("inside", str(tmp_path / "runs"))
    assert script.wait() == 0, script.log[-5000:]
    result = json.loads(script.until(r"result (\{.*\})")[1])
    assert result["values"] == [4.0, 4.0, 4.0]
    assert result["still connected"]
    assert result["metrics"] == {"count": 2.0}
    assert sorted(result["members"]) in ([[0, 0, 1], [1, 0, 1]], [[0, 0, 2], [0, 1, 2]])  # as Ray has placed them


def test_a_group_of_a_framework(run: Run, nodes: Nodes, tmp_path: Path) -> None:
    """Its members find each other at an address of a node; when one dies, or its worker, all begin again."""
    nodes.add(OTHER)
    script = run("group", str(tmp_path))
    assert script.wait() == 0, script.log[-5000:]
    metrics, values = json.loads(script.until(r"result (\[.*\])")[1])
    assert metrics == {"met": 2}
    assert [value["met"] for value in values] == [[1, 2], [3], [3]]
    assert all(value["says"] for value in values)
    assert {value["node"] for value in values} == {0, 1}, "it was on both nodes"
    (where,) = {value["where"] for value in values}
    assert where == nodes.other or not where.startswith("127."), "an address that the other node reaches"
    assert {path.name for path in tmp_path.glob("?-?")} == {"0-3", "1-3", "2-3"}


def test_an_elastic_run(run: Run, nodes: Nodes, tmp_path: Path) -> None:
    """It grows as far as there is room, goes on without a node that is removed, shrinks, and grows on another node.

    No row is lost, and what was counted twice, the result tells of.
    """
    nodes.add(OTHER)
    script = run("elastic", str(tmp_path))

    def ask(workers: int) -> None:
        at = len(script.log)
        assert script.process.stdin is not None
        script.process.stdin.write(f"{workers}\n".encode())
        script.process.stdin.flush()
        script.until(r"scaled.*(\n.*)*tasks .*\n", at)

    def has(size: int) -> None:
        script.until(rf"report \d+  size {size}\b", len(script.log))

    has(1)
    ask(4)
    has(4)
    ask(5)
    sentence = (
        r"not scaled: the Ray cluster has no room for 1 more worker after 5 s: they need CPU 2 \(\S+ free of 10\)"
    )
    assert re.search(sentence, script.log), script.log[-5000:]
    has(4)
    places = [json.loads(line) for line in re.findall(r"tasks (\[.*\])", script.log)][-1]
    other = f"{nodes.other}:"
    (lost,) = (int(name.removeprefix("worker ")) for name, _, address in places if address.startswith(other))
    assert lost > 0
    nodes.remove()
    has(3)
    ask(lost)  # also the one that waits for a node with room
    has(lost)
    nodes.add(THIRD)
    ask(4)
    has(4)
    write_whole(tmp_path / "ends", json.loads(script.log.rpartition("epoch ")[2].split()[0]) + 3)
    assert script.wait() == 0, script.log[-5000:]
    seen, again = json.loads(script.until(r"result (\[.*\])")[1])
    assert script.log.count("not scaled") == 1
    epochs = int((tmp_path / "ends").read_text())
    assert min(seen) >= epochs
    assert sum(seen) - epochs * 201 <= again


def test_what_is_asked_for(run: Run, tmp_path: Path) -> None:
    """Where there is no room, or no cluster, what was asked for is named, and what there is, within a deadline.

    Afterwards the room is free: there the tasks have their variables and modules, and are killed and restarted at will.
    """
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "only_there.py").write_text("VALUE = 42")
    script = run("asks", str(tmp_path / "shipped"))
    assert script.wait() == 0, script.log[-5000:]
    sentence = (
        r"RayClusterError the Ray cluster has no room for 3 tasks with placement='SPREAD' after 2 s: they need "
        r"CPU 201 \(\S+ free of \d+\), and there are \d nodes; stop what uses it, add nodes, or ask for less"
    )
    assert re.search(sentence, script.log), script.log[-5000:]
    assert re.search(r"they need CPU 1 \(.*\), GPU 2 \(0 free of 0\)", script.log), script.log[-5000:]
    assert "ConfigurationError tls is False, but the tasks are reached over a network" in script.log
    assert "<RayCluster running: ps 0 pid" in script.log
    assert "variables ['2', '300', '1', None]" in script.log
    for line in ("module 42", "killed True True", "restarted True", "where it was True"):
        assert line in script.log, script.log[-5000:]
    with pytest.raises(RayClusterError, match=r"no Ray cluster at the address '127\.0\.0\.1:1': .* refused"):
        RayCluster(address="127.0.0.1:1").start()
    with pytest.raises(ConfigurationError, match="run the script on a node of the Ray cluster"):
        RayCluster(address="ray://127.0.0.1:1").start()


def test_a_port_that_is_taken(nodes: Nodes) -> None:
    """A server has the port that it had, unless another program has it after a while."""

    def reserved(port: int) -> tuple[str, int]:
        actor = RoleActor("ps 0", VERSION)
        place = actor.reserve(port, 0.1)
        assert actor._reserved is not None
        actor._reserved.close()
        return place

    host, port = reserved(0)
    with socket.create_server((host, port)):
        assert reserved(port)[1] != port
    assert reserved(port) == (host, port)
