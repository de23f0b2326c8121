"""`pscluster run --ps 2 --workers 3 SCRIPT [ARGS]`: a local cluster around a coordinator's script.

The roles exit by themselves after the script, whose coordinator has told them that the job is over; those that have not
within the grace are stopped. The script is not restarted: only its author knows where it could resume. If a role is
given up after too many restarts, the script is terminated, since it would wait for the role in vain.

Signals. Exactly one SIGINT must reach the script, whatever its source. In the foreground of a terminal the script stays
in our process group, so that it can read from the terminal; Ctrl-C then reaches it from the terminal, and we do not
forward it. Elsewhere (a service, a container, a background job) the script gets its own process group, and we forward
the signals that reach us. SIGTERM always reaches only us and is forwarded. While the cluster starts or stops, each of
these signals ends the run.

What may be lost: when this process is killed by SIGKILL, the roles end with it, and on Linux the script receives
SIGTERM. Elsewhere the script continues, and ends with the error that its servers are down.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pscluster.coordinator.local.environment import child_environ
from pscluster.coordinator.local.local_cluster import LocalCluster, LocalClusterError
from pscluster.coordinator.local.monitor import ClusterError
from pscluster.coordinator.local.processes import block_until_dead
from pscluster.coordinator.local.reports import LAUNCHER_VARIABLE, ReportPipe
from pscluster.core.errors import ConfigurationError
from pscluster.core.functions.policy import DATA_VARIABLE, FUNCTIONS_VARIABLE, PICKLE_VARIABLE, functions_from_also
from pscluster.core.role.options import METRICS_PORT_VARIABLE
from pscluster.core.role.process import configure_logging

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FIRST_END_SECONDS = 2.0
# The script's standard input is the terminal, so the end of a pipe can't tell it that we were killed; the kernel can.
# The request survives exec but not fork, hence this intermediate step: Python code between fork and exec (`preexec_fn`)
# may deadlock in a process with threads.
_TIED_TO_PARENT = """
import ctypes, os, signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGTERM)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_FROM_TERMINAL = frozenset({signal.SIGINT, signal.SIGHUP})


_Message: TypeAlias = int | ClusterError | subprocess.Popen[bytes]
"""A signal, a role that was given up, or the script, which has ended."""


class _Inbox:
    """Messages for the main thread, from its signal handlers and from other threads.

    `queue` would not do: a signal that the kernel delivers to another thread does not wake a main thread that waits for
    a lock. A byte from the interpreter's own handler does wake a `select`.
    """

    def __init__(self) -> None:
        self._messages: deque[_Message] = deque()
        self._collects = False
        self._wakes, self._wakeup = socket.socketpair()
        self._wakes.setblocking(False)
        self._wakeup.setblocking(False)

    def put(self, message: _Message) -> None:
        """Add a message. Safe in a signal handler."""
        self._messages.append(message)
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: the run is over
            self._wakeup.send(b"m")

    def get(self, timeout: float | None) -> _Message | None:
        """Return the next message, or None after `timeout` seconds without one."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._messages:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            if select.select([self._wakes], [], [], left)[0]:
                self._wakes.recv(4096)
        return self._messages.popleft()

    def __len__(self) -> int:
        return len(self._messages)

    def close(self) -> None:
        self._wakes.close()
        self._wakeup.close()

    @contextlib.contextmanager
    def taking_signals(self) -> Iterator[None]:
        """Handle the signals that end a run: raise `_Interrupted`, or within `collecting` add a message.

        A signal that was ignored when we were started (nohup) stays ignored. Do nothing outside the main thread, where
        Python sets no handlers.
        """
        with contextlib.ExitStack() as undo:
            if threading.current_thread() is threading.main_thread():
                before_us = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
                undo.callback(signal.set_wakeup_fd, before_us)
                for signal_number in _FORWARDED:
                    before = signal.getsignal(signal_number)
                    if before not in (signal.SIG_IGN, None):
                        signal.signal(signal_number, self._take)
                        undo.callback(signal.signal, signal_number, before)
            yield

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        self._collects = True
        try:
            yield
        finally:
            self._collects = False

    def _take(self, signal_number: int, _frame: object) -> None:
        if not self._collects:
            raise _Interrupted(signal_number)
        self.put(signal_number)


class _Interrupted(BaseException):
    """A signal arrived while no script was running."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


def script_at(path: str | os.PathLike[str]) -> Path:
    script = Path(path)
    if not script.is_file():
        why = "is a directory" if script.is_dir() else "does not exist"
        raise ConfigurationError(f"the script {script} {why}; give a Python file")
    return script


