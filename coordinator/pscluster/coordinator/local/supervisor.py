"""Decides what becomes of the processes of a local cluster. Pure: it knows no process, no clock, no chance.

`Supervisor.handle(event, now, jitter)` changes the state and returns the actions to carry out, in order. The
shell (`local_cluster.py`) carries them out and comes back with what happened; `next_due()` tells it when to
come back (with a `Tick`) though nothing happened. The states of one task:

    WAITING  --its time has come----------------> STARTING      Start
    STARTING --Started--------------------------> RUNNING
             --StartFailed, the first time------> GIVEN_UP      GiveUp: what never started won't by itself
             --StartFailed, later---------------> as a death
    RUNNING  --Exited 0-------------------------> FINISHED      in order: the job is over, or it was stopped
             --Exited 2-------------------------> GIVEN_UP      GiveUp: a wrong configuration stays wrong
             --Exited otherwise, a death--------> WAITING       or GIVEN_UP once the restarts are spent,
                                                                or DEAD where restarts are switched off
             --StopRequested, RestartRequested--> STOPPING      Signal SIGTERM; SIGKILL when the grace is over
    STOPPING --Exited, whatever the code--------> STOPPED       or WAITING, due at once, for a restart
    any without a process --RestartRequested----> WAITING       due at once, with a fresh budget
    WAITING  --StopRequested--------------------> STOPPED

Budget: a task may be restarted `max_restarts` times. The first restart comes at once, the later ones after a
backoff that doubles. A process that stayed up for `refill_after` seconds gives its task the whole budget
back, so that the budget bounds a crash loop and not the length of a run.

Stop: roles stop in `stop_order`, the next one when no process of the earlier ones is left, each process with
its own grace. `StopRequested(at_once=True)` kills all that is left, in no order.

`check_invariants()` says what always holds; the tests call it after every event.
"""

from __future__ import annotations

import enum
import logging
import math
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

TaskKey: TypeAlias = tuple[str, int]
"""Role and index."""

CONFIGURATION_EXIT_CODE = 2


def task_name(task: TaskKey) -> str:
    """A task as the log names it: "worker 1"."""
    return f"{task[0]} {task[1]}"


def describe_exit(code: int | None) -> str:
    """What an exit status says, as the predicate of a sentence. A negative code is a signal's number."""
    if code is None:
        return "ended with a status that something else in this process collected"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # the real-time signals have no names
        return f"was killed by signal {-code}"


class Phase(enum.Enum):
    """Where a task stands; see the module's docstring."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    DEAD = "dead"
    GIVEN_UP = "given up"
    STOPPED = "stopped"

    @property
    def is_final(self) -> bool:
        """Whether the task has no process and gets none unless asked for."""
        return self in _FINAL


_WITH_PROCESS = frozenset({Phase.STARTING, Phase.RUNNING, Phase.STOPPING})
_FINAL = frozenset({Phase.FINISHED, Phase.DEAD, Phase.GIVEN_UP, Phase.STOPPED})


@dataclass(frozen=True, slots=True)
class Started:
    """The process of a task was started."""

    task: TaskKey
    pid: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The process of a task could not be started."""

    task: TaskKey
    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The process of a task ended: an exit code, a negative signal number, or None if nobody knows."""

    task: TaskKey
    pid: int
    code: int | None


@dataclass(frozen=True, slots=True)
class RestartRequested:
    """Somebody asks for a new process of a task: the old one, if any, stops in order first."""

    task: TaskKey


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The cluster is to end."""

    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event: TypeAlias = Started | StartFailed | Exited | RestartRequested | StopRequested | Tick


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process for the task, and answer with Started or StartFailed."""

    task: TaskKey


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to the task's process, if it still lives."""

    task: TaskKey
    pid: int
    number: signal.Signals


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The task will not be restarted, and the cluster is not what it should be: tell the user."""

    task: TaskKey
    reason: str


@dataclass(frozen=True, slots=True)
class Log:
    """Write a line to the log, about a task where one is given."""

    level: int
    text: str
    task: TaskKey | None = None


Action: TypeAlias = Start | Signal | GiveUp | Log


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often and when a task that died is started again.

    Attributes:
        enabled: whether it is at all.
        max_restarts: restarts in a row; the budget.
        refill_after: seconds for which a process stays up to give its task the whole budget back.
        base_delay: seconds before the second restart in a row, doubled for each one after. The first has
            none.
        max_delay: the most that doubling reaches.
    """

    enabled: bool = True
    max_restarts: int = 10
    refill_after: float = 600.0
    base_delay: float = 0.5
    max_delay: float = 10.0

    def delay(self, nth: int, jitter: float) -> float:
        """Seconds before the nth restart in a row (from 1); jitter from 0 to 1 picks from the upper half."""
        if nth <= 1:
            return 0.0
        doublings = min(nth - 2, 60)  # beyond that only the float's range would be tested
        return min(self.max_delay, self.base_delay * 2.0**doublings) * (0.5 + 0.5 * jitter)


