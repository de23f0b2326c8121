"""What `pscluster run --ps 2 --workers 3 SCRIPT [ARGS]` does: a local cluster around a coordinator's script.

    1  the parameter servers and workers start (`LocalCluster`, until the job is done)
    2  the script starts, as `python -m pscluster.coordinator SCRIPT ARGS`, with the terminal as its own
    3  the script ends; the coordinator has told the roles that the job is over, and they end by themselves
    4  what has not ended within the grace is stopped

The script is not restarted: nobody but its author knows where it could go on. If a role is given up (its
restarts are spent), the script is terminated, since it would wait for the role in vain.

Signals. Exactly one SIGINT has to reach the script, whoever sends it. In the foreground of a terminal the
script stays in our process group, so that it may read from the terminal; Ctrl-C then reaches it from the
terminal, and is not sent on by us. Elsewhere (a service, a container, a background job) the script gets a
process group of its own, and what reaches us we send on. SIGTERM always comes to us alone and is sent on.
While the cluster starts or stops, each of them means: make an end of it.

What may be lost: when this process is killed by SIGKILL, the roles end with it, and on Linux the script is
sent SIGTERM. Elsewhere the script is on its own then and ends with the error that its servers are gone.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pscluster.coordinator.local.launcher import LAUNCHER_VARIABLE, ReportPipe, descriptor_of
from pscluster.coordinator.local.local_cluster import LocalCluster, LocalClusterError, block_until_dead, child_environ
from pscluster.core.errors import ConfigurationError
from pscluster.core.functions.policy import DATA_VARIABLE, FUNCTIONS_VARIABLE, PICKLE_VARIABLE, functions_from_also
from pscluster.core.role.options import METRICS_PORT_VARIABLE
from pscluster.core.role.process import configure_logging
from pscluster.core.sanitize import shown

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FIRST_END_SECONDS = 2.0
# The script's standard input is the terminal, so no pipe's end can tell it that we were killed; the kernel
# can. The request outlives exec but not fork, hence this step between: Python code between fork and exec
# (`preexec_fn`) may deadlock where there are threads.
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


@dataclass(frozen=True, slots=True)
class _Signalled:
    number: int


@dataclass(frozen=True, slots=True)
class _Failed:
    error: LocalClusterError


@dataclass(frozen=True, slots=True)
class _ScriptEnded:
    pass


_Message: TypeAlias = _Signalled | _Failed | _ScriptEnded


class _Inbox:
    """Messages for the main thread, from its signal handlers and from other threads.

    Not a queue of the library: a signal that the kernel gives to another thread does not wake a main thread
    that waits on a lock, so its handler would run only when something else wakes it. A byte from the
    interpreter's own handler does wake a `select`.
    """

    def __init__(self) -> None:
        self._messages: deque[_Message] = deque()
        self._wakes, self.wakeup = socket.socketpair()
        self._wakes.setblocking(False)
        self.wakeup.setblocking(False)

    def put(self, message: _Message) -> None:
        """Add a message. Safe in a signal handler."""
        self._messages.append(message)
        with contextlib.suppress(OSError):  # full: it wakes already; closed: nobody reads any more
            self.wakeup.send(b"m")

    def get(self, timeout: float | None) -> _Message | None:
        """The next message, or None after `timeout` seconds without one."""
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
        """No more messages will be read."""
        self._wakes.close()
        self.wakeup.close()


class _Interrupted(BaseException):
    """A signal came while no script was there to take it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_script(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    num_ps: int = 1,
    num_workers: int = 1,
    max_restarts: int = 10,
    log_level: str = "WARNING",
    log_format: str = "text",
    dashboard: bool = False,
    dashboard_address: str | None = None,
    env: Mapping[str, str] | None = None,
    token: str | None = None,
    allow_pickle: bool | None = None,
    functions_from: Sequence[str] = (),
    data_from: Sequence[str] = (),
    grace: float = 10.0,
    metrics_port: int | None = 0,
    transport: str | None = None,
    tls: bool = False,
    _role_command: Sequence[str] | None = None,
    _coordinator_command: Sequence[str] | None = None,
) -> int:
    """Run a coordinator's script with a local cluster around it; the exit code for this process.

    Args:
        script: a Python file.
        args: the script's arguments.
        max_restarts, log_level, log_format, env, token, allow_pickle: as of `LocalCluster`; the last four are the
            script's too.
        functions_from: folders and packages whose functions the roles take without pickles, as well as those of the
            script's folder. Default: see docs/security.md.
        data_from: folders whose files workers map without pickles, as well as those of `functions_from`.
        dashboard, dashboard_address: whether the coordinator shows the live page, and where; see `Dashboard`.
        grace: seconds that the roles have to end in by themselves when the script has ended, and the script
            after SIGTERM if a role was given up.
        metrics_port: where the coordinator serves its metrics: 0: any free port, as the roles; None: nobody does.
        transport: as of `LocalCluster`.
        tls: whether all of them have certificates, made for this run, and ask each other for them: over TCP.
        _role_command, _coordinator_command: for tests: what to start in place of `python -m pscluster.ROLE`.

    Returns:
        The script's exit code; 128 + n if signal n ended it, or came and was obeyed in order; 1 if a role was
        given up; 2 if there is no such script or an argument is out of its range, and nothing was started.
    """
    path = Path(script)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        return _complain(f"the script {os.fspath(script)} {what}; give a Python file", 2)
    command = _coordinator_command or (sys.executable, "-m", "pscluster.coordinator")
    env = {**(env or {}), METRICS_PORT_VARIABLE: "off" if metrics_port is None else str(metrics_port)}
    env.setdefault(FUNCTIONS_VARIABLE, functions_from_also(path.resolve().parent, given=functions_from))
    if data_from:
        env.setdefault(DATA_VARIABLE, os.pathsep.join(map(os.path.abspath, data_from)))
    with contextlib.closing(_Inbox()) as inbox, contextlib.closing(ReportPipe()) as reports:
        try:
            cluster = LocalCluster(
                num_ps,
                num_workers,
                until_done=True,
                max_restarts=max_restarts,
                env=env,
                log_level=log_level,
                log_format=log_format,
                token=token,
                transport=transport,
                tls=tls or None,
                allow_pickle=allow_pickle,
                _command=_role_command,
                _on_failure=lambda error: inbox.put(_Failed(error)),
                _on_report=reports.send,
            )
        except ConfigurationError as error:
            return _complain(str(error), 2)
        if allow_pickle is not None:
            env[PICKLE_VARIABLE] = str(int(allow_pickle))
        if log_format != "text":
            configure_logging("run", "WARNING", log_format)
        options = ["--log-format", log_format] if log_format != "text" else []
        options += ["--dashboard"] if dashboard else []
        options += ["--dashboard-address", dashboard_address] if dashboard_address is not None else []
        env[LAUNCHER_VARIABLE] = reports.variable
        return _run(command, options, [os.fspath(script), *args], cluster, env, grace, inbox)


