"""Roles that talk over Unix sockets: started by hand, by `pscluster run`, and by a LocalCluster that is killed."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.roles.processes import PSCLUSTER, Process, Roles, environ, run, run_all, tf_config
from tests.waiting import until

from pscluster.core.security.tls import CERTIFICATE

SCRIPT = """
import json, os, sys
import numpy as np
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver, Variable

if __name__ == "__main__":
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    with ParameterServerStrategy(TFConfigClusterResolver()) as strategy:
        with strategy.scope():
            v = Variable(np.zeros(1 << 20, np.float32), name="v")
        coordinator = ClusterCoordinator(strategy)
        for _ in range(10):
            coordinator.schedule(lambda: v.assign_add(np.ones(1 << 20, np.float32)))
        coordinator.join()
        server = strategy.client._servers[0]
        print("trained", float(v.numpy()[-1]), server._transport.usable(), cluster["ps"][0], flush=True)
        if len(sys.argv) > 1:
            strategy.client.check_saved(["v"])
            print("saved", flush=True)
            sys.stdin.readline()
            v.assign_add(np.ones(1 << 20, np.float32))
            print("went on", float(v.numpy()[-1]), server._transport.usable(), flush=True)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="psc-test-", dir="/tmp") as made:
        yield Path(made)


def test_roles_started_by_hand(folder: Path, tmp_path: Path) -> None:
    """They create the sockets' folder, answer all commands, and one that was killed takes its socket again."""
    sockets = folder / "sockets"
    cluster = {job: [f"unix:{sockets}/{job}-0"] for job in ("ps", "worker", "chief")}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    state = ("--state-dir", str(tmp_path / "state"))
    with Roles(cluster, tmp_path) as roles:
        ps = roles.ps(0, *state)
        worker = roles.worker()
        worker.wait_for(f"worker 0 serving on unix:{sockets}/worker-0")
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in sockets.iterdir()} == {0o600}
        assert "without a token" not in ps.output, "no other user can reach it"

        command = [*PSCLUSTER, "coordinator", str(script), "stay"]
        with Process(command, environ(tf_config(cluster, "chief")), stdin=-1) as coordinator:
            coordinator.wait_for(f"trained 10.0 True unix:{sockets}/ps-0")
            coordinator.wait_for("saved")
            assert "live page" not in coordinator.output, "it was not asked for"
            code, shown = run("status", "--json", config=tf_config(cluster, "chief"))
            assert code == 0, shown
            tasks = json.loads(shown.splitlines()[-1])["tasks"]
            assert {task["address"] for task in tasks} == {address for (address,) in cluster.values()}
            code, shown = run("health", cluster["ps"][0])
            assert (code, f"unix:{sockets}/ps-0 is SERVING" in shown) == (0, True), shown
            code, shown = run("top", "--rounds", "1", config=tf_config(cluster, "chief"))
            assert code == 0, shown

            second = roles.ps(0, "--durability", "none")
            assert second.wait() == 1
            assert f"can't listen on unix:{sockets}/ps-0: another process has this socket" in second.output

            ps.send(signal.SIGKILL)
            ps.wait()
            assert stat.S_ISSOCK((sockets / "ps-0").stat().st_mode), "it left its socket"
            roles.ps(0, *state).wait_for("parameter server 0 serving on unix:")
            assert coordinator._popen.stdin is not None
            coordinator._popen.stdin.write("go on\n")
            coordinator._popen.stdin.flush()
            coordinator.wait_for("went on 11.0 True")
            assert coordinator.wait() == 0
        code, shown = run("health", f"unix:{sockets}/ps-9")
        assert (code, "there is no such socket" in shown) == (1, True), shown


