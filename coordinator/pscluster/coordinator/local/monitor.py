"""The thread that starts, watches and restarts the tasks of a cluster, and the jobs that it tells of their end.

It alone starts tasks, reports events to the supervisor, and acts on the answer. One condition guards all state, and is
notified of every change; tasks are started, and logs written, without holding it.
"""

from __future__ import annotations

import logging
import queue
import random
import subprocess
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, Protocol

from pscluster.coordinator import waiting
from pscluster.coordinator.local.reports import Report, Reports
from pscluster.coordinator.local.supervisor import Supervisor
from pscluster.coordinator.local.tasks import (
    Action,
    Event,
    Exited,
    GiveUp,
    Log,
    Signal,
    Start,
    StartFailed,
    StopRequested,
    TaskKey,
    Tick,
    task_name,
)
from pscluster.core.errors import PsClusterError

logger = logging.getLogger("pscluster.local_cluster")


class ClusterError(PsClusterError):
    """A task of a cluster has died and will not be restarted; the message says which one and why."""


class Launcher(Protocol):
    """What runs the tasks of a cluster. A running task has a pid, which names it in the log.

    How it starts one is between it and its cluster, see `SupervisedCluster._start_process`. The cluster's condition
    guards it: hold it to call `pid`, `pids` or `signal`.
    """

    def pid(self, task: TaskKey) -> int | None:
        """Return the pid of the task if it is alive."""

    def pids(self) -> dict[TaskKey, int]:
        """Return the pids of all living tasks."""

    def signal(self, task: TaskKey, pid: int, signal_number: int) -> None:
        """Send a signal to the task, if it still has this pid."""

    def join(self, pid: int) -> None:
        """Join the thread that reported this exit."""

    def kill_all(self) -> None:
        """Kill every task, and return when all are gone. For the thread that starts them."""


class Job(Protocol):
    """A strategy in this process that uses a cluster."""

    def close(self, reason: str) -> None:
        """Tell the roles that the job is over. Idempotent."""

    def workers_gone(self, error: ClusterError | None) -> None:
        """Take note that no worker is left or will be restarted; None: one will be, on request.

        Must not block: called on the monitor's thread, or by `SupervisedCluster.serve`.
        """

    def retire_worker(self, index: int) -> None:
        """Take note that a worker is being stopped for good."""


class Monitored(ABC):
    """A cluster as its monitor needs it: base of `SupervisedCluster`, which has what users call."""

    noun: ClassVar[str]
    """What it is called in messages."""
    error: ClassVar[type[ClusterError]] = ClusterError
    """What it raises."""
    _processes: Launcher

    def __init__(
        self,
        supervisor: Supervisor,
        on_failure: Callable[[ClusterError], None] | None,
        on_report: Callable[[Report], None] | None,
    ) -> None:
        self._supervisor = supervisor
        self._on_failure = on_failure
        self.reports = Reports(on_report)
        self._changed = waiting.Condition()
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._ended = waiting.Event()
        self._crash: BaseException | None = None  # of the monitor: a bug here
        self._jobs: weakref.WeakSet[Job] = weakref.WeakSet()
        self._workers_gone = ""  # why, as the jobs know it
        self._notifying = threading.Lock()

    @abstractmethod
    def _start_process(self, task: TaskKey) -> None:
        """Start a process for a task, and report Started, or StartFailed. On the monitor's thread."""

    @abstractmethod
    def _release_resources(self) -> None:
        """Release what `_open` has reserved; no task is left. Idempotent."""

    def _request_stop(self, *, at_once: bool = False) -> None:
        self._inbox.put(StopRequested(at_once))

    def _notify_of_workers(self, jobs: Iterable[Job]) -> None:
        """Tell jobs whether a worker is left, or will be restarted; one call at a time, so that the newest is last."""
        with self._notifying:
            with self._changed:
                why = self._workers_gone
            for job in jobs:
                job.workers_gone(self.error(f"no worker is left: {why}") if why else None)

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
            logger.exception("the monitor of the %s failed; killing its processes", self.noun)
            self._crash = error
            if self._on_failure is not None:
                self._on_failure(self.error(f"the monitor of the {self.noun} failed: {error!r}"))
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
                    self._on_failure(self.error(reason))
            case Log(level, text, about):
                logger.log(level, "%s", text)
                if about is not None:
                    self.reports.add(task_name(about), text)

    def _end(self) -> None:
        """Leave no process, port or file behind, even if the monitor failed."""
        self._processes.kill_all()
        self._release_resources()
        with self._changed:
            self._ended.set()
            self._changed.notify_all()
