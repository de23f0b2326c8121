"""Which process of a pool does which task, and which process has died or is frozen. Pure.

A task is a call of a dataset's function for some examples:

    WAITING --give--> GIVEN --done--> gone
    GIVEN --its process is gone, which was not yet at it--> WAITING, before all others
    GIVEN --its process is gone, which was at it----------> WAITING, before all others; gone at the last attempt: FAILED
    any   --drop--> gone: it is no longer wanted, and its result is dropped

A process has up to `DEPTH` tasks, in the order in which they were given, and is at the first of them. So it has
something to do while its worker is busy:

    STARTING --ready--> READY       --died--> gone; another one is started when it is missed
    STARTING, READY with tasks --no progress for its time--> overdue: it is killed, and so dies

The time is what the caller says it is. Progress is a number that the process raises after each example.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from pscluster.core.errors import ProtocolError

DEPTH = 2
ATTEMPTS = 3
START_SECONDS = 120.0


class Given(NamedTuple):
    """A task for a process."""

    process: int
    slot: int  # which of its `DEPTH` pieces of memory the task uses
    task: int


class Death(NamedTuple):
    """What the death of a process means."""

    task: int | None  # that it was at
    failed: bool  # this was its last attempt
    unready: bool  # the process had not started


@dataclass(slots=True)
class _Process:
    since: float  # when it was last seen to make progress
    ready: bool = False
    progress: int = 0
    tasks: deque[tuple[int, int]] = field(default_factory=deque)  # with their slots
    slots: list[int] = field(default_factory=lambda: list(range(DEPTH)))


class Plan:
    """The tasks and processes of a pool.

    Args:
        workers: how many processes it has.
        timeout: seconds after which one that makes no progress is overdue.
    """

    def __init__(self, workers: int, timeout: float) -> None:
        self.workers = workers
        self.timeout = timeout
        self._waiting: deque[int] = deque()
        self._attempts: dict[int, int] = {}  # of all tasks that are wanted
        self._processes: dict[int, _Process] = {}

    @property
    def missing(self) -> int:
        """How many processes to start."""
        return self.workers - len(self._processes) if self._waiting else 0

    def add(self, task: int) -> None:
        """Take a new task."""
        self._attempts[task] = 0
        self._waiting.append(task)

    def drop(self, task: int) -> None:
        """Forget a task. A process that has it is not stopped."""
        if self._attempts.pop(task, None) is not None and task in self._waiting:
            self._waiting.remove(task)

    def started(self, process: int, now: float) -> None:
        """Note that a process was started."""
        self._processes[process] = _Process(now)

    def ready(self, process: int, now: float) -> None:
        """Note that a process can be given tasks."""
        known = self._processes[process]
        known.ready, known.since = True, now

    def give(self, now: float) -> list[Given]:
        """Give waiting tasks to the processes that have the fewest."""
        given = []
        ready = [(number, process) for number, process in self._processes.items() if process.ready]
        for depth in range(DEPTH):
            for number, process in ready:
                if self._waiting and len(process.tasks) == depth:
                    task, slot = self._waiting.popleft(), process.slots.pop()
                    if not process.tasks:
                        process.since, process.progress = now, 0
                    process.tasks.append((task, slot))
                    given.append(Given(number, slot, task))
        return given

    def at(self, process: int) -> int | None:
        """Return the slot of the task that a process is at."""
        tasks = self._processes[process].tasks
        return tasks[0][1] if tasks else None

    def observe(self, process: int, progress: int, now: float) -> None:
        """Note what a process has done of the task that it is at."""
        known = self._processes[process]
        if progress != known.progress:
            known.progress, known.since = progress, now

    def done(self, process: int, slot: int, now: float) -> int | None:
        """Note that a process has ended the task that it was at, in this slot. Return the task, if it is wanted."""
        known = self._processes[process]
        if self.at(process) != slot:
            raise ProtocolError(f"process {process} of a pool has ended a task in slot {slot}, which it was not at")
        task, _ = known.tasks.popleft()
        known.slots.append(slot)
        known.since, known.progress = now, 0
        return None if self._attempts.pop(task, None) is None else task

    def overdue(self, now: float) -> list[int]:
        """Return the processes to kill."""
        return [
            number
            for number, process in self._processes.items()
            if (process.tasks or not process.ready)
            and now - process.since > (self.timeout if process.ready else max(self.timeout, START_SECONDS))
        ]

    def died(self, process: int) -> Death:
        """Take back the tasks of a process that is gone."""
        known = self._processes.pop(process)
        wanted = [task for task, _ in known.tasks if task in self._attempts]
        self._waiting.extendleft(reversed(wanted))
        at = known.tasks[0][0] if known.tasks else None
        if at not in self._attempts:
            return Death(None, failed=False, unready=not known.ready)
        self._attempts[at] += 1
        if failed := self._attempts[at] >= ATTEMPTS:
            self.drop(at)
        return Death(at, failed, unready=False)
