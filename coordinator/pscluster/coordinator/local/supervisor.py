"""Decides when the processes of a local cluster start, stop and restart. Pure: no processes, clocks or randomness.

`Supervisor.handle(event, now, jitter)` changes the state and returns the actions to carry out, in order. The shell
(`monitor.py`) carries them out and reports the results as events; `next_due()` tells it when to send a `Tick` if
nothing happens before. The states of one task:

    WAITING  --due------------------------------> STARTING      Start
    STARTING --Started--------------------------> RUNNING
             --StartFailed, the first time------> GIVEN_UP      GiveUp: it would fail again
             --StartFailed, later---------------> as for a death
    RUNNING  --Exited 0-------------------------> FINISHED      cleanly: the job is over, or it was stopped
             --Exited 2-------------------------> GIVEN_UP      GiveUp: a wrong configuration stays wrong
             --Exited otherwise, a death--------> WAITING       or GIVEN_UP after too many restarts, or DEAD where
                                                                restarts are disabled
             --StopRequested, RestartRequested--> STOPPING      Signal SIGTERM; SIGKILL at the end of the grace
    STOPPING --Exited, whatever the code--------> STOPPED       or WAITING, due at once, for a restart
    any without a process --RestartRequested----> WAITING       due at once, with a full budget
    WAITING  --StopRequested--------------------> STOPPED
    none     --Added----------------------------> WAITING       due at once
    STARTING, RUNNING --Removed-----------------> STOPPING      once it is started; then there is no such task
    any without a process --Removed-------------> none          at once

Budget: a task may be restarted `max_restarts` times. The first restart is immediate, the later ones follow a backoff
that doubles. A process that stays up for `refill_after` seconds restores its task's whole budget, so that the budget
limits a crash loop and not the length of a run.

Stop: roles stop in `stop_order`, each one when no process of the earlier ones is left, and each process has its own
grace. `StopRequested(at_once=True)` kills every process that is left, in no order.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pscluster.coordinator.local.tasks import (
    CONFIGURATION_EXIT_CODE,
    WITH_PROCESS,
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
    Started,
    StartFailed,
    StopRequested,
    TaskKey,
    TaskState,
    Tick,
    describe_exit,
)


class Supervisor:
    """The state of all tasks of a cluster, and the decisions about them. See the module's docstring."""

    def __init__(
        self,
        tasks: Iterable[TaskKey],
        policy: RestartPolicy,
        *,
        stop_order: Sequence[str],
        grace: float,
        until_done: bool = False,
        noun: str = "local cluster",
    ) -> None:
        """Start nothing before the first event; then start the tasks in their order.

        `stop_order` has every role of the tasks. With `until_done`, exit code 0 means that the job is over. The log
        calls the tasks together `noun`.
        """
        self._tasks = {key: TaskState(key) for key in tasks}
        self._actions: list[Action] = []  # of the event that is being handled
        self._policy = policy
        self._stop_order = tuple(stop_order)
        self._grace = grace
        self._until_done = until_done
        self._noun = noun
        self._stopping = False
        assert {role for role, _ in self._tasks} <= set(self._stop_order), "a role outside the order would never stop"

    def handle(self, event: Event, now: float, jitter: float = 1.0) -> list[Action]:
        """Take an event into account, and return the actions to carry out, in order.

        `now`: monotonic seconds. `jitter`: a random number from 0 to 1, used if the event leads to a backoff.
        """
        match event:
            case Started(key, pid):
                self._started(self._tasks[key], pid, now)
            case StartFailed(key, reason):
                self._start_failed(self._tasks[key], reason, now, jitter)
            case Exited(key, pid, code, how):
                self._exited(self._tasks[key], pid, code, how, now, jitter)
            case RestartRequested(key):
                if key in self._tasks:
                    self._request_restart(self._tasks[key], now)
            case Added(key):
                if not self._stopping:
                    self._tasks.setdefault(key, TaskState(key))
            case Removed(key):
                if key in self._tasks:
                    self._remove(self._tasks[key], now)
            case StopRequested(at_once):
                self._stop_requested(at_once)
            case Tick():
                pass
        if self._stopping:
            self._continue_stop(now)
        for task in self._tasks.values():
            self._on_time(task, now)
        actions, self._actions = self._actions, []
        return actions

    def next_due(self) -> float | None:
        """Return when a Tick is due, or None if nothing waits for a point in time."""
        starts = [task.due for task in self._tasks.values() if task.phase is Phase.WAITING]
        kills = [task.kill_at for task in self._tasks.values() if task.kill_at is not None]
        return min([*starts, *kills], default=None)

    @property
    def ended(self) -> bool:
        """Return whether a stop was requested and no process is left, so that no event can follow."""
        return self._stopping and self.settled

    @property
    def settled(self) -> bool:
        """Return whether no task has a process, or gets one unless asked for."""
        return all(task.phase.is_final for task in self._tasks.values())

    @property
    def failures(self) -> list[str]:
        """Why tasks were given up, one sentence each."""
        return [task.failure for task in self._tasks.values() if task.phase is Phase.GIVEN_UP]

    def why_gone(self, task: TaskKey) -> str:
        """Return why the task gets no process unless asked for: it was given up, or the cluster is stopped; or ""."""
        if self._stopping:
            return f"the {self._noun} was stopped"
        return self._tasks[task].failure if task in self._tasks else f"the {self._noun} was scaled down"

    def why_none(self, role: str) -> str:
        """Return why no task of the role has a process, or gets one by itself; empty unless some were given up."""
        tasks = [task for task in self._tasks.values() if task.task[0] == role]
        if self._stopping or not all(task.phase.is_final for task in tasks) or not any(task.failure for task in tasks):
            return ""
        return "; ".join(task.failure or f"{task} is {task.phase.value}" for task in tasks)

    def has(self, task: TaskKey) -> bool:
        """Return whether there is such a task."""
        return task in self._tasks

    def state(self, task: TaskKey) -> TaskState:
        """Return a copy of a task's state. KeyError if there is no such task."""
        return replace(self._tasks[task])

    def states(self) -> tuple[TaskState, ...]:
        return tuple(self.state(task) for task in self._tasks)

    def _log(self, text: str, task: TaskKey | None = None, level: int = logging.WARNING) -> None:
        self._actions.append(Log(level, text, task))

    def _started(self, task: TaskState, pid: int, now: float) -> None:
        assert task.phase is Phase.STARTING, f"{task} was started without a request"
        task.phase, task.pid, task.up_since = Phase.RUNNING, pid, now
        task.starts, task.newest_pid = task.starts + 1, pid
        if task.removed:
            self._terminate(task, now)
        elif task.cause:
            self._log(f"{task.cause}; restarted as pid {pid}{self._restart_count(task)}", task.task)
            task.cause = ""

    def _start_failed(self, task: TaskState, reason: str, now: float, jitter: float) -> None:
        assert task.phase is Phase.STARTING, f"{task} was started without a request"
        text = f"{task} could not be started: {reason}"
        if task.removed:
            del self._tasks[task.task]
        elif self._stopping:
            task.phase = Phase.STOPPED
        elif task.starts == 0:
            self._give_up(task, text)
        else:
            self._died(task, text, now, jitter)

    def _exited(self, task: TaskState, pid: int, code: int | None, how: str, now: float, jitter: float) -> None:
        assert task.pid == pid, f"{task} is not pid {pid}"
        who, phase = str(task), task.phase
        text = f"{who} {how or describe_exit(code)}"
        if now - task.up_since >= self._policy.refill_after:
            task.restarts_used = 0
        task.pid, task.kill_at = None, None
        if task.removed:
            del self._tasks[task.task]
        elif self._stopping:
            task.phase = Phase.STOPPED
            if phase is Phase.RUNNING and code != 0:  # its turn to stop had not come
                self._log(f"{text} while the cluster was stopping")
        elif task.restart_requested:
            self._restart_now(task, f"{text}, as requested", now)
        elif code == 0:
            task.phase = Phase.FINISHED
            if self._until_done:
                self._log(f"{who} is done", level=logging.INFO)
            else:
                self._log(f"{who} exited cleanly, stopped from outside the cluster; it is not restarted", task.task)
        elif code == CONFIGURATION_EXIT_CODE:
            self._give_up(task, f"{text}, which a restart can't fix (see its message above); it is not restarted")
        else:
            self._died(task, text, now, jitter)

    def _died(self, task: TaskState, text: str, now: float, jitter: float) -> None:
        used = task.restarts_used
        if not self._policy.enabled:
            task.phase = Phase.DEAD
            self._log(f"{text}; restarts are disabled", task.task)
        elif used >= self._policy.max_restarts:
            why = f"after {used} restart{'s' * (used != 1)} in a row" if used else "because max_restarts is 0"
            self._give_up(task, f"{text}; giving it up {why}")
        else:
            task.restarts_used += 1
            delay = self._policy.delay(task.restarts_used, jitter)
            task.phase, task.due, task.cause = Phase.WAITING, now + delay, text
            if delay > 0:
                self._log(f"{text}; restarting in {delay:.1f} s{self._restart_count(task)}", task.task)

    def _restart_count(self, task: TaskState) -> str:
        return f" (restart {task.restarts_used} of {self._policy.max_restarts})" if task.restarts_used else ""

    def _give_up(self, task: TaskState, reason: str) -> None:
        task.phase, task.failure = Phase.GIVEN_UP, reason
        self._actions.append(GiveUp(task.task, reason))

    def _request_restart(self, task: TaskState, now: float) -> None:
        if self._stopping:
            return
        if task.phase is Phase.RUNNING:
            task.restart_requested = True
            self._terminate(task, now)
        elif task.phase is Phase.WAITING:
            self._restart_now(task, task.cause, now)
        elif task.phase.is_final:
            self._restart_now(task, f"{task} was {task.phase.value}", now)

    def _remove(self, task: TaskState, now: float) -> None:
        task.removed, task.restart_requested = True, False
        if task.phase is Phase.RUNNING:
            self._terminate(task, now)
        elif task.phase not in WITH_PROCESS:
            del self._tasks[task.task]

    def _restart_now(self, task: TaskState, cause: str, now: float) -> None:
        task.phase, task.due, task.cause = Phase.WAITING, now, cause
        task.restarts_used, task.restart_requested, task.failure = 0, False, ""

    def _stop_requested(self, at_once: bool) -> None:
        self._stopping = True
        if at_once:
            self._grace = 0.0
        for task in self._tasks.values():
            task.restart_requested = False
            if task.phase is Phase.WAITING:
                task.phase = Phase.STOPPED
            if at_once and task.pid is not None:
                task.phase, task.kill_at = Phase.STOPPING, None
                self._actions.append(Signal(task.task, task.pid, signal.SIGKILL))

    def _continue_stop(self, now: float) -> None:
        """Tell the processes of the first role that has any to stop."""
        for role in self._stop_order:
            left = [task for task in self._tasks.values() if task.task[0] == role and task.phase in WITH_PROCESS]
            for task in left:
                if task.phase is Phase.RUNNING:
                    self._terminate(task, now)
            if left:
                return

    def _terminate(self, task: TaskState, now: float) -> None:
        assert task.pid is not None, f"{task} has no process to stop"
        task.phase, task.kill_at = Phase.STOPPING, now + self._grace
        self._actions.append(Signal(task.task, task.pid, signal.SIGTERM))

    def _on_time(self, task: TaskState, now: float) -> None:
        if task.phase is Phase.WAITING and task.due <= now:
            task.phase = Phase.STARTING
            self._actions.append(Start(task.task))
        if task.kill_at is not None and task.kill_at <= now:
            assert task.pid is not None, f"{task} has no process to kill"
            task.kill_at = None
            if self._grace:
                self._log(f"{task} did not stop within {self._grace:g} s of SIGTERM; killing it")
            self._actions.append(Signal(task.task, task.pid, signal.SIGKILL))
