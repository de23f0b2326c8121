"""The local cluster with real processes: small scripts stand in for the roles and the coordinator."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click import Command
from tests.faults.support import gone
from tests.waiting import TIMEOUT, until

from pscluster.coordinator.cli.run import run_script
from pscluster.coordinator.local.local_cluster import LocalCluster, LocalClusterError
from pscluster.coordinator.strategy import ParameterServerStrategy
from pscluster.core.cluster.spec import validate_for_strategy
from pscluster.core.cluster.tf_config import TFConfig
from pscluster.core.errors import ConfigurationError, MisuseError, WaitTimeoutError
from pscluster.core.role.process import main_of

# Behaves as the roles' contract says, and obeys a line sent to its port. What it does it writes to a diary.
ROLE = """
import json, os, signal, socket, subprocess, sys, threading, time

task = json.loads(os.environ["TF_CONFIG"])["task"]
me = f"{task['type']} {task['index']}"
host, port = json.loads(os.environ["TF_CONFIG"])["cluster"][task["type"]][task["index"]].rsplit(":", 1)
behaviour = os.environ.get("BEHAVIOUR_" + me.replace(" ", "_"), "")

def note(what):
    diary = os.open(os.environ["DIARY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(diary, f"{me} {what}\\n".encode())
    os.close(diary)

def terminated(number, frame):
    note("asked to stop")
    if behaviour != "stubborn":
        os._exit(0)

def watch_parent():
    while os.read(0, 100):
        pass
    os._exit(0)

if behaviour.startswith("exit"):
    note("exits")
    os._exit(int(behaviour.split()[1]))
signal.signal(signal.SIGTERM, terminated)
assert "--exit-with-parent" in sys.argv
threading.Thread(target=watch_parent, daemon=True).start()
listener = socket.socket()
if "--share-port" in sys.argv:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind((host, int(port)))
listener.listen()

def serve():
    while True:
        connection, _ = listener.accept()
        with connection:
            command = connection.recv(100).decode()
            if command == "describe":
                reply = {"pid": os.getpid(), "argv": sys.argv[1:], "cwd": os.getcwd()}
                connection.sendall(json.dumps({**reply, "env": dict(os.environ)}).encode())
            elif command == "spawn":
                child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
                connection.sendall(str(child.pid).encode())
            elif command == "job over" and "--until-done" in sys.argv:
                note("done")
                os._exit(0)

threading.Thread(target=serve, daemon=True).start()
note("serves")
while True:
    time.sleep(0.05)  # a signal just before an endless wait would be noticed after that: never
"""

# Runs a script as the coordinator does, and tells the roles at its end that the job is over.
COORDINATOR = """
import json, os, runpy, socket, sys

assert sys.argv.pop(1) == "--share-port"
sys.argv.pop(0)
config = json.loads(os.environ["TF_CONFIG"])
assert config["task"] == {"type": "chief", "index": 0}
assert os.environ["PSCLUSTER_TOKEN"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    for role in ("worker", "ps"):
        for address in config["cluster"][role]:
            host, port = address.rsplit(":", 1)
            for _ in range(1000):
                try:
                    with socket.create_connection((host, int(port)), timeout=5) as peer:
                        peer.sendall(b"job over")
                        peer.recv(1)
                    break
                except ConnectionRefusedError:
                    __import__("time").sleep(0.01)
                except ConnectionResetError:
                    break
"""


class House:
    """Where the stand-ins live: their scripts and their diary."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.diary_file = folder / "diary"
        self.diary_file.touch()
        (folder / "role.py").write_text(ROLE)
        (folder / "coordinator.py").write_text(COORDINATOR)
        # -S and -E: a start in a third of the time.
        self.role = [sys.executable, "-S", "-E", str(folder / "role.py")]
        self.coordinator = [sys.executable, "-S", "-E", str(folder / "coordinator.py")]

    def cluster(self, num_ps: int = 1, num_workers: int = 1, **options: object) -> LocalCluster:
        """A cluster of stand-ins."""
        behaviours = options.pop("behaviours", {})
        assert isinstance(behaviours, dict)
        options.setdefault("transport", "tcp")  # the stand-ins know ports only
        options.setdefault("env", {"DIARY": str(self.diary_file), **self.behave(behaviours)})
        return LocalCluster(num_ps, num_workers, _command=self.role, **options)  # type: ignore[arg-type]

    @staticmethod
    def behave(behaviours: dict[tuple[str, int], str]) -> dict[str, str]:
        """Variables that tell stand-ins what to do."""
        return {f"BEHAVIOUR_{role}_{index}": behaviour for (role, index), behaviour in behaviours.items()}

    def diary(self) -> list[str]:
        """What the stand-ins have done so far."""
        return self.diary_file.read_text().splitlines()

    def wait_for(self, *entries: str) -> None:
        """Wait until the diary has the entries."""
        until(lambda: set(entries) <= set(self.diary()), f"the diary has {entries}")

    def script(self, text: str) -> Path:
        """A script for the coordinator."""
        path = self.folder / "script.py"
        path.write_text(textwrap.dedent(text))
        return path

    def run(self, text: str, *args: str, **options: object) -> int:
        """Run a coordinator's script with stand-ins around it."""
        behaviours = options.pop("behaviours", {})
        assert isinstance(behaviours, dict)
        return run_script(
            self.script(text),
            args,
            env={"DIARY": str(self.diary_file), **self.behave(behaviours)},
            _role_command=self.role,
            _coordinator_command=self.coordinator,
            transport="tcp",
            **options,  # type: ignore[arg-type]
        )

    def program(self, text: str) -> list[str]:
        """The command line of a program of its own that uses the stand-ins, as `house`."""
        path = self.folder / "program.py"
        head = f"""
            import signal, sys
            sys.path.insert(0, {str(Path(__file__).parents[3])!r})
            from pathlib import Path
            from tests.coordinator.local.test_local_cluster import House, address_of
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` has it ignored, and so would be what we start
            house = House(Path({str(self.folder)!r}))
        """
        path.write_text(textwrap.dedent(head) + textwrap.dedent(text))
        return [sys.executable, str(path)]


def address_of(cluster: LocalCluster, role: str, index: int) -> tuple[str, int]:
    """Where a task listens."""
    host, port = cluster.cluster_spec().task_address(role, index).rsplit(":", 1)
    return host, int(port)


def ask(cluster: LocalCluster, role: str, index: int, command: str) -> bytes:
    """Send a command to a stand-in as soon as it serves; its reply."""
    replies: list[bytes] = []

    def answered() -> bool:
        with (
            contextlib.suppress(ConnectionRefusedError, ConnectionResetError),
            socket.create_connection(address_of(cluster, role, index), timeout=TIMEOUT) as peer,
        ):
            peer.sendall(command.encode())
            peer.shutdown(socket.SHUT_WR)
            replies.append(b"".join(iter(lambda: peer.recv(1 << 16), b"")))
        return bool(replies)

    until(answered, f"{role} {index} answers")
    return replies[0]


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a session of its own, which does not outlive the test."""
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def house(tmp_path: Path) -> House:
    """Stand-ins for the roles."""
    return House(tmp_path)


def _children() -> set[str]:
    """The processes that this one has started and not reaped; other tests may share a cluster."""
    children: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            children.update((task / "children").read_text().split())
    return children


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """No test leaves a thread, a file descriptor or a child behind."""
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    children = _children()
    yield
    until(lambda: set(threading.enumerate()) <= threads, "all threads have ended")
    assert len(os.listdir("/proc/self/fd")) <= files
    assert _children() <= children


# --- the cluster ---


def test_processes_know_their_place(house: House, tmp_path: Path) -> None:
    """Every task runs at the address that the resolver tells, with TF_CONFIG, the token and the options."""
    with house.cluster(2, 3, until_done=True, log_level="info", cwd=tmp_path) as cluster:
        assert list(cluster.pids) == [("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1), ("worker", 2)]
        for (role, index), pid in cluster.pids.items():
            seen = json.loads(ask(cluster, role, index, "describe"))
            assert seen["pid"] == pid
            assert seen["cwd"] == str(tmp_path)
            config = TFConfig.parse(seen["env"]["TF_CONFIG"])
            assert config == TFConfig.parse(cluster.tf_config(role, index))
            assert config.cluster == cluster.cluster_spec()
            assert seen["env"]["PSCLUSTER_TOKEN"] == cluster.token
            assert cluster.token not in " ".join(seen["argv"]), "others may read a command line"
            assert {"--until-done", "--exit-with-parent", "--share-port"} < set(seen["argv"])
            assert seen["argv"][seen["argv"].index("--log-level") + 1] == "info"


def test_each_task_can_have_variables_of_its_own(house: House) -> None:
    """A function of role and index gives them, once for each task: one that is restarted has the same."""
    calls: list[tuple[str, int]] = []

    def env(role: str, index: int) -> dict[str, str]:
        calls.append((role, index))
        return {
            "DIARY": str(house.diary_file),
            "CUDA_VISIBLE_DEVICES": str(index) if role == "worker" else "",
            "OMP_NUM_THREADS": "7",
        }

    with house.cluster(1, 2, env=env) as cluster:
        pid = cluster.pids["worker", 1]
        cluster.kill("worker", 1)
        cluster.wait_restarted("worker", 1, pid)
        found = {task: json.loads(ask(cluster, *task, "describe"))["env"] for task in cluster.pids}
        assert {task: seen["CUDA_VISIBLE_DEVICES"] for task, seen in found.items()} == {
            ("ps", 0): "",
            ("worker", 0): "0",
            ("worker", 1): "1",
        }
        assert {seen["OMP_NUM_THREADS"] for seen in found.values()} == {"7"}
        assert calls == [("ps", 0), ("worker", 0), ("worker", 1)]


def test_is_a_resolver(house: House) -> None:
    """A strategy may use it as it is: the holder is the chief of a cluster that is sound."""
    with house.cluster(1, 2) as cluster:
        validate_for_strategy(cluster.cluster_spec(), cluster.task_type, cluster.task_id)
        assert (cluster.task_type, cluster.task_id, cluster.rpc_layer, cluster.environment) == (
            "chief",
            0,
            "grpc",
            "",
        )
        assert cluster.master() == "grpc://" + cluster.cluster_spec().task_address("chief", 0)
        assert cluster.master("ps", 0).startswith("grpc://127.0.0.1:")
        assert "worker 1 pid" in repr(cluster)


def test_a_killed_worker_is_restarted_at_its_address(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """After kill -9 the old process is reaped, a new one serves at its address, and the log tells of it."""
    with house.cluster(1, 2) as cluster:
        old = cluster.kill("worker", 1)
        with pytest.raises(ProcessLookupError):
            os.kill(old, 0)
        new = cluster.wait_restarted("worker", 1, old)
        assert new == cluster.pids["worker", 1] != old
        assert json.loads(ask(cluster, "worker", 1, "describe"))["pid"] == new
        line = f"worker 1 (pid {old}) was killed by SIGKILL; restarted as pid {new} (restart 1 of 10)"
        until(lambda: line in caplog.messages, "the restart is logged")
        cluster.check()


def test_a_spent_budget_is_an_error(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """Spent restarts are logged, told to those that asked, and raised from check(); the others live on."""
    told: list[LocalClusterError] = []
    with house.cluster(1, 2, max_restarts=1, _on_failure=told.append) as cluster:
        cluster.check()
        cluster.wait_restarted("worker", 0, cluster.kill("worker", 0))
        last = cluster.kill("worker", 0)
        with pytest.raises(LocalClusterError, match="giving it up after 1 restart in a row"):
            cluster.wait_restarted("worker", 0, last)
        with pytest.raises(LocalClusterError, match=rf"worker 0 \(pid {last}\) was killed by SIGKILL"):
            cluster.check()
        until(lambda: told, "the failure is told")
        assert caplog.records[-1].levelno == logging.ERROR
        assert list(cluster.pids) == [("ps", 0), ("worker", 1)]
    with pytest.raises(LocalClusterError):
        cluster.check()


def test_configuration_errors_are_not_restarted(house: House) -> None:
    """A role that exits with 2 is given up at once."""

    def run() -> None:
        with house.cluster(behaviours={("worker", 0): "exit 2"}) as cluster:  # the start may see it already
            cluster.wait_first_end(TIMEOUT)
            cluster.check()

    with pytest.raises(LocalClusterError, match="exited with code 2, which a restart can't fix"):
        run()
    assert house.diary().count("worker 0 exits") == 1


def test_an_orderly_end_is_not_restarted(house: House) -> None:
    """A role that was asked to stop by SIGTERM is over, and no failure; restart() brings it back."""
    with house.cluster() as cluster:
        house.wait_for("worker 0 serves")
        old = cluster.kill("worker", 0, signal.SIGTERM)
        assert cluster.wait_first_end(TIMEOUT)
        assert not cluster.is_alive("worker", 0)
        cluster.check()
        with pytest.raises(MisuseError, match="worker 0 has no process to signal: it is finished"):
            cluster.kill("worker", 0)
        assert cluster.restart("worker", 0) != old
        assert cluster.is_alive("worker", 0)


def test_restart_of_a_living_process(house: House) -> None:
    """restart() stops the old process cleanly and returns when the new one has started."""
    with house.cluster() as cluster:
        house.wait_for("ps 0 serves")
        old = cluster.pids["ps", 0]
        new = cluster.restart("ps", 0)
        assert json.loads(ask(cluster, "ps", 0, "describe"))["pid"] == new != old
        assert house.diary().count("ps 0 asked to stop") == 1


def test_without_restarts_the_caller_decides(house: House) -> None:
    """With restart=False a dead worker stays dead until restart() is called."""
    with house.cluster(restart=False) as cluster:
        old = cluster.kill("worker", 0)
        with pytest.raises(LocalClusterError, match="it is dead"):
            cluster.wait_restarted("worker", 0, old)
        cluster.check()
        cluster.restart("worker", 0)
        assert cluster.is_alive("worker", 0)


def test_a_restart_ends_though_the_new_process_died_meanwhile(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that called restart() may look only after that."""
    with house.cluster(restart=False) as cluster:
        old = cluster.kill("worker", 0)
        wait_for = cluster._changed.wait_for

        def late(predicate: Callable[[], object], timeout: float | None = None) -> object:
            assert wait_for(lambda: ("worker", 0) in cluster.pids, TIMEOUT)
            os.kill(cluster.pids["worker", 0], signal.SIGKILL)
            assert wait_for(lambda: "worker 0 dead" in repr(cluster) and not cluster.is_alive("worker", 0), TIMEOUT)
            return wait_for(predicate, timeout)

        monkeypatch.setattr(cluster._changed, "wait_for", late)
        assert cluster.restart("worker", 0, timeout=1.0) != old
        monkeypatch.undo()
        assert not cluster.is_alive("worker", 0)


def test_a_signal_that_is_not_deadly_returns_at_once(house: House) -> None:
    """A stopped process lives on, and kill() tells so rather than waiting for ever."""
    with house.cluster(grace=0.0) as cluster:
        house.wait_for("worker 0 serves")
        cluster.kill("worker", 0, signal.SIGSTOP)
        with pytest.raises(WaitTimeoutError, match=r"is still alive .* after SIGTERM"):
            cluster.kill("worker", 0, signal.SIGTERM, timeout=0.01)
        cluster.kill("worker", 0, signal.SIGCONT)


def test_stop_leaves_nothing(house: House) -> None:
    """After the stop no process lives and every port is free; a second stop does nothing."""
    cluster = house.cluster(2, 3).start()
    pids, spec = cluster.pids, cluster.cluster_spec()
    cluster.stop()
    cluster.stop()
    assert cluster.pids == {}
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    for role in spec.jobs:
        for index in spec.task_indices(role):
            with socket.socket() as probe:
                probe.bind(address_of(cluster, role, index))
    assert repr(cluster).startswith("<LocalCluster stopped")
    with pytest.raises(MisuseError, match="make a new one"):
        cluster.start()


def test_stop_in_order(house: House) -> None:
    """The parameter servers are asked to stop after the workers have ended."""
    with house.cluster(2, 2) as cluster:
        tasks = [f"{role} {index}" for role, index in cluster.pids]
        house.wait_for(*(f"{task} serves" for task in tasks))
    stops = [line.split()[0] for line in house.diary() if line.endswith("asked to stop")]
    assert stops == ["worker", "worker", "ps", "ps"]


def test_stop_from_several_threads(house: House) -> None:
    """Every call of stop() returns once the cluster is gone."""
    cluster = house.cluster(2, 2).start()
    seen: list[dict[tuple[str, int], int]] = []

    def stop() -> None:
        cluster.stop()
        seen.append(cluster.pids)

    threads = [threading.Thread(target=stop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [{}] * 4


def test_a_stubborn_process_is_killed(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """A process that ignores SIGTERM is killed when its grace is over."""
    with house.cluster(grace=0.1, behaviours={("worker", 0): "stubborn"}) as cluster:
        house.wait_for("worker 0 serves")
        pid = cluster.pids["worker", 0]
    assert "worker 0 asked to stop" in house.diary()
    assert f"worker 0 (pid {pid}) did not stop within 0.1 s of SIGTERM; killing it" in caplog.messages


def test_a_second_interrupt_kills(house: House) -> None:
    """Ctrl-C during the wait for a stubborn process ends it before the grace is over, whichever thread gets it."""
    cluster = house.cluster(grace=3600.0, behaviours={("worker", 0): "stubborn"}).start()
    house.wait_for("worker 0 serves")

    def press() -> None:
        house.wait_for("worker 0 asked to stop")
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # so that it does not interrupt the wait

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        cluster.stop()
    presser.join()
    assert cluster.pids == {}


def test_what_a_role_started_dies_with_it(house: House) -> None:
    """A child of a killed worker does not live on."""
    with house.cluster() as cluster:
        grandchild = int(ask(cluster, "worker", 0, "spawn"))
        assert not gone(grandchild)
        cluster.kill("worker", 0)
        until(lambda: gone(grandchild), "the grandchild is gone")


def test_without_shared_ports(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ports can't be shared, each is freed just before its process starts, and the address stays."""
    monkeypatch.setattr("pscluster.coordinator.local.addresses._SHARES_PORTS", False)
    with house.cluster() as cluster:
        assert "--share-port" not in json.loads(ask(cluster, "worker", 0, "describe"))["argv"]
        new = cluster.wait_restarted("worker", 0, cluster.kill("worker", 0))
        assert json.loads(ask(cluster, "worker", 0, "describe"))["pid"] == new


def test_two_clusters_at_once(house: House) -> None:
    """Clusters in one process have nothing in common."""
    with house.cluster(1, 1) as one, house.cluster(1, 1) as other:
        assert one.token != other.token
        old = one.kill("worker", 0)
        one.wait_restarted("worker", 0, old)
        for cluster in (one, other):
            seen = json.loads(ask(cluster, "worker", 0, "describe"))
            assert seen["pid"] == cluster.pids["worker", 0]
            assert seen["env"]["PSCLUSTER_TOKEN"] == cluster.token
        one.stop()
        assert other.is_alive("ps", 0)


def test_a_command_that_is_not_there(house: House) -> None:
    """A cluster whose processes can't be started raises at its start and leaves nothing."""
    house.role = [str(house.folder / "nothing-here")]
    cluster = house.cluster(1, 2)
    assert repr(cluster) == "<LocalCluster not started: 1 ps and 2 workers>"
    with pytest.raises(LocalClusterError, match=r"ps 0 could not be started: .*nothing-here"):
        cluster.start()
    assert re.match("<LocalCluster failed: ps 0 could not be started: .*nothing-here", repr(cluster))
    with pytest.raises(MisuseError, match="this LocalCluster has been stopped; make a new one"):
        ParameterServerStrategy(cluster)


def test_a_cluster_that_was_never_started(house: House) -> None:
    """It says so, whether it was stopped since, or its arguments could not be."""
    cluster = house.cluster()
    cluster.stop()
    assert repr(cluster) == "<LocalCluster stopped, and never started: 1 ps and 1 worker>"
    assert repr(LocalCluster.__new__(LocalCluster)) == "<LocalCluster with invalid arguments>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ps": 0}, "num_ps is 0"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"grace": -0.5}, "grace is -0.5"),
        ({"log_level": "LOUD"}, "log_level is 'LOUD'"),
        ({"cwd": "no/such/place"}, "cwd is 'no/such/place'"),
        ({"env": {"TF_CONFIG": "{}"}}, "env names TF_CONFIG"),
        ({"env": {"OMP_NUM_THREADS": 1}}, "env has 'OMP_NUM_THREADS': 1; a variable's name and value are strings"),
        ({"env": ["OMP_NUM_THREADS"]}, "env is a list; give a dictionary"),
        ({"env": lambda role, index: {"TF_CONFIG": ""} if role == "ps" else {}}, r"env\('ps', 0\) names TF_CONFIG"),
        ({"env": lambda role, index: {"PSCLUSTER_DATA_PORT": "off"}}, "which all tasks have in common"),
        ({"env": lambda role, index: {"GPU": "01"[index]}, "num_workers": 3}, r"env\('worker', 2\) raised IndexError"),
        ({"env": lambda role, index: None}, r"env\('ps', 0\) is None; give a dictionary"),
        ({"token": "short"}, "can be guessed"),
        ({"transport": "udp"}, "transport is 'udp'; give one of unix, tcp"),
        ({"transport": "unix", "tls": True}, "host= and tls=True are for TCP"),
        ({"transport": "unix", "host": "127.0.0.1"}, "host= and tls=True are for TCP"),
    ],
)
def test_bad_arguments(options: dict[str, object], message: str) -> None:
    """What can't be right is refused before anything is started."""
    with pytest.raises(ConfigurationError, match=message):
        LocalCluster(**options)  # type: ignore[arg-type]


def test_a_host_that_is_not_here() -> None:
    """A host of another machine, or of none, is named at the start, which leaves nothing."""
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1"):
        LocalCluster(host="192.0.2.1").start()
    with pytest.raises(ConfigurationError, match="does not resolve"):
        LocalCluster(host="no host at all").start()


def test_misuse_is_named(house: House) -> None:
    """A task that isn't there, or a cluster that isn't started, is a sentence."""
    cluster = house.cluster(1, 2)
    for call in (cluster.cluster_spec, lambda: cluster.restart("ps", 0), lambda: cluster.kill("ps", 0)):
        with pytest.raises(MisuseError):
            call()
    for role, index in (("worker", 2), ("chief", 0), ("ps", -1)):
        with pytest.raises(MisuseError, match=f"there is no {role} {index} in a cluster of 1 ps and 2 workers"):
            cluster.is_alive(role, index)
    cluster.stop()


def test_a_killed_parent_takes_its_children_along(house: House) -> None:
    """After kill -9 of the process that holds the cluster, its processes end by themselves."""
    command = house.program(
        """
        with house.cluster(1, 2) as cluster:
            house.wait_for("ps 0 serves", "worker 0 serves", "worker 1 serves")
            print(*cluster.pids.values(), flush=True)
            sys.stdin.read()
        """
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 3
        assert not any(map(gone, pids))
        parent.kill()
    for pid in pids:
        until(lambda pid=pid: gone(pid), f"{pid} is gone")  # type: ignore[misc]


def test_a_forgotten_stop(house: House) -> None:
    """A program that ends without stopping its cluster stops it at its exit, with its own exit code."""
    command = house.program(
        """
        cluster = house.cluster(1, 1).start()
        house.wait_for("ps 0 serves", "worker 0 serves")
        print(*cluster.pids.values(), flush=True)
        sys.exit(5)
        """
    )
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert (ended.returncode, ended.stderr) == (5, "")
    assert all(gone(int(pid)) for pid in ended.stdout.split())
    assert house.diary()[-2:] == ["worker 0 asked to stop", "ps 0 asked to stop"]


def test_an_end_in_order_is_silent() -> None:
    """Whichever of strategy and cluster ends first, and where the script ends neither."""
    program = """
        from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy, Variable

        def train(cluster, *strategies):
            strategy = ParameterServerStrategy(cluster, job_name="an end in order")
            with strategy.scope():
                count = Variable(0, name="count")
            coordinator = ClusterCoordinator(strategy)
            for _ in range(20):
                coordinator.schedule(count.assign_add, args=(1,))
            coordinator.join()
            assert count.numpy() == 20
            return strategy

        with LocalCluster(1, 1) as cluster:
            strategy = train(cluster)
        assert not strategy.connected
        strategy.close()
        cluster = LocalCluster(1, 1).start()
        train(cluster).close()
        with train(cluster):
            cluster.stop()
        forgotten = train(LocalCluster(1, 1).start())
        print("the end")
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "the end\n", "")


# --- pscluster run ---


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("print('ok')", 0),
        ("import sys; sys.exit(3)", 3),
        ("raise RuntimeError", 1),
        ("import os; os.kill(os.getpid(), 9)", 128 + 9),
    ],
)
def test_run_exits_as_the_script_does(house: House, text: str, code: int) -> None:
    """The exit code is the script's, or 128 + n for a signal."""
    assert house.run(text) == code


def test_run_gives_the_script_its_cluster_and_arguments(house: House) -> None:
    """The script sees its arguments and every task; roles that are told of its end are not asked to stop."""
    result = house.folder / "result"
    text = """
        import json, os, sys
        cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
        open(sys.argv[1], "w").write(json.dumps([sys.argv[2:], cluster]))
    """
    assert house.run(text, str(result), "--flag", "x y", num_ps=2, num_workers=2) == 0
    args, cluster = json.loads(result.read_text())
    assert args == ["--flag", "x y"]
    assert {job: len(tasks) for job, tasks in cluster.items()} == {"chief": 1, "ps": 2, "worker": 2}
    assert sorted(line for line in house.diary() if not line.endswith("serves")) == [
        "ps 0 done",
        "ps 1 done",
        "worker 0 done",
        "worker 1 done",
    ]


def test_run_without_a_script(
    house: House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing script is one line and exit code 2, and nothing is started."""
    monkeypatch.setattr(sys, "argv", ["pscluster"])

    def run(path: Path) -> None:
        main_of(Command("run", callback=lambda: run_script(path, _role_command=house.role)))

    for path, why in ((house.folder / "none.py", "does not exist"), (house.folder, "is a directory")):
        with pytest.raises(SystemExit, match="2"):
            run(path)
        assert capsys.readouterr().err == f"pscluster: the script {path} {why}; give a Python file\n"
    with pytest.raises(ConfigurationError, match="num_workers is 0; it must be a whole number, 1 or more"):
        run_script(house.script(""), num_workers=0)
    assert house.diary() == []


_WAITS = """
    import os, time
    try:
        open(os.environ["DIARY"], "a").write("script waits\\n")
        while True:
            time.sleep(0.05)  # a signal just before a single wait would be handled only after it
    finally:
        open(os.environ["DIARY"], "a").write("script ends\\n")
"""


def test_run_ends_when_a_role_is_given_up(house: House) -> None:
    """When a role's restarts are spent, the script is terminated, and the error says whose, and why."""
    with pytest.raises(LocalClusterError, match=r"^ps 0 \(pid \d+\) exited with code 7; .* the script was terminated$"):
        house.run(_WAITS, max_restarts=1, behaviours={("ps", 0): "exit 7"})


def test_run_kills_a_script_that_does_not_end(house: House) -> None:
    """A script that ignores SIGTERM is killed after the grace when a role was given up."""
    text = """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open({ready!r}, "w").close()
        while True:
            signal.pause()
    """
    ready = house.folder / "ready"
    killer_done = threading.Event()

    def kill_roles() -> None:
        until(ready.exists, "the script ignores SIGTERM")
        until(lambda: "worker 0 serves" in house.diary(), "the worker serves")
        (house.folder / "role.py").write_text("import os; os._exit(2)")
        for pid in children_of(os.getpid(), "role.py"):
            os.kill(pid, signal.SIGKILL)
        killer_done.set()

    killer = threading.Thread(target=kill_roles)
    killer.start()
    with pytest.raises(LocalClusterError):
        house.run(text.format(ready=str(ready)), grace=0.1)
    killer.join()
    assert killer_done.is_set()


def children_of(parent: int, name: str) -> list[int]:
    """The children of a process that have the name in their command line."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            its_parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if its_parent == parent and name.encode() in (folder / "cmdline").read_bytes():
                pids.append(int(folder.name))
    return pids


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_run_sends_signals_on(house: House, signum: signal.Signals) -> None:
    """Away from a terminal, a signal to the command is the script's, which decides on the exit code."""
    handler = f"import signal, sys; signal.signal({int(signum)}, lambda *_: sys.exit(40))"
    command = house.program(f"sys.exit(house.run({handler + textwrap.dedent(_WAITS)!r}))")
    with running(command) as process:
        house.wait_for("script waits")
        process.send_signal(signum)
        assert process.wait(TIMEOUT) == 40
    assert house.diary().count("script ends") == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a child of its parent's death")
def test_run_killed_takes_all_along(house: House) -> None:
    """After kill -9 of the command neither the script nor a role lives on."""
    with running(house.program(f"house.run({_WAITS!r})")) as process:
        house.wait_for("script waits", "ps 0 serves", "worker 0 serves")
        pids = children_of(process.pid, str(house.folder))
        assert len(pids) == 3
        process.kill()
        for pid in pids:
            until(lambda pid=pid: gone(pid), f"{pid} is gone")  # type: ignore[misc]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_run_stops_while_nothing_but_roles_run(house: House, signum: signal.Signals) -> None:
    """A signal that comes when the script has ended, and a role is still waited for, ends the wait."""
    command = house.program(
        """
        sys.exit(house.run("import os; os._exit(6)", grace=3600.0, behaviours={("worker", 0): "stubborn"}))
        """
    )
    (house.folder / "coordinator.py").write_text("import os; os._exit(6)")
    with running(command) as process:
        until(lambda: "worker 0 serves" in house.diary() and "ps 0 serves" in house.diary(), "the roles serve")
        house.wait_for("worker 0 asked to stop")
        process.send_signal(signum)
        assert process.wait(TIMEOUT) == 6


def test_run_in_a_terminal_gives_the_script_one_interrupt(house: House) -> None:
    """Ctrl-C in a terminal reaches the script once, from the terminal, and the command outlives it."""
    count = """
        import os, signal
        arrivals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)  # a byte for each, where two handlers' calls may become one
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: None)
        diary = open(os.environ["DIARY"], "a", buffering=1)
        diary.write("script waits\\n")
        seen = b""
        while signal.SIGTERM not in seen:  # which is sent on after any SIGINT would have been
            seen += os.read(arrivals, 1)
            diary.write("script got one\\n")
        os._exit(40 + seen.count(signal.SIGINT))
    """
    master, slave = os.openpty()
    name = os.ttyname(slave)
    command = house.program(
        f"""
        import os
        terminal = os.open({name!r}, os.O_RDWR)  # a session's first terminal becomes its own
        os.dup2(terminal, 0)
        sys.exit(house.run({textwrap.dedent(count)!r}))
        """
    )
    try:
        with running(command) as process:
            house.wait_for("script waits")
            os.write(master, b"\x03")
            house.wait_for("script got one")
            process.terminate()
            assert process.wait(TIMEOUT) == 41
    finally:
        os.close(master)
        os.close(slave)


def test_another_one_of_the_process(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """Another cluster, as of a notebook cell that is run again, warns of the first one, which can be stopped."""
    before = LocalCluster.running()
    clusters = []
    for _ in range(2):
        cluster = house.cluster(1, 1).start()
        clusters.append(cluster)
    pids = [f"{role} {index} (pid {pid})" for (role, index), pid in clusters[0].pids.items()]
    told = [record.getMessage() for record in caplog.records if "another local cluster" in record.getMessage()]
    assert f"{pids[0]}, {pids[1]}, started at {__file__}:" in told[-1]
    assert len(told) == len(before) * 2 + 1
    running = LocalCluster.running()
    assert running == [*before, *clusters]
    for other in running[len(before) :]:
        other.stop()
    assert LocalCluster.running() == before
    caplog.clear()
    with house.cluster():
        assert len(caplog.records) == len(before)
