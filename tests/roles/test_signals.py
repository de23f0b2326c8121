"""How roles end: by a signal, by the end of the job, by the death of their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from pathlib import Path

import numpy as np
import pytest
from tests.roles.processes import DONE, HELD, IDLE, JOB, PSCLUSTER, Process, Roles, environ, make_cluster, tf_config
from tests.roles.wire import Frames, add_to_all, connect
from tests.waiting import until

from pscluster.core.transport.frames import CHUNK_BYTES, pack
from pscluster.v1 import ps_pb2

SIGNALS = [signal.SIGTERM, signal.SIGINT]


def ends_in_order(process: Process, reason: str) -> None:
    """Check that the role says why it stops and that it has stopped, and exits with 0."""
    assert process.wait() == 0
    says = [line.split(" INFO ")[1] for line in process.output.splitlines() if " INFO stop" in line]
    assert says == [f"stopping: {reason}", "stopped"]
    assert "Traceback" not in process.output


@pytest.mark.parametrize("signum", SIGNALS)
def test_idle_roles(signum: signal.Signals, tmp_path: Path) -> None:
    """A worker that waits for its server, a server, and an idle worker end cleanly."""
    with Roles(make_cluster(), tmp_path) as roles:
        waiting = roles.worker()
        waiting.wait_for("waiting for ps 0")
        waiting.send(signum)
        ends_in_order(waiting, signum.name)
        ps, worker = roles.ps(), roles.worker()
        ps.wait_for("serving on")
        worker.wait_for("serving on")
        for process in (worker, ps):
            process.send(signum)
            ends_in_order(process, signum.name)


def test_worker_that_runs_a_function(tmp_path: Path) -> None:
    """The running function ends and counts, those not started go to the other worker, and nothing counts twice.

    Both signals request the same stop, see `test_idle_roles`; SIGTERM meets a running function in `test_grace`.
    """
    gate = tmp_path / "gate"
    with Roles(make_cluster(workers=2), tmp_path) as roles:
        roles.ps()
        workers = [roles.worker(0), roles.worker(1)]
        coordinator = roles.coordinator(HELD, str(gate))
        for worker in workers:
            worker.wait_for("running on worker")
        workers[0].send(signal.SIGINT)
        workers[0].wait_for("stopping: SIGINT")
        assert workers[0].is_running, "its function has not ended"
        gate.touch()
        ends_in_order(workers[0], "SIGINT")
        assert coordinator.wait_for("w is").strip() == "w is [20.0, 20.0, 20.0, 20.0]"
        assert coordinator.wait() == 0
        workers[1].wait_for("the job is over")  # nothing of the job is printed after it
        assert workers[0].output.count("running on worker") + workers[1].output.count("running on worker") == 20
        assert "is gone; keeping its state" not in workers[0].output, "it is the worker that goes"


@pytest.mark.parametrize("signum", SIGNALS)
def test_coordinator_that_waits(signum: signal.Signals, tmp_path: Path) -> None:
    """A coordinator that waits for tasks ends as by a signal, and says that its script had not ended."""
    with Roles(make_cluster(), tmp_path) as roles:
        coordinator = roles.coordinator(JOB)
        coordinator.wait_for("waiting for")
        coordinator.send(signum)
        assert coordinator.wait() == 128 + signum
        assert coordinator.output.splitlines()[-1].endswith(f"stopped by {signum.name} before the script had ended")


FINALIZERS = """
import os, signal, sys, time

class Closed:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        for _ in range(1000):  # the signal arrives here, where Python drops what its handler raises
            pass

def count():
    value = Closed()
    del value
    while True:
        time.sleep(0.01)

try:
    count()
finally:
    print("cleaned up", flush=True)
