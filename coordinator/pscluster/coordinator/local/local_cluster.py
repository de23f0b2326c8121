"""A cluster of processes on this machine, for development, tests and one large machine.

The coordinator runs in this process or, given `tf_config("chief", 0)` and the token, in another. `supervisor.py`
decides; this module carries out its decisions:

    monitor     one thread; it alone starts processes, reports events to the supervisor and acts on the answer
    waiter      one thread for each process, blocked until the process is dead; see `processes.py`
    callers     kill(), restart(), stop() and the waits, from any thread

One condition guards all state, and is notified of every change; processes are started, and logs written, without
holding it.

What can be lost: when a parameter server dies, what `durability` says; when a worker dies, the functions in flight,
which the coordinator schedules again. When this process dies, in any way, the children see the end of their standard
input and stop cleanly by themselves; only one that hangs at that very moment stays behind. The next cluster removes the
files that are left on disk; see `temp_folder.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

from pscluster.coordinator.local.addresses import Addresses, choose_transport
from pscluster.coordinator.local.environment import child_environ, role_environ
from pscluster.coordinator.local.launcher import Report, Reports
from pscluster.coordinator.local.processes import Processes
from pscluster.coordinator.local.supervisor import (
    Action,
    Added,
    Event,
    Exited,
    GiveUp,
    Log,
    Phase,
    Removed,
    RestartPolicy,
    RestartRequested,
    Signal,
    Start,
    StartFailed,
    StopRequested,
    Supervisor,
    TaskKey,
    Tick,
    task_name,
)
from pscluster.coordinator.local.temp_folder import OwnFolder
from pscluster.core import checks
from pscluster.core.checks import configuration_errors
from pscluster.core.cluster.resolvers import ClusterResolver
from pscluster.core.cluster.spec import ClusterSpec, Task, TFConfig, is_loopback
from pscluster.core.errors import ConfigurationError, MisuseError, PsClusterError, WaitTimeoutError
from pscluster.core.handles import StaysHere
from pscluster.core.ids import make_identity
from pscluster.core.role.options import DATA_PORT_VARIABLE, GRACE_SECONDS
from pscluster.core.role.process import LOG_FORMATS, LOG_LEVELS
from pscluster.core.security.tls import Tls, load_tls
from pscluster.core.security.tokens import TOKEN_VARIABLE, load_token, new_token
from pscluster.core.transport.channels import PeerAddress, wait_for_peers
from pscluster.ps.storage.options import STATE_VARIABLE

logger = logging.getLogger("pscluster.local_cluster")

MAX_WORKERS = 1000
"""The most workers of a local cluster."""

# Signals that end a process that does not handle them, so that kill() can wait for its death.
_DEADLY = {
    signal.Signals[f"SIG{name}"] for name in ("ABRT", "BUS", "FPE", "HUP", "ILL", "INT", "KILL", "QUIT", "SEGV", "TERM")
}


class LocalClusterError(PsClusterError):
    """A process of the local cluster has died and will not be restarted; the message says which one and why."""


class Job(Protocol):
    """A strategy in this process that uses a cluster."""

    def close(self, reason: str) -> None:
        """Tell the roles that the job is over. Idempotent."""

    def workers_gone(self, error: LocalClusterError | None) -> None:
        """Take note that no worker is left or will be restarted; None: one will be, on request.

        Must not block: called on the monitor's thread, or by `LocalCluster.serve`.
        """

    def retire_worker(self, index: int) -> None:
        """Take note that a worker is being stopped for good."""


class LocalCluster(ClusterResolver, StaysHere):
    """Parameter servers and workers as processes on this machine; a context manager and a cluster resolver.

    Attributes:
        token: the cluster's token; the processes have it in their environment, a coordinator in this process takes it
            from here.
        tls: the certificates of a coordinator in this process, once the cluster is started; None without TLS.
        tls_folder: the folder with the certificates of all roles; "" without TLS.
        task_type, task_id, rpc_layer, environment: as for any resolver; the process that holds the cluster is its
            chief.
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
        log_dir: str | os.PathLike[str] | None = None,
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
        """Check the arguments; `start()` or `with` starts the processes.

        Args:
            until_done: the processes exit when the coordinator ends its job; otherwise they wait for the next one.
            restart: whether a process that dies is restarted. If not, `restart()` restarts it.
            max_restarts: restarts in a row of one task. A process that stays up for ten minutes resets the count.
            transport: "unix", Unix sockets in a folder that only this user can enter, or "tcp", ports of the host.
                Default: "tcp" if a host or certificates are requested, else "unix".
            host: where the processes listen, over TCP. Default: 127.0.0.1.
            env: variables to add to the environment that the processes inherit from this one; for example
                `{"OMP_NUM_THREADS": "1"}` where several workers share few cores.
            log_level: of the processes, which log to this process's standard error.
            log_format: "text", lines for people, or "json", one object per line.
            log_dir: a directory for what the processes log and print, each to its own file, such as worker-0.log, at
                once, behind what is in it. Default: it goes where this process's output goes.
            token: the cluster token. Default: a random one.
            tls: whether the processes use mutual TLS, with certificates made for this cluster. Only over TCP.
                Default: if the host is not loopback.
            cwd: the processes' working directory. Default: this process's.
            grace: seconds that a process has to stop after SIGTERM, before it is killed. The roles wait up to 10 s for
                running functions; stopping the cluster takes at most twice the grace.
            durability: what the death of a parameter server may cost: "none" (all that it held), "snapshot" (the
                updates since its last snapshot, seconds ago) or "log" (nothing). Default: $PSCLUSTER_DURABILITY, or
                "snapshot".
            state_dir: where parameter servers keep their state. Default: a temporary directory, removed with the
                cluster.
            allow_pickle: whether functions and objects may travel as pickles; a strategy on this cluster follows it
                too. Default: $PSCLUSTER_ALLOW_PICKLE, or yes. Without pickles the processes accept functions from files
                in the script's folder, `cwd` and the folders of PYTHONPATH, unless PSCLUSTER_FUNCTIONS_FROM names
                others: see docs/security.md.
            _command: for tests: run this instead of `python -m pscluster.ROLE`; it finds its role in TF_CONFIG.
            _on_failure: called, on the monitor's thread, with the error when a task is given up.
            _on_report: called, on the monitor's thread, with each report about a process.

        Raises:
            ConfigurationError: an argument is invalid.
        """
        with configuration_errors():
            num_ps = checks.whole("num_ps", num_ps, at_least=1)
            num_workers = checks.whole("num_workers", num_workers, at_least=1)
            max_restarts = checks.whole("max_restarts", max_restarts, at_least=0)
            grace = checks.real("grace", grace, kind="number of seconds", at_least=0)
        if log_level.upper() not in LOG_LEVELS:
            raise ConfigurationError(f"log_level is {log_level!r}; give one of {', '.join(LOG_LEVELS)}")
        if log_format not in LOG_FORMATS:
            raise ConfigurationError(f"log_format is {log_format!r}; give one of {', '.join(LOG_FORMATS)}")
        if cwd is not None and not Path(cwd).is_dir():
            raise ConfigurationError(f"cwd is {os.fspath(cwd)!r}, which is not a directory")
        if log_dir is not None and not Path(log_dir).is_dir():
            raise ConfigurationError(f"log_dir is {os.fspath(log_dir)!r}, which is not a directory")
        self._env = role_environ(env or {}, num_workers, durability, allow_pickle, cwd)
        self.transport = choose_transport(transport, host, tls)
        self.token = new_token() if token is None else str(load_token(None, {TOKEN_VARIABLE: token}))
        super().__init__("chief", 0, "grpc", "")
        self.tls: Tls | None = None
        self.tls_folder = ""
        self.allow_pickle = allow_pickle
        self._host = host or "127.0.0.1"
        self._wants_tls = not is_loopback(self._host) if tls is None else tls
        self._grace = grace
        self._counts = {"ps": num_ps, "worker": num_workers}
        self._state_dir = None if state_dir is None else os.path.abspath(state_dir)
        self._own_folder: OwnFolder | None = None  # to be removed
        self._cwd = cwd
        self._log_dir = None if log_dir is None else Path(os.path.abspath(log_dir))
        self._command = _command
        self._on_failure = _on_failure
        self.reports = Reports(_on_report)
        self._options = ["--exit-with-parent", "--log-level", log_level, "--log-format", log_format]
        if until_done:
            self._options.append("--until-done")
        tasks = [(role, index) for role, count in self._counts.items() for index in range(count)]
        policy = RestartPolicy(enabled=restart, max_restarts=max_restarts)
        self._changed = threading.Condition()
        # Workers stop first, so that the servers still take their last requests.
        self._supervisor = Supervisor(tasks, policy, stop_order=("worker", "ps"), grace=grace, until_done=until_done)
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._processes = Processes(self._changed, self._inbox.put)
        self._addresses: Addresses | None = None  # None before the start
        self._monitor: threading.Thread | None = None
        self._owner = 0  # the process that started it
        self._ended = threading.Event()
        self._crash: BaseException | None = None  # of the monitor: a bug here
        self._jobs: weakref.WeakSet[Job] = weakref.WeakSet()
        self._workers_gone = ""  # why, as the jobs know it
        self._notifying = threading.Lock()
        self._scaling = threading.Lock()
        self._joining: set[int] = set()  # workers that were started by `scale`: they register with the coordinator
        self._started_at = ""  # the caller's file and line

    @staticmethod
    def running() -> list[LocalCluster]:
        """Return the clusters that this process has started and not stopped, the oldest first."""
        with _running_lock:
            return list(_running)

    def start(self) -> Self:
        """Reserve the addresses and start the processes; return when all are started, though not yet serving.

        Raises:
            ConfigurationError: the host does not resolve or is not this machine.
            LocalClusterError: a process could not be started; nothing is left running.
            MisuseError: the cluster has been stopped; an object can be started once.
        """
        with self._changed:
            self.check_not_stopped()
            if self._monitor is not None:
                return self
            try:
                host = self._host if self.transport == "tcp" else None
                has_data = self._env[DATA_PORT_VARIABLE] != "off"
                self._addresses = Addresses({"chief": 1, **self._counts}, host, data_ports=has_data)
                self._make_own_folder()
            except BaseException:
                self._release_resources()
                raise
            self._owner = os.getpid()
            # A daemon, so that an interpreter that exits reaches its atexit handlers, which stop it.
            self._monitor = threading.Thread(target=self._run, name="local-cluster-monitor", daemon=True)
            self._monitor.start()
        atexit.register(self.stop)
        self._started_at = _place_of_caller()
        self._warn_of_others()
        try:
            with self._changed:
                self._changed.wait_for(self._all_started_once)
            self.check()
        except BaseException:
            self.stop()
            raise
        return self

    def _warn_of_others(self) -> None:
        """Warn of clusters that this process is already running: a notebook cell that is run again starts another."""
        with _running_lock:
            others = list(_running)
            if not self._ended.is_set():  # by a monitor that failed
                _running.append(self)
        for other in others:
            logger.warning(
                "another local cluster of this process is still running: %s, started at %s; running a cell or line "
                "again does not stop the cluster that it started before: LocalCluster.running()[0].stop() does, and so "
                "does the end of a `with LocalCluster(...)` block or of this process",
                ", ".join(f"{task_name(task)} (pid {pid})" for task, pid in other.pids.items()) or "no process",
                other._started_at,
            )

    def _make_own_folder(self) -> None:
        state_dir = self._state_dir
        if state_dir is None or self._wants_tls:
            self._own_folder = own = OwnFolder()
            if self._wants_tls:
                # Slow to import, and most clusters do not need it.
                from pscluster.core.security.certificates import make_certificates

                self.tls_folder = str(own.tls)
                make_certificates(own.tls, self._certified_hosts())
                self.tls = load_tls("coordinator", own.tls)
            state_dir = state_dir or str(own.state)
        self._env[STATE_VARIABLE] = state_dir

    def _certified_hosts(self) -> list[str]:
        return [self._host]

    def stop(self) -> None:
        """Stop the workers, then the parameter servers; return when all have exited and the ports are free.

        First close the strategies of this process that use the cluster, so that the end is no failure to them, and
        later calls raise an error that says why.

        A second call, a call from another thread, or a call before the start does nothing more. A KeyboardInterrupt
        during the wait kills the processes that are left.
        """
        if self._owner not in (0, os.getpid()):
            return  # a fork of the owner must not stop the owner's cluster
        with self._changed:
            if self._monitor is None:
                self._ended.set()
                return
        if threading.current_thread() is self._monitor:
            self._inbox.put(StopRequested())
            return  # called by _on_failure: the monitor can't wait for itself
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

    def __exit__(self, *_: object) -> None:
        self.stop()

    def scale(self, workers: int, *, timeout: float = 60.0) -> None:
        """Start workers, or stop those with the highest indices, until there are so many. Return when that is done.

        Those that had ended, or been given up, are started again, with their full number of restarts.

        Jobs on this cluster go on meanwhile: a new worker gets functions at once, and one that is stopped lets the
        function that it runs end within the grace, or gives it back, to run elsewhere. A coordinator in another process
        learns of workers that were started here, and counts one that was there from its start as missing if it is
        stopped.

        Args:
            workers: how many there are afterwards, from 1 to 1,000.
            timeout: seconds for new workers to serve, and beyond its grace for each that is stopped to end.

        Raises:
            ConfigurationError: `workers` is out of range. Nothing has changed.
            MisuseError: the cluster isn't running.
            LocalClusterError: a worker could not be started.
            UnavailableError: a new worker does not serve within `timeout` seconds; it may do so later.
            WaitTimeoutError: a worker does not end.
        """
        with configuration_errors():
            workers = checks.whole("workers", workers, at_least=1, at_most=MAX_WORKERS)
            timeout = checks.real("timeout", timeout, kind="number of seconds", at_least=0)
        with self._scaling:
            with self._changed:
                if self._monitor is None or self._ended.is_set():
                    raise MisuseError("the cluster can't be scaled: it isn't running")
                before = self._counts["worker"]
                there = range(min(before, workers))
                ended = [index for index in there if self._supervisor.state(("worker", index)).phase.is_final]
            for index in ended:
                self.restart("worker", index, timeout=timeout)
            for index in range(before, workers):
                self._add_worker(index)
            for index in reversed(range(workers, before)):
                self._remove_worker(index, timeout)
            self._wait_until_serving([*ended, *range(before, workers)], timeout)

    def _add_worker(self, index: int) -> None:
        task = "worker", index
        with self._changed:
            self._started_addresses().add(task)
            self._counts["worker"] = index + 1
            self._joining.add(index)
        self._inbox.put(Added(task))

    def _remove_worker(self, index: int, timeout: float) -> None:
        task = "worker", index
        for job in list(self._jobs):
            job.retire_worker(index)
        self._inbox.put(Removed(task))
        with self._changed:
            left = not self._changed.wait_for(
                lambda: self._ended.is_set() or not self._supervisor.has(task), self._grace + timeout
            )
            if left:
                raise WaitTimeoutError(f"{task_name(task)} does not end {self._grace + timeout:g} s after SIGTERM")
            if not self._ended.is_set():
                self._counts["worker"] = index
                self._started_addresses().remove(task)

    def _wait_until_serving(self, indices: Iterable[int], timeout: float) -> None:
        spec, peers = self.cluster_spec(), []
        tls = load_tls("coordinator", Path(self.tls_folder)) if self.tls_folder else None
        for index in indices:
            why_gone = functools.partial(self.why_gone, "worker", index)
            peers.append(PeerAddress("worker", index, spec.task_address("worker", index), tls, self.token, why_gone))
        if peers:
            wait_for_peers(peers, make_identity("tool", 0), timeout=timeout, purpose="scaling")
        self.check()

    def check(self) -> None:
        """Raise LocalClusterError if a task was given up: too many restarts, or a wrong configuration."""
        with self._changed:
            if self._crash is not None:
                raise LocalClusterError(f"the monitor of the local cluster failed: {self._crash!r}") from self._crash
            failures = self._supervisor.failures
        if failures:
            raise LocalClusterError("; ".join(failures))

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all processes have ended by themselves and stay so; return False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._supervisor.settled or self._ended.is_set(), timeout)

    def wait_first_end(self, timeout: float | None = None) -> bool:
        """Wait until a process has ended by itself and stays so; return False after `timeout` seconds."""

        def one_has_ended() -> bool:
            return self._ended.is_set() or any(state.phase.is_final for state in self._supervisor.states())

        with self._changed:
            return self._changed.wait_for(one_has_ended, timeout)

    def serve(self, job: Job) -> None:
        """Tell a job when no worker is left, and close it when the cluster is stopped."""
        with self._changed:
            self._jobs.add(job)
        self._notify_of_workers([job])

    def _notify_of_workers(self, jobs: Iterable[Job]) -> None:
        """Tell jobs whether a worker is left, or will be restarted; one call at a time, so that the newest is last."""
        with self._notifying:
            with self._changed:
                why = self._workers_gone
            for job in jobs:
                job.workers_gone(LocalClusterError(f"no worker is left: {why}") if why else None)

    def why_gone(self, role: str, index: int) -> str:
        """Return why a task has no process and gets none unless asked for; empty if it has one, or will."""
        with self._changed:
            if index < self._counts.get(role, 0) and not self._supervisor.has((role, index)):
                return ""  # it is being added
            return self._supervisor.why_gone((role, index))

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks, and one for the chief, for the process that runs the coordinator."""
        return self._started_addresses().spec

    def _started_addresses(self) -> Addresses:
        with self._changed:
            if self._addresses is None:
                raise MisuseError(
                    "the cluster has no addresses before its start: use `with LocalCluster(...) as cluster`"
                )
            return self._addresses

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default the chief's, prefixed with the protocol."""
        role = "chief" if task_type is None else task_type
        return self._url(self.cluster_spec().task_address(role, 0 if task_id is None else task_id), rpc_layer)

    def tf_config(self, role: str, index: int) -> str:
        """Return the TF_CONFIG of a task, as JSON. ConfigurationError if there is no such task."""
        return TFConfig(self.cluster_spec(), Task(role, index), "grpc").to_json()

    def hand_over_port(self, role: str, index: int) -> list[str]:
        """Return the options for a process that is about to listen at a task's address."""
        return self._started_addresses().hand_over((role, index))

    @property
    def pids(self) -> dict[TaskKey, int]:
        """Map role and index to process id, for the living processes."""
        with self._changed:
            return self._processes.pids()

    def is_alive(self, role: str, index: int) -> bool:
        """Return whether the task has a process now."""
        task = self._task(role, index)
        with self._changed:
            return self._processes.pid(task) is not None

    def kill(self, role: str, index: int, sig: int = signal.SIGKILL, *, timeout: float = 30.0) -> int:
        """Send a signal to the task's process, and return its pid.

        If the signal is one that ends processes, return when the process is dead and reaped. It is restarted like any
        other that dies, soon after or even before this returns; after SIGTERM or SIGINT a role exits cleanly, with 0,
        and is not restarted.

        Raises:
            MisuseError: there is no such task, or it has no process now.
            WaitTimeoutError: the process is still alive after `timeout` seconds.
        """
        task = self._task(role, index)
        with self._changed:
            pid = self._processes.pid(task)
            if pid is None:
                phase = self._supervisor.state(task).phase
                raise MisuseError(f"{task_name(task)} has no process to signal: it is {phase.value}")
            self._processes.signal(task, pid, sig)
            if sig in _DEADLY and not self._changed.wait_for(lambda: self._processes.pid(task) != pid, timeout):
                name = signal.Signals(sig).name
                raise WaitTimeoutError(f"{task_name(task)} (pid {pid}) is still alive {timeout:g} s after {name}")
            return pid

    def restart(self, role: str, index: int, *, timeout: float = 60.0) -> int:
        """Give the task a new process, and its full number of restarts; return the new pid.

        A living process is stopped cleanly first. A task that ended or was given up is restarted too.

        Raises:
            MisuseError: there is no such task, or the cluster isn't running.
            WaitTimeoutError: there is no new process after `timeout` seconds.
        """
        task = self._task(role, index)
        with self._changed:
            if self._monitor is None or self._ended.is_set():
                raise MisuseError(f"{task_name(task)} can't be restarted: the cluster isn't running")
            old_pid = self._processes.pid(task)
            self._inbox.put(RestartRequested(task))
            pid = self._wait_replaced(task, old_pid, timeout, lambda: False)
        if pid is None:
            raise MisuseError(f"{task_name(task)} can't be restarted: the cluster was stopped")
        return pid

    def wait_restarted(self, role: str, index: int, old_pid: int, timeout: float = 60.0) -> int:
        """Wait until the task has a process other than `old_pid`, and return its pid.

        Raises:
            LocalClusterError: there will be none.
            WaitTimeoutError: there is none after `timeout` seconds.
        """
        task = self._task(role, index)
        with self._changed:
            pid = self._wait_replaced(task, old_pid, timeout, lambda: self._supervisor.state(task).phase.is_final)
            state = self._supervisor.state(task)
        if pid is None:
            raise LocalClusterError(
                state.failure or f"{task_name(task)} will not be restarted: it is {state.phase.value}"
            )
        return pid

    def _wait_replaced(
        self, task: TaskKey, old_pid: int | None, timeout: float, is_over: Callable[[], bool]
    ) -> int | None:
        """Return the pid of the task's next process; None if the task or the cluster ends before there is one."""

        def pid() -> int | None:
            pid = self._processes.pid(task)
            return pid if pid != old_pid else None

        if not self._changed.wait_for(lambda: pid() or is_over() or self._ended.is_set(), timeout):
            phase = self._supervisor.state(task).phase.value
            raise WaitTimeoutError(f"{task_name(task)} has no new process after {timeout:g} s: it is {phase}")
        return pid()

    @property
    def _size(self) -> str:
        workers = self._counts["worker"]
        return f"{self._counts['ps']} ps and {workers} worker{'s' * (workers != 1)}"

    def check_not_stopped(self) -> None:
        """Raise MisuseError if the cluster has been stopped, so that its addresses are dead."""
        if self._ended.is_set():
            raise MisuseError("this LocalCluster has been stopped; make a new one")

    def __repr__(self) -> str:
        if not hasattr(self, "_started_at"):
            return "<LocalCluster with invalid arguments>"
        with self._changed:
            states, failures = self._supervisor.states(), self._supervisor.failures
            ended = self._ended.is_set()
        if self._monitor is None:
            return f"<LocalCluster {'stopped, and never' if ended else 'not'} started: {self._size}>"
        if ended and failures:
            return f"<LocalCluster failed: {'; '.join(failures)}>"
        tasks = ", ".join(
            task_name(state.task) + (f" pid {state.pid}" if state.phase is Phase.RUNNING else f" {state.phase.value}")
            for state in states
        )
        return f"<LocalCluster {'stopped' if ended else 'running'}: {tasks}>"

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

    def _run(self) -> None:
        """Report events to the supervisor, and act on its answers: the monitor."""
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
            self._end()

    def _handle(self, event: Event) -> None:
        if isinstance(event, Exited):
            self._processes.join(event.pid)
        jitter = random.random()  # noqa: S311 (nothing secret)  # nosec B311
        with self._changed:
            actions = self._supervisor.handle(event, time.monotonic(), jitter)
            self._changed.notify_all()
            why = self._supervisor.why_none("worker")
            jobs = [] if why == self._workers_gone else list(self._jobs)
            self._workers_gone = why
        if jobs:
            self._notify_of_workers(jobs)
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Start(task):
                try:
                    self._start_process(task)
                except (OSError, ValueError, TypeError, RuntimeError, subprocess.SubprocessError) as error:
                    self._inbox.put(StartFailed(task, str(error)))
            case Signal(task, pid, signal_number):
                with self._changed:
                    self._processes.signal(task, pid, signal_number)
            case GiveUp(task, reason):
                logger.error("%s", reason)
                self.reports.add(task_name(task), reason)
                if self._on_failure is not None:
                    self._on_failure(LocalClusterError(reason))
            case Log(level, text, about):
                logger.log(level, "%s", text)
                if about is not None:
                    self.reports.add(task_name(about), text)

    def _start_process(self, task: TaskKey) -> None:
        role, index = task
        command = self._command or (sys.executable, "-m", f"pscluster.{role}")
        env = dict(self._env)
        if (port := self._started_addresses().data_ports.get(task)) is not None:
            env[DATA_PORT_VARIABLE] = str(port)
        options, config = [*self._options, *self.hand_over_port(role, index)], self.tf_config(role, index)
        if role == "worker" and index in self._joining and self._command is None:
            spec, config = self.cluster_spec(), "{}"
            options += ["--join", spec.task_address("chief", 0), "--task", str(index)]
            options += ["--bind", spec.task_address(role, index)]
        env = child_environ(env, config, self.token, self.tls_folder)
        log = None
        if self._log_dir is not None:
            log = self._log_dir / f"{role}-{index}.log"
            env.setdefault("PYTHONUNBUFFERED", "1")  # what it prints before it dies, too
        self._processes.start(task, [*command, *options], env, self._cwd, log)

    def _end(self) -> None:
        """Leave no process, port or file behind, even if the monitor failed."""
        self._processes.kill_all()
        self._release_resources()
        with self._changed:
            self._ended.set()
            self._changed.notify_all()
        with _running_lock, contextlib.suppress(ValueError):
            _running.remove(self)

    def _release_resources(self) -> None:
        if self._addresses is not None:
            self._addresses.release()
        if self._own_folder is not None:
            self._own_folder.remove()
            self._own_folder = None


# The clusters of this process that have not been stopped, the oldest first.
_running: list[LocalCluster] = []
_running_lock = threading.Lock()
os.register_at_fork(after_in_child=_running.clear)  # they belong to the parent


def _place_of_caller() -> str:
    """Return the file and line that called into this module."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
