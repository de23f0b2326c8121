"""A cluster of processes on this machine, for development, tests and one big machine.

    with LocalCluster(num_ps=2, num_workers=3) as cluster:
        strategy = ParameterServerStrategy(cluster)

It starts `python -m pscluster.ps` and `python -m pscluster.worker`, restarts what dies, and stops everything
at its end. It is a cluster resolver for the coordinator, which runs in this process or, given
`tf_config("chief", 0)` and the token, in another.

What is decided is decided in `supervisor.py`. Here is what carries it out:

    monitor     one thread; it alone starts processes, tells the supervisor of events and acts on the answer
    waiter      one thread a process, blocked until that process is dead; it reaps it and tells the monitor
    callers     kill(), restart(), stop() and the waits, from any thread

The waiters were preferred to one selector over pidfds: they work wherever there are threads, and a cluster on
one machine has dozens of processes, not thousands. All state is guarded by one condition, which is notified
at every change; processes are started, and logs written, outside of it.

The processes talk over Unix sockets in a folder that no other user can enter, or over TCP on loopback: then ports for
gRPC and for data stay reserved for the cluster's life, also while a process is dead.

What may be lost: of a parameter server that dies what `durability` says, of a worker the functions in flight,
which the coordinator hands out anew. When this process dies, however it does, the children see the end of their
standard input and stop in order by themselves; only one that hangs at that very moment stays behind. What was kept
on disk for it goes when the next cluster starts; see `own_folder.py`.

What a role starts dies with it: each role leads a process group, and what is left of the group when the role
has died is killed, lest a data loader that inherited the listening socket takes the connections of the next
incarnation.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from pscluster.coordinator.local.launcher import Report, Reports
from pscluster.coordinator.local.supervisor import (
    Action,
    Event,
    Exited,
    GiveUp,
    Log,
    Phase,
    RestartPolicy,
    RestartRequested,
    Signal,
    Start,
    Started,
    StartFailed,
    StopRequested,
    Supervisor,
    TaskKey,
    Tick,
    task_name,
)
from pscluster.coordinator.local.temp_folder import OwnFolder, folder_for_sockets
from pscluster.core.cluster.resolvers import ClusterResolver
from pscluster.core.cluster.spec import ClusterSpec, Task, TFConfig, is_loopback
from pscluster.core.errors import ConfigurationError, MisuseError, PsClusterError, WaitTimeoutError
from pscluster.core.functions.policy import FUNCTIONS_VARIABLE, PICKLE_VARIABLE, functions_from_also
from pscluster.core.handles import StaysHere
from pscluster.core.role.options import (
    DATA_PORT_VARIABLE,
    GRACE_SECONDS,
    METRICS_PORT_VARIABLE,
    data_port_of,
    metrics_port_of,
)
from pscluster.core.role.process import LOG_FORMATS, LOG_LEVELS
from pscluster.core.security.tls import SERVER_ONLY_VARIABLE, TLS_VARIABLE, Tls, load_tls
from pscluster.core.security.tokens import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, load_token, new_token
from pscluster.core.transport.unix_sockets import address_of
from pscluster.core.transport.unix_sockets import supported as has_unix_sockets
from pscluster.ps.storage.options import DURABILITY_VARIABLE, STATE_VARIABLE, durability_named

logger = logging.getLogger("pscluster.local_cluster")

_OURS = frozenset(
    {
        "TF_CONFIG",
        TOKEN_VARIABLE,
        TOKEN_FILE_VARIABLE,
        TLS_VARIABLE,
        DURABILITY_VARIABLE,
        STATE_VARIABLE,
        PICKLE_VARIABLE,
    }
)
TRANSPORTS = ("unix", "tcp")
_SHARES_PORTS = hasattr(socket, "SO_REUSEPORT")
# What ends a process that does nothing about it, so that kill() can wait for the end.
_DEADLY = frozenset(
    {
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGHUP,
        signal.SIGILL,
        signal.SIGINT,
        signal.SIGKILL,
        signal.SIGQUIT,
        signal.SIGSEGV,
        signal.SIGTERM,
    }
)


_LOOPBACK = "127.0.0.1"


class LocalClusterError(PsClusterError):
    """A process of the local cluster is gone for good: the message says which one and why."""


class Job(Protocol):
    """What works with a cluster from this process: a strategy."""

    def close(self, reason: str) -> None:
        """Tell the roles that it is over. Idempotent."""

    def workers_gone(self, error: LocalClusterError | None) -> None:
        """No worker is left, nor will one come by itself, for this reason. None: one comes, since that was asked for.

        Called on the monitor's thread or that which calls `LocalCluster.serve`. May not wait.
        """


class LocalCluster(ClusterResolver, StaysHere):
    """Parameter servers and workers as processes on this machine; a context manager and a cluster resolver.

    Attributes:
        token: the cluster's token; the processes have it in their environment, a coordinator in this process
            takes it from here.
        tls: the certificates of a coordinator in this process, once it is started; None where there are none.
        tls_folder: where those of all roles are; "" where there are none.
        transport: how the processes talk: "unix" or "tcp".
        task_type, task_id, rpc_layer, environment: as of any resolver; the process that holds the cluster is
            its chief.
    """

    instead = "use variables in the function, or the strategy, which it may capture"

    def __init__(
        self,
        num_ps: int = 1,
        num_workers: int = 1,
        *,
        until_done: bool = False,
        restart: bool = True,
        max_restarts: int = 10,
        transport: str | None = None,
        host: str | None = None,
        env: Mapping[str, str] | None = None,
        log_level: str = "WARNING",
        log_format: str = "text",
        token: str | None = None,
        tls: bool | None = None,
        cwd: str | os.PathLike[str] | None = None,
        grace: float = GRACE_SECONDS + 5.0,
        durability: str | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        allow_pickle: bool | None = None,
        _command: Sequence[str] | None = None,
        _on_failure: Callable[[LocalClusterError], None] | None = None,
        _on_report: Callable[[Report], None] | None = None,
    ) -> None:
        """Checks the arguments; nothing is started before `start()` or `with`.

        Args:
            until_done: the processes exit when the coordinator ends its job; otherwise they wait for the next
                one.
            restart: whether a process that dies is started again. Without, `restart()` does it.
            max_restarts: restarts in a row that a task may have. A process that stays up for ten minutes
                gives its task the whole number back.
            transport: "unix", Unix sockets in a folder of this user's own, or "tcp", ports of the host. Default: "tcp"
                where a host or certificates are asked for, else "unix".
            host: where the processes listen, over TCP. Default: 127.0.0.1.
            env: added to the environment that the processes inherit from this one; for example
                `{"OMP_NUM_THREADS": "1"}` where several workers share few cores.
            log_level: of the processes, which log to this one's standard error.
            log_format: "text", lines for people, or "json", an object a line.
            token: the cluster token. Default: a random one.
            tls: whether the processes have certificates, made for this cluster, and ask each other for them. Default:
                where the host is not loopback. Only over TCP.
            cwd: the processes' working directory. Default: this one's.
            grace: seconds that a process has to stop in after SIGTERM, before it is killed. The roles take up
                to 10 s for what runs to end; a stop of the cluster takes twice the grace at most.
            durability: what the death of a parameter server may cost: "none" (all that it held), "snapshot" (what came
                since its last snapshot, seconds ago) or "log" (nothing). Default: $PSCLUSTER_DURABILITY, or
                "snapshot".
            state_dir: where parameter servers keep their state. Default: a temporary directory, which goes with the
                cluster.
            allow_pickle: whether functions and objects may travel as pickles; a strategy on this cluster goes by it,
                too. Default: as PSCLUSTER_ALLOW_PICKLE says, else yes. Without them the processes take functions of
                files in the script's folder, `cwd` and those of PYTHONPATH, unless PSCLUSTER_FUNCTIONS_FROM names
                others: see docs/security.md.
            _command: for tests: what to start in place of `python -m pscluster.ROLE`; it finds its role in
                TF_CONFIG.
            _on_failure: called, on the monitor's thread, with the error of a task that was given up.
            _on_report: called, on the monitor's thread, with what became of a process.

        Raises:
            ConfigurationError: an argument is out of its range.
        """
        for name, number in (("num_ps", num_ps), ("num_workers", num_workers)):
            if number < 1:
                raise ConfigurationError(f"{name} is {number}; a cluster needs at least 1")
        if max_restarts < 0:
            raise ConfigurationError(f"max_restarts is {max_restarts}; give 0 or more, or restart=False")
        if grace < 0:
            raise ConfigurationError(f"grace is {grace}; give 0 seconds or more")
        if taken := _OURS.intersection(env or ()):
            raise ConfigurationError(
                f"env names {', '.join(sorted(taken))}, which LocalCluster sets; use token=, tls=, durability=, "
                "state_dir= or allow_pickle="
            )
        if log_level.upper() not in LOG_LEVELS:
            raise ConfigurationError(f"log_level is {log_level!r}; give one of {', '.join(LOG_LEVELS)}")
        if log_format not in LOG_FORMATS:
            raise ConfigurationError(f"log_format is {log_format!r}; give one of {', '.join(LOG_FORMATS)}")
        kind = durability_named(durability)
        self.transport = _transport_of(transport, host, tls)
        if cwd is not None and not Path(cwd).is_dir():
            raise ConfigurationError(f"cwd is {os.fspath(cwd)!r}, which is no directory")
        self.token = new_token() if token is None else str(load_token(None, {TOKEN_VARIABLE: token}))
        super().__init__("chief", 0, "grpc", "")
        self.tls: Tls | None = None
        self.tls_folder = ""
        self._host = host or _LOOPBACK
        self._wants_tls = not is_loopback(self._host) if tls is None else tls
        self._counts = {"ps": num_ps, "worker": num_workers}
        self._env = {**_one_share_of_cores(num_workers), **(env or {}), DURABILITY_VARIABLE: kind.value}
        # A port that is given would be one process': on one machine each role takes a free one.
        for variable, port_of in ((METRICS_PORT_VARIABLE, metrics_port_of), (DATA_PORT_VARIABLE, data_port_of)):
            asked = self._env.get(variable) or os.environ.get(variable) or "0"
            self._env[variable] = "off" if port_of(asked) is None else "0"
        self.allow_pickle = allow_pickle
        if allow_pickle is not None:
            self._env[PICKLE_VARIABLE] = str(int(allow_pickle))
        if FUNCTIONS_VARIABLE not in self._env and FUNCTIONS_VARIABLE not in os.environ:
            script = getattr(sys.modules.get("__main__"), "__file__", None)
            self._env[FUNCTIONS_VARIABLE] = functions_from_also(
                cwd, script and os.path.dirname(os.path.abspath(script))
            )
        self._state_dir = None if state_dir is None else os.path.abspath(state_dir)
        self._own_folders: list[OwnFolder] = []  # to be removed
        self._cwd = cwd
        self._command = _command
        self._on_failure = _on_failure
        self.reports = Reports(_on_report)
        """What became of processes, until it is taken."""
        self._options = ["--exit-with-parent", "--log-level", log_level, "--log-format", log_format]
        if until_done:
            self._options.append("--until-done")
        tasks = [(role, index) for role, count in self._counts.items() for index in range(count)]
        policy = RestartPolicy(enabled=restart, max_restarts=max_restarts)
        # Workers first: what they still send on their way out has a server to go to.
        stop_order = ("worker", "ps")
        self._changed = threading.Condition()
        self._supervisor = Supervisor(tasks, policy, stop_order=stop_order, grace=grace, until_done=until_done)
        self._processes: dict[TaskKey, subprocess.Popen[bytes]] = {}
        self._waiters: dict[int, threading.Thread] = {}  # by pid; the monitor's own
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._reserved: dict[TaskKey, list[socket.socket]] = {}
        self._data_ports: dict[TaskKey, int] = {}
        self._spec: ClusterSpec | None = None
        self._monitor: threading.Thread | None = None
        self._owner = 0  # the process that started it
        self._ended = threading.Event()
        self._crash: BaseException | None = None  # of the monitor: a bug here
        self._jobs: weakref.WeakSet[Job] = weakref.WeakSet()
        self._workers_gone = ""  # why, as the jobs are told
        self._telling = threading.Lock()
        self._made_at = ""

    # --- life ---

    @staticmethod
    def running() -> list[LocalCluster]:
        """Return those that this process has started and not stopped, the oldest first."""
        with _running_lock:
            return list(_running)

    def start(self) -> Self:
        """Reserve the addresses and start the processes; returns when all are started, though not yet serving.

        Raises:
            ConfigurationError: the host does not resolve or is not of this machine.
            LocalClusterError: a process could not be started; nothing is left running.
            MisuseError: the cluster was stopped before. One object is one cluster.
        """
        with self._changed:
            self.check_not_stopped()
            if self._monitor is not None:
                return self
            try:
                self._reserve_addresses()
                self._make_own_folder()
            except BaseException:
                self._let_go()
                raise
            self._owner = os.getpid()
            # A daemon, so that an interpreter that exits gets to its atexit handlers, which stop it.
            self._monitor = threading.Thread(target=self._run, name="local-cluster-monitor", daemon=True)
            self._monitor.start()
        atexit.register(self.stop)
        self._tell_of_others()
        try:
            with self._changed:
                self._changed.wait_for(self._all_started_once)
            self.check()
        except BaseException:
            self.stop()
            raise
        return self

    def _tell_of_others(self) -> None:
        """Warn of those that this process runs already: a cell that is run again makes one more."""
        self._made_at = _place_of_caller()
        with _running_lock:
            others = list(_running)
            if not self._ended.is_set():  # by a monitor that failed
                _running.append(self)
        for other in others:
            logger.warning(
                "another local cluster of this process still runs, until its stop() or the end of this process: %s, "
                "started at %s; a cell or line that is run again does not end the one that it made before: "
                "LocalCluster.running()[0].stop() does, and `with LocalCluster(...)` at its end",
                ", ".join(f"{task_name(task)} (pid {pid})" for task, pid in other.pids.items()) or "no process",
                other._made_at,
            )

    def _make_own_folder(self) -> None:
        state_dir = self._state_dir
        if state_dir is None or self._wants_tls:
            own = OwnFolder()
            self._own_folders.append(own)
            if self._wants_tls:
                self._make_certificates(own.tls)
            state_dir = state_dir or str(own.state)
        self._env[STATE_VARIABLE] = state_dir

    def _make_certificates(self, folder: Path) -> None:
        # Slow to import, and most clusters need none.
        from pscluster.core.security.certificates import make_certificates

        self.tls_folder = str(folder)
        make_certificates(folder, self._certified_hosts())
        self.tls = load_tls("coordinator", folder)

    def _certified_hosts(self) -> list[str]:
        return [self._host]

    def stop(self) -> None:
        """Stop the workers, then the parameter servers, and return when all are gone and the ports are free.

        Strategies of this process that work with them are closed first: an end in order is no failure to them, and what
        is asked of them afterwards is an error that says so.

        Stopping twice, from several threads, or without a start does nothing more. A KeyboardInterrupt during
        the wait means no more patience: what is left is killed.
        """
        if self._owner not in (0, os.getpid()):
            return  # a fork of the owner must not end what the owner still uses
        with self._changed:
            if self._monitor is None:
                self._ended.set()
                return
        if threading.current_thread() is self._monitor:
            self._inbox.put(StopRequested())
            return  # from _on_failure: the monitor can't wait for itself
        try:
            for job in list(self._jobs):
                try:
                    job.close("the local cluster was stopped")
                except Exception:
                    logger.exception("could not shut down a job on the local cluster cleanly")
            self._inbox.put(StopRequested())
            self._ended.wait()
        except BaseException:
            self._inbox.put(StopRequested(at_once=True))
            self._ended.wait()
            raise
        self._monitor.join()
        atexit.unregister(self.stop)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def check(self) -> None:
        """Raise LocalClusterError if a task was given up: restarts spent, or a wrong configuration."""
        with self._changed:
            if self._crash is not None:
                raise LocalClusterError(f"the monitor of the local cluster failed: {self._crash!r}") from self._crash
            failures = self._supervisor.failures
        if failures:
            raise LocalClusterError("; ".join(failures))

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all processes have ended by themselves, for good; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._supervisor.settled or self._ended.is_set(), timeout)

    def wait_first_end(self, timeout: float | None = None) -> bool:
        """Wait until any process has ended by itself, for good; False after `timeout` seconds."""

        def one_has_ended() -> bool:
            return self._ended.is_set() or any(state.phase.is_final for state in self._supervisor.states())

        with self._changed:
            return self._changed.wait_for(one_has_ended, timeout)

    def serve(self, job: Job) -> None:
        """A job runs on this cluster: it is told when no worker is left, and ended when the cluster is stopped."""
        with self._changed:
            self._jobs.add(job)
        self._tell_of_workers([job])

    def _tell_of_workers(self, jobs: Iterable[Job]) -> None:
        """Tell jobs whether a worker is left, or comes. In turn, lest an earlier answer is given after a later one."""
        with self._telling:
            with self._changed:
                why = self._workers_gone
            for job in jobs:
                job.workers_gone(LocalClusterError(f"no worker is left: {why}") if why else None)

    def why_gone(self, role: str, index: int) -> str:
        """Why a task gets no process unless somebody asks for one; empty: it has one, or will."""
        with self._changed:
            return self._supervisor.why_gone(self._task(role, index))

    # --- resolver ---

    def cluster_spec(self) -> ClusterSpec:
        """Who listens where. The chief has an address too, for whoever runs the coordinator."""
        with self._changed:
            if self._spec is None:
                raise MisuseError(
                    "the cluster has no addresses before its start: use `with LocalCluster(...) as cluster`"
                )
            return self._spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task, the chief's if none is named, with the protocol before it."""
        role = "chief" if task_type is None else task_type
        return self._url(self.cluster_spec().task_address(role, 0 if task_id is None else task_id), rpc_layer)

    def tf_config(self, role: str, index: int) -> str:
        """The TF_CONFIG of a task, as JSON. ConfigurationError if there is no such task."""
        return TFConfig(self.cluster_spec(), Task(role, index), "grpc").to_json()

    def hand_over_port(self, role: str, index: int) -> list[str]:
        """To be called just before a process listens at a task's address: the options that the process needs."""
        # Of coordinators there may be two for a while.
        if _SHARES_PORTS if self.transport == "tcp" else role == "chief":
            return ["--share-port"]
        for reserved in self._reserved.pop((role, index), ()):
            reserved.close()
        return []

    # --- processes ---

    @property
    def pids(self) -> dict[TaskKey, int]:
        """The living processes: role and index to process id."""
        with self._changed:
            return {task: process.pid for task, process in sorted(self._processes.items())}

    def is_alive(self, role: str, index: int) -> bool:
        """Whether the task has a process now."""
        task = self._task(role, index)
        with self._changed:
            return task in self._processes

    def kill(self, role: str, index: int, sig: int = signal.SIGKILL, *, timeout: float = 30.0) -> int:
        """Send a signal to the task's process; its pid.

        If the signal is one that ends processes, return when the process is dead and reaped. It is restarted
        like any other that dies, soon after or even before this returns; after SIGTERM or SIGINT a role exits
        with 0, in order, and is not restarted.

        Raises:
            MisuseError: there is no such task, or it has no process now.
            WaitTimeoutError: the process still lives after `timeout` seconds.
        """
        task = self._task(role, index)
        with self._changed:
            process = self._processes.get(task)
            if process is None:
                phase = self._supervisor.state(task).phase
                raise MisuseError(f"{task_name(task)} has no process to signal: it is {phase.value}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, sig)
            if sig in _DEADLY and not self._changed.wait_for(lambda: self._processes.get(task) is not process, timeout):
                who, name = f"{task_name(task)} (pid {process.pid})", signal.Signals(sig).name
                raise WaitTimeoutError(f"{who} is still alive {timeout:g} s after {name}")
            return process.pid

    def restart(self, role: str, index: int, *, timeout: float = 60.0) -> int:
        """Give the task a new process, and a fresh budget of restarts; the new pid.

        A living process is stopped in order first. Also for a task that ended or was given up.

        Raises:
            MisuseError: there is no such task, or the cluster isn't running.
            WaitTimeoutError: there is no new process after `timeout` seconds.
        """
        task = self._task(role, index)
        with self._changed:
            if self._monitor is None or self._ended.is_set():
                raise MisuseError(f"{task_name(task)} can't be restarted: the cluster isn't running")
            before = self._processes.get(task)
            self._inbox.put(RestartRequested(task))
            self._changed.wait_for(
                lambda: self._processes.get(task) not in (None, before) or self._ended.is_set(), timeout
            )
            process = self._processes.get(task)
            if process is None or process is before:
                phase = self._supervisor.state(task).phase
                raise WaitTimeoutError(f"{task_name(task)} has no new process after {timeout:g} s: it is {phase.value}")
            return process.pid

    def wait_restarted(self, role: str, index: int, old_pid: int, timeout: float = 60.0) -> int:
        """Wait until the task has another process than `old_pid`; its pid.

        Raises:
            LocalClusterError: there will be none.
            WaitTimeoutError: there is none after `timeout` seconds.
        """
        task = self._task(role, index)

        def decided() -> bool:
            process = self._processes.get(task)
            if process is not None and process.pid != old_pid:
                return True
            return self._supervisor.state(task).phase.is_final or self._ended.is_set()

        with self._changed:
            in_time = self._changed.wait_for(decided, timeout)
            state, process = self._supervisor.state(task), self._processes.get(task)
        if not in_time:
            raise WaitTimeoutError(
                f"{task_name(task)} has no new process after {timeout:g} s: it is {state.phase.value}"
            )
        if process is None or process.pid == old_pid:
            raise LocalClusterError(
                state.failure or f"{task_name(task)} will not be restarted: it is {state.phase.value}"
            )
        return process.pid

    @property
    def _size(self) -> str:
        return " and ".join(f"{count} {name}" for name, count in self._counts.items())

    def check_not_stopped(self) -> None:
        """MisuseError if nobody listens any more at the cluster's addresses, for it was stopped."""
        if self._ended.is_set():
            raise MisuseError("this LocalCluster has been stopped; make a new one")

    def __repr__(self) -> str:
        if not hasattr(self, "_crash"):
            return "<LocalCluster that could not be made>"
        with self._changed:
            states, failures = self._supervisor.states(), self._supervisor.failures
            if self._monitor is None:
                return f"<LocalCluster {'stopped, and never' if self._ended.is_set() else 'not'} started: {self._size}>"
            if self._ended.is_set() and failures:
                return f"<LocalCluster failed: {'; '.join(failures)}>"
            life = "stopped" if self._ended.is_set() else "running"
        tasks = ", ".join(
            task_name(state.task) + (f" pid {state.pid}" if state.phase is Phase.RUNNING else f" {state.phase.value}")
            for state in states
        )
        return f"<LocalCluster {life}: {tasks}>"

    # --- within ---

    def _task(self, role: str, index: int) -> TaskKey:
        if not 0 <= index < self._counts.get(role, 0):
            raise MisuseError(f"there is no {role} {index} in a cluster of {self._size}")
        return role, index

    def _all_started_once(self) -> bool:
        return (
            self._ended.is_set()
            or bool(self._supervisor.failures)
            or all(state.starts for state in self._supervisor.states())
        )

    def _reserve_addresses(self) -> None:
        """Hold an address for each task and the chief.

        Sockets need a folder that is ours; who listens in it locks each. Of ports, each process has one for gRPC, and
        the roles one for data.

        A port that is looked for, closed and handed on may be taken by somebody else before the child binds
        it, and again at every restart. So the sockets stay bound for the cluster's life. They never listen,
        so no connection is ever given to them; SO_REUSEPORT lets the child, of the same user, bind the same
        port. Where the platform lacks it, the socket is closed just before the child starts, and the race is
        small.
        """
        tasks = [(role, index) for role, count in {"chief": 1, **self._counts}.items() for index in range(count)]
        addresses: dict[str, list[str]] = {}
        if self.transport == "unix":
            folder = folder_for_sockets()
            self._own_folders.append(folder)
            for role, index in tasks:
                addresses.setdefault(role, []).append(address_of(folder.path / f"{role}-{index}"))
        else:
            host = f"[{self._host}]" if ":" in self._host else self._host
            has_data = self._env[DATA_PORT_VARIABLE] != "off"
            for role, index in tasks:
                mine = self._reserved.setdefault((role, index), [])
                for _ in range(2 if has_data and role != "chief" else 1):
                    mine.append(_reserve_port(self._host))
                ports = [reserved.getsockname()[1] for reserved in mine]
                addresses.setdefault(role, []).append(f"{host}:{ports[0]}")
                if len(ports) > 1:
                    self._data_ports[role, index] = ports[1]
        self._spec = ClusterSpec(addresses, source="LocalCluster")

    def _run(self) -> None:
        """The monitor."""
        try:
            self._handle(Tick())
            while True:
                with self._changed:
                    if self._supervisor.ended:
                        return
                    due = self._supervisor.next_due()
                try:
                    event = self._inbox.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
                except queue.Empty:
                    event = Tick()
                self._handle(event)
        except BaseException as error:
            logger.exception("the monitor of the local cluster failed; killing its processes")
            self._crash = error
            if self._on_failure is not None:
                self._on_failure(LocalClusterError(f"the monitor of the local cluster failed: {error!r}"))
        finally:
            self._release()

    def _handle(self, event: Event) -> None:
        events: deque[Event] = deque([event])
        while events:
            event = events.popleft()
            if isinstance(event, Exited):
                self._waiters.pop(event.pid).join()  # these were its last words
            jitter = random.random()  # noqa: S311 (nothing secret)  # nosec B311
            with self._changed:
                actions = self._supervisor.handle(event, time.monotonic(), jitter)
                self._changed.notify_all()
                why = self._supervisor.why_none("worker")
                jobs = [] if why == self._workers_gone else list(self._jobs)
                self._workers_gone = why
            if jobs:
                self._tell_of_workers(jobs)
            for action in actions:
                follow_up = self._act(action)
                if follow_up is not None:
                    events.append(follow_up)

    def _act(self, action: Action) -> Event | None:
        match action:
            case Start(task):
                return self._start_process(task)
            case Signal(task, pid, number):
                with self._changed:
                    process = self._processes.get(task)
                    if process is not None and process.pid == pid:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, number)
            case GiveUp(task, reason):
                logger.error("%s", reason)
                self.reports.add(task_name(task), reason)
                if self._on_failure is not None:
                    self._on_failure(LocalClusterError(reason))
            case Log(level, text, about):
                logger.log(level, "%s", text)
                if about is not None:
                    self.reports.add(task_name(about), text)
        return None

    def _start_process(self, task: TaskKey) -> Started | StartFailed:
        role, index = task
        command = self._command or (sys.executable, "-m", f"pscluster.{role}")
        env = dict(self._env)
        if (port := self._data_ports.get(task)) is not None:
            env[DATA_PORT_VARIABLE] = str(port)
        try:
            process = subprocess.Popen(  # noqa: S603 (our own command line)
                [*command, *self._options, *self.hand_over_port(role, index)],
                stdin=subprocess.PIPE,  # nothing is written: its end says that this process is gone
                bufsize=0,
                env=child_environ(env, self.tf_config(role, index), self.token, self.tls_folder),
                cwd=self._cwd,
                # Ctrl-C in the terminal reaches this process only, which then stops the children in order.
                start_new_session=True,
            )
        except (OSError, ValueError, TypeError, RuntimeError, subprocess.SubprocessError) as error:
            return StartFailed(task, str(error))
        waiter = threading.Thread(
            target=self._await_death, args=(task, process), name=f"local-cluster-{role}-{index}", daemon=True
        )
        with self._changed:
            self._processes[task] = process
            try:
                waiter.start()
            except RuntimeError as error:  # no more threads, or the interpreter is about to end
                del self._processes[task]
                process.kill()
                process.communicate()
                return StartFailed(task, str(error))
            self._waiters[process.pid] = waiter
            self._changed.notify_all()
        return Started(task, process.pid)

    def _await_death(self, task: TaskKey, process: subprocess.Popen[bytes]) -> None:
        """A waiter: block until the process is dead, then reap it."""
        known = block_until_dead(process)
        if known:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started and did not end
        with self._changed:  # kill() signals under this lock too: never a pid that has been reaped
            code = process.wait()
            del self._processes[task]
            self._changed.notify_all()
        if process.stdin is not None:
            process.stdin.close()
        self._inbox.put(Exited(task, process.pid, code if known else None))

    def _release(self) -> None:
        """The end of the monitor: nothing of the cluster is left, even if the monitor failed."""
        with self._changed:
            left = list(self._processes.values())
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for waiter in self._waiters.values():
            waiter.join()
        self._let_go()
        with self._changed:
            self._ended.set()
            self._changed.notify_all()
        with _running_lock, contextlib.suppress(ValueError):
            _running.remove(self)

    def _let_go(self) -> None:
        """Of the ports, and of what is on disk."""
        while self._reserved:
            for reserved in self._reserved.popitem()[1]:
                reserved.close()
        while self._own_folders:
            self._own_folders.pop().remove()


