"""The processes in which a worker calls the function of a dataset's map. See `plan` for what is decided here.

They are started by `subprocess`: a process with gRPC's threads must not be forked. There is no thread here: tasks are
given out and results are taken while somebody waits for one, by one thread at a time, the worker's reader. Meanwhile
each process has up to `DEPTH` tasks, so that it has something to do while the worker computes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pscluster.core.awake import AwakeTime
from pscluster.core.context import current_function
from pscluster.core.errors import MisuseError
from pscluster.core.functions.policy import chosen_policy
from pscluster.v1 import worker_pb2
from pscluster.worker.data.processes.messages import Connection, Kind
from pscluster.worker.data.processes.plan import ATTEMPTS, DEPTH, Plan
from pscluster.worker.data.processes.slots import Slot
from pscluster.worker.failures import rebuild_error

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.1
_MAX_FAILED_STARTS = 3
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")

Receive = Callable[[Any, Exception | None], None]
"""Called with a result, or with None and the error instead of it."""


@dataclass(eq=False)
class _Process:
    process: subprocess.Popen[bytes]
    connection: Connection
    slots: list[Slot]

    def close(self) -> str:
        """End it, if it has not ended. Return how it did."""
        self.process.kill()
        code = self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.connection.socket.close()
        for slot in self.slots:
            slot.close()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


@dataclass(frozen=True, eq=False)
class _Task:
    examples: Any
    receive: Receive
    first: int


class Pool:
    """Processes that call one function. One thread at a time may use it; `close` may be called by any.

    Args:
        name: the function's, for errors.
        setup: what a process is told first; see `child`.
        workers: how many processes.
        timeout: seconds that a call may take.
        lends: whether large arrays of results are only lent to their receiver.
    """

    def __init__(self, name: str, setup: Mapping[str, Any], workers: int, timeout: float, *, lends: bool) -> None:
        policy = asdict(chosen_policy())
        for folders in ("folders", "data"):
            policy[folders] = tuple(map(str, policy[folders]))
        self._name = name
        self._lends = lends
        self._setup = {**setup, "name": name, "policy": policy}
        self._plan = Plan(workers, timeout)
        self._time = AwakeTime(_CHECK_SECONDS)
        self._tasks: dict[int, _Task] = {}
        self._numbers = itertools.count(1)
        self._processes: dict[int, _Process] = {}
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self._broken: Exception | None = None
        self._held: set[int] = set()
        self.abandoned: deque[int] = deque()
        """Tasks whose results have been used, or are no longer wanted; any thread may append to it."""
        self._closed = False
        self._turning = threading.Lock()

    @property
    def pids(self) -> list[int]:
        """The ids of its processes."""
        return [process.process.pid for process in list(self._processes.values())]

    def submit(self, examples: Any, receive: Receive, first: int = 0) -> int:
        """Have the function called for these examples, and return the task's number. `receive` gets the result.

        Errors count examples from `first`.
        """
        task = next(self._numbers)
        self._tasks[task] = _Task(examples, receive, first)
        self._held.add(task)
        self._plan.add(task)
        return task

    def held(self) -> int:
        """Return how many tasks are wanted: those under way, and those whose results are not used yet."""
        while self.abandoned:
            task = self.abandoned.popleft()
            self._plan.drop(task)
            self._tasks.pop(task, None)
            self._held.discard(task)
        return len(self._held)

    def begin(self) -> None:
        """Start the processes and give them what waits. Does not wait for them."""
        self._turn(0)

    def wait(self, done: Callable[[], bool]) -> None:
        """Take results until `done()`. FunctionCancelled if the function that waits was told to stop."""
        while not done():
            self._turn(_CHECK_SECONDS)
            if (function := current_function()) is not None:
                function.check()

    def close(self) -> None:
        """Kill the processes: the dataset is gone, or the job has ended."""
        self._closed = True
        with self._turning:  # a thread that waits for a result notices soon
            for process in self._processes.values():
                process.close()
            self._processes.clear()
            self._tasks.clear()
            self._selector.close()

    # What is done in turn

    def _turn(self, timeout: float) -> None:
        with self._turning:
            if self._closed:
                raise MisuseError(f"the dataset whose map calls {self._name} is gone, or the job has ended")
            self._take_turn(timeout)

    def _take_turn(self, timeout: float) -> None:
        self._time.check()
        self.held()
        if self._broken is None:
            for _ in range(self._plan.missing):
                self._start()
        self._give()
        ready = self._selector.select(timeout)
        for key, _ in ready:
            self._hear(key.data)
        if ready:
            self._give()
        elif timeout:
            self._look()
        if self._broken is not None:
            self._fail(list(self._tasks), self._broken)

    def _give(self) -> None:
        for number, slot, task in self._plan.give(self._time.seconds):
            process, kind = self._processes[number], Kind.TASK
            try:
                process.slots[slot].write(self._tasks[task].examples, "an example")
            except TypeError as error:
                kind = Kind.NOTHING
                self._fail([task], error)
            with contextlib.suppress(OSError):  # it is dead, as its connection will tell
                process.connection.send(kind, slot)

    def _start(self) -> None:
        number = next(self._numbers)
        mine, its = socket.socketpair()
        slots = [Slot() for _ in range(DEPTH)]
        descriptors = [its.fileno(), *(slot.descriptor for slot in slots)]
        with contextlib.ExitStack() as unless_started, its:
            unless_started.callback(mine.close)
            for slot in slots:
                unless_started.callback(slot.close)
            process = subprocess.Popen(  # noqa: S603  (our own command line)
                [sys.executable, "-m", "pscluster.worker.data.processes.child", *map(str, descriptors)],
                stdin=subprocess.PIPE,  # nothing is written: its end tells the process that this one has died
                bufsize=0,
                env={**os.environ, **dict.fromkeys(_THREADS, "1")},
                pass_fds=descriptors,
            )
            unless_started.pop_all()
        started = _Process(process, Connection(mine), slots)
        self._processes[number] = started
        self._selector.register(mine, selectors.EVENT_READ, number)
        self._plan.started(number, self._time.seconds)
        slots[0].write({**self._setup, "path": list(sys.path)})
        with contextlib.suppress(OSError):
            started.connection.send(Kind.SETUP, 0)

    def _hear(self, number: int) -> None:
        process = self._processes[number]
        messages = process.connection.receive()
        if messages is None:
            self._bury(number)
            return
        for kind, slot in messages:
            if kind is Kind.READY:
                self._failed_starts = 0
                self._plan.ready(number, self._time.seconds)
            elif kind is Kind.UNLOADABLE:
                self._broken = self._error_of(process, slot)[0]
            else:
                self._take(number, kind, slot)

    def _take(self, number: int, kind: Kind, slot: int) -> None:
        """Take a result."""
        process, task = self._processes[number], self._plan.done(number, slot, self._time.seconds)
        if task is None or (found := self._tasks.pop(task, None)) is None:
            return
        try:
            if kind is Kind.DONE:
                found.receive(process.slots[slot].read(lend=self._lends), None)
                return
            error, done = self._error_of(process, slot)
            error.add_note(f"raised by {self._name}{self._place(found, done)}")
        except Exception as unreadable:
            error = unreadable
        found.receive(None, error)

    def _place(self, task: _Task, done: int) -> str:
        """Say which example a process was at."""
        return f" for number {task.first + done} of the examples" if self._setup["each"] else ""

    def _error_of(self, process: _Process, slot: int) -> tuple[Exception, int]:
        """Return what a process has raised, and for which of its examples."""
        said = process.slots[slot].read()
        failure = worker_pb2.Failure.FromString(said["failure"])
        return rebuild_error(failure, f"In process {process.process.pid}, for a dataset's map"), said["example"]

    def _look(self) -> None:
        """Look for processes that make no progress: there was nothing to hear for a while."""
        now = self._time.seconds
        for number, process in self._processes.items():
            if (slot := self._plan.at(number)) is not None:
                self._plan.observe(number, process.slots[slot].progress, now)
        for number in self._plan.overdue(now):
            self._bury(number, overdue=True)

    def _bury(self, number: int, *, overdue: bool = False) -> None:
        """End a process that has died or is overdue; have what it was at done again, or give that up."""
        process = self._processes.pop(number)
        self._selector.unregister(process.connection.socket)
        slot = self._plan.at(number)
        done = 0 if slot is None else process.slots[slot].progress
        how, pid = process.close(), process.process.pid
        if overdue:
            how = f"made no progress for {self._plan.timeout:g} s, and was killed"
        death = self._plan.died(number)
        if self._broken is not None:
            return
        if death.unready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                self._broken = RuntimeError(
                    f"the processes of the map that calls {self._name} can't be started: process {pid} {how}"
                )
        where = "" if death.task is None else f" in {self._name}{self._place(self._tasks[death.task], done)}"
        logger.warning("process %d of a dataset's map %s%s", pid, how, where)
        if death.failed and death.task is not None:
            kind = TimeoutError if overdue else RuntimeError
            hint = "; map(..., timeout=) sets the limit" if overdue else ""
            message = f"process {pid} {how}{where}; this was attempt {ATTEMPTS}, and the last{hint}"
            self._fail([death.task], kind(message))

    def _fail(self, tasks: list[int], error: Exception) -> None:
        for task in tasks:
            self._plan.drop(task)
            self._tasks.pop(task).receive(None, error)