def test_what_is_refused(folder: Path) -> None:
    """Folders that are not private, certificates, and invalid paths are refused before anything is started."""
    sockets = folder / "open"
    sockets.mkdir(0o755)
    addresses = {
        "shared": {job: [f"unix:{sockets}/{job}-0"] for job in ("ps", "worker")},
        "relative": {"ps": ["unix:ps-0"], "worker": ["w:1"]},
        "far": {"ps": [f"unix:{folder}/{'x' * 100}"], "worker": ["w:1"]},
        "good": {job: [f"unix:{folder}/mine/{job}-0"] for job in ("ps", "worker")},
    }
    (folder / CERTIFICATE).touch()
    config = {name: {"TF_CONFIG": tf_config(cluster, "ps")} for name, cluster in addresses.items()}
    results = run_all(
        [
            (("ps",), config["shared"]),
            (("status",), config["shared"]),
            (("health", addresses["shared"]["ps"][0]), {}),
            (("ps",), config["relative"]),
            (("status",), config["far"]),
            (("health", "unix:@ps-0"), {}),
            (("ps", "--bind", "unix:ps-0"), config["good"]),
            (("run", "--transport", "unix", "--tls", __file__), {}),
        ]
    )
    reasons = (
        f"{sockets} has the mode 0755, which lets others in; chmod 700 {sockets}",
        f"{sockets} has the mode 0755",
        f"{sockets} has the mode 0755",
        "begins with /",
        "at most 99 bytes",
        "no abstract names",
        "begins with /",
        'transport is "unix", but host= and tls=True are for TCP',
    )
    for (code, shown), reason in zip(results, reasons, strict=True):
        assert code == 2, shown
        assert reason in shown
    assert not list(sockets.iterdir())


def test_run(tmp_path: Path) -> None:
    """It uses Unix sockets, whatever TMPDIR is; TCP on request, and with certificates."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    long = tmp_path / ("x" * 140) / ("y" * 160)
    long.mkdir(parents=True)
    expected = {
        (): r"trained 10\.0 True unix:/tmp/psc-\w+\.tmp/ps-0",
        ("--transport", "tcp"): r"trained 10\.0 True 127\.0\.0\.1:\d+",
        ("--tls",): r"trained 10\.0 True 127\.0\.0\.1:\d+",
    }
    with ExitStack() as stack:
        commands = {options: [*PSCLUSTER, "run", *options, str(script)] for options in expected}
        processes = {
            options: stack.enter_context(Process(command, environ(TMPDIR=str(long))))
            for options, command in commands.items()
        }
        for options, line in expected.items():
            printed = processes[options].wait_for(line)
            assert processes[options].wait() == 0, processes[options].output
            if "unix:" in printed:
                assert not Path(printed.split("unix:")[1].strip()).parent.exists()


HOLDS = """
import signal
from pscluster.coordinator import LocalCluster

if __name__ == "__main__":
    cluster = LocalCluster(1, 1, log_level="INFO").start()
    print("at", cluster.cluster_spec().task_address("ps", 0), *cluster.pids.values(), flush=True)
    signal.pause()
"""


def test_what_a_killed_cluster_leaves_goes_with_the_next(tmp_path: Path) -> None:
    """Its roles end by themselves; while one still has its socket, its folder is not removed."""
    script = tmp_path / "script.py"
    script.write_text(HOLDS)
    command = [sys.executable, str(script)]
    with Process(command, environ()) as first:
        _, address, *pids = first.wait_for("^at unix:").split()
        sockets = Path(address.removeprefix("unix:")).parent
        first.wait_for("worker 0 serving")  # it has its socket
        worker = int(pids[1])
        os.kill(worker, signal.SIGSTOP)
        try:
            first.send(signal.SIGKILL)
            with Process(command, environ()) as second:
                second.wait_for("^at unix:")
                assert sockets.exists(), "the worker is still there"
                second.send(signal.SIGTERM)
                second.wait()
        finally:
            os.kill(worker, signal.SIGCONT)
        first.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the roles have ended")
    with Process(command, environ()) as third:
        third.wait_for("^at unix:")
        assert not sockets.exists()
        third.send(signal.SIGINT)
        third.wait()