def _transport_of(asked: str | None, host: str | None, tls: bool | None) -> str:
    """How the processes are to talk. ConfigurationError if what was asked for does not go together."""
    wants_tcp = host is not None or bool(tls)
    if asked is None:
        return "tcp" if wants_tcp or not has_unix_sockets() else "unix"
    if asked not in TRANSPORTS:
        raise ConfigurationError(f"transport is {asked!r}; give one of {', '.join(TRANSPORTS)}")
    if asked == "unix" and wants_tcp:
        raise ConfigurationError('transport is "unix", but host= and tls=True are for TCP; give transport="tcp"')
    if asked == "unix" and not has_unix_sockets():
        raise ConfigurationError('transport is "unix", but this system has no Unix sockets; give transport="tcp"')
    return asked


# Of this process, not stopped; the oldest first.
_running: list[LocalCluster] = []
_running_lock = threading.Lock()
os.register_at_fork(after_in_child=_running.clear)  # they are the parent's


def _place_of_caller() -> str:
    """The file and line outside of this module that runs now."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def child_environ(env: Mapping[str, str], tf_config: str, token: str, tls_folder: str = "") -> dict[str, str]:
    """This process's environment with what a process of the cluster needs."""
    others = (TOKEN_FILE_VARIABLE, TLS_VARIABLE, SERVER_ONLY_VARIABLE)  # what they name is of another cluster
    inherited = {name: value for name, value in os.environ.items() if name not in others}
    environ = {**inherited, **env, "TF_CONFIG": tf_config, TOKEN_VARIABLE: token}
    if tls_folder:
        environ[TLS_VARIABLE] = tls_folder
    return environ


def _one_share_of_cores(num_workers: int) -> dict[str, str]:
    """Numeric libraries take all cores for each process: several workers on one machine then hinder each other."""
    threads = str(max(1, (os.cpu_count() or 1) // num_workers))
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: threads for name in names if name not in os.environ}


def _reserve_port(host: str) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"host is {host!r}, which does not resolve ({error}); give one such as 127.0.0.1"
        ) from None
    reserved = socket.socket(family, kind, protocol)
    try:
        if _SHARES_PORTS:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(where)
    except OSError as error:
        reserved.close()
        raise ConfigurationError(
            f"host is {host!r}, where no port can be had ({error.strerror}); give an address of this machine"
        ) from None
    return reserved


def block_until_dead(process: subprocess.Popen[bytes]) -> bool:
    """Return when the process is dead, but not reaped. False if its exit status is lost."""
    if not hasattr(os, "waitid"):
        process.wait()  # some systems have no better; a pid is free but still known for a short moment
        return True
    try:
        # WNOWAIT leaves a zombie, which holds the pid: until it is reaped no signal can hit a stranger.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return False  # reaped by somebody who waits for any child, or SIGCHLD is ignored
    return True
