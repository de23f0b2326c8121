"""One script for all roles, as in TensorFlow's tutorial: started once per role, or under `pscluster run`."""

from __future__ import annotations

import signal
import sys
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from tests.roles.processes import DONE, JOB, PSCLUSTER, Process, Roles, environ, make_cluster, run
from tests.roles.wire import JOB as WIRE_JOB
from tests.roles.wire import SECONDS, Connection

from pscluster.v1 import ps_pb2

SCRIPT = f"""
from pscluster.coordinator import Server, TFConfigClusterResolver

resolver = TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    Server(resolver).join()
    raise SystemExit("join() never returns")

{JOB}
print("task", resolver.task_type, resolver.task_id)
"""

# What a function of the script sees where the script is not the worker's main module.
IMPORTED = """
import sys
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, Server, TFConfigClusterResolver

def where(number):
    return number, sys.argv[1:]

def main():
    resolver = TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        server = Server(resolver)
        print("target", server.target, flush=True)
        server.join()
    coordinator = ClusterCoordinator(ParameterServerStrategy(resolver))
    results = [coordinator.schedule(where, args=(number,)) for number in range(3)]
    print("results", coordinator.fetch(results))

if __name__ == "__main__":
    main()
"""

PYTHON = (sys.executable,)


def test_started_once_a_role(tmp_path: Path) -> None:
    """The same file, run by `python` with each task's TF_CONFIG, becomes each of the roles."""
    cluster = make_cluster(ps=2, workers=2)
    with Roles(cluster, tmp_path) as roles:
        script = roles.script(SCRIPT)
        chief = roles.start(script, "--lr", "-1", role="chief", command=PYTHON)
        others = [
            roles.start(script, role=role, index=index, command=PYTHON) for role in ("worker", "ps") for index in (0, 1)
        ]
        assert "with ['--lr', '-1']" in chief.wait_for(DONE)
        assert chief.wait() == 0
        assert chief.output.splitlines()[-1] == "task chief 0"
        for process in others:
            process.wait_for("the job is over")
            process.send(signal.SIGTERM)
            assert process.wait() == 0
            assert process.output.splitlines()[-1].endswith("stopped")


def test_the_next_chief_finds_the_same_servers(tmp_path: Path) -> None:
    """A second run of the script's coordinator part uses the roles that the first one left waiting."""
    with Roles(make_cluster(), tmp_path) as roles:
        script = roles.script(SCRIPT)
        for role in ("ps", "worker"):
            roles.start(script, role=role, command=PYTHON)
        for _ in range(2):
            chief = roles.start(script, role="chief", command=PYTHON)
            chief.wait_for(DONE)
            assert chief.wait() == 0


def test_functions_of_the_script(tmp_path: Path) -> None:
    """A function of the script runs on the script's own workers, whose main module is the same file."""
    cluster = make_cluster()
    with Roles(cluster, tmp_path) as roles:
        script = roles.script(IMPORTED)
        roles.start(script, role="ps", command=PYTHON)
        worker = roles.start(script, "--worker", role="worker", command=PYTHON)
        assert worker.wait_for("target").split() == ["target", f"grpc://{cluster['worker'][0]}"]
        chief = roles.start(script, "--chief", role="chief", command=PYTHON)
        assert chief.wait_for("results").strip() == "results [(0, ['--worker']), (1, ['--worker']), (2, ['--worker'])]"
        assert chief.wait() == 0


def test_roles_may_be_mixed(tmp_path: Path) -> None:
    """A role started by the script and one started by a command are interchangeable."""
    with Roles(make_cluster(), tmp_path) as roles:
        script = roles.script(SCRIPT)
        coordinator = roles.start("coordinator", script, role="chief")
        roles.start(script, role="worker", command=PYTHON)
        roles.ps()
        coordinator.wait_for(DONE)
        assert coordinator.wait() == 0


def test_a_script_s_server_hears_the_environment(tmp_path: Path) -> None:
    """It follows the variables for where checkpoints may lie, and for the memory of large requests."""
    cluster, root = make_cluster(), tmp_path / "checkpoints"
    with Roles(cluster, tmp_path, {"PSCLUSTER_CHECKPOINT_ROOT": str(root)}) as roles:
        script = roles.script(SCRIPT)
        roles.start(script, role="ps", command=PYTHON).wait_for("serving on")
        connection = Connection(cluster["ps"][0])
        with closing(connection), connection.held():
            for folder, sentence in ((tmp_path, "is outside of"), (root, "is not marked on ps 0")):
                request = ps_pb2.CheckpointRequest(
                    job=WIRE_JOB, action=ps_pb2.CheckpointRequest.WRITE, id=1, directory=str(folder), file="part"
                )
                with pytest.raises(grpc.RpcError, match=sentence):
                    connection.ps.checkpoint(request, timeout=SECONDS)
        roles.env["PSCLUSTER_IN_FLIGHT_MIB"] = "much"
        other = roles.start(script, role="ps", command=PYTHON)
        assert other.wait() == 1
        assert "PSCLUSTER_IN_FLIGHT_MIB is 'much'; it must be a whole number of MiB, 1 or more" in other.output


def test_a_chief_is_no_server(tmp_path: Path) -> None:
    """`Server` in the wrong role says what it is for, and what to do."""
    with Roles(make_cluster(), tmp_path) as roles:
        script = roles.script("from pscluster.coordinator import Server\nServer().join()\n")
        plain = roles.start(script, role="chief", command=PYTHON)
        assert plain.wait() == 1
        ours = roles.start("coordinator", script, role="chief")
        assert ours.wait() == 2
        sentence = "a Server is a 'ps' or a 'worker', not 'chief': branch on resolver.task_type"
        assert plain.output.splitlines()[-1] == f"pscluster.core.errors.ConfigurationError: {sentence}"
        assert ours.output.splitlines() == [f"pscluster: {sentence}"]


def test_under_run(tmp_path: Path) -> None:
    """`pscluster run` starts a local cluster around the same script; arguments with dashes reach it."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    code, output = run("run", "--ps", "2", "--workers", "3", str(path), "--ps", "-h", "--", "--help", "x")
    assert code == 0, output
    # Whether the coordinator has to wait for a worker, and says so, depends on the machine.
    assert [line for line in output.splitlines() if " INFO " not in line] == [
        "w is [20.0, 20.0, 20.0, 20.0] with ['--ps', '-h', '--', '--help', 'x']",
        "task chief 0",
    ]


def test_exit_codes_under_run(tmp_path: Path) -> None:
    """`pscluster run` exits with the script's exit code; the traceback shows none of our frames but the one it
    called."""
    path = tmp_path / "script.py"
    job = "ParameterServerStrategy(TFConfigClusterResolver())"
    start = f"import sys\nfrom pscluster.coordinator import *\nstrategy = {job}\n"
    for end, expected in (("sys.exit(7)", 7), ("raise ValueError('mine')", 1), ("sys.exit('so it ends')", 1)):
        path.write_text(start + end)
        with Process([*PSCLUSTER, "run", str(path)], environ()) as process:
            assert process.wait() == expected
            if "mine" in end:
                lines = [line.strip() for line in process.output.splitlines() if " INFO " not in line]
                assert lines[1].startswith(f'File "{path}", line 4, in <module>')
                assert lines[-1] == "ValueError: mine"
            elif "so it" in end:
                assert process.output.endswith("so it ends\n")
