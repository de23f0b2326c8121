"""Asking roles for their state: the standard health check, `pscluster health`, `pscluster status`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.roles.processes import (
    HELD,
    IDLE,
    PSCLUSTER,
    Process,
    Roles,
    environ,
    free_addresses,
    listener,
    make_cluster,
    run,
    tf_config,
)
from tests.roles.wire import SECONDS
from tests.waiting import until

from pscluster.coordinator.cli.main import cli

OPEN = {"PSCLUSTER_INSECURE": "1"}  # on loopback: any user may call
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def check(address: str, service: str = "") -> int:
    """What a plain gRPC health client is told; -1 if it gets no answer."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            return int(stub.Check(request, timeout=SECONDS).status)
        except grpc.RpcError:
            return -1


def test_standard_health_check(tmp_path: Path) -> None:
    """Every role says NOT_SERVING while it waits for others and SERVING from then on."""
    cluster = make_cluster()
    ps_address, worker_address, chief_address = (cluster[job][0] for job in ("ps", "worker", "chief"))
    gate = tmp_path / "gate"
    with Roles(cluster, tmp_path, OPEN) as roles:
        coordinator = roles.coordinator(IDLE, str(gate))
        coordinator.wait_for("waiting for ps 0")
        assert check(chief_address) == NOT_SERVING
        worker = roles.worker()
        worker.wait_for("waiting for ps 0")
        assert check(worker_address) == NOT_SERVING
        assert check(worker_address, "pscluster.v1.Worker") == NOT_SERVING
        roles.ps().wait_for("serving on")
        assert check(ps_address) == SERVING
        assert check(ps_address, "pscluster.v1.ParameterServer") == SERVING
        worker.wait_for("serving on")
        coordinator.wait_for("connected")
        for address in (ps_address, worker_address, chief_address):
            assert check(address) == SERVING
        assert check(ps_address, "no.such.Service") == -1
        gate.touch()
        assert coordinator.wait() == 0
        assert check(ps_address) == check(worker_address) == SERVING, "they wait for the next coordinator"
        assert check(chief_address) == -1


def test_a_leaving_role_is_not_serving(tmp_path: Path) -> None:
    """A worker that was asked to stop says NOT_SERVING while the running function ends."""
    cluster = make_cluster()
    gate = tmp_path / "gate"
    with Roles(cluster, tmp_path, OPEN) as roles:
        roles.ps()
        worker = roles.worker()
        roles.coordinator(HELD, str(gate))
        worker.wait_for("running on worker")
        worker.wait_for("serving on")
        with grpc.insecure_channel(cluster["worker"][0]) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
            assert next(watch).status == SERVING
            os.kill(worker.pid, 15)
            assert next(watch).status == NOT_SERVING
            watch.cancel()
        assert worker.is_running
        gate.touch()
        assert worker.wait() == 0


def test_health_command(tmp_path: Path) -> None:
    """`pscluster health` exits with 0 if the role serves and with 1 if not, and says so in one line."""
    cluster = make_cluster()
    with Roles(cluster, tmp_path, OPEN) as roles:
        worker = roles.worker()
        worker.wait_for("waiting for")
        assert run("health", cluster["worker"][0], **OPEN) == (1, f"{cluster['worker'][0]} is NOT_SERVING\n")
        roles.ps().wait_for("serving on")
        assert run("health", cluster["ps"][0], **OPEN) == (0, f"{cluster['ps'][0]} is SERVING\n")
    nowhere = cluster["ps"][0]
    assert run("health", nowhere, **OPEN) == (1, f"{nowhere} does not answer: nothing is listening there\n")


def http(connection: socket.socket) -> None:
    """A web server."""
    connection.recv(1000)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def noise(connection: socket.socket) -> None:
    """A server of an unknown protocol."""
    connection.sendall(os.urandom(1000))
    connection.recv(1000)


def silence(connection: socket.socket) -> None:
    """A server that waits for its client to say something it knows."""
    while connection.recv(1000):
        pass


@pytest.mark.parametrize("answer", [http, noise, silence])
def test_health_of_another_program(answer: Callable[[socket.socket], None]) -> None:
    """If something else listens, `pscluster health` says that it may not be a pscluster role."""
    with listener(answer) as address:
        code, output = run("health", address, **OPEN)
    assert code == 1
    why = "something is listening there, but calls to it fail: check that it is a pscluster role, and not frozen"
    assert output == f"{address} does not answer: {why}\n"


def test_health_of_a_bad_address() -> None:
    """An invalid address is a mistake in the command line: exit code 2."""
    code, output = run("health", "somewhere", **OPEN)
    assert code == 2
    assert output == 'pscluster: address is "somewhere", but it has no port; write, for example, "somewhere:2222"\n'
    code, output = run("health", "no-such-host.invalid:2222", **OPEN)
    assert code == 1
    assert output.startswith(
        "no-such-host.invalid:2222 does not answer: the host no-such-host.invalid does not resolve"
    )


def rows(output: str) -> dict[str, list[str]]:
    """The table's rows by their first column."""
    cells = [[cell.strip() for cell in re.split("[│|]", line)[1:-1]] for line in output.splitlines()]
    return {row[0]: row[1:] for row in cells if row and row[0]}


