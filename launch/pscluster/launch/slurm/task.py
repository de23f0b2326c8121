"""One task of the job step: it learns from Slurm which role it is, runs it, and restarts it if it dies.

A server or worker that dies is restarted in place, as often and as late as in a local cluster; see `supervisor`. The
coordinator is not: its end is the job's. Its task writes the exit code, and tells the others with SIGUSR2.

Slurm signals every process of a step. If it stopped the servers at the same moment as the coordinator, a script could
not save anything. So the roles have SIGTERM and SIGUSR2 blocked, and their task stops them with SIGINT in its turn:

| signal | the coordinator's task | the others |
|---|---|---|
| SIGTERM (scancel, time limit) | stops it | wait for the coordinator to end the job, then stop their role |
| SIGTERM before a requeue | kills the coordinator: the servers save what it will find again | the same |
| SIGUSR2 | ignores it | stop their role, if it does not stop by itself |
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from pscluster.coordinator.local.environment import common_environ
from pscluster.coordinator.local.supervisor import Supervisor
from pscluster.coordinator.local.tasks import (
    CONFIGURATION_EXIT_CODE,
    Action,
    Event,
    Exited,
    GiveUp,
    Log,
    RestartPolicy,
    Signal,
    Start,
    Started,
    StartFailed,
    StopRequested,
    Tick,
)
from pscluster.core.cluster.addresses import split_address
from pscluster.core.cluster.slurm import SlurmClusterResolver
from pscluster.core.cluster.spec import VARIABLE, ClusterSpec
from pscluster.core.cluster.tf_config import Task, TFConfig
from pscluster.core.errors import ConfigurationError
from pscluster.core.role.process import configure_logging, main_of, print_error
from pscluster.launch.slurm.commands import is_cancelled, signal_step
from pscluster.launch.slurm.job_script import CLUSTER, EXIT_CODE, STATE
from pscluster.ps.storage.options import state_folder

logger = logging.getLogger(__name__)

GRACE_SECONDS = 8.0
"""From SIGTERM to SIGKILL, for each role. Slurm's own SIGKILL comes 30 s after its SIGTERM (KillWait)."""

_PATIENCE = {"worker": 8.0, "ps": 10.0, "evaluator": 8.0}
"""Seconds after Slurm's SIGTERM in which the coordinator may end the job, before a role is told to stop."""

_LAST_SECONDS = 2.0
"""The same after SIGUSR2: the coordinator has ended, and has told the roles if it could."""


class _Signals:
    """Signals, as numbers to read. A `select` on `fileno` wakes when one arrives."""

    NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
    BLOCKED = (signal.SIGTERM, signal.SIGUSR2)  # in the roles

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in self.NUMBERS:
            signal.signal(number, lambda _number, _frame: None)

    def close(self) -> None:
        """Ignore signals from now on: they must not end a task that is about to exit with its own code."""
        for number in self.NUMBERS:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
        signal.set_wakeup_fd(-1)

    def wait(self, timeout: float | None) -> bytes:
        """Return the numbers of the signals that have arrived, or nothing after the timeout."""
        select.select([self._read], [], [], timeout)
        with contextlib.suppress(BlockingIOError):
            return self._read.recv(4096)
        return b""