def run_script(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    log_format: str = "text",
    dashboard: bool = False,
    dashboard_address: str | None = None,
    env: Mapping[str, str] | None = None,
    allow_pickle: bool | None = None,
    functions_from: Sequence[str] = (),
    data_from: Sequence[str] = (),
    grace: float = 10.0,
    metrics_port: int | None = 0,
    tls: bool = False,
    _role_command: Sequence[str] | None = None,
    _coordinator_command: Sequence[str] | None = None,
    **cluster_options: Any,
) -> int:
    """Run a coordinator's script with a local cluster around it, and return the exit code for this process.

    The cluster's options are those of `LocalCluster`; log_format, env and allow_pickle are for the script, too.

    Args:
        functions_from: folders and packages whose functions the roles accept without pickles, in addition to the
            script's folder. Default: see docs/security.md.
        data_from: folders whose files workers map without pickles, in addition to those of `functions_from`.
        grace: seconds that the roles have to exit by themselves after the script has ended, and that the script has
            after SIGTERM if a role was given up.
        metrics_port: where the coordinator serves its metrics; 0: any free port, as for the roles; None: not at all.
        _role_command, _coordinator_command: for tests: what to run instead of `python -m pscluster.ROLE`.

    Returns:
        The script's exit code; 128 + n if signal n ended it, or arrived and the script then exited cleanly.

    Raises:
        ConfigurationError: there is no such script, or an argument is invalid. Nothing was started.
        LocalClusterError: a role was given up.
    """
    path = script_at(script)
    command = [*(_coordinator_command or (sys.executable, "-m", "pscluster.coordinator"))]
    env = {**(env or {}), METRICS_PORT_VARIABLE: "off" if metrics_port is None else str(metrics_port)}
    env.setdefault(FUNCTIONS_VARIABLE, functions_from_also(path.resolve().parent, given=functions_from))
    if data_from:
        env.setdefault(DATA_VARIABLE, os.pathsep.join(map(os.path.abspath, data_from)))
    code: int | None = None
    with contextlib.closing(_Inbox()) as inbox, contextlib.closing(ReportPipe()) as reports:
        cluster = LocalCluster(
            until_done=True,
            env=env,
            log_format=log_format,
            tls=tls or None,
            allow_pickle=allow_pickle,
            _command=_role_command,
            _on_failure=inbox.put,
            _on_report=reports.send,
            **cluster_options,
        )
        if allow_pickle is not None:
            env[PICKLE_VARIABLE] = str(int(allow_pickle))
        options: list[str] = []
        if log_format != "text":
            configure_logging("run", "WARNING", log_format)
            options += ["--log-format", log_format]
        options += ["--dashboard"] if dashboard else []
        options += ["--dashboard-address", dashboard_address] if dashboard_address is not None else []
        try:
            with inbox.taking_signals(), cluster:
                command += [*cluster.hand_over_port("chief", 0), *options, os.fspath(script), *args]
                code = _run_to_end(command, cluster, env, reports, grace, inbox)
                # If no role has begun to exit by now, none was told to: the script never started a job.
                if code >= 0 and cluster.wait_first_end(min(grace, _FIRST_END_SECONDS)):
                    cluster.join(grace)
        except _Interrupted as interrupt:
            if code is None:
                return 128 + interrupt.signal_number
        return code if code >= 0 else 128 - code


def _run_to_end(
    command: Sequence[str],
    cluster: LocalCluster,
    env: Mapping[str, str],
    reports: ReportPipe,
    grace: float,
    inbox: _Inbox,
) -> int:
    """Start the script, forward signals, and wait for its end. LocalClusterError if a role was given up."""
    shares_terminal = _in_foreground()
    failure: ClusterError | None = None
    signalled = 0
    with inbox.collecting():
        script = subprocess.Popen(  # noqa: S603 (the user's own script)
            _tied_to_parent(command),
            env=child_environ(
                {**env, LAUNCHER_VARIABLE: reports.variable},
                cluster.tf_config("chief", 0),
                cluster.token,
                cluster.tls_folder,
            ),
            process_group=None if shares_terminal else 0,
            pass_fds=[reports.for_script],
        )
        early = len(inbox)  # signals that the terminal sent before the script existed

        def wait() -> None:
            block_until_dead(script)
            inbox.put(script)

        threading.Thread(target=wait, name="script-waiter", daemon=True).start()
        while (message := inbox.get(timeout=None if failure is None else grace)) is not script:
            early -= 1
            match message:
                case None:
                    script.kill()
                case int(signal_number):
                    signalled = signalled or signal_number
                    if early >= 0 or not (shares_terminal and signal_number in _FROM_TERMINAL):
                        script.send_signal(signal_number)
                case ClusterError() as error:
                    failure = failure or error
                    script.terminate()
    code = script.wait()
    if failure is not None:
        raise LocalClusterError(f"{failure}; the script was terminated")
    # A clean stop is a success for a role, but the caller of this command must not take the job for done.
    return 128 + signalled if signalled and code == 0 else code


def _tied_to_parent(command: Sequence[str]) -> Sequence[str]:
    """Return the command, wrapped so that it ends with this process if the system supports that."""
    if not sys.platform.startswith("linux"):
        return command
    return [sys.executable, "-I", "-S", "-c", _TIED_TO_PARENT, str(os.getpid()), *command]


def _in_foreground() -> bool:
    """Return whether Ctrl-C in a terminal signals our process group."""
    try:
        with open("/dev/tty", "rb", 0, opener=lambda path, flags: os.open(path, flags | os.O_NOCTTY)) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