"""


@pytest.mark.parametrize("signum", SIGNALS)
def test_coordinator_in_a_finalizer(signum: signal.Signals, tmp_path: Path) -> None:
    """The script ends by a signal also where Python drops exceptions: in a finalizer, such as those of gRPC."""
    with Roles(make_cluster(), tmp_path) as roles:
        coordinator = roles.coordinator(FINALIZERS, str(int(signum)))
        assert coordinator.wait() == 128 + signum
        assert "cleaned up" in coordinator.output
        assert f"stopped by {signum.name} before the script had ended" in coordinator.output
        assert "Exception ignored" not in coordinator.output


@pytest.mark.parametrize("signum", SIGNALS)
def test_coordinator_in_join(signum: signal.Signals, tmp_path: Path) -> None:
    """A coordinator in join() ends the job cleanly: the roles are told, and serve the next coordinator."""
    gate = tmp_path / "gate"
    with Roles(make_cluster(), tmp_path) as roles:
        ps, worker = roles.ps(), roles.worker()
        coordinator = roles.coordinator(HELD, str(gate))
        coordinator.wait_for("joining")
        worker.wait_for("running on worker 0")
        coordinator.send(signum)
        assert coordinator.wait() == 128 + signum
        assert f"stopped by {signum.name} before the script had ended" in coordinator.output
        assert "Traceback" not in coordinator.output
        for process in (ps, worker):
            process.wait_for(f"the job is over: the coordinator was stopped by {signum.name}")
        gate.touch()  # for the old job's function, which holds the worker
        after = roles.coordinator(JOB)
        after.wait_for(DONE)
        assert after.wait() == 0


def test_coordinator_that_keeps_its_job(tmp_path: Path) -> None:
    """With --keep-job SIGTERM leaves the variables on the servers, and the same script continues with them."""
    source = IDLE.replace('"connected"', '"resumed" if strategy.resumed else "began"')
    with Roles(make_cluster(), tmp_path) as roles:
        roles.ps()
        roles.worker()
        gate = tmp_path / "gate"
        first = roles.coordinator(source, str(gate), options=["--keep-job"])
        first.wait_for("began")
        first.send(signal.SIGTERM)
        assert first.wait() == 143
        assert "the job is left to the next coordinator" in first.output
        second = roles.coordinator(source, str(gate), options=["--keep-job"])
        second.wait_for("resumed")
        gate.touch()
        assert second.wait() == 0
        third = roles.coordinator(source, str(gate))
        third.wait_for("began")  # a script that ends has ended its job
        assert third.wait() == 0


def test_script_that_handles_the_signal(tmp_path: Path) -> None:
    """A script sees SIGTERM as a KeyboardInterrupt, and may end in its own way and with its own code."""
    source = HELD.replace(
        'print("joining", flush=True)\ncoordinator.join()',
        "try:\n"
        "    print('joining', flush=True)\n"
        "    coordinator.join()\n"
        "except KeyboardInterrupt:\n"
        "    print('saved', w.numpy().tolist(), flush=True)\n"
        "    sys.exit(5)",
    )
    with Roles(make_cluster(), tmp_path) as roles:
        roles.ps()
        worker = roles.worker()
        coordinator = roles.coordinator(source, str(tmp_path / "gate"))
        worker.wait_for("running on worker 0")
        coordinator.wait_for("joining")
        coordinator.send(signal.SIGTERM)
        assert coordinator.wait() == 5
        assert "saved [0.0, 0.0, 0.0, 0.0]" in coordinator.output
        worker.wait_for("the job is over: the coordinator's script ended with code 5")
        # A script that ignores it has not completed its job either.
        coordinator = roles.coordinator(source.replace("sys.exit(5)", "pass"), str(tmp_path / "gate"))
        coordinator.wait_for("joining")
        coordinator.send(signal.SIGTERM)
        assert coordinator.wait() == 128 + signal.SIGTERM
        assert "saved" in coordinator.output


def test_grace(tmp_path: Path) -> None:
    """A function that still runs when the grace period ends is given back, and the worker says so and exits with 0."""
    gate = tmp_path / "gate"
    with Roles(make_cluster(workers=2), tmp_path) as roles:
        roles.ps()
        workers = [roles.worker(0, "--grace", "0.2"), roles.worker(1)]
        coordinator = roles.coordinator(HELD, str(gate))
        for worker in workers:
            worker.wait_for("running on worker")
        workers[0].send(signal.SIGTERM)
        workers[0].wait_for("a function was still running after 0.2 s; returning it unfinished")
        ends_in_order(workers[0], "SIGTERM")
        gate.touch()
        assert coordinator.wait_for("w is").strip() == "w is [20.0, 20.0, 20.0, 20.0]"
        assert coordinator.wait() == 0
        workers[1].wait_for("the job is over")
        assert workers[1].output.count("running on worker") == 20


def test_second_signal(tmp_path: Path) -> None:
    """A second signal ends the worker at once, without waiting for the running function, with 128 + n."""
    with Roles(make_cluster(), tmp_path) as roles:
        roles.ps()
        worker = roles.worker()
        roles.coordinator(HELD, str(tmp_path / "gate"))
        worker.wait_for("running on worker")
        worker.send(signal.SIGTERM)
        worker.wait_for("stopping: SIGTERM")
        worker.send(signal.SIGINT)
        assert worker.wait() == 128 + signal.SIGINT


def test_server_with_a_request_under_way(tmp_path: Path) -> None:
    """A server that is asked to stop receives the rest of an update in progress, applies it and acknowledges it."""
    values = np.ones((CHUNK_BYTES // 8, 4), np.float32)  # two frames
    data = values.tobytes()
    cluster = make_cluster()
    with Roles(cluster, tmp_path) as roles, connect(cluster["ps"][0]) as connection:
        ps = roles.ps()
        connection.attach()
        connection.create(len(values))
        frames, head = Frames(), add_to_all(values, sequence=1)
        reply = connection.ps.push.future(iter(frames))
        frames.give(pack(head, [data[:CHUNK_BYTES]]))
        assert connection.read(len(values)).sum() == values.size, "nothing is applied before the last frame"
        ps.send(signal.SIGTERM)
        ps.wait_for("stopping: SIGTERM")
        frames.give(pack(ps_pb2.Request(last=True), [data[CHUNK_BYTES:]]))
        frames.give(None)
        assert ps_pb2.Reply.FromString(reply.result()).update.applied == 1
        ends_in_order(ps, "SIGTERM")


def test_until_done(tmp_path: Path) -> None:
    """With --until-done a role exits with 0 when the job is over; without, it serves the next coordinator."""
    cluster = make_cluster(ps=2, workers=2)
    with Roles(cluster, tmp_path) as roles:
        leaving = [roles.ps(0, "--until-done"), roles.worker(0, "--until-done")]
        staying = [roles.ps(1), roles.worker(1)]
        assert roles.coordinator(JOB).wait() == 0
        for process in leaving:
            ends_in_order(process, "the job is over")
        roles.ps(0)
        roles.worker(0)
        again = roles.coordinator(JOB)
        again.wait_for(DONE)
        assert again.wait() == 0
        for process in staying:
            process.wait_for("the job is over", count=2)
            assert process.is_running


def test_until_done_when_the_script_fails(tmp_path: Path) -> None:
    """A job whose script failed is over too."""
    with Roles(make_cluster(), tmp_path) as roles:
        others = [roles.ps(0, "--until-done"), roles.worker(0, "--until-done")]
        source = JOB.replace("coordinator.join()", "raise OSError('no data')")
        assert roles.coordinator(source).wait() == 1
        for process in others:
            process.wait_for("the job is over: the coordinator's script failed: OSError")
            ends_in_order(process, "the job is over")


def test_coordinator_that_is_killed_frees_its_roles(tmp_path: Path) -> None:
    """Roles whose coordinator was killed accept the next one; meanwhile --until-done does not make them exit."""
    with Roles(make_cluster(), tmp_path) as roles:
        others = [roles.ps(0, "--until-done"), roles.worker(0, "--until-done")]
        gate = tmp_path / "gate"
        first = roles.coordinator(HELD, str(gate))
        others[1].wait_for("running on worker")
        first.send(signal.SIGKILL)
        for process in others:
            process.wait_for("is gone; keeping its state")
        gate.touch()
        second = roles.coordinator(JOB)
        second.wait_for(DONE)
        assert second.wait() == 0
        for process in others:
            ends_in_order(process, "the job is over")


def test_coordinator_that_does_not_come_back(tmp_path: Path) -> None:
    """Roles wait as long as they were told; then the job is dropped, even by a server that was restored."""
    with Roles(make_cluster(ps=2), tmp_path, {"PSCLUSTER_COORDINATOR_TIMEOUT": "600"}) as roles:
        waiting = roles.ps(0)
        restored = roles.ps(1)
        worker = roles.worker(0, "--until-done", "--coordinator-timeout", "0.5")
        first = roles.coordinator(IDLE, str(tmp_path / "never"))
        first.wait_for("connected")
        first.send(signal.SIGKILL)
        ends_in_order(worker, "the job is over")
        worker.wait_for("no coordinator came back within 0.5 s: dropped the job's state")
        waiting.wait_for("is gone; keeping its state")
        restored.send(signal.SIGKILL)
        restored.wait()
        restored = roles.ps(1, "--coordinator-timeout", "0.5")
        restored.wait_for("no coordinator came back within 0.5 s: dropped the job's state")
        roles.worker(0)
        second = roles.coordinator(JOB)
        second.wait_for(DONE)
        assert second.wait() == 0
        assert "came back within" not in waiting.output


def test_coordinator_that_comes_back_in_time(tmp_path: Path) -> None:
    """Its roles keep waiting, and start anew after its next death."""
    with Roles(make_cluster(), tmp_path) as roles:
        others = [roles.ps(0, "--coordinator-timeout", "60"), roles.worker(0, "--coordinator-timeout", "60")]
        for end in (signal.SIGKILL, signal.SIGTERM):
            script = roles.coordinator(IDLE, str(tmp_path / "never"))
            script.wait_for("connected")
            script.send(end)
            script.wait()
        for process in others:
            process.wait_for("the job is over")
            assert "came back within" not in process.output


def test_first_signal_while_stopping(tmp_path: Path) -> None:
    """The first signal does not end a worker at once that is stopping already for another reason, as when the job is
    over and Compose stops the containers that are left."""
    gate, cluster = tmp_path / "gate", make_cluster()
    with Roles(cluster, tmp_path) as roles:
        roles.ps()
        command = [*PSCLUSTER, "worker", "--exit-with-parent"]
        with Process(command, environ(tf_config(cluster, "worker")), stdin=subprocess.PIPE) as worker:
            roles.coordinator(HELD, str(gate))
            worker.wait_for("running on worker")
            worker.close_stdin()
            worker.wait_for("stopping: the parent process is gone")
            worker.send(signal.SIGTERM)
            gate.touch()
            ends_in_order(worker, "the parent process is gone")


@pytest.mark.parametrize("role", ["ps", "worker", "coordinator"])
def test_exit_with_parent(role: str, tmp_path: Path) -> None:
    """With --exit-with-parent a role stops cleanly at the end of its standard input, which is empty here."""
    with Roles(make_cluster(), tmp_path) as roles:
        if role == "coordinator":
            process = roles.coordinator(JOB, options=["--exit-with-parent"])
            assert process.wait() == 128 + signal.SIGTERM
            assert "stopped by SIGTERM before the script had ended" in process.output
        else:
            process = roles.start(role, "--exit-with-parent", role=role)
            ends_in_order(process, "the parent process is gone")


def left_over(mark: str) -> list[str]:
    """The command lines of the live processes whose environment has the mark."""
    command_lines = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    command_lines.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # it has ended, or belongs to another user
                continue
    return command_lines


@pytest.mark.plain_starts
@pytest.mark.parametrize("signum", SIGNALS)
def test_run(signum: signal.Signals, tmp_path: Path) -> None:
    """`pscluster run` ends the script and the roles on a signal, leaves nothing, and exits with 128 + n."""
    script, mark = tmp_path / "script.py", uuid.uuid4().hex
    script.write_text(HELD)
    command = [*PSCLUSTER, "run", "--workers", "2", str(script), str(tmp_path / "gate")]
    with Process(command, environ(MARK=mark)) as process:
        process.wait_for("running on worker")
        assert len(left_over(mark)) == 5, "run, the script, and the three roles"
        process.send(signum)
        assert process.wait() == 128 + signum
        assert left_over(mark) == []
        assert f"stopped by {signum.name} before the script had ended" in process.output
        assert "Traceback" not in process.output


@pytest.mark.plain_starts
@pytest.mark.parametrize("signum", SIGNALS)
def test_run_before_the_script_has_a_cluster(signum: signal.Signals, tmp_path: Path) -> None:
    """A signal before the script has begun a job ends `pscluster run` as well."""
    script, mark = tmp_path / "script.py", uuid.uuid4().hex
    script.write_text("import time\nprint('imports', flush=True)\nwhile True:\n    time.sleep(0.05)\n")
    with Process([*PSCLUSTER, "run", str(script)], environ(MARK=mark)) as process:
        process.wait_for("imports")
        process.send(signum)
        assert process.wait() == 128 + signum
        assert left_over(mark) == []


@pytest.mark.plain_starts
def test_run_that_is_killed(tmp_path: Path) -> None:
    """When `pscluster run` is killed by SIGKILL its roles end by themselves."""
    script, mark = tmp_path / "script.py", uuid.uuid4().hex
    script.write_text("import time\nprint('imports', flush=True)\nwhile True:\n    time.sleep(0.05)\n")
    with Process([*PSCLUSTER, "run", "--log-level", "info", str(script)], environ(MARK=mark)) as process:
        process.wait_for("imports")
        process.wait_for("worker 0 serving on")
        process.send(signal.SIGKILL)
        until(
            lambda: not any("pscluster.ps" in line or "pscluster.worker" in line for line in left_over(mark)),
            "the roles have ended",
        )
        for line in left_over(mark):
            assert "script.py" in line
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and folder.name != str(os.getpid()):
                try:
                    if mark.encode() in (folder / "environ").read_bytes():
                        os.kill(int(folder.name), signal.SIGKILL)  # the script, which has no parent any more
                except OSError:
                    continue
