"""The cluster in a terminal: `pscluster status --json`, `--watch`, `pscluster top`, and `pscluster plan`."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
from tests.roles.processes import PSCLUSTER, Process, Roles, environ, make_cluster, run, tf_config
from tests.roles.wire import SECONDS

from pscluster.coordinator.observability.rates import RateMeter
from pscluster.v1 import node_pb2

# Works until the file named by its argument exists; the variables' names test what a name may hold.
BUSY = """
import pathlib, sys
import numpy as np
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver, Variable

strategy = ParameterServerStrategy(TFConfigClusterResolver())
with strategy.scope():
    hot = Variable(np.zeros((100, 100), np.float32), name="hot [bold]")
    cold = Variable(np.zeros(4, np.float32), name="cold")
coordinator = ClusterCoordinator(strategy)

def step():
    strategy.read([hot, cold])
    hot.assign_add(np.ones((100, 100), np.float32))

print("busy", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    for _ in range(20):
        coordinator.schedule(step)
    coordinator.join()
"""


def test_a_busy_cluster(tmp_path: Path) -> None:
    """`status --json` has every task and number, `top` what moves most data, `plan` what would balance the servers.

    `--watch` continues until Ctrl-C.
    """
    cluster = make_cluster(ps=2, workers=2)
    config = tf_config(cluster, "ps")
    gate = tmp_path / "gate"
    with Roles(cluster, tmp_path) as roles:
        for index in range(2):
            roles.ps(index)
            roles.worker(index)
        coordinator = roles.coordinator(BUSY, str(gate))
        coordinator.wait_for("busy")
        code, output = run("top", "--rounds", "2", "--every", "0.5", config=config)
        assert code == 0, output
        names = [line.split("│")[1].strip() for line in output.splitlines() if "│" in line]
        assert names.index("hot [bold]") < names.index("cold")
        for task in ("ps 0", "ps 1", "worker 0", "worker 1"):
            assert names.count(task) == 2, "a row in each picture"
        code, output = run("status", "--json", config=config)
        assert code == 0
        status = json.loads(output)
        tasks = {f"{task['task']} {task['index']}": task for task in status["tasks"]}
        assert status["all_up"]
        assert list(tasks) == ["chief 0", "ps 0", "ps 1", "worker 0", "worker 1"]
        assert tasks["worker 0"]["functions_done"] + tasks["worker 1"]["functions_done"] > 0
        assert tasks["chief 0"]["functions_done"] > 0
        assert tasks["worker 0"]["function_seconds"] > 0
        for server in ("ps 0", "ps 1"):
            assert tasks[server]["requests"] > 0
        assert sum(tasks[server]["bytes_out"] for server in ("ps 0", "ps 1")) > 40_000
        assert all(task["memory_bytes"] > 1 << 20 for task in tasks.values())
        for task in tasks.values():  # where Prometheus finds it
            with urllib.request.urlopen(f"http://{task['metrics_address']}/healthz", timeout=SECONDS) as answer:
                assert answer.status == 200

        code, output = run("plan", config=config)
        assert code == 0
        assert "highest is" in output
        assert "hot [bold]: its only shard has" in output
        code, output = run("plan", "--json", config=config)
        assert code == 0
        plan = json.loads(output)
        assert len(plan["before"]) == 2
        assert plan["cuts"][0]["variable"] == "hot [bold]"

        with Process([*PSCLUSTER, "status", "--watch", "--every", "0.2", "--json"], environ(config)) as watch:
            watch.wait_for("all_up", count=3)
            os.kill(watch.pid, signal.SIGINT)
            assert watch.wait() == 0
            assert all(json.loads(line)["all_up"] for line in watch.output.splitlines())
        gate.touch()
        assert coordinator.wait() == 0
    code, output = run("top", "--rounds", "1", "--every", "0.1", config=config)
    assert code == 0
    assert "not up: chief 0, ps 0, ps 1, worker 0, worker 1: it does not answer" in output


@pytest.mark.parametrize(
    ("command", "signum", "code"),
    [
        (["status", "--watch"], signal.SIGINT, 0),
        (["status", "--watch"], signal.SIGTERM, -signal.SIGTERM),
        (["top"], signal.SIGINT, 0),
        (["top"], signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_live_in_a_terminal(command: list[str], signum: signal.Signals, code: int, tmp_path: Path) -> None:
    """In a terminal the picture is redrawn in place; however it ends, the cursor is restored."""
    cluster = make_cluster(chief=False)
    with Roles(cluster, tmp_path) as roles:
        roles.ps().wait_for("serving on")
        terminal, theirs = pty.openpty()
        command = [*PSCLUSTER, *command, "--every", "0.2"]
        env = environ(tf_config(cluster, "ps"), TERM="xterm")
        with subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            shown = b""
            while shown.count(b"ps 0") < 3:
                shown += os.read(terminal, 4096)
            process.send_signal(signum)
            with contextlib.suppress(OSError):  # the terminal has ended, on Linux
                while more := os.read(terminal, 4096):
                    shown += more
            assert process.wait() == code
        os.close(terminal)
    assert shown.rstrip().endswith(b"\x1b[?25h"), shown[-200:]
    assert b"Traceback" not in shown


def reply(boot_id: int, done: int, reads: int = 0, name: str = "w", held: int = 8) -> node_pb2.StatusReply:
    """A status reply from a server with that boot id."""
    load = node_pb2.VariableLoad(name=name, bytes=held, reads=reads, read_bytes=8 * reads)
    identity = node_pb2.Identity(role="ps", index=1, boot_id=boot_id)
    return node_pb2.StatusReply(identity=identity, requests=done, bytes_in=10 * done, busiest=[load])


def test_rates() -> None:
    """Two replies of one process give rates; a restarted process has none until it has been asked twice."""
    meter = RateMeter()
    assert meter.add(10.0, {"ps 1": reply(1, 100, 50)}).tasks == {}
    rates = meter.add(12.0, {"ps 1": reply(1, 120, 60)})
    assert (rates.tasks["ps 1"].requests, rates.tasks["ps 1"].bytes_in) == (10.0, 100.0)
    (variable,) = rates.variables
    assert (variable.reads, variable.read_bytes, variable.nbytes, variable.servers) == (5.0, 40.0, 8, {1: 40.0})
    rates = meter.add(13.0, {"ps 1": reply(2, 5, 5)})
    assert rates.tasks == {}
    assert [rate.moved for rate in rates.variables] == [0.0]
    assert meter.add(14.0, {"ps 1": reply(2, 6, 5)}).tasks["ps 1"].requests == 1.0
    assert meter.add(15.0, {}).tasks == {}
    assert meter.add(16.0, {"ps 1": reply(2, 9, 2)}).tasks == {}, "it was away in between"
    assert [rate.moved for rate in meter.add(17.0, {"ps 1": reply(2, 9, 1)}).variables] == [0.0], "made anew"
    meter.add(18.0, {"ps 1": reply(3, 1, held=0)})
    assert [rate.servers for rate in meter.add(19.0, {"ps 1": reply(3, 2, held=0)}).variables] == [{}], "held elsewhere"