class RoleTask:
    """Runs one role of the step to its end."""

    def __init__(self, task: Task, command: Sequence[str], env: Mapping[str, str], *, requeue: bool) -> None:
        self._is_chief = task.type == "chief"
        self._key = ("coordinator" if self._is_chief else task.type, task.index)
        self._command, self._env, self._requeue = command, env, requeue
        self._supervisor = Supervisor(
            [self._key],
            RestartPolicy(enabled=not self._is_chief),
            stop_order=[self._key[0]],
            grace=GRACE_SECONDS,
            until_done=True,
        )
        self._patience = _PATIENCE.get(task.type, 0.0)
        self._signals = _Signals()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_at: float | None = None
        self._code = 0
        self._given_up = False
        self._stopped = False

    def run(self) -> int:
        """Run the role, and return its exit code: of a server or worker 0, unless it was given up."""
        self._handle(Tick())
        while not self._supervisor.settled:
            for number in self._signals.wait(self._timeout()):
                self._on_signal(number)
            self._reap()
            now = time.monotonic()
            if self._stop_at is not None and self._stop_at <= now:
                self._stop_at = None
                self._handle(StopRequested())
            self._handle(Tick())
        self._signals.close()
        if self._is_chief:
            if not self._stopped:
                signal_step(signal.SIGUSR2)
            elif self._code == 128 + signal.SIGINT:
                return 128 + signal.SIGTERM  # what this task was sent
            return self._code if self._code >= 0 else 128 - self._code
        if self._given_up and (self._key[0] == "ps" or self._code == CONFIGURATION_EXIT_CODE):
            signal_step(signal.SIGTERM)  # the job can't go on without it; a wrong configuration is wrong everywhere
        return 1 if self._given_up else 0

    def _timeout(self) -> float | None:
        times = [at for at in (self._supervisor.next_due(), self._stop_at) if at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _on_signal(self, number: int) -> None:
        match number:
            case signal.SIGTERM | signal.SIGINT:
                self._stopped = True
                if self._is_chief:
                    if self._requeue and not is_cancelled():
                        logger.warning("the job will run again: killing the coordinator; the servers save its state")
                        self._handle(StopRequested(at_once=True))
                    else:
                        self._handle(StopRequested())
                elif self._stop_at is None:
                    self._stop_at = time.monotonic() + self._patience
            case signal.SIGUSR2 if not self._is_chief:
                soon = time.monotonic() + _LAST_SECONDS
                self._stop_at = soon if self._stop_at is None else min(soon, self._stop_at)

    def _reap(self) -> None:
        process = self._process
        if process is not None and _is_dead(process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started and did not end
            self._code = process.wait()
            self._process = None
            if process.stdin is not None:
                process.stdin.close()
            self._handle(Exited(self._key, process.pid, self._code))

    def _handle(self, event: Event) -> None:
        for action in self._supervisor.handle(event, time.monotonic(), random.random()):  # noqa: S311  # nosec B311
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Start(key):
                signal.pthread_sigmask(signal.SIG_BLOCK, _Signals.BLOCKED)  # inherited by the role
                try:
                    self._process = subprocess.Popen(  # noqa: S603 (our own command line)
                        self._command, stdin=subprocess.PIPE, bufsize=0, env=self._env, process_group=0
                    )
                except OSError as error:
                    self._code = 1
                    self._handle(StartFailed(key, str(error)))
                else:
                    self._handle(Started(key, self._process.pid))
                finally:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, _Signals.BLOCKED)
            case Signal(_, pid, number):
                if self._process is not None and self._process.pid == pid:
                    self._process.send_signal(signal.SIGINT if number == signal.SIGTERM else number)
            case GiveUp(_, reason):
                self._given_up = True
                logger.error("%s", reason)
            case Log(level, text):
                logger.log(level, "%s", text)


def _is_dead(process: subprocess.Popen[bytes]) -> bool:
    """Return whether it is dead, without reaping it: until then no signal can reach another process by its id."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def check_port(task: Task, cluster: ClusterSpec) -> None:
    """Raise ConfigurationError if another program has this task's port."""
    host, port = split_address(cluster.task_address(task.type, task.index) or "")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104  # nosec B104  (where the role will listen)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ConfigurationError(
                f"port {port} of {host}, which SLURM_JOB_ID {os.environ.get('SLURM_JOB_ID')} gives to {task.type} "
                f"{task.index}, is in use by another program: submit the job again, or choose ports with --port-base"
            ) from None


def adopt_state(state: Path, index: int, address: str) -> None:
    """Give the state that this server saved on another node, before a requeue, the name that it has here."""
    own = state_folder(state, index, address)
    others = [path for path in state.glob(f"{state_folder(state, index, '').name}*") if path != own]
    if others and not own.exists():
        max(others, key=lambda path: path.stat().st_mtime).rename(own)


def role_command(task: Task, cluster: ClusterSpec, run: Path, script: str, args: Sequence[str]) -> list[str]:
    """Return what a task runs."""
    command = [sys.executable, "-m"]
    if task.type == "chief":
        return [*command, "pscluster.coordinator", "--exit-with-parent", script, *args]
    command += [f"pscluster.{task.type}", "--exit-with-parent", "--until-done", "--grace", str(GRACE_SECONDS - 2)]
    if task.type == "ps":
        (run / STATE).mkdir(mode=0o700, exist_ok=True)
        adopt_state(run / STATE, task.index, cluster.task_address("ps", task.index) or "")
        command += ["--state-dir", str(run / STATE)]
    return command


def task_environ(task: Task, cluster: ClusterSpec, script: str) -> dict[str, str]:
    """Return the variables of a role's process: those of the job, and what this role needs.

    ConfigurationError if one of the job's is invalid.
    """
    threads = int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))
    own = common_environ(os.environ, threads, Path(script).resolve().parent)
    return {"PYTHONUNBUFFERED": "1", **os.environ, **own, VARIABLE: TFConfig(cluster, task).to_json()}


@click.command("task", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--ps", type=click.IntRange(1), required=True)
@click.option("--workers", type=click.IntRange(1), required=True)
@click.option("--port-base", type=int)
@click.option("--requeue", is_flag=True)
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run_task(
    ps: int, workers: int, port_base: int | None, requeue: bool, run: Path, script: str, args: tuple[str, ...]
) -> None:
    """Run this task's role of a job that `pscluster slurm` has submitted."""
    resolver = SlurmClusterResolver({"chief": 1, "ps": ps, "worker": workers}, port_base)
    task, cluster = Task(*resolver.get_task_info()), resolver.cluster_spec()
    is_chief = task.type == "chief"
    configure_logging(f"slurm {task.type}/{task.index}", "INFO")
    if is_chief:
        (run / CLUSTER).write_text(TFConfig(cluster).to_json() + "\n")
    try:
        check_port(task, cluster)
        env = task_environ(task, cluster, script)
    except ConfigurationError as error:
        signal_step(signal.SIGTERM)  # the others would wait for this task in vain
        code = print_error(error, CONFIGURATION_EXIT_CODE)
    else:
        command = role_command(task, cluster, run, script, args)
        code = RoleTask(task, command, env, requeue=requeue).run()
    if is_chief:
        draft = run / f".{EXIT_CODE}"
        draft.write_text(json.dumps(code))
        draft.replace(run / EXIT_CODE)
    sys.exit(code)


if __name__ == "__main__":
    main_of(run_task)