@dataclass(frozen=True, slots=True)
class TaskState:
    """A task as others may see it."""

    task: TaskKey
    phase: Phase
    pid: int | None
    starts: int
    restarts_used: int
    failure: str


@dataclass(slots=True)
class _Task:
    key: TaskKey
    phase: Phase = Phase.WAITING
    pid: int | None = None
    due: float = -math.inf  # WAITING: when to start
    up_since: float = 0.0  # with a pid: since when
    kill_at: float | None = None  # STOPPING: when SIGKILL follows; None once it was sent
    restart_asked: bool = False  # STOPPING for RestartRequested, not for a stop
    starts: int = 0  # processes that were started
    used: int = 0  # restarts taken from the budget
    cause: str = ""  # why the coming process is not the first, for the line that tells of it
    failure: str = ""  # GIVEN_UP: why

    def who(self) -> str:
        return task_name(self.key) + (f" (pid {self.pid})" if self.pid is not None else "")


class Supervisor:
    """The state of all tasks of a local cluster, and the decisions about them. See the module's docstring."""

    def __init__(
        self,
        tasks: Iterable[TaskKey],
        policy: RestartPolicy,
        *,
        stop_order: Sequence[str],
        grace: float,
        until_done: bool = False,
    ) -> None:
        """Nothing is started before the first event.

        Args:
            tasks: in the order in which they start.
            stop_order: every role of the tasks, the first to stop first.
            grace: seconds from SIGTERM to SIGKILL.
            until_done: exit code 0 means that the job is over, and so is no news.
        """
        self._tasks = {key: _Task(key) for key in tasks}
        self._policy = policy
        self._stop_order = tuple(stop_order)
        self._grace = grace
        self._until_done = until_done
        self._stopping = False
        assert {role for role, _ in self._tasks} <= set(self._stop_order), "a role outside the order would never stop"

    def handle(self, event: Event, now: float, jitter: float = 1.0) -> list[Action]:
        """Take an event into account.

        Args:
            now: monotonic seconds; never less than at the event before.
            jitter: a random number from 0 to 1, used if the event leads to a backoff.
        """
        actions: list[Action] = []
        match event:
            case Started(key, pid):
                self._started(self._tasks[key], pid, now, actions)
            case StartFailed(key, reason):
                self._start_failed(self._tasks[key], reason, now, jitter, actions)
            case Exited(key, pid, code):
                self._exited(self._tasks[key], pid, code, now, jitter, actions)
            case RestartRequested(key):
                self._restart_requested(self._tasks[key], now, actions)
            case StopRequested(at_once):
                self._stop_requested(at_once, actions)
            case Tick():
                pass
        if self._stopping:
            self._continue_stop(now, actions)
        for task in self._tasks.values():
            self._on_time(task, now, actions)
        return actions

    def next_due(self) -> float | None:
        """When a Tick is due, or None if nothing waits for a time."""
        starts = [task.due for task in self._tasks.values() if task.phase is Phase.WAITING]
        kills = [task.kill_at for task in self._tasks.values() if task.kill_at is not None]
        return min([*starts, *kills], default=None)

    @property
    def ended(self) -> bool:
        """Whether a stop was asked for and no process is left, so that no event can follow."""
        return self._stopping and self.settled

    @property
    def settled(self) -> bool:
        """Whether no task has a process or is going to get one by itself."""
        return all(task.phase.is_final for task in self._tasks.values())

    @property
    def failures(self) -> list[str]:
        """Why tasks were given up, one sentence each."""
        return [task.failure for task in self._tasks.values() if task.phase is Phase.GIVEN_UP]

    def why_gone(self, task: TaskKey) -> str:
        """Why the task gets no process unless somebody asks for one: it was given up, or the cluster is stopped."""
        return "the local cluster was stopped" if self._stopping else self._tasks[task].failure

    def why_none(self, role: str) -> str:
        """Why no task of the role has a process, or gets one by itself; empty unless some of them were given up."""
        tasks = [task for task in self._tasks.values() if task.key[0] == role]
        if self._stopping or not all(task.phase.is_final for task in tasks) or not any(task.failure for task in tasks):
            return ""
        return "; ".join(task.failure or f"{task_name(task.key)} is {task.phase.value}" for task in tasks)

    def state(self, task: TaskKey) -> TaskState:
        """A task as it stands. KeyError if there is none such."""
        found = self._tasks[task]
        return TaskState(found.key, found.phase, found.pid, found.starts, found.used, found.failure)

    def states(self) -> tuple[TaskState, ...]:
        """All tasks as they stand."""
        return tuple(self.state(task) for task in self._tasks)

    def check_invariants(self) -> None:
        """AssertionError if the state is one that can't be."""
        for task in self._tasks.values():
            alive = task.phase in (Phase.RUNNING, Phase.STOPPING)
            assert (task.pid is not None) == alive, f"{task}: a pid if and only if there is a process"
            assert task.kill_at is None or task.phase is Phase.STOPPING, f"{task}: a kill without a stop"
            assert not task.restart_asked or task.phase is Phase.STOPPING, f"{task}: a restart of nothing"
            assert bool(task.failure) == (task.phase is Phase.GIVEN_UP), f"{task}: given up without a reason"
            assert 0 <= task.used <= self._policy.max_restarts, f"{task}: the budget is overdrawn"
            assert not (self._stopping and task.phase is Phase.WAITING), f"{task}: a start during the stop"
            assert not (self._stopping and task.restart_asked), f"{task}: a restart during the stop"

    def _started(self, task: _Task, pid: int, now: float, actions: list[Action]) -> None:
        assert task.phase is Phase.STARTING, f"{task} was started unasked"
        task.phase, task.pid, task.up_since = Phase.RUNNING, pid, now
        task.starts += 1
        if task.cause:
            text = f"{task.cause}; restarted as pid {pid}{self._restart_count(task)}"
            actions.append(Log(logging.WARNING, text, task.key))
            task.cause = ""

    def _start_failed(self, task: _Task, reason: str, now: float, jitter: float, actions: list[Action]) -> None:
        assert task.phase is Phase.STARTING, f"{task} was started unasked"
        text = f"{task_name(task.key)} could not be started: {reason}"
        if self._stopping:
            task.phase = Phase.STOPPED
        elif task.starts == 0:
            self._give_up(task, text, actions)
        else:
            self._died(task, text, now, jitter, actions)

    def _exited(
        self, task: _Task, pid: int, code: int | None, now: float, jitter: float, actions: list[Action]
    ) -> None:
        assert task.pid == pid, f"{task} is not pid {pid}"
        who, text, phase = task.who(), f"{task.who()} {describe_exit(code)}", task.phase
        if now - task.up_since >= self._policy.refill_after:
            task.used = 0
        task.pid, task.kill_at = None, None
        if self._stopping:
            task.phase = Phase.STOPPED
            if phase is Phase.RUNNING and code != 0:  # its turn to stop had not come
                actions.append(Log(logging.WARNING, f"{text} while the cluster was stopping"))
        elif task.restart_asked:
            self._restart_now(task, f"{text}, as asked", now)
        elif code == 0:
            task.phase = Phase.FINISHED
            if self._until_done:
                actions.append(Log(logging.INFO, f"{who} is done"))
            else:
                text = f"{who} was stopped from outside, in order; it is not restarted"
                actions.append(Log(logging.WARNING, text, task.key))
        elif code == CONFIGURATION_EXIT_CODE:
            self._give_up(
                task, f"{text}: its configuration is wrong (see its message above); it is not restarted", actions
            )
        else:
            self._died(task, text, now, jitter, actions)

    def _died(self, task: _Task, text: str, now: float, jitter: float, actions: list[Action]) -> None:
        if not self._policy.enabled:
            task.phase = Phase.DEAD
            actions.append(Log(logging.WARNING, f"{text}; restarts are switched off", task.key))
        elif task.used >= self._policy.max_restarts:
            plural = "" if task.used == 1 else "s"
            spent = f"after {task.used} restart{plural} in a row" if task.used else "since max_restarts is 0"
            self._give_up(task, f"{text}; it is given up {spent}", actions)
        else:
            task.used += 1
            delay = self._policy.delay(task.used, jitter)
            task.phase, task.due, task.cause = Phase.WAITING, now + delay, text
            if delay > 0:
                wait = f"; restarting in {delay:.1f} s{self._restart_count(task)}"
                actions.append(Log(logging.WARNING, text + wait, task.key))

    def _restart_count(self, task: _Task) -> str:
        return f" (restart {task.used} of {self._policy.max_restarts})" if task.used else ""

    def _give_up(self, task: _Task, reason: str, actions: list[Action]) -> None:
        task.phase, task.failure = Phase.GIVEN_UP, reason
        actions.append(GiveUp(task.key, reason))

    def _restart_requested(self, task: _Task, now: float, actions: list[Action]) -> None:
        if self._stopping:
            return
        if task.phase is Phase.RUNNING:
            task.restart_asked = True
            self._terminate(task, now, actions)
        elif task.phase is Phase.WAITING:
            self._restart_now(task, task.cause, now)
        elif task.phase.is_final:
            self._restart_now(task, f"{task_name(task.key)} was {task.phase.value}", now)

    def _restart_now(self, task: _Task, cause: str, now: float) -> None:
        task.phase, task.due, task.cause = Phase.WAITING, now, cause
        task.used, task.restart_asked, task.failure = 0, False, ""

    def _stop_requested(self, at_once: bool, actions: list[Action]) -> None:
        self._stopping = True
        if at_once:
            self._grace = 0.0
        for task in self._tasks.values():
            task.restart_asked = False
            if task.phase is Phase.WAITING:
                task.phase = Phase.STOPPED
            if at_once and task.pid is not None:
                task.phase, task.kill_at = Phase.STOPPING, None
                actions.append(Signal(task.key, task.pid, signal.SIGKILL))

    def _continue_stop(self, now: float, actions: list[Action]) -> None:
        """Ask the processes of the first role that has any to stop."""
        for role in self._stop_order:
            left = [task for task in self._tasks.values() if task.key[0] == role and task.phase in _WITH_PROCESS]
            for task in left:
                if task.phase is Phase.RUNNING:
                    self._terminate(task, now, actions)
            if left:
                return

    def _terminate(self, task: _Task, now: float, actions: list[Action]) -> None:
        assert task.pid is not None, f"{task} has no process to stop"
        task.phase, task.kill_at = Phase.STOPPING, now + self._grace
        actions.append(Signal(task.key, task.pid, signal.SIGTERM))

    def _on_time(self, task: _Task, now: float, actions: list[Action]) -> None:
        if task.phase is Phase.WAITING and task.due <= now:
            task.phase = Phase.STARTING
            actions.append(Start(task.key))
        if task.kill_at is not None and task.kill_at <= now:
            assert task.pid is not None, f"{task} has no process to kill"
            task.kill_at = None
            if self._grace:
                text = f"{task.who()} did not stop within {self._grace:g} s of SIGTERM; it is killed"
                actions.append(Log(logging.WARNING, text))
            actions.append(Signal(task.key, task.pid, signal.SIGKILL))
