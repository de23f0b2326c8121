"""A cluster of processes on this machine, for development, tests and one large machine.

The coordinator runs in this process or, given `tf_config("chief", 0)` and the token, in another. How the processes are
supervised: see `supervised.py`. One thread for each process is blocked until it is dead; see `processes.py`.

What can be lost: when a parameter server dies, what `durability` says; when a worker dies, the functions in flight,
which the coordinator schedules again. When this process dies, in any way, the children see the end of their standard
input and stop cleanly by themselves; only one that hangs at that very moment stays behind. The next cluster removes the
files that are left on disk; see `temp_folder.py`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from pscluster.coordinator.local import supervised
from pscluster.coordinator.local.addresses import Addresses, choose_transport
from pscluster.coordinator.local.environment import TaskEnv, child_environ, role_environ, task_environ
from pscluster.coordinator.local.monitor import ClusterError, logger
from pscluster.coordinator.local.processes import Processes
from pscluster.coordinator.local.reports import Report
from pscluster.coordinator.local.scaling import ScalableCluster
from pscluster.coordinator.local.tasks import Added, RestartPolicy, TaskKey, task_name
from pscluster.coordinator.local.temp_folder import OwnFolder
from pscluster.core import checks
from pscluster.core.checks import configuration_errors
from pscluster.core.cluster.addresses import is_loopback
from pscluster.core.cluster.spec import ClusterSpec
from pscluster.core.display.notebook import current_cell, place_of_cell
from pscluster.core.errors import ConfigurationError, MisuseError
from pscluster.core.role.options import DATA_PORT_VARIABLE, GRACE_SECONDS
from pscluster.core.role.process import LOG_FORMATS, LOG_LEVELS
from pscluster.core.security.tls import Tls, load_tls
from pscluster.core.security.tokens import TOKEN_VARIABLE, load_token, new_token
from pscluster.ps.storage.options import STATE_VARIABLE


class LocalClusterError(ClusterError):
    """A process of the local cluster has died and will not be restarted; the message says which one and why."""


class LocalCluster(ScalableCluster):
    """Parameter servers and workers as processes on this machine; a context manager and a cluster resolver.

    Attributes:
        token: the cluster's token; the processes have it in their environment, a coordinator in this process takes it
            from here.
        tls: the certificates of a coordinator in this process, once the cluster is started; None without TLS.
        tls_folder: the folder with the certificates of all roles; "" without TLS.
        task_type, task_id, rpc_layer, environment: as for any resolver; the process that holds the cluster is its
            chief.

    Examples:
        >>> with LocalCluster(num_ps=1, num_workers=2, env={"OMP_NUM_THREADS": "1"}) as cluster:
        ...     sorted(cluster.pids)
        [('ps', 0), ('worker', 0), ('worker', 1)]
    """

    noun = "local cluster"
    error = LocalClusterError
    _processes: Processes

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
        env: TaskEnv | None = None,
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
        _on_failure: Callable[[ClusterError], None] | None = None,
        _on_report: Callable[[Report], None] | None = None,
    ) -> None:
        """Check the arguments; `start()` or `with` starts the processes.

        Args:
            num_ps, num_workers: how many processes of each role, at least 1.
            until_done: the processes exit when the coordinator ends its job; otherwise they wait for the next one.
            restart: whether a process that dies is restarted. If not, `restart()` restarts it.
            max_restarts: restarts in a row of one task. A process that stays up for ten minutes resets the count.
            transport: "unix", Unix sockets in a folder that only this user can enter, or "tcp", ports of the host.
                Default: "tcp" if a host or certificates are requested, else "unix".
            host: where the processes listen, over TCP. Default: 127.0.0.1.
            env: variables to add to the environment that the processes inherit from this one; for example
                `{"OMP_NUM_THREADS": "1"}` where several workers share few cores. Or a function of a task's role, "ps"
                or "worker", and index that returns the variables for it, such as
                `lambda role, index: {"CUDA_VISIBLE_DEVICES": str(index) if role == "worker" else ""}`. It is called
                once for each task: here, and in `scale` and `add_server` for those that they add.
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
            allow_pickle = None if allow_pickle is None else checks.flag("allow_pickle", allow_pickle)
        for name, value in (("host", host), ("token", token)):
            if value is not None:
                checks.text(name, value)
        for name, folder in (("cwd", cwd), ("log_dir", log_dir), ("state_dir", state_dir)):
            if folder is not None:
                checks.path(name, folder)
        if checks.text("log_level", log_level).upper() not in LOG_LEVELS:
            raise ConfigurationError(f"log_level is {log_level!r}; give one of {', '.join(LOG_LEVELS)}")
        if log_format not in LOG_FORMATS:
            raise ConfigurationError(f"log_format is {log_format!r}; give one of {', '.join(LOG_FORMATS)}")
        if cwd is not None and not Path(cwd).is_dir():
            raise ConfigurationError(f"cwd is {os.fspath(cwd)!r}, which is not a directory")
        if log_dir is not None and not Path(log_dir).is_dir():
            raise ConfigurationError(f"log_dir is {os.fspath(log_dir)!r}, which is not a directory")
        of_all = {} if env is None or callable(env) else env
        self._env = role_environ(of_all, num_workers, durability, allow_pickle, cwd)
        self._task_env = env
        self._of_task = {  # what each task has besides, also when it is restarted
            (role, index): task_environ(env, role, index)
            for role, count in (("ps", num_ps), ("worker", num_workers))
            for index in range(count)
        }
        self.transport = choose_transport(transport, host, tls)
        self.token = new_token() if token is None else str(load_token(None, {TOKEN_VARIABLE: token}))
        self.tls: Tls | None = None
        self.tls_folder = ""
        self.allow_pickle = allow_pickle
        self._host = host or "127.0.0.1"
        self._wants_tls = not is_loopback(self._host) if tls is None else tls
        self._state_dir = None if state_dir is None else os.path.abspath(state_dir)
        self._own_folder: OwnFolder | None = None  # to be removed
        self._cwd = cwd
        self._log_dir = None if log_dir is None else Path(os.path.abspath(log_dir))
        self._command = _command
        self._options = ["--exit-with-parent", "--log-level", log_level, "--log-format", log_format]
        if until_done:
            self._options.append("--until-done")
        super().__init__(
            {"ps": num_ps, "worker": num_workers},
            RestartPolicy(enabled=restart, max_restarts=max_restarts),
            grace=grace,
            until_done=until_done,
            on_failure=_on_failure,
            on_report=_on_report,
        )
        self._processes = Processes(self._changed, self._inbox.put)
        self._addresses: Addresses | None = None  # None before the start
        self._joining: set[int] = set()  # workers that were started by `scale`: they register with the coordinator
        self._started_at = ""  # the caller's file and line
        self._cell, self._made_in = current_cell(), place_of_cell() or _place_of_caller()

    @staticmethod
    def running() -> list[LocalCluster]:
        """Return the clusters that this process has started and not stopped, the oldest first."""
        with _running_lock:
            return list(_running)

    def start(self) -> Self:
        self._started_at = self._started_at or _place_of_caller()
        for other in LocalCluster.running():
            if self._cell is not None and other._cell not in (None, self._cell) and other._made_in == self._made_in:
                logger.warning("stopping the cluster that this cell started before")
                other.stop()
        return super().start()

    def _open(self) -> None:
        host = self._host if self.transport == "tcp" else None
        has_data = self._env[DATA_PORT_VARIABLE] != "off"
        addresses = Addresses({"chief": 1, **self._counts}, host, data_ports=has_data)
        with self._changed:
            self._addresses = addresses
        self._make_own_folder()

    def _on_started(self) -> None:
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

    def _reserve_workers(self, indices: Sequence[int], timeout: float) -> None:
        del timeout  # there is room at once
        of_task = {("worker", index): task_environ(self._task_env, "worker", index) for index in indices}
        with self._changed:
            self._of_task |= of_task
            for index in indices:
                self._started_addresses().add(("worker", index))
                self._joining.add(index)

    def _release_worker(self, index: int) -> None:
        with self._changed:
            self._started_addresses().remove(("worker", index))

    def start_server(self, index: int) -> str:
        """Start a parameter server with this index, the next one, and return its address; for `add_server`."""
        task = "ps", index
        with self._scaling, self._changed:
            if self._monitor is None or self._ended.is_set():
                raise MisuseError("the cluster can't be scaled: it isn't running")
            if index != self._counts["ps"]:
                raise MisuseError(f"the cluster has {self._counts['ps']} parameter servers, so the next is not {index}")
            self._of_task[task] = task_environ(self._task_env, *task)
            self._started_addresses().add(task)
            self._counts["ps"] = index + 1
            self._inbox.put(Added(task))
            return self.cluster_spec().task_address(*task)

    def has_server(self, index: int) -> bool:
        """Return whether this parameter server is the last one of the cluster."""
        return self._counts["ps"] == index + 1

    def stop_server(self, index: int, timeout: float = 60.0) -> None:
        """Stop the last parameter server for good, which no job uses any more. WaitTimeoutError if it does not end."""
        with self._scaling:
            if self._remove(("ps", index), timeout):
                with self._changed:
                    self._started_addresses().remove(("ps", index))

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

    def hand_over_port(self, role: str, index: int) -> list[str]:
        """Return the options for a process that is about to listen at a task's address."""
        return self._started_addresses().hand_over((role, index))

    def _start_process(self, task: TaskKey) -> None:
        role, index = task
        command = self._command or (sys.executable, "-m", f"pscluster.{role}")
        env = {**self._env, **self._of_task[task]}
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
        super()._end()
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
    while frame.f_code.co_filename in (__file__, supervised.__file__) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
