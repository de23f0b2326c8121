"""What the supervisor knows of each task, the events reported to it, and the actions it answers with: plain data."""

from __future__ import annotations

import enum
import math
import signal
from dataclasses import dataclass
from typing import TypeAlias

TaskKey: TypeAlias = tuple[str, int]
"""Role and index."""

CONFIGURATION_EXIT_CODE = 2


def task_name(task: TaskKey) -> str:
    """Return a task's name in the log: "worker 1"."""
    return f"{task[0]} {task[1]}"


def describe_exit(code: int | None) -> str:
    """Describe an exit status, as the predicate of a sentence. A negative code is a signal's number."""
    if code is None:
        return "ended with an unknown status, which other code in this process collected"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # the real-time signals have no names
        return f"was killed by signal {-code}"


class Phase(enum.Enum):
    """Where a task stands; see `supervisor`."""

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
        """Return whether the task has no process, and gets none unless asked for."""
        return self not in WITH_PROCESS and self is not Phase.WAITING


WITH_PROCESS = frozenset({Phase.STARTING, Phase.RUNNING, Phase.STOPPING})


@dataclass(frozen=True, slots=True)
class Started:
    task: TaskKey
    pid: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    task: TaskKey
    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    task: TaskKey
    pid: int
    code: int | None  # negative: a signal's number; None: unknown
    how: str = ""  # it ended, if not with a code


@dataclass(frozen=True, slots=True)
class RestartRequested:
    """A caller requests a new process for a task; the old one, if any, stops cleanly first."""

    task: TaskKey


@dataclass(frozen=True, slots=True)
class Added:
    """A caller requests another task. Ignored while the cluster stops."""

    task: TaskKey


@dataclass(frozen=True, slots=True)
class Removed:
    """A caller requests that a task ends for good; its process, if any, stops cleanly first."""

    task: TaskKey


@dataclass(frozen=True, slots=True)
class StopRequested:
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event: TypeAlias = Started | StartFailed | Exited | RestartRequested | Added | Removed | StopRequested | Tick


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process for the task, and answer with Started or StartFailed."""

    task: TaskKey


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to the task's process, if it is still alive."""

    task: TaskKey
    pid: int
    signal_number: signal.Signals


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Tell the user that the task failed and will not be restarted."""

    task: TaskKey
    reason: str


@dataclass(frozen=True, slots=True)
class Log:
    level: int
    text: str
    task: TaskKey | None = None


Action: TypeAlias = Start | Signal | GiveUp | Log


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often and when a task that died is restarted. Times are in seconds."""

    enabled: bool = True
    max_restarts: int = 10  # in a row; the budget
    refill_after: float = 600.0  # how long a process must stay up to restore its task's whole budget
    base_delay: float = 0.5  # before the second restart in a row, doubled for each later one; the first has none
    max_delay: float = 10.0  # the upper limit of the doubling

    def delay(self, nth: int, jitter: float) -> float:
        """Return the seconds before the nth restart in a row (from 1); jitter from 0 to 1 picks from the upper half."""
        if nth <= 1:
            return 0.0
        doublings = min(nth - 2, 60)  # more would overflow a float
        return min(self.max_delay, self.base_delay * 2.0**doublings) * (0.5 + 0.5 * jitter)


@dataclass(slots=True)
class TaskState:
    task: TaskKey
    phase: Phase = Phase.WAITING
    pid: int | None = None
    due: float = -math.inf  # WAITING: when to start
    up_since: float = 0.0  # with a pid: when it started
    kill_at: float | None = None  # STOPPING: when SIGKILL follows; None once sent
    restart_requested: bool = False  # STOPPING for RestartRequested, not for a stop
    removed: bool = False  # it ends for good
    starts: int = 0  # processes started
    newest_pid: int | None = None  # of the last of them, which may have ended
    restarts_used: int = 0  # of the budget
    cause: str = ""  # why the next process is a restart, for the log
    failure: str = ""  # GIVEN_UP: why

    def __str__(self) -> str:
        return task_name(self.task) + (f" (pid {self.pid})" if self.pid is not None else "")
