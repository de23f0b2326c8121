"""What a user gets for a wrong configuration: one line that says what is wrong and how to correct it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conftest import grpc_server
from tests.roles.processes import (
    DONE,
    HELD,
    IDLE,
    JOB,
    PSCLUSTER,
    Process,
    Roles,
    environ,
    free_addresses,
    listener,
    make_cluster,
    run,
    run_all,
    tf_config,
)
from tests.waiting import TIMEOUT

from pscluster.core.ids import VERSION

PYTHON = (sys.executable,)
CLUSTER = {
    "chief": ["127.0.0.1:3000"],
    "ps": ["127.0.0.1:3001", "127.0.0.1:3002"],
    "worker": ["127.0.0.1:3003", "127.0.0.1:3004"],
}
TYPES = {"ps": "ps", "worker": "worker", "coordinator": "chief", "evaluator": "evaluator"}


def command_of(name: str, folder: Path, *options: str) -> list[str]:
    """The command line of a role; one that runs a script gets one that needs a cluster."""
    if name in ("ps", "worker"):
        return [*PSCLUSTER, name, *options]
    script = folder / "job.py"
    script.write_text(JOB)
    return [*PSCLUSTER, name, *options, str(script)]


def complaint(process: Process, code: int) -> str:
    """The one line that a process wrote before it ended with that code, but for those that say whom it waits for."""
    assert process.wait() == code, process.output
    lines = [line for line in process.output.splitlines() if " INFO coordinator: waiting for " not in line]
    assert len(lines) == 1, process.output
    assert lines[0].startswith("pscluster: ")
    return lines[0].removeprefix("pscluster: ")


def with_task(role: str, index: object = 0, **jobs: object) -> str:
    """TF_CONFIG of a task in a cluster in which some jobs are replaced."""
    return json.dumps({"cluster": {**CLUSTER, **jobs}, "task": {"type": role, "index": index}})


# What is wrong: the TF_CONFIG for a role, the key that must be named, and a right value that must be shown.
MALFORMED: dict[str, tuple[Callable[[str], str], str, str]] = {
    "not JSON": (lambda role: with_task(role)[:-1], "TF_CONFIG: the value is not JSON at line 1", '{"cluster": {'),
    "no object": (lambda role: "[1]", "TF_CONFIG: the value is [1]", '{"cluster": {'),
    "unknown role": (lambda role: with_task("server"), 'TF_CONFIG: task.type is "server"', '"worker"'),
    "unknown job": (lambda role: with_task(role, server=["h:1"]), 'a key of cluster is "server"', '"worker"'),
    "index out of range": (
        lambda role: with_task(role, 2),
        "TF_CONFIG: task.index is 2, but cluster.",
        '{"task": {"type": ',
    ),
    "index of a wrong type": (lambda role: with_task(role, 1.5), "TF_CONFIG: task.index is 1.5", "0"),
    "no index": (
        lambda role: json.dumps({"cluster": CLUSTER, "task": {"type": role}}),
        "TF_CONFIG: task.index is missing",
        '{"task": {"type": "worker", "index": 0}}',
    ),
    "no port": (lambda role: with_task(role, ps=["ps1"]), 'TF_CONFIG: cluster.ps[0] is "ps1"', '"ps1:2222"'),
    "a protocol": (
        lambda role: with_task(role, worker=["grpc://w:1"]),
        'TF_CONFIG: cluster.worker[0] is "grpc://w:1"',
        '"ps0:2222"',
    ),
    "an address twice": (
        lambda role: with_task(role, ps=["127.0.0.1:3003"]),
        "127.0.0.1:3003",
        '"host1:2222"',
    ),
    "no list": (lambda role: with_task(role, ps="h:1"), "TF_CONFIG: cluster.ps is", '["host0:2222"]'),
    "another layer": (
        lambda role: json.dumps({**json.loads(with_task(role)), "rpc_layer": "mpi"}),
        'TF_CONFIG: rpc_layer is "mpi"',
        '"grpc"',
    ),
}


def one_line(result: tuple[int, str]) -> str:
    """The one line of a configuration error, whose exit code is 2."""
    code, output = result
    assert code == 2, output
    assert len(output.splitlines()) == 1, output
    assert output.startswith("pscluster: ")
    return output.removeprefix("pscluster: ").rstrip()


@pytest.mark.parametrize("name", ["ps", "worker", "coordinator"])
def test_malformed(name: str, tmp_path: Path) -> None:
    """A malformed TF_CONFIG ends each command with one line that names the key and shows a right one: exit code 2."""
    arguments = command_of(name, tmp_path)[1:]
    results = run_all([(arguments, {"TF_CONFIG": make(TYPES[name])}) for make, _, _ in MALFORMED.values()])
    for (_, key, right), result in zip(MALFORMED.values(), results, strict=True):
        line = one_line(result)
        assert key in line
        assert right in line.split("; write, for example, ")[1]


@pytest.mark.parametrize("name", ["ps", "worker", "coordinator"])
def test_malformed_in_a_process_of_its_own(name: str, tmp_path: Path) -> None:
    """A user sees the same on standard error, with the process's exit code."""
    make, key, _ = MALFORMED["no port"]
    done = subprocess.run(
        command_of(name, tmp_path), env=environ(make(TYPES[name])), capture_output=True, text=True, timeout=TIMEOUT
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"pscluster: {key}")
    assert len(done.stderr.splitlines()) == 1


