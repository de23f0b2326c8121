"""The actors of a cluster's tasks: what `processes.py` is for those of this machine.

Each start of a task has a thread, which makes the actor, starts the role in it, and waits for its end:

    PLACING   Ray finds room for the actor; for the first one of a task within a deadline
    STARTING  it reserves its port, the address is noted, the role's process is started   -> Started, or StartFailed
    RUNNING   the role's process ends, or the actor is lost, or its node is               -> Exited; the actor is killed

An actor is not restarted by Ray: the supervisor starts another one, which has what its task needs by then (where the
coordinator is, certificates for its node). A parameter server asks for the port that it had, where clients look first.
A worker has any port, and registers it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from pscluster.coordinator.local.monitor import logger
from pscluster.coordinator.local.tasks import Event, Exited, Started, StartFailed, TaskKey, task_name
from pscluster.launch.ray.connection import RayClusterError, import_ray, reason

PORT_SECONDS = 15.0
"""How long a server waits for the port that it had: its last process may still be saving."""

_POLL_SECONDS = 1.0
_WARN_SECONDS = 10.0
_CLEAN_SECONDS = 5.0


class Plan(Protocol):
    """What a cluster knows of its tasks."""

    def actor(self, task: TaskKey) -> Any:
        """Return a new actor for a task."""

    def arguments(self, task: TaskKey, host: str, port: int) -> tuple[Any, ...]:
        """Return the arguments of `RoleActor.start` for a task that is there. Called on its thread."""

    def folder(self, task: TaskKey) -> str:
        """Return the name of the task's folder on its node."""

    def shortage(self, task: TaskKey) -> str:
        """Return what the task needs, and what of it there is."""


class Actors:
    """The living tasks. `changed` guards them, and is notified when one starts or has ended."""

    def __init__(self, plan: Plan, changed: threading.Condition, report: Callable[[Event], None], timeout: float):
        self._plan, self._changed, self._report, self._timeout = plan, changed, report, timeout
        self._ray = import_ray()
        self._starting: dict[TaskKey, Any] = {}  # actors
        self._living: dict[TaskKey, tuple[int, Any]] = {}  # pids and actors
        self._threads: dict[TaskKey, threading.Thread] = {}
        self._given_up: set[TaskKey] = set()  # whose starts fail
        self._ending = False
        self.places: dict[TaskKey, tuple[str, int]] = {}  # host and port of each task, now or when it last ran

    def start(self, task: TaskKey) -> None:
        """Begin to start a task; Started or StartFailed follows."""
        thread = threading.Thread(target=self._run, args=(task,), name=f"ray-{task[0]}-{task[1]}", daemon=True)
        self._threads[task] = thread
        thread.start()

    def _run(self, task: TaskKey) -> None:
        try:
            pid, actor = self._started(task)
        except Exception as error:
            with self._changed:
                actor = self._starting.pop(task, None)
            self._kill(actor)
            self._report(StartFailed(task, reason(error)))
            return
        code, how = None, ""
        try:
            code = self._ray.get(actor.wait.remote())
        except Exception as error:
            how = f"was lost with its actor: {reason(error)}"
        with self._changed:
            del self._living[task]
            self._changed.notify_all()
            is_over = self._ending or task[0] != "ps"  # a server that returns finds its state
        if is_over and not how:
            with contextlib.suppress(Exception):  # the actor is about to go, and perhaps it has
                self._ray.get(actor.clean.remote(self._plan.folder(task)), timeout=_CLEAN_SECONDS)
        self._kill(actor)
        self._report(Exited(task, pid, code, how))

    def _started(self, task: TaskKey) -> tuple[int, Any]:
        """Return the pid of a task, and its actor, once it runs."""
        if not self._ray.is_initialized():  # otherwise Ray would start a cluster now
            raise RayClusterError("this process is not connected to Ray any more")
        actor = self._plan.actor(task)
        with self._changed:
            self._starting[task] = actor
            if self._ending or task in self._given_up:
                raise RayClusterError("the cluster was stopped, or scaled down")
            known = self.places.get(task)
        port = known[1] if known is not None and task[0] == "ps" else 0
        self._await_room(task, actor, is_first=known is None)
        host, port = self._ray.get(actor.reserve.remote(port, PORT_SECONDS))
        with self._changed:
            self.places[task] = host, port
        pid = self._ray.get(actor.start.remote(*self._plan.arguments(task, host, port)))
        with self._changed:
            self._living[task] = pid, self._starting.pop(task)
            self._report(Started(task, pid))
            self._changed.notify_all()
        return pid, actor

    def _await_room(self, task: TaskKey, actor: Any, *, is_first: bool) -> None:
        """Return once Ray has found room for an actor, and it has started. RayClusterError if the first one is late."""
        ready, began, warned = actor.__ray_ready__.remote(), time.monotonic(), False
        while not self._ray.wait([ready], timeout=_POLL_SECONDS)[0]:
            waited = time.monotonic() - began
            if is_first and waited > self._timeout:
                raise RayClusterError(f"Ray has not started its actor within {self._timeout:g} s")
            if waited > _WARN_SECONDS and not warned:
                warned = True
                needs = self._plan.shortage(task)
                logger.warning("Ray has not started an actor for %s yet, which needs %s", task_name(task), needs)
        self._ray.get(ready)

    def pid(self, task: TaskKey) -> int | None:
        """Return the pid of the role's process, on its node, if it is alive."""
        living = self._living.get(task)
        return None if living is None else living[0]

    def pids(self) -> dict[TaskKey, int]:
        """Return the pids of all living tasks."""
        return {task: pid for task, (pid, _) in sorted(self._living.items())}

    def signal(self, task: TaskKey, pid: int, signal_number: int) -> None:
        """Send a signal to the role's process, if it still has this pid."""
        living = self._living.get(task)
        if living is not None and living[0] == pid and self._ray.is_initialized():
            living[1].signal.remote(int(signal_number))

    def join(self, pid: int) -> None:
        """Return: the thread that reported this exit has ended."""

    def give_up_start(self, task: TaskKey) -> None:
        """Have a start of this task fail that has not succeeded, and later ones until `forget`."""
        with self._changed:
            self._given_up.add(task)
            actor = self._starting.get(task)
        self._kill(actor)

    def forget(self, task: TaskKey) -> None:
        """Forget a task, which has ended for good."""
        with self._changed:
            self._given_up.discard(task)
            self.places.pop(task, None)
            self._threads.pop(task, None)

    def give_up_starts(self) -> None:
        """Have all starts fail that have not succeeded, and all later ones."""
        with self._changed:
            self._ending = True
            actors = list(self._starting.values())
        for actor in actors:
            self._kill(actor)

    def kill_all(self) -> None:
        """Kill every actor, and return when all threads have ended. For the thread that starts them."""
        self.give_up_starts()
        with self._changed:
            actors = [actor for _, actor in self._living.values()]
        for actor in actors:
            self._kill(actor)
        for thread in self._threads.values():
            thread.join()

    def _kill(self, actor: Any) -> None:
        if actor is not None and self._ray.is_initialized():
            with contextlib.suppress(Exception):  # its node, or Ray itself, is gone
                self._ray.kill(actor)