def test_status(tmp_path: Path) -> None:
    """`pscluster status` shows every task, dead ones too; it exits with 0 if all but an evaluator answer."""
    cluster = {**make_cluster(ps=1, workers=2), "evaluator": free_addresses(1)}
    config = tf_config(cluster, "ps")
    gate = tmp_path / "gate"
    with Roles(cluster, tmp_path, OPEN) as roles:
        coordinator = roles.coordinator(IDLE, str(gate))
        coordinator.wait_for("waiting for ps 0")
        code, output = run("status", config=config, **OPEN)
        table = rows(output)
        assert code == 1
        assert list(table)[-5:] == ["chief 0", "ps 0", "worker 0", "worker 1", "evaluator 0"]
        assert table["chief 0"][1] == "waiting for tasks"
        assert table["ps 0"] == [cluster["ps"][0], "not up", "", "nothing is listening there"]

        roles.ps().wait_for("serving on")
        workers = [roles.worker(0), roles.worker(1)]
        coordinator.wait_for("connected")  # one worker has run its function; the other may not be up yet
        until(lambda: "2 of 2 workers up" in run("status", config=config, **OPEN)[1], "both workers are up")
        code, output = run("status", config=config, **OPEN)
        table = rows(output)
        assert code == 0, output
        assert table["chief 0"][1] == "coordinating"
        assert table["ps 0"][1] == "serving"
        assert "1 shards, 40 bytes" in table["ps 0"][3]
        assert [table[f"worker {i}"][1] for i in range(2)] == ["serving", "serving"]
        assert table["evaluator 0"][1] == "not up"
        assert "1 functions done" in table["worker 0"][3] + table["worker 1"][3]

        os.kill(workers[0].pid, 9)
        workers[0].wait()
        coordinator.wait_for("worker 0 at .* is gone")
        code, output = run("status", config=config, **OPEN)
        table = rows(output)
        assert code == 1
        assert "1 of 2 workers up, missing: worker 0" in " ".join(output.split())
        assert table["worker 0"] == [cluster["worker"][0], "not up", "", "nothing is listening there"]
        assert table["worker 1"][1] == "serving"

        gate.touch()
        assert coordinator.wait() == 0
        code, output = run("status", config=config, **OPEN)
        assert rows(output)["ps 0"][1] == "waiting for a coordinator"


def test_status_of_the_wrong_role(tmp_path: Path) -> None:
    """If another role answers than the one that TF_CONFIG names, the table says which."""
    cluster = make_cluster()
    with Roles(cluster, tmp_path, OPEN) as roles:
        roles.ps().wait_for("serving on")
        roles.worker().wait_for("serving on")
        swapped = {"ps": cluster["worker"], "worker": cluster["ps"]}
        code, output = run("status", config=tf_config(swapped, "ps"), **OPEN)
    assert code == 1
    table = rows(output)
    assert table["ps 0"][1] == "not up"
    assert re.match(r"worker 0 \(.*, pid \d+\) answers there: check TF_CONFIG", table["ps 0"][3])


def test_status_broken_off() -> None:
    """Ctrl-C during the query does not give the exit code of a cluster that is up."""
    asked, over = threading.Event(), threading.Event()

    def hold(_: socket.socket) -> None:
        asked.set()
        over.wait(SECONDS)

    with listener(hold) as address:
        config = tf_config({"ps": [address]}, "ps")
        with Process([*PSCLUSTER, "status", "--insecure"], environ(config)) as process:
            assert asked.wait(SECONDS)
            process.send(signal.SIGINT)
            assert process.wait() == 130
            assert "Traceback" not in process.output
        over.set()


@pytest.mark.parametrize("config", [None, "{}", '{"cluster": {}}'])
def test_status_of_no_cluster(config: str | None) -> None:
    """Without a cluster to ask, `pscluster status` says what to set: exit code 2."""
    code, output = run("status", config=config, **OPEN)
    assert code == 2
    assert output.startswith("pscluster: TF_CONFIG names no cluster; set it")
    assert len(output.splitlines()) == 1


HEAVY = ("numpy", "rich", "cloudpickle", "pscluster.coordinator.strategy", "pscluster.ps", "pscluster.worker")


@pytest.mark.parametrize("arguments", [["--help"], ["health", "127.0.0.1:1"], ["token"], ["version"]])
def test_light_commands_import_little(arguments: list[str]) -> None:
    """Commands that containers run every few seconds, or users for help, load neither NumPy nor any role."""
    program = (
        "import sys\n"
        "from pscluster.coordinator.cli.main import main\n"
        f"sys.argv = ['pscluster', *{arguments!r}]\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        f"    print('loaded', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environ(), capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "loaded []", done.stderr


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_help(name: str) -> None:
    """Every command has help, and the list of commands has the same in short."""
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: cli {name} [OPTIONS]")
    listed = CliRunner().invoke(cli, ["--help"], terminal_width=200).output
    (line,) = [line for line in listed.splitlines() if line.split()[:1] == [name]]
    summary = " ".join(line.split()[1:])
    assert summary.rstrip(".") in " ".join(result.output.split())