def test_no_task() -> None:
    """A role that is not told its task shows what is missing."""
    configs: list[dict[str, str]] = [{}, {"TF_CONFIG": "{}"}, {"TF_CONFIG": json.dumps({"cluster": CLUSTER})}]
    for role in ("ps", "worker"):
        for result in run_all([([role], config) for config in configs]):
            right = f'{{"task": {{"type": "{role}", "index": 0}}}}'
            assert one_line(result) == f"TF_CONFIG: task is missing; this {role} needs one such as {right}"


@pytest.mark.parametrize("config", [None, "{}", '{"cluster": {}}'])
def test_coordinator_without_a_cluster(config: str | None, tmp_path: Path) -> None:
    """A coordinator's script that expects a cluster in a TF_CONFIG without one is told what to write."""
    with Process(command_of("coordinator", tmp_path), environ(config)) as process:
        line = complaint(process, 2)
    assert line.startswith("TF_CONFIG: cluster is empty, but a strategy needs a ps and a worker; write, for example, {")


def test_wrong_type_for_the_command(tmp_path: Path) -> None:
    """Each command refuses the TF_CONFIG of another role, and names both."""
    cases = [(name, role) for name in TYPES for role in TYPES.values() if role != TYPES[name]]
    more = {"evaluator": ["127.0.0.1:3009"]}
    results = run_all(
        [(command_of(name, tmp_path)[1:], {"TF_CONFIG": with_task(role, **more)}) for name, role in cases]
    )
    for (name, role), result in zip(cases, results, strict=True):
        right = f'{{"task": {{"type": "{TYPES[name]}", "index": 0}}}}'
        assert one_line(result) == (
            f'TF_CONFIG: task.type is "{role}", but this is `pscluster {name}`; write, for example, {right}'
        )


CONTRADICTORY: dict[str, tuple[dict[str, list[str]], str, str]] = {
    "two chiefs": ({"chief": ["127.0.0.1:3000", "127.0.0.1:3009"]}, "cluster.chief has 2 tasks", "at most one chief"),
    "two evaluators": ({"evaluator": ["a:1", "b:1"]}, "cluster.evaluator has 2 tasks", "at most one evaluator"),
    "no ps": ({"ps": []}, "cluster.ps has no tasks", "at least one ps"),
    "no worker": ({"worker": []}, "cluster.worker has no tasks", "at least one worker"),
}


@pytest.mark.parametrize("case", CONTRADICTORY)
def test_contradictory(case: str, tmp_path: Path) -> None:
    """A cluster that no coordinator can use is refused before anything is dialled."""
    jobs, problem, rule = CONTRADICTORY[case]
    with Process(command_of("coordinator", tmp_path), environ(with_task("chief", **jobs))) as process:
        line = complaint(process, 2)
    assert line.startswith(f"TF_CONFIG: {problem}")
    assert rule in line
    assert "; write, for example, {" in line


def test_worker_without_its_servers() -> None:
    """A worker needs every server, so a list of servers with a gap is refused."""
    config = with_task("worker", ps={"1": "127.0.0.1:3001"})
    line = one_line(run_all([(["worker"], {"TF_CONFIG": config})])[0])
    assert line.startswith("TF_CONFIG: cluster.ps has the indices [1], but a worker needs every parameter server, or ")