def _run(
    command: Sequence[str],
    options: Sequence[str],
    arguments: Sequence[str],
    cluster: LocalCluster,
    env: Mapping[str, str],
    grace: float,
    inbox: _Inbox,
) -> int:
    code: int | None = None
    try:
        with _SignalDesk(inbox) as desk, cluster:
            command = [*command, *cluster.hand_over_port("chief", 0), *options, *arguments]
            code = _run_to_end(command, cluster, env, grace, inbox, desk)
            # If no role is on its way out by now, none was told to be: the script never got as far as a job.
            if code >= 0 and cluster.wait_first_end(min(grace, _FIRST_END_SECONDS)):
                cluster.join(grace)
    except _Interrupted as interrupt:
        if code is None:
            return 128 + interrupt.number
    except LocalClusterError as error:
        return _complain(str(error), 1)
    return code if code >= 0 else 128 - code


def _run_to_end(
    command: Sequence[str],
    cluster: LocalCluster,
    env: Mapping[str, str],
    grace: float,
    inbox: _Inbox,
    desk: _SignalDesk,
) -> int:
    """Start the script, send signals on, wait for its end. LocalClusterError if a role was given up."""
    shares_terminal = _in_foreground()
    failure: LocalClusterError | None = None
    signalled = 0
    with desk.collecting():
        script = subprocess.Popen(  # noqa: S603 (the user's own script)
            _tied_to_parent(command),
            env=child_environ(env, cluster.tf_config("chief", 0), cluster.token, cluster.tls_folder),
            process_group=None if shares_terminal else 0,
            pass_fds=[descriptor_of(env[LAUNCHER_VARIABLE])[0]],
        )
        early = len(inbox)  # what the terminal sent before there was a script to get it

        def wait() -> None:
            block_until_dead(script)
            inbox.put(_ScriptEnded())

        threading.Thread(target=wait, name="script-waiter", daemon=True).start()
        while True:
            message = inbox.get(timeout=None if failure is None else grace)
            early -= 1
            match message:
                case None:
                    script.kill()
                case _Signalled(number):
                    signalled = signalled or number
                    if early >= 0 or not (shares_terminal and number in _FROM_TERMINAL):
                        script.send_signal(number)
                case _Failed(error):
                    failure = failure or error
                    script.terminate()
                case _ScriptEnded():
                    break
    code = script.wait()
    if failure is not None:
        raise LocalClusterError(f"{failure}; the script was terminated")
    # Stopped in order is a good end for a role, but whoever started the whole must not take the job for done.
    return 128 + signalled if signalled and code == 0 else code


def _tied_to_parent(command: Sequence[str]) -> Sequence[str]:
    """The command, made to end with this process where the system can do that."""
    if not sys.platform.startswith("linux"):
        return command
    return [sys.executable, "-I", "-S", "-c", _TIED_TO_PARENT, str(os.getpid()), *command]


class _SignalDesk:
    """Takes the signals that mean an end: as `_Interrupted`, or as messages while a script runs.

    A signal that was ignored when we were started (nohup) stays ignored. Outside of the main thread, where
    Python sets no handlers, it does nothing.
    """

    def __init__(self, inbox: _Inbox) -> None:
        self._inbox = inbox
        self._collects = False
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> _SignalDesk:
        if threading.current_thread() is threading.main_thread():
            before_us = signal.set_wakeup_fd(self._inbox.wakeup.fileno(), warn_on_full_buffer=False)
            self._undo.callback(signal.set_wakeup_fd, before_us)
            for number in _FORWARDED:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):
                    signal.signal(number, self._take)
                    self._undo.callback(signal.signal, number, before)
        return self

    def __exit__(self, *_error: object) -> None:
        self._undo.close()

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Within, signals become messages."""
        self._collects = True
        try:
            yield
        finally:
            self._collects = False

    def _take(self, number: int, _frame: object) -> None:
        if not self._collects:
            raise _Interrupted(number)
        self._inbox.put(_Signalled(number))


def _in_foreground() -> bool:
    """Whether the keys of a terminal send their signals to our process group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _complain(sentence: str, code: int) -> int:
    print(f"pscluster run: {shown(' | '.join(sentence.splitlines()))}", file=sys.stderr)
    return code
