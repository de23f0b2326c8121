"""A cluster whose tasks this process starts, watches and restarts, wherever they run; a base class.

supervisor  decides, pure: `supervisor.py`
monitor     one thread, which carries out its decisions: `monitor.py`
launcher    what runs the tasks: processes of this machine (`processes.py`), or of others. It reports Started,
            StartFailed and Exited, from threads of its own
callers     kill(), restart(), stop() and the waits, from any thread: this module
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Self

from pscluster.coordinator.local.monitor import ClusterError, Job, Monitored, logger
from pscluster.coordinator.local.reports import Report
from pscluster.coordinator.local.supervisor import Supervisor
from pscluster.coordinator.local.tasks import Phase, RestartPolicy, RestartRequested, TaskKey, task_name
from pscluster.core.cluster.resolvers import ClusterResolver
from pscluster.core.cluster.tf_config import Task, TFConfig
from pscluster.core.display.notebook import html_table
from pscluster.core.errors import MisuseError, WaitTimeoutError
from pscluster.core.handles import StaysHere
from pscluster.core.security.tls import Tls

# Signals that end a process that does not handle them, so that kill() can wait for its death.
_DEADLY = {
    signal.Signals[f"SIG{name}"] for name in ("ABRT", "BUS", "FPE", "HUP", "ILL", "INT", "KILL", "QUIT", "SEGV", "TERM")
}


_HEADER = ("task", "state", "pid", "restarts", "failure")


class SupervisedCluster(ClusterResolver, Monitored, StaysHere):
    """Parameter servers and workers that this process starts and restarts; a context manager and a cluster resolver.

    Subclasses say where tasks run: `_open`, `_start_process`, `_release_resources`, `cluster_spec`, `hand_over_port`,
    and `_processes`.
    """

    instead = "use variables in the function, or the strategy, which it may capture"
    token: str
    tls: Tls | None  # of a coordinator in this process, once the cluster is started
    allow_pickle: bool | None

    def __init__(
        self,
        counts: Mapping[str, int],
        policy: RestartPolicy,
        *,
        grace: float,
        until_done: bool = False,
        on_failure: Callable[[ClusterError], None] | None = None,
        on_report: Callable[[Report], None] | None = None,
    ) -> None:
        self._counts = dict(counts)
        self._grace = grace
        tasks = [(role, index) for role, count in self._counts.items() for index in range(count)]
        # Workers stop first, so that the servers still take their last requests.
        order = "worker", "ps"
        supervisor = Supervisor(tasks, policy, stop_order=order, grace=grace, until_done=until_done, noun=self.noun)
        ClusterResolver.__init__(self, "chief", 0, "grpc", "")
        Monitored.__init__(self, supervisor, on_failure, on_report)
        self._starting = threading.Lock()
        self._monitor: threading.Thread | None = None
        self._owner = 0  # the process that started it

    @abstractmethod
    def _open(self) -> None:
        """Reserve what the tasks need. If it raises, `_release_resources` follows."""

    @abstractmethod
    def hand_over_port(self, role: str, index: int) -> list[str]:
        """Return the options for a process that is about to listen at a task's address."""

    def _on_started(self) -> None:
        """Do more once the monitor runs. On the caller's thread."""

    def start(self) -> Self:
        """Reserve the addresses and start the processes; return when all are started, though not yet serving.

        Raises:
            ConfigurationError: a task can't be where it is wanted, such as a host that is not this machine.
            ClusterError: a process could not be started; nothing is left running.
            MisuseError: the cluster has been stopped; an object can be started once.
        """
        with self._starting:
            self.check_not_stopped()
            if self._monitor is not None:
                return self
            try:
                self._open()
            except BaseException:
                self._release_resources()
                raise
            self._owner = os.getpid()
            # A daemon, so that an interpreter that exits reaches its atexit handlers, which stop it.
            monitor = threading.Thread(target=self._run, name=f"{self.noun.replace(' ', '-')}-monitor", daemon=True)
            with self._changed:
                self._monitor = monitor
                monitor.start()
        atexit.register(self.stop)
        self._on_started()
        try:
            with self._changed:
                self._changed.wait_for(self._all_started_once)
            self.check()
        except BaseException:
            self.stop()
            raise
        return self

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
            self._request_stop()
            return  # called by _on_failure: the monitor can't wait for itself
        try:
            for job in list(self._jobs):
                try:
                    job.close(f"the {self.noun} was stopped")
                except Exception:
                    logger.exception("could not shut down a job on the %s cleanly", self.noun)
            self._request_stop()
            self._ended.wait()
        except BaseException:
            self._request_stop(at_once=True)
            self._ended.wait()
            raise
        self._monitor.join()
        atexit.unregister(self.stop)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check(self) -> None:
        """Raise ClusterError if a task was given up: too many restarts, or a wrong configuration."""
        with self._changed:
            if self._crash is not None:
                raise self.error(f"the monitor of the {self.noun} failed: {self._crash!r}") from self._crash
            failures = self._supervisor.failures
        if failures:
            raise self.error("; ".join(failures))

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

    def why_gone(self, role: str, index: int, address: str = "") -> str:
        """Return why a task has no process and gets none unless asked for; empty if it has one, or will.

        With an address: also why it does not come back there.
        """
        with self._changed:
            if index < self._counts.get(role, 0) and not self._supervisor.has((role, index)):
                return ""  # it is being added
            if why := self._supervisor.why_gone((role, index)):
                return why
        now = self._address_of((role, index)) if address else ""
        if now == address:
            return ""
        return (
            f"{task_name((role, index))} came back at {now}, where a running job does not find it: make another "
            "strategy on this cluster, and restore a checkpoint"
        )

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default the chief's, prefixed with the protocol."""
        role = "chief" if task_type is None else task_type
        return self._url(self.cluster_spec().task_address(role, 0 if task_id is None else task_id), rpc_layer)

    def _address_of(self, task: TaskKey) -> str:
        """Return where a task is now, or was when it last ran."""
        return self.cluster_spec().task_address(*task)

    def worker_hosts(self) -> list[str]:
        """Return the hosts of the workers, in their order, if they are on other machines."""
        return []

    def task_hosts(self) -> list[str]:
        """Return the hosts where tasks that register may be, beside where they call from."""
        return []

    def tf_config(self, role: str, index: int) -> str:
        """Return the TF_CONFIG of a task, as JSON. ConfigurationError if there is no such task."""
        return TFConfig(self.cluster_spec(), Task(role, index), "grpc").to_json()

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

        A living process is stopped cleanly first. A task that ended or was given up is restarted too. The new process
        may die as soon as it has started; see `is_alive`.

        Raises:
            MisuseError: there is no such task, or the cluster isn't running.
            WaitTimeoutError: there is no new process after `timeout` seconds.
        """
        task = self._task(role, index)
        with self._changed:
            if self._monitor is None or self._ended.is_set():
                raise MisuseError(f"{task_name(task)} can't be restarted: the cluster isn't running")
            old_pid, starts = self._processes.pid(task), self._supervisor.state(task).starts

            def new_pid() -> int | None:
                """Return the pid even if the process has died meanwhile: then it is not among the living."""
                state = self._supervisor.state(task)
                return state.newest_pid if state.starts > starts and state.newest_pid != old_pid else None

            self._inbox.put(RestartRequested(task))
            self._wait_replaced(task, timeout, new_pid)
            pid = new_pid()
        if pid is None:
            raise MisuseError(f"{task_name(task)} can't be restarted: the cluster was stopped")
        return pid

    def wait_restarted(self, role: str, index: int, old_pid: int, timeout: float = 60.0) -> int:
        """Wait until the task has a process other than `old_pid`, and return its pid.

        Raises:
            ClusterError: there will be none.
            WaitTimeoutError: there is none after `timeout` seconds.
        """
        task = self._task(role, index)
        with self._changed:

            def new_pid() -> int | None:
                pid = self._processes.pid(task)
                return pid if pid != old_pid else None

            self._wait_replaced(task, timeout, lambda: new_pid() or self._supervisor.state(task).phase.is_final)
            pid, state = new_pid(), self._supervisor.state(task)
        if pid is None:
            raise self.error(state.failure or f"{task_name(task)} will not be restarted: it is {state.phase.value}")
        return pid

    def _wait_replaced(self, task: TaskKey, timeout: float, is_over: Callable[[], object]) -> None:
        """Wait until the task has its next process, or will have none, as `is_over` tells, or the cluster ends."""
        if not self._changed.wait_for(lambda: is_over() or self._ended.is_set(), timeout):
            phase = self._supervisor.state(task).phase.value
            raise WaitTimeoutError(f"{task_name(task)} has no new process after {timeout:g} s: it is {phase}")

    @property
    def _size(self) -> str:
        workers = self._counts["worker"]
        return f"{self._counts['ps']} ps and {workers} worker{'s' * (workers != 1)}"

    def check_not_stopped(self) -> None:
        """Raise MisuseError if the cluster has been stopped, so that its addresses are dead."""
        if self._ended.is_set():
            raise MisuseError(f"this {type(self).__name__} has been stopped; make a new one")

    def __repr__(self) -> str:
        name = type(self).__name__
        if not hasattr(self, "_monitor"):
            return f"<{name} with invalid arguments>"
        with self._changed:
            states, failures = self._supervisor.states(), self._supervisor.failures
            ended = self._ended.is_set()
        if self._monitor is None:
            return f"<{name} {'stopped, and never' if ended else 'not'} started: {self._size}>"
        if ended and failures:
            return f"<{name} failed: {'; '.join(failures)}>"
        tasks = ", ".join(
            task_name(state.task) + (f" pid {state.pid}" if state.phase is Phase.RUNNING else f" {state.phase.value}")
            for state in states
        )
        return f"<{name} {'stopped' if ended else 'running'}: {tasks}>"

    def _repr_html_(self) -> str:
        """Return a table of its tasks for a notebook."""
        if not hasattr(self, "_monitor"):
            return html_table(repr(self), (), ())
        with self._changed:
            states, failures = self._supervisor.states(), self._supervisor.failures
            ended, started = self._ended.is_set(), self._monitor is not None
        life = "failed" if ended and failures else "stopped" if ended else "running" if started else "not started"
        rows = [
            (task_name(state.task), state.phase.value, state.pid or "", max(state.starts - 1, 0), state.failure)
            for state in states
        ]
        return html_table(f"{type(self).__name__}: {life}, {self._size}", _HEADER, rows)

    def _task(self, role: str, index: int) -> TaskKey:
        count = self._counts.get(role, 0) if isinstance(role, str) else 0
        if index not in range(count):
            raise MisuseError(f"there is no {role} {index!r} in a cluster of {self._size}")
        return role, index

    def _all_started_once(self) -> bool:
        return (
            self._ended.is_set()
            or bool(self._supervisor.failures)
            or all(state.starts for state in self._supervisor.states())
        )