def test_clusters_that_differ(tmp_path: Path) -> None:
    """A different number of servers in a worker's TF_CONFIG is named by both sides, once; unused entries may differ."""
    cluster = make_cluster(ps=2, workers=3)
    spare = cluster["worker"].pop()
    elsewhere = [address.replace("127.0.0.1", "localhost") for address in cluster["ps"]]
    short = {"ps": cluster["ps"][:1], "worker": cluster["worker"][:1]}
    gate = tmp_path / "gate"
    said = "the coordinator has 2 parameter servers, and TF_CONFIG of worker 0 lists 1: give both the same cluster.ps"
    with Roles(cluster, tmp_path) as roles:

        def worker(index: int, cluster: dict[str, object]) -> Process:
            config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
            roles.started.append(Process([*PSCLUSTER, "worker"], environ(config), tmp_path))
            return roles.started[-1]

        roles.ps(0)
        roles.ps(1)
        wrong = worker(0, dict(short))
        alone = worker(1, {"worker": {"1": cluster["worker"][1]}})  # like TensorFlow's workers
        assert complaint(roles.coordinator(HELD, str(gate)), 2).startswith(said)
        assert complaint(roles.coordinator(HELD, str(gate)), 2).startswith(said)
        wrong.__exit__(None, None, None)
        assert wrong.output.count(said) == 1

        # In the middle of a job: it continues without the worker that has another list, and uses it once that is
        # corrected.
        first = worker(0, {"ps": elsewhere, "worker": [cluster["worker"][0]]})
        coordinator = roles.coordinator(HELD, str(gate))
        first.wait_for("running on worker 0")
        alone.wait_for("running on worker 1")
        unknown = worker(2, {"ps": cluster["ps"], "worker": [*cluster["worker"], spare]})
        told = r"worker 2 gets no functions: cluster.worker of {} has 2 tasks \(0 and 1\); add worker 2 there"
        unknown.wait_for(told.format(r"chief 0 \(.*\)"))
        coordinator.wait_for(r"worker 2 \(.*\) is up, but " + told.format("this coordinator"))
        first.__exit__(None, None, None)
        wrong = worker(0, dict(short))
        coordinator.wait_for(f"worker 0 at {cluster['worker'][0]} refuses this coordinator until .*: {said}")
        wrong.wait_for(said)
        status = [*PSCLUSTER, "status"]
        with Process(status, environ(tf_config(cluster, "chief"))) as process:  # some attempts later
            process.wait()
        wrong.__exit__(None, None, None)
        worker(0, {"worker": {"0": cluster["worker"][0]}}).wait_for("running on worker 0")
        gate.touch()
        coordinator.wait_for(DONE)
        assert coordinator.wait() == 0
        assert [process.output.count(said) for process in (coordinator, wrong)] == [1, 1]
        assert "Traceback" not in "".join(process.output for process in roles.started)


def test_bad_bind() -> None:
    """An invalid address for --bind is a mistake in the command line."""
    addresses = ["somewhere", "127.0.0.1:0", "127.0.0.1:70000", ":2222", "127.0.0.1"]
    results = run_all([(["ps", "--bind", bind], {"TF_CONFIG": with_task("ps")}) for bind in addresses])
    for bind, result in zip(addresses, results, strict=True):
        assert one_line(result).startswith(f'address is "{bind}", but ')


def test_no_script(tmp_path: Path) -> None:
    """A script that does not exist, or is a folder, is named: exit code 2."""
    cases = [(name, path) for name in ("coordinator", "run", "evaluator") for path in ("missing.py", str(tmp_path))]
    more = {"evaluator": ["127.0.0.1:3009"]}
    results = run_all(
        [([name, path], {"TF_CONFIG": with_task(TYPES.get(name, "chief"), **more)}) for name, path in cases]
    )
    for (_, path), (code, output) in zip(cases, results, strict=True):
        problem = "does not exist" if path == "missing.py" else "is a directory"
        assert code == 2
        assert output.removeprefix("pscluster").removeprefix(" run") == (
            f": the script {path} {problem}; give a Python file\n"
        )


