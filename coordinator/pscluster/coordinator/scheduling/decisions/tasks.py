"""What the scheduler knows of each function and of each worker: plain data, and the words for its decisions."""

from __future__ import annotations

import enum
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from pscluster.coordinator.scheduling.decisions.gang import Gang

TARGET_SECONDS = 0.01
"""A worker keeps this much work, by measured time, beyond what it runs."""

MAX_WINDOW = 1000

P = TypeVar("P")


class State(enum.Enum):
    """Of a task; see `scheduler`."""

    BLOCKED = enum.auto()
    QUEUED = enum.auto()
    SENT = enum.auto()
    ORPHANED = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()
    CANCELLED = enum.auto()


ENDED = (State.DONE, State.FAILED, State.CANCELLED)


class Late(enum.Enum):
    """What to do about a task that has run too long."""

    STOP = enum.auto()  # ask it to stop: it will run again
    GIVE_UP = enum.auto()  # give up its worker: it has not stopped
    END = enum.auto()  # end it with `fail`: it does not run again


class Ending(enum.Enum):
    """What becomes of a task whose attempt did not return in time, and how timelines show that attempt."""

    CANCELLED = "cancelled"
    AGAIN = "failed, run again"  # call `run_again`
    FAILED = "failed"  # call `fail`


class Loss(enum.Enum):
    """What becomes of the task that a lost worker ran."""

    AGAIN = enum.auto()
    RETRY = enum.auto()  # it ran too long and did not stop: it uses up one of its retries
    TOO_LONG = enum.auto()  # it fails: it did so, and has no retry left
    DEADLY = enum.auto()  # it fails: too many workers died running it


@dataclass(frozen=True, slots=True)
class RunLimits:
    """How long a task may run, and how often it is retried."""

    timeout: float | None = None  # seconds, for each attempt
    retries: int = 0  # after it raised or ran too long
    data_retries: int = 0  # after its examples could not be read


NO_LIMITS = RunLimits()  # shared: a million tasks may be queued


@dataclass(slots=True, eq=False, repr=False)
class Task(Generic[P]):
    """One scheduled function. The scheduler does not look into `payload`."""

    payload: P
    blockers: int = 0  # arguments that are not ready
    size: int = 0  # bytes of its message
    _: KW_ONLY
    isolated: bool = False  # its error cancels nothing else
    since: float = 0.0  # when it was scheduled
    limits: RunLimits = NO_LIMITS
    key: int = 0  # names its piece of work; 0: none
    gang: Gang[P] | None = None  # of which it is a member
    id: int = 0
    state: State = State.QUEUED
    attempts: int = 0
    begun_on: int = -1  # the worker of an attempt that may have changed something and did not end it; -1: none
    sent: float = 0.0  # when it was last sent
    position: int = 0  # on its worker's stream, counting from 1
    failures: int = 0  # that were retried
    withdrawn: bool = False  # unwanted: cancelled as soon as it fails or would be queued again
    follows: int = 0  # id of the task before it on its worker: unless that returns, the worker gives it back; 0: any

    @property
    def begun(self) -> bool:
        """Return whether an attempt that did not end it may have changed something."""
        return self.begun_on >= 0

    def max_retries(self, *, data_unread: bool) -> int:
        """Return how often it may be retried, after a failure to read its examples or after any other."""
        limits = self.limits
        return max(limits.retries, limits.data_retries) if data_unread else limits.retries

    @property
    def data_retries_are_used_up(self) -> bool:
        """Return whether an attempt that can't read an example must do without it, or fail."""
        return self.failures >= self.limits.data_retries

    def __repr__(self) -> str:
        return f"<Task {self.id} {self.state.name} attempts={self.attempts}>"


@dataclass(slots=True)
class WorkerState(Generic[P]):
    """What the scheduler knows of a worker. Others only read it."""

    up: bool = False
    idle: bool = False  # its writer is waiting for tasks, and can send them at once; only while it gets tasks
    leaving: bool = False  # it gets no more tasks
    recalled: bool = False  # a request for some of its tasks is under way
    awaited: bool = True  # it was never up, and may be soon: nobody does its work meanwhile
    gone: Exception | None = None  # why it is no member of the cluster any more
    reserved: list[Task[P]] = field(default_factory=list)  # the members of a gang that it gets next, all at once
    sent: dict[int, Task[P]] = field(default_factory=dict)  # by id, in the order of sending
    orphaned: list[Task[P]] = field(default_factory=list)
    lingering: dict[int, Task[P]] = field(default_factory=dict)  # ended, but may still run here
    front: tuple[int, int] = (0, 0)  # id and position of its first task
    front_since: float = 0.0  # when that was first seen to be the first
    stopping: int = 0  # id of a task that ran too long and was asked to stop
    sent_count: int = 0
    seconds: float | None = None  # of a function, smoothed
    waited: float = 0.0  # of these, for its data
    done: int = 0  # functions that returned

    @property
    def empty(self) -> bool:
        """Return whether it runs nothing, and nothing waits there."""
        return not (self.sent or self.lingering)

    @property
    def free(self) -> bool:
        """Return whether it is certain to take a task: one that has tasks already may have no room."""
        return self.idle and not (self.reserved or self.sent or self.lingering)

    @property
    def window(self) -> int:
        """Return how many tasks to keep with this worker: one until it is known how long they take.

        Where they mostly wait for their data, the data of one more is prepared: else a map's processes would have
        nothing to do while a function ends and the next one is on its way.
        """
        if self.seconds is None:
            return 1
        waiting = 2 if 2 * self.waited > self.seconds else 1
        return min(MAX_WINDOW, 1 + waiting + int(TARGET_SECONDS / max(self.seconds, 1e-6)))