def test_address_in_use(tmp_path: Path) -> None:
    """A role whose port is taken says so, with the port, and does not share it with the process that has it."""
    cluster = make_cluster()
    with Roles(cluster, tmp_path) as roles:
        roles.ps().wait_for("serving on")
        with Process([*PSCLUSTER, "ps"], environ(tf_config(cluster, "ps"))) as process:
            assert re.match(
                r"another parameter server \(pid \d+\) already stores its state in .*--state-dir", complaint(process, 2)
            )
        for role, command in (("ps", ["ps", "--durability", "none"]), ("chief", ["coordinator", roles.script(JOB)])):
            address = cluster["ps"][0]
            jobs = {"ps": free_addresses(1), "chief": [address]} if role == "chief" else {}
            with Process([*PSCLUSTER, *command], environ(tf_config({**cluster, **jobs}, role))) as process:
                line = complaint(process, 1)
            port = address.split(":")[1]
            assert line == (
                f"can't listen on {address}: port {port} is in use by another process; stop it, or give another port"
            )


def test_address_of_another_machine() -> None:
    """A role can't listen on an address of another machine (192.0.2.0/24 belongs to none)."""
    code, output = run("ps", "--bind", "192.0.2.1:3001", "--insecure", config=with_task("ps"))
    assert code == 1
    assert output.startswith("pscluster: can't listen on 192.0.2.1:3001: ")
    assert "--bind" in output
    code, output = run("ps", "--bind", "no-such-host.invalid:3001", "--insecure", config=with_task("ps"))
    assert code == 1
    assert output.startswith("pscluster: can't listen on no-such-host.invalid:3001: the host no-such-host.invalid does")


def peers_of(name: str, ps: str, tmp_path: Path, *options: str) -> Process:
    """A worker or coordinator whose server is at that address."""
    cluster = {**make_cluster(), "ps": [ps]}
    return Process(command_of(name, tmp_path, *options), environ(tf_config(cluster, TYPES[name])))


DIALLERS = ("worker", "coordinator")


@pytest.mark.parametrize("name", DIALLERS)
def test_host_that_does_not_resolve(name: str, tmp_path: Path) -> None:
    """A host that does not resolve is named, with the task, when the time is over: until then it might appear."""
    with peers_of(name, "no-such-host.invalid:2222", tmp_path, "--connect-timeout", "1") as process:
        assert process.wait() == 1
        last = process.output.splitlines()[-1]
    assert last.startswith("pscluster: gave up after 1 s: ")
    assert "ps 0 at no-such-host.invalid:2222: the host no-such-host.invalid does not resolve" in last


def web(connection: socket.socket) -> None:
    """A web server."""
    connection.recv(1000)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def noise(connection: socket.socket) -> None:
    """A server of an unknown protocol."""
    connection.sendall(os.urandom(1000))
    connection.recv(1000)


@pytest.mark.parametrize("answer", [web, noise])
@pytest.mark.parametrize("name", DIALLERS)
def test_peer_that_is_not_pscluster(name: str, answer: Callable[[socket.socket], None], tmp_path: Path) -> None:
    """If something else listens in a server's place, it is named, with what was tried and for how long."""
    with listener(answer) as address, peers_of(name, address, tmp_path, "--connect-timeout", "1") as process:
        assert process.wait() == 1
        last = process.output.splitlines()[-1]
    assert last.startswith("pscluster: gave up after 1 s: ")
    assert f"ps 0 at {address}: something is listening there, but calls to it fail" in last
    assert "Traceback" not in process.output


@pytest.fixture
def other_grpc() -> Iterator[str]:
    """A gRPC server that does not know pscluster."""
    with grpc_server(2) as server:
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"


@pytest.mark.parametrize("name", DIALLERS)
def test_peer_that_speaks_only_grpc(name: str, other_grpc: str, tmp_path: Path) -> None:
    """Another gRPC service in a server's place is recognised immediately."""
    with peers_of(name, other_grpc, tmp_path) as process:
        assert process.wait() == 1
        last = process.output.splitlines()[-1]
    assert last.startswith(f"pscluster: ps 0 at {other_grpc} speaks gRPC but is not a pscluster role of this kind")


def test_swapped_addresses(tmp_path: Path) -> None:
    """A worker in a server's place, or another server, is named immediately by the roles that dial it."""
    cluster = make_cluster(ps=2, workers=2)
    with Roles(cluster, tmp_path) as roles:
        for index in range(2):
            roles.ps(index).wait_for("serving on")
        roles.worker(0).wait_for("serving on")
        roles.worker(1).wait_for("serving on")
        ps, worker = cluster["ps"], cluster["worker"]
        swapped = {**cluster, "ps": worker, "worker": ps}
        crossed = {**cluster, "ps": ps[::-1], "worker": [worker[0], *free_addresses(1)]}
        hint = "answers there: compare the cluster in TF_CONFIG on both"
        with Process(command_of("coordinator", tmp_path), environ(tf_config(swapped, "chief"))) as process:
            line = complaint(process, 1)
            assert line.startswith(f"{worker[0]} should be ps 0, but worker 0 ")
            assert line.endswith(hint)
        with Process(command_of("worker", tmp_path), environ(tf_config(crossed, "worker", 1))) as process:
            line = complaint(process, 1)
            assert line.startswith(f"{ps[1]} should be ps 0, but ps 1 ")
            assert line.endswith(hint)


LAUNCHER = """
import sys
from pscluster.core import ids as identity

identity.VERSION = "9.9.9"
sys.argv = ["pscluster", *sys.argv[1:]]
from pscluster.coordinator.cli.main import main

main()
"""


def test_another_version(tmp_path: Path) -> None:
    """A role of another version is refused by the roles that dial it and by those it dials, in a message with both."""
    with Roles(make_cluster(), tmp_path) as roles:
        launcher = roles.script(LAUNCHER, "launcher.py")
        script = roles.script(JOB)
        ours = roles.ps()
        ours.wait_for("serving on")
        worker = roles.start(launcher, "worker", role="worker", command=PYTHON)
        line = complaint(worker, 1)
        assert line.startswith("worker 0 (")
        assert " runs pscluster 9.9.9, ps 0 (" in line
        assert line.endswith(": install the same version on every task of the cluster")
        assert f" runs {VERSION}: " in line

        roles.worker().wait_for("serving on")
        newer = roles.start(launcher, "coordinator", script, role="chief", command=PYTHON)
        line = complaint(newer, 1)
        assert line.startswith("chief 0 (")
        assert "runs pscluster 9.9.9" in line
        assert VERSION in line
        assert roles.coordinator(JOB).wait() == 0, "the running job was not disturbed"


def test_older_coordinator(tmp_path: Path) -> None:
    """A coordinator of this version names a server of another one."""
    with Roles(make_cluster(), tmp_path) as roles:
        launcher = roles.script(LAUNCHER, "launcher.py")
        roles.start(launcher, "ps", role="ps", command=PYTHON).wait_for("serving on")
        roles.start(launcher, "worker", role="worker", command=PYTHON).wait_for("serving on")
        line = complaint(roles.coordinator(JOB), 1)
        assert f"runs pscluster {VERSION}, " in line
        assert " runs 9.9.9: install the same version on every task" in line


def test_second_coordinator(tmp_path: Path) -> None:
    """A second coordinator is told which one holds the servers, and what to do."""
    cluster = make_cluster()
    gate = tmp_path / "gate"
    with Roles(cluster, tmp_path) as roles:
        roles.ps()
        roles.worker()
        first = roles.coordinator(IDLE, str(gate))
        first.wait_for("connected")
        roles.cluster = {**cluster, "chief": free_addresses(1)}
        line = complaint(roles.start("coordinator", roles.script(JOB, "job.py"), role="chief"), 1)
        assert line.startswith("ps 0 (")
        assert " works for chief 0 (" in line
        assert line.endswith("take it over with take_over=True, or give this coordinator a cluster of its own")
        gate.touch()
        assert first.wait() == 0
        last = roles.start("coordinator", roles.script(JOB, "job.py"), role="chief")
        last.wait_for(DONE)


def test_wrong_command_lines() -> None:
    """A wrong option or argument is named, without a traceback: exit code 2."""
    lines = [
        ["ps", "--connect-timeout", "soon"],
        ["ps", "--no-such-option"],
        ["ps", "extra"],
        ["worker", "--log-level", "loud"],
        ["coordinator"],
        ["run", "--ps", "0", "x.py"],
        ["run", "--max-restarts", "-1", "x.py"],
        ["run", "--log-level", "loud", "x.py"],
        ["nonsense"],
    ]
    for code, output in run_all([(line, {"TF_CONFIG": with_task("ps")}) for line in lines]):
        assert code == 2
        assert output.startswith("Usage: pscluster ")
        assert output.splitlines()[-1].startswith("Error: ")
