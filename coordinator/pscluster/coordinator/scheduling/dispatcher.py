"""Dispatch: the shell around the scheduler. Moves tasks to workers and outcomes back, on the loop's thread.

One lock guards the scheduler and all RemoteValues' transitions; it is held for decisions only. User threads
enter tasks and wait on its condition; a thread for each worker takes its outcomes; the loop's thread looks after
connections, takes tasks back, and has for each worker a writer that prepares tasks and sends them. While a writer waits
for something to do (its worker is `hungry`), the other threads send for it what needs no preparation, under the lock:
a message is started there, not waited for. So a function that is scheduled alone goes to its worker without a word
to the loop.

Order that others rely on: a result's large arrays are fetched before the task counts as finished; a lost
worker's incarnation is closed on every server before its tasks go back to the queue; the ids of ended
functions reach the servers in the background, since they only free memory there.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import grpc
import tenacity

from pscluster.coordinator.data.dataset import DataPart
from pscluster.coordinator.observability.events import Observed
from pscluster.coordinator.observability.job_metrics import CoordinatorCounts
from pscluster.coordinator.scheduling.connections import (
    LOST_CONNECTION,
    TELL_SECONDS,
    Distrust,
    PsLink,
    WorkerConnection,
    end_job,
    out_of_reach,
    seconds_to_redial,
    why_lost,
)
from pscluster.coordinator.scheduling.partly_applied import PartlyApplied
from pscluster.coordinator.scheduling.remote_value import RemoteValue, RemoteValueStatus
from pscluster.coordinator.scheduling.scheduler import Late, Scheduler, State, Task
from pscluster.coordinator.scheduling.waiting import Condition, result_of
from pscluster.core.awake import AwakeTime
from pscluster.core.errors import (
    CancelledError,
    DatasetError,
    FunctionError,
    FunctionTimeoutError,
    MisuseError,
    PsClusterError,
    PSUnavailableError,
    StaleError,
    UnavailableError,
    WaitTimeoutError,
    from_rpc,
)
from pscluster.core.fault_points import reach
from pscluster.core.functions.definitions import CapturedFunction, split_off_bulk
from pscluster.core.metrics.registry import Snapshot
from pscluster.core.metrics.trace import EACH, SHORT_SECONDS
from pscluster.core.transport.channels import MAX_INLINE_BYTES, PeerAddress
from pscluster.core.transport.tcp.client import DataPort
from pscluster.core.values import MAX_DEPTH, Buffer, ClassDefiner, children, nesting, splice
from pscluster.core.values.handles import Handle
from pscluster.ps.server.dedup import IntervalSet
from pscluster.v1 import node_pb2, value_pb2, worker_pb2
from pscluster.worker.failures import PARTLY_APPLIED, failure_of, rebuild_failure

logger = logging.getLogger(__name__)

STEAL_SECONDS = 0.01
"""So long a worker is idle before it is given what another one has not started."""

FINISH_SECONDS = 2.0
"""So often servers are told which functions have ended: it only frees their memory, and delays what runs meanwhile."""

QUIET_SECONDS = 60.0
"""When nothing has come back from any worker for so long, the log says what is waited for: once, until that changes."""

CANCEL_SECONDS = 0.1
"""After so long a task that goes on is cancelled again."""

LEAVE_SECONDS = 1.0
"""So long one of a worker's two streams, which tell of its outcomes and of its end, may end behind the other."""

AT_ONCE = 16
"""More functions than that, or those that need preparation, are sent by the loop: messages are made under the lock."""

TIMEOUT_STEP = 0.1
"""So often it is looked whether a function has run longer than it may."""

MAX_DEFINITIONS = 256
"""So many functions and classes a worker keeps, beyond those that it still needs."""

_BUSY = "another checkpoint, or other copies of variables, are still made or restored"

Outcome = worker_pb2.Outcome

_ENDED = (State.DONE, State.FAILED, State.CANCELLED)

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def _nothing() -> Mapping[str, Any]:
    return _NOTHING


T = TypeVar("T")
E = TypeVar("E", bound=FunctionError)

_STEP_BYTES = 64  # of a step without arguments
_DATASET_ERROR = DatasetError.__module__, DatasetError.__qualname__
_SERVER_LOST = PSUnavailableError.__module__, PSUnavailableError.__qualname__


@dataclass(slots=True)
class Call:
    """What a task carries: the function, its arguments, and who waits for the result.

    A million of them may be queued: what is empty is shared, and the message is made when it is sent.
    """

    function: CapturedFunction
    result: weakref.ref[RemoteValue]
    arguments: value_pb2.Value | None = None
    attachments: list[memoryview] | tuple[()] = ()  # large arrays among them
    # RemoteValues among them, by the key of their placeholder.
    remote: Mapping[str, RemoteValue] = field(default_factory=_nothing)
    # Classes of dataclasses among them, which the worker may have to be given; and what adds to them.
    classes: Mapping[str, CapturedFunction] = field(default_factory=_nothing)
    define: ClassDefiner | None = None
    # Handles among them: a per-worker iterator lives on the workers for as long as its handle does.
    handles: Sequence[Handle] = ()
    deaths: Sequence[str] = ()  # of workers that were running it
    retries: int = 0  # how often it may raise and is run again
    timeout: float | None = None  # seconds that it may run, each time
    failures: int = 0
    key: int = 0  # its name in the work, for the servers; 0: it has none
    parts: Sequence[DataPart] = ()  # of distributed datasets, among the handles
    apart: bool = False  # its error is that of who waits for it, and of nobody else
    applied: bool = False  # some attempt may have applied updates

    @property
    def data_retries(self) -> int:
        """How often it is run again when its examples can't be read."""
        return max((part.dataset.retries for part in self.parts), default=0)

    @property
    def skips(self) -> bool:
        """Is it to leave out what it can't read, since others have tried?"""
        return self.failures >= self.data_retries and all(part.dataset.on_error == "skip" for part in self.parts)

    @property
    def size(self) -> int:
        """Bytes in the message that runs it, about."""
        return _STEP_BYTES if self.arguments is None else _STEP_BYTES + self.arguments.ByteSize()


@dataclass(frozen=True, slots=True)
class ResourceRecipe:
    """A per-worker resource, to be built on every worker, anew on those that return."""

    message: worker_pb2.Resource
    function: CapturedFunction


@dataclass(slots=True)
class LinkState:
    """What is known of a worker's link; for its coroutines and for the status."""

    peer: PeerAddress
    wake: asyncio.Event
    connection: WorkerConnection | None = None
    up: bool = False
    leaving: bool = False
    hungry: bool = False
    stealing: bool = False
    known: dict[str, None] = field(default_factory=dict)  # definitions, the last used one at the end
    built: set[int] = field(default_factory=set)
    restarts: int = -1
    outcomes: int = 0  # that have come, of all its lives
    heard: float = 0.0  # when it was given something or gave something back
    sent: int = 0  # the last place on its stream that something was sent for
    doomed: asyncio.Event = field(default_factory=asyncio.Event)  # it has not stopped
    why: str = "not connected yet"
    data: DataPort = field(init=False)

    def __post_init__(self) -> None:
        self.data = DataPort(str(self.peer), self.peer.token, self.peer.tls)


@dataclass(frozen=True, slots=True)
class WorkerLook:
    """A worker, as the coordinator sees it at a moment."""

    peer: PeerAddress
    up: bool
    why: str  # it is not
    incarnation: int
    restarts: int  # how often it came back; -1: it has not been there yet
    has: int  # functions that it runs, or that wait there
    running: str  # the name of the first of these
    quiet: float  # seconds since something came or went
    outcomes: int  # functions that came back, also unbegun
    done: int
    seconds: float | None  # that a function takes, smoothed


@dataclass(frozen=True, slots=True)
class Look:
    """The queue and the workers at a moment."""

    waiting: int
    oldest: float  # seconds since the next of these was scheduled
    in_flight: int
    scheduled: int  # ever
    done: int
    failed: int
    retried: int
    cancelled: int
    paused: bool
    error: str  # that nobody has been told of yet; "": none
    workers: Sequence[WorkerLook]


@dataclass(frozen=True, slots=True)
class Recall:
    """Tasks of a worker, where they were when it was decided to ask for them back: soon they may be elsewhere."""

    link: LinkState
    connection: WorkerConnection
    functions: Sequence[int]
    positions: Sequence[int]


class Dispatcher:
    """Runs the tasks of one coordinator on the workers of its cluster."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        workers: Sequence[PeerAddress],
        servers: Sequence[PsLink],
        attach: node_pb2.AttachRequest,
        *,
        max_queued: int,
        max_attempts: int,
        worker_lease: float = math.inf,
        counts: CoordinatorCounts | None = None,
        observed: Observed | None = None,
        partly_applied: PartlyApplied | None = None,
    ) -> None:
        self._counted = counts or CoordinatorCounts()
        self._loop = loop
        self._observed = observed or Observed()
        self._partly_applied = partly_applied or PartlyApplied()
        self._servers = list(servers)
        self._attach = attach
        self._max_queued = max_queued
        self._max_attempts = max_attempts
        self._worker_lease = worker_lease
        self._lock = threading.Lock()
        self._changed = Condition(self._lock)
        self._scheduler: Scheduler[Call] = Scheduler(len(workers), max_attempts)
        self._links = [LinkState(peer, asyncio.Event()) for peer in workers]
        self._resources: dict[int, ResourceRecipe] = {}
        self._wake_asked = False
        self._turn = 0  # whose turn it is when there is less to do than there are idle workers
        self._closed = False
        self._no_workers: PsClusterError | None = None  # why none will come by itself
        self.term = attach.term
        """Under which functions update variables; it changes while none runs."""
        self._cancelled_by_error = 0
        self._final_told = False
        self._no_worker_since = self._failed_at = time.monotonic()
        self._alone: int | None = None  # the thread that alone may schedule
        self._keys: set[int] = set()  # of functions that are scheduled and have not ended
        self._to_forget: set[int] = set()  # keys
        self._forgotten = [set[int]() for _ in servers]  # those that each server has not been told of yet
        self._timed = asyncio.Event()  # some functions have a timeout
        self._jobs: list[asyncio.Task[None]] = []

    # On users' threads

    def forget(self, keys: Mapping[int, str]) -> None:
        """Functions with these keys will not be scheduled again: let the servers forget what they did."""
        with self._lock:
            early = [name for key, name in keys.items() if key in self._keys]
            if early:
                raise MisuseError(f"functions with the keys {early[:5]} have not ended: join first, then forget them")
            self._to_forget.update(keys)

    def forget_ended(self, keys: Iterable[int]) -> set[int]:
        """As `forget`, but for those that are scheduled again; the others."""
        with self._lock:
            ended = {key for key in keys if key not in self._keys}
            self._to_forget.update(ended)
        return ended

    def forgotten(self) -> set[int]:
        """Keys that will not be scheduled again, and that some server may not have been told of yet."""
        with self._lock:
            return self._to_forget.union(*(keys.copy() for keys in self._forgotten))  # copied at once: the loop's

    def at_once(self, look: Callable[[], T]) -> T:
        """What it gives while nothing begins or ends. It may take positions' locks, and no others."""
        with self._lock:
            return look()

    def submit(self, call: Call, key: str = "", left: float | None = None) -> Task[Call]:
        """Enter a function. Blocks while the queue is full; raises the pending error, or that of the cluster.

        One that stands apart is cancelled by such an error, and leaves it to the others.

        Raises:
            WaitTimeoutError: it could not be entered within the seconds that are left.
        """
        deadline = None if left is None else time.monotonic() + left
        blockers = list(call.remote.values())
        if (size := call.size) > MAX_INLINE_BYTES:
            raise TypeError(_too_large(size))
        # The lock and not its condition: entering that is Python code, where Ctrl-C could leave it locked for ever.
        with self._lock:
            while True:
                if call.apart:
                    self.check_no_error(call.function.name)
                else:
                    self._raise_error(deadline, "schedule")
                if self._no_workers is not None:
                    raise self._no_workers.with_traceback(None)
                if self._closed:
                    raise CancelledError("the strategy is closed: no function can be scheduled any more")
                mine = self._alone in (None, threading.get_ident())
                if mine and self._scheduler.waiting < self._max_queued:
                    break
                if not self._changed.wait(None if deadline is None else deadline - time.monotonic()):
                    raise WaitTimeoutError(f"the time is over before all was scheduled: {self._describe()}")
            pending = [value for value in blockers if value.status is RemoteValueStatus.NOT_READY]
            for value in blockers:
                if value._error is not None:
                    raise CancelledError(f"an argument has no value: {value!r}") from value._error
            if call.key in self._keys:
                raise MisuseError(
                    f"a function with the key {key!r} is scheduled and has not ended: a key names one piece of work"
                )
            task = Task(call, len(pending), size, apart=call.apart, since=time.monotonic(), timeout=call.timeout)
            if call.timeout is not None and not self._timed.is_set():
                self._loop.call_soon_threadsafe(self._timed.set)
            free = None if pending or self._scheduler.queued else self._free()
            # In this order: wherever Ctrl-C strikes there is a wake-up too many, not one too few; but for what is
            # handed over directly, which the loop finds by itself.
            if not pending and free is None:
                self._ask_to_wake()
            for value in pending:
                if value.dependents is None:
                    value.dependents = []
                value.dependents.append(task)
            self._scheduler.add(task)
            if call.key:
                self._keys.add(call.key)
            if free is not None and not self._hand_over(free):
                self._ask_to_wake()
        return task

    def workers_gone(self, error: PsClusterError | None) -> None:
        """No worker is left, nor will one come by itself: what is scheduled fails with this. None: one comes."""
        with self._lock:
            self._no_workers = error
            busy = not self._scheduler.idle
        if error is not None and busy:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(functools.partial(self._abort, error, final=False))

    def check_no_error(self, name: str) -> None:
        """Under the lock; see `at_once`. What stands apart is cancelled by an error of others, which is theirs."""
        if (error := self._scheduler.error) is not None:
            if self._scheduler.final:  # to do it again would be of no use
                raise error.with_traceback(None)
            raise _cancelled(name, error) from error

    def wait_for(self, values: Sequence[RemoteValue], left: float | None, timeout: float | None) -> None:
        """Wait, for `left` of the `timeout` seconds that the user gave, until these have their values.

        Of functions that stand apart. Raises the error of one that will have none, or WaitTimeoutError.
        """
        deadline = None if left is None else time.monotonic() + left
        with self._lock:
            while True:
                for value in values:
                    if value._error is not None:
                        raise value._error.with_traceback(None)
                waiting = [value for value in values if value.status is not RemoteValueStatus.READY]
                if not waiting:
                    return
                self.check_no_error(waiting[0]._function)  # those that run may take long to be cancelled
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise WaitTimeoutError(f"not evaluated after {timeout:g} s: {self._describe()}")
                self._changed.wait(left)

    def tasks_of(self, values: Iterable[RemoteValue]) -> list[Task[Call]]:
        """Those that have not ended."""
        wanted = set(map(id, values))
        with self._lock:
            return _with_dependents([task for task in self._scheduler.tasks() if id(task.payload.result()) in wanted])

    def withdraw(self, tasks: Sequence[Task[Call]]) -> None:
        """Nobody waits for these any more: what has not begun never does, what runs is asked to stop."""
        with self._lock:
            self._settle_cancelled(self._scheduler.withdraw(tasks))
            recalls = [
                recall
                for index, worker in enumerate(self._scheduler.workers)
                for recall in self._recalls_of(index, [task for task in worker.sent.values() if task.withdrawn])
            ]
            self._changed.notify_all()  # there is room in the queue
        if recalls:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._recall, recalls)

    def cancel(self, values: Iterable[RemoteValue] | None, kill_after: float | None) -> int:
        """Cancel the functions of these values (None: all), with those that wait for their results; how many.

        See `_stop_strays` for `kill_after`, which goes for those of them, too, that had ended so before.
        """
        wanted = None if values is None else set(map(id, values))
        with self._lock:
            tasks = [task for task in self._scheduler.tasks() if wanted is None or id(task.payload.result()) in wanted]
            tasks += [
                task for _, task in self._scheduler.strays if wanted is None or id(task.payload.result()) in wanted
            ]
            ended = [task for task in tasks if task.state in _ENDED]
            cancelled, left = self._scheduler.cancel(_with_dependents(tasks))
            for task in left:
                task.payload.applied = True  # or not: nobody knows
            for task in cancelled:
                error = _cancelled(task.payload.function.name, None, task.payload.applied)
                self._set_error(task, error, RemoteValueStatus.CANCELLED)
            self._changed.notify_all()
            if left or (ended and kill_after is not None):
                self._part_with([*left, *ended], kill_after)
        return len(cancelled)

    def release_function(self, function: CapturedFunction) -> None:
        """It is scheduled no more: the workers need not keep it."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._drop_definition, function.digest)

    def _drop_definition(self, digest: str) -> None:
        """On the loop's thread."""
        with self._lock:
            having = [link for link in self._links if digest in link.known]
            for link in having:
                del link.known[digest]
        for link in having:
            if link.connection is not None:
                self._in_background(link.connection.release(definitions=[digest]))

    def _ask_to_wake(self) -> None:
        """Under the lock."""
        if not self._wake_asked:
            self._loop.call_soon_threadsafe(self._wake_hungry)
            self._wake_asked = True

    def _free(self) -> int | None:
        """Under the lock: an idle worker, in turn."""
        count = len(self._links)
        for place in range(self._turn, self._turn + count):
            if self._links[place % count].hungry and self._is_idle(place % count):
                self._turn = place % count + 1
                return place % count
        return None

    def _hand_over(self, index: int) -> bool:
        """Under the lock: send a worker what it may have, if its writer waits and there is nothing to prepare.

        False if the writer is to look. Not where a worker that has something gets nothing now: the writer would find
        the same, and there will be a next outcome.

        Ctrl-C before the worker is said to have it: it is given again, and what it does counts once.
        """
        link, connection = self._links[index], self._links[index].connection
        if not link.hungry or link.leaving or not set(self._resources) <= link.built:
            return False
        tasks = self._scheduler.offer(index)
        if not tasks and self._scheduler.workers[index].sent:
            return True
        if connection is None or not 0 < len(tasks) <= AT_ONCE or not all(self._is_ready(link, task) for task in tasks):
            return False
        full = self._scheduler.waiting >= self._max_queued
        position, now = self._scheduler.place(index, len(tasks)), time.monotonic()
        connection.send(position, [_step(task, task.attempts + 1, self.term) for task in tasks])
        self._scheduler.give(index, tasks, position, now)
        self._counted.sent(tasks, now)
        link.heard, link.sent = now, position + len(tasks) - 1
        if full:
            self._changed.notify_all()
        return True

    def _is_ready(self, link: LinkState, task: Task[Call]) -> bool:
        """Under the lock: can the worker be given the task as it is?"""
        call = task.payload
        return not (call.attachments or call.remote or call.classes) and _has_definition(link, call.function)

    def join(self, timeout: float | None) -> None:
        """Wait until everything scheduled has ended. Raises the first error, once."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self._scheduler.settled:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise WaitTimeoutError(
                        f"not done after {timeout:g} s: {self._describe()}"
                    ) from self._scheduler.error
                self._changed.wait(left)
            self._raise_error(deadline, "join")

    def done(self) -> bool:
        """Has everything ended? Does not wait; raises the first error, once, when nothing executes any more."""
        with self._lock:
            error = self._scheduler.take_error()
            if error is not None:
                raise self._explained(error, "done")
            return self._scheduler.settled

    def _raise_error(self, deadline: float | None, by: str) -> None:
        """Under the lock. Waits until what runs has stopped, then raises the error, if there is one."""
        while (pending := self._scheduler.error) is not None:
            error = self._scheduler.take_error()
            if error is not None:
                raise self._explained(error, by)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise WaitTimeoutError(
                    f"the time is over before all that runs has stopped: {self._describe()}"
                ) from pending
            self._changed.wait(left)

    def _explained(self, error: Exception, by: str) -> Exception:
        """Under the lock: an error that was taken, to be raised by this call, which may have nothing to do with it."""
        self._cancelled_by_error, self._final_told = 0, self._scheduler.final
        if isinstance(error, FunctionError) and not self._scheduler.final and (error._fetched or by == "schedule"):
            ago = time.monotonic() - self._failed_at
            when = time.strftime("%H:%M:%S", time.localtime(time.time() - ago))
            told = ", and fetch() has raised it before" if error._fetched else ""
            lost = ". What was given to schedule() has not been scheduled: do so again" if by == "schedule" else ""
            error.add_note(
                f"This is the error of {error.function}, which failed at {when}, {ago:.1f} s ago{told}: schedule(), "
                f"join() and done() raise the first error of all functions, once. It is cleared now{lost}."
            )
        return error.with_traceback(None)  # else one that is final would grow with every call

    def pending(self) -> str:
        """The error that waits to be raised, and for what; or ""."""
        with self._lock:
            return self._pending()

    def _pending(self) -> str:
        """Under the lock."""
        error = self._scheduler.error
        if error is None:
            return ""
        head = str(error).partition("\n\n")[0]
        if self._scheduler.final or not self._scheduler.in_flight:
            return f"the next call raises: {head}"
        return (
            f"an error waits to be raised until all that runs has stopped ({self._unended()}): {head}; "
            "RemoteValue.cancel() or coordinator.cancel() ends what does not stop"
        )

    @contextlib.contextmanager
    def paused(self, timeout: float = threading.TIMEOUT_MAX) -> Iterator[None]:
        """Within the block no function runs, and none has begun that may still run: a cut through the job.

        What has begun ends first, also where it went back to the queue: it is run again before all others. What has
        not begun waits. One such block at a time: what reads all variables at one moment must not meet what replaces
        them.

        Raises:
            WaitTimeoutError: some have not ended after so many seconds; the message names them. They go on.
        """
        deadline, cut, scheduler = time.monotonic() + timeout, object(), self._scheduler
        try:
            scheduler.begin_cut(cut)
            self._loop.call_soon_threadsafe(self._recall_all, False)
            with self._lock:
                while not scheduler.take_cut(cut):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise WaitTimeoutError(f"after {timeout:g} s {self._unended() or _BUSY}")
                    self._changed.wait(left)
            yield
        finally:  # wherever Ctrl-C struck
            scheduler.cuts.discard(cut)
            with self._lock:
                scheduler.end_cut(cut)
                self._changed.notify_all()
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._wake_all)

    def cancel_waiting(self, values: Iterable[RemoteValue]) -> int:
        """Cancel those of these functions that no worker has begun; how many. Waits for what has, whosever it is."""
        wanted = list(values)
        with self.paused():
            # On the loop's thread, where no Ctrl-C strikes.
            return result_of(asyncio.run_coroutine_threadsafe(self._withdraw(wanted), self._loop))

    async def _withdraw(self, values: Sequence[RemoteValue]) -> int:
        tasks = self.tasks_of(values)
        self.withdraw(tasks)
        return len(tasks)

    @contextlib.contextmanager
    def alone(self, timeout: float | None) -> Iterator[None]:
        """Within the block no function runs but those that this thread schedules: all others have ended, or wait.

        Raises as `join` does.
        """
        me, begin = threading.get_ident(), time.monotonic()

        def left() -> float | None:
            return None if timeout is None else timeout - (time.monotonic() - begin)

        try:
            with self._lock:
                while self._alone is not None:
                    if not self._changed.wait(left()):
                        raise WaitTimeoutError(f"after {timeout:g} s another evaluation still runs: {self._describe()}")
                self._alone = me
            self.join(left())
            yield
        finally:  # wherever Ctrl-C struck
            with self._lock:
                if self._alone == me:
                    self._alone = None
                    self._changed.notify_all()

    def _running(self) -> str:
        """Under the lock: what the workers have, by name."""
        found = [
            f"{task.payload.function.name} on {link.peer}"
            for index, link in enumerate(self._links)
            for task in self._scheduler.workers[index].sent.values()
        ]
        return _listed(found)

    def _unended(self) -> str:
        """Under the lock: what has begun and not ended, by name; and who is missing, where that is why."""
        begun = [task for worker in self._scheduler.workers for task in worker.limbo] + self._scheduler.begun
        found = [f"{task.payload.function.name}, begun on {self._links[task.begun_on].peer}" for task in begun]
        told = [f"functions still run: {running}"] if (running := self._running()) else []
        if self._scheduler.is_shutting_out:
            told.append("parameter servers are told to refuse what functions that were ended still update")
        if found:
            told.append(f"functions that were cut short wait to be run again: {_listed(found)} ({self._who_is_up()})")
        return "; ".join(told)

    def stranded(self, seconds: float) -> str:
        """Why nothing that has begun ends: no worker has been there for so long. Empty: it may, or nothing has."""
        away = time.monotonic() - self._no_worker_since
        if self.workers_up or away < seconds:
            return ""
        with self._lock:
            unended = self._unended()
        return f"no worker has been there for {away:.0f} s, and {unended}" if unended else ""

    def add_resource(self, recipe: ResourceRecipe) -> None:
        """Build this on every worker before its next function."""
        with self._lock:
            self._resources[recipe.message.id] = recipe
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake_all)

    def release_resource(self, number: int) -> None:
        """Nobody uses it any more. May be called by the garbage collector, on any thread: takes no lock."""
        recipe = self._resources.pop(number, None)
        if recipe is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._release_everywhere, recipe.message)

    @property
    def workers_up(self) -> int:
        """How many workers take functions now."""
        return sum(link.up for link in self._links)

    @property
    def functions_done(self) -> int:
        """How many have returned. Takes no lock."""
        return sum(worker.done for worker in self._scheduler.workers)

    def counts(self) -> tuple[int, int]:
        """(waiting, in flight)."""
        with self._lock:
            return self._scheduler.waiting, self._scheduler.in_flight

    def figures(self) -> Snapshot:
        """The queue's, the workers' and the servers'; see `CoordinatorTelemetry`."""
        look = self.look()
        workers = {str(worker.peer.index): worker for worker in look.workers}
        return {
            "queue_functions": look.waiting,
            "queue_age_seconds": look.oldest,
            "functions_scheduled_total": look.scheduled,
            "functions_running": look.in_flight,
            "functions_done_total": look.done,
            "functions_failed_total": look.failed,
            "functions_cancelled_total": look.cancelled,
            "worker_up": {number: int(worker.up) for number, worker in workers.items()},
            "worker_functions": {number: worker.has for number, worker in workers.items()},
            "worker_function_seconds": {number: worker.seconds or 0.0 for number, worker in workers.items()},
            "worker_outcomes_total": {number: worker.outcomes for number, worker in workers.items()},
            "worker_reconnects_total": {number: max(worker.restarts, 0) for number, worker in workers.items()},
            "server_up": {str(server.peer.index): int(not server.gone_since) for server in self._servers},
            "server_returns_total": {str(server.peer.index): server.returns for server in self._servers},
        }

    def missing(self) -> list[str]:
        """Tasks that are not there."""
        workers = [str(link.peer) for link in self._links if not link.up]
        return [*map(str, out_of_reach(self._servers)), *workers]

    def look(self) -> Look:
        """How all is now. Takes a moment for each worker, whatever is queued."""
        now = time.monotonic()
        with self._lock:
            scheduler, oldest = self._scheduler, self._scheduler.next_one
            workers = []
            for link, worker in zip(self._links, scheduler.workers, strict=True):
                # What has ended and goes on keeps it busy, too.
                first = next(itertools.chain(worker.strays.values(), worker.sent.values()), None)
                workers.append(
                    WorkerLook(
                        link.peer,
                        link.up,
                        link.why,
                        0 if link.connection is None else link.connection.incarnation,
                        link.restarts,
                        len(worker.strays) + len(worker.sent),
                        "" if first is None else first.payload.function.name,
                        now - link.heard if link.heard else 0.0,
                        link.outcomes,
                        worker.done,
                        worker.seconds,
                    )
                )
            return Look(
                scheduler.waiting,
                0.0 if oldest is None else now - oldest.since,
                scheduler.in_flight,
                scheduler.entered,
                self.functions_done,
                scheduler.failed,
                self._counted.retried_failed + self._counted.retried_lost,
                scheduler.were_cancelled,
                bool(scheduler.cuts),
                "" if scheduler.error is None else str(scheduler.error).partition("\n\n")[0],
                workers,
            )

    def explain(self) -> str:
        """Lines for people: what waits for whom, and since when."""
        now = time.monotonic()
        with self._lock:
            lines = [self._describe()]
            for index, link in enumerate(self._links):
                tasks = list(self._scheduler.workers[index].sent.values())
                if tasks:
                    others = f", {len(tasks) - 1} more behind it" if len(tasks) > 1 else ""
                    name = tasks[0].payload.function.name
                    lines.append(f"{link.peer}: {name}{others}; nothing came or went for {now - link.heard:.0f} s")
                for task in self._scheduler.workers[index].strays.values():
                    name = task.payload.function.name
                    lines.append(
                        f"{link.peer}: {name} has ended, and still runs there: until it stops nothing else does"
                    )
                if not tasks and not link.up:
                    lines.append(f"{link.peer}: not there: {link.why}")
            if self._scheduler.cuts:
                what = "a checkpoint, or copies of variables, are made: meanwhile no function begins"
                unended = self._unended()
                lines.append(f"{what}; {unended}" if unended else what)
        lines += [
            f"{peer}: unreachable for {seconds:.0f} s: reads and updates there wait for it"
            for peer, seconds in out_of_reach(self._servers).items()
        ]
        return "\n".join(lines)

    async def _warn_when_quiet(self) -> None:
        said = ""
        while True:
            await asyncio.sleep(QUIET_SECONDS)
            with self._lock:
                busy = self._scheduler.in_flight > 0 or self._scheduler.waiting > 0
                state = f"{self._describe()}; {self._running()}; {[link.heard for link in self._links]}"
            # What stays as it is is said once.
            if state != said and busy and time.monotonic() - max(link.heard for link in self._links) >= QUIET_SECONDS:
                said = state
                logger.warning("nothing has come back for %g s:\n%s", QUIET_SECONDS, self.explain())

    async def _watch_timeouts(self) -> None:
        await self._timed.wait()
        awake = AwakeTime(TIMEOUT_STEP)
        while True:
            await asyncio.sleep(TIMEOUT_STEP)
            awake.look()
            with self._lock:
                recalls = [recall for index in range(len(self._links)) for recall in self._late(index, awake.seconds)]
            self._recall(recalls)

    def _late(self, index: int, now: float) -> list[Recall]:
        """Under the lock: how to stop what a worker runs, if that has run too long."""
        link, scheduler = self._links[index], self._scheduler
        late, task = scheduler.late(index, link.sent, now, self._has_retries), scheduler.first(index)
        if late is None or task is None:
            return []
        if late is Late.ASK:
            return self._recalls_of(index, [task])
        if late is Late.GIVE_UP:
            link.doomed.set()
            return []
        task.payload.applied = True  # or not: it has not said, and goes on
        error, before = self._too_long(index, task), scheduler.error
        failed, cancelled = scheduler.time_out(index, task, error)
        self._counted.remember(task, task.payload.function.name, index, time.monotonic(), "failed")
        if failed is not None:
            self._say(index, error)
            self._set_error(task, error, RemoteValueStatus.FAILED)
        self._settle_cancelled(cancelled)
        self._changed.notify_all()
        self._part_with([task])
        return self._all_recalls() if scheduler.error is not before else []

    def _has_retries(self, task: Task[Call]) -> bool:
        """Under the lock: may it be run again where it fails now?"""
        call = task.payload
        return call.failures < call.retries and not task.withdrawn and self._scheduler.error is None

    def _part_with(self, tasks: Sequence[Task[Call]], kill_after: float | None = None) -> None:
        """Under the lock, on any thread: these have ended, and may run on. See to it that it does not matter."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._shut_out, list(tasks))
            self._loop.call_soon_threadsafe(self._stop_strays, {task.id for task in tasks}, kill_after)

    def _shut_out(self, tasks: Sequence[Task[Call]]) -> None:
        """On the loop's thread: no server takes an update of these any more, and nothing is cut before that is so."""
        intervals = list(_runs(sorted(task.id for task in tasks)))

        async def shut_out() -> None:
            try:
                await asyncio.gather(*(server.finish_functions(intervals, shut_out=True) for server in self._servers))
            except PsClusterError as error:
                why = f"the updates of a function that was ended can't be shut out from all parameter servers: {error}"
                self._abort(PSUnavailableError(why), final=True)
            finally:
                with self._lock:
                    self._scheduler.shut_out(tasks)
                    self._changed.notify_all()

        self._in_background(shut_out())

    def _stop_strays(self, numbers: Set[int], kill_after: float | None) -> None:
        """On the loop's thread: ask these to stop, and take back what waits behind them.

        Args:
            numbers: of functions that have ended.
            kill_after: seconds, after which the process of a worker that still runs one is ended; None: it is not.
        """
        stop, behind = [], []
        with self._lock:
            for index, link in enumerate(self._links):
                strays = [task for task in self._scheduler.workers[index].strays.values() if task.id in numbers]
                if strays:
                    stop += self._recalls_of(index, strays)
                    behind += self._recalls_of(index)
                if kill_after is not None:
                    for task in strays:
                        self._loop.call_later(kill_after, self._end_process_of, index, link.connection, task)
        self._recall(stop)
        self._recall(behind, cancel_running=False)

    def _end_process_of(self, index: int, connection: WorkerConnection | None, task: Task[Call]) -> None:
        """On the loop's thread: it has had its time to stop."""
        link = self._links[index]
        with self._lock:
            runs = self._scheduler.workers[index].strays.get(task.id) is task and link.connection is connection
        if runs and connection is not None:
            logger.warning("%s is still running on %s; ending its process", task.payload.function.name, link.peer)
            work = connection.recall([task.id], [task.position], cancel_running=True, end_process=True)
            self._in_background(work)

    def describe(self) -> str:
        """A line for people: what waits, what runs, which workers are missing."""
        with self._lock:
            return self._describe()

    def _who_is_up(self) -> str:
        missing = [f"{link.peer} ({link.why})" for link in self._links if not link.up]
        workers = f"{self.workers_up} of {len(self._links)} workers up"
        if missing:
            workers += f", missing: {', '.join(missing)}"
        return workers

    def _describe(self) -> str:
        """Under the lock."""
        if self._closed:
            return "the job is over: nothing waits, and nothing runs"
        workers = self._who_is_up()
        waiting = self._scheduler.waiting
        noun = "function" if waiting == 1 else "functions"
        line = f"{waiting} {noun} waiting, {self._scheduler.in_flight} with workers; {workers}"
        return f"{line}; {pending}" if (pending := self._pending()) else line

    # On the loop's thread

    async def start(self) -> None:
        """Begin to dial workers and to watch the servers."""
        jobs = [self._serve_worker(index) for index in range(len(self._links))]
        jobs += [self._watch_server(server) for server in self._servers]
        told = [IntervalSet() for _ in self._servers]
        jobs += [
            self._tell_finished(server, untold, keys)
            for server, untold, keys in zip(self._servers, told, self._forgotten, strict=True)
        ]
        jobs += [self._collect_finished(told), self._warn_when_quiet(), self._watch_timeouts()]
        self._jobs = [asyncio.create_task(self._supervised(job)) for job in jobs]

    async def _supervised(self, job: Coroutine[Any, Any, None]) -> None:
        """A job that ended unnoticed would let others wait for ever: what it fails with is the cluster's error."""
        try:
            await job
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            failure: BaseException = error  # nobody asked for it: grpc's word for a call that is gone
        except Exception as error:
            failure = error
        else:
            return
        logger.error("a job of the coordinator failed", exc_info=failure)
        self._abort(PsClusterError(f"the coordinator failed ({type(failure).__name__}: {failure})"), final=True)

    async def close(self, reason: str) -> None:
        """Cancel what is scheduled, tell the workers that the job is over, end all connections."""
        with self._changed:
            self._closed = True
            cancelled = self._scheduler.abort(CancelledError(f"the job is over: {reason}"), final=True)
            self._settle_cancelled(cancelled)
            self._changed.notify_all()
        for server in self._servers:
            server.over = True
        # The roles first, while they still see the coordinator: an ended job is no lost coordinator.
        peers = [*(link.peer for link in self._links), *(server.peer for server in self._servers)]
        reach("coordinator.end.before")
        await asyncio.gather(*(end_job(peer, self._attach.job, reason) for peer in peers))
        reach("coordinator.end.after")
        await _end(self._jobs)
        await asyncio.gather(*(link.connection.close() for link in self._links if link.connection is not None))
        with self._changed:
            for index, link in enumerate(self._links):
                link.up = False
                self._scheduler.lose(index)
                self._settle_cancelled(self._scheduler.requeue(index)[1])
            self._scheduler.shut_out()
            self._changed.notify_all()

    def tell_of_forgotten(self) -> None:
        """The job is to end: say which functions nobody has waited for, and which error nobody was told of."""
        with self._lock:
            scheduler, error = self._scheduler, self._scheduler.error
            waiting, running, cancelled = scheduler.waiting, scheduler.in_flight, self._cancelled_by_error
            told = error is None or self._final_told or (isinstance(error, FunctionError) and error._fetched)
            after = (
                f", {cancelled} were cancelled by the error of another one" if error is not None and cancelled else ""
            )
        if waiting or running or after:
            logger.warning(
                "the job ended before all of its functions had: %d were waiting, %d were running%s; coordinator.join() "
                "waits for them and raises their errors",
                waiting,
                running,
                after,
            )
        if not told:
            logger.error(
                "the job ended with an error that nobody was told of (coordinator.join() raises it): %s", error
            )

    def _wake_hungry(self) -> None:
        """Wake those who may take something: as many idle workers as there are tasks, in turn, or all."""
        hungry = [index for index, link in enumerate(self._links) if link.hungry]
        with self._lock:
            self._wake_asked = False
            count = self._scheduler.queued
            # These take one for certain; whoever has something may have no room.
            idle = [index for index in hungry if self._is_idle(index)]
        if len(idle) >= count:
            self._turn += 1
            hungry = [idle[(self._turn + place) % len(idle)] for place in range(count)]
        for index in hungry:
            self._links[index].wake.set()

    def _is_idle(self, index: int) -> bool:
        link = self._links[index]
        return link.up and not link.leaving and self._scheduler.workers[index].empty

    def _wake_all(self) -> None:
        for link in self._links:
            link.wake.set()

    def _release_everywhere(self, resource: worker_pb2.Resource) -> None:
        # A dataset's definition holds its data, and is no other resource's; a function may be used again.
        definitions = [resource.definition] if resource.distributed else []
        for link in self._links:
            if resource.id in link.built and link.connection is not None:
                link.built.discard(resource.id)
                for digest in definitions:
                    link.known.pop(digest, None)
                self._in_background(link.connection.release([resource.id], definitions))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        async def quietly() -> None:
            with suppress(*LOST_CONNECTION):
                await work

        task = self._loop.create_task(quietly())
        self._jobs.append(task)
        task.add_done_callback(self._jobs.remove)
        task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it began

    # A worker's link

    async def _serve_worker(self, index: int) -> None:
        link = self._links[index]
        while True:
            connection = await self._connect(index, link)
            with self._changed:
                self._scheduler.worker_up(index)
            link.up, link.restarts, link.heard = True, link.restarts + 1, time.monotonic()
            if link.restarts:
                logger.warning("%s is back", link.peer)
            self._observed.tell(link.peer.task, "up", "is back" if link.restarts else "is up")
            try:
                await self._until_lost(index, link, connection)
                link.why = "it left" if link.leaving else "its connection ended"
            except (*LOST_CONNECTION, PsClusterError) as error:
                link.why = str(why_lost(error, "it"))
            except Exception as error:  # a message that can't be written, for one; it must not end the link for good
                logger.exception("the link to %s failed", link.peer)
                link.why = f"{type(error).__name__}: {error}"
            finally:
                link.up, link.hungry = False, False
                self._no_worker_since = time.monotonic()
                if not self._closed:
                    await connection.close()
            if self._closed:
                return
            logger.warning("%s is gone: %s", link.peer, link.why)
            self._observed.tell(link.peer.task, "down", f"is gone: {link.why}")
            await self._give_up(index, connection.incarnation)

    async def _connect(self, index: int, link: LinkState) -> WorkerConnection:
        """Dial until the worker is attached and has all resources, for as long as that takes."""

        def pause(state: tenacity.RetryCallState) -> float:
            chance = random.random()  # noqa: S311 (nothing secret)  # nosec B311
            return seconds_to_redial(state.seconds_since_start or 0.0, chance)

        retrying = tenacity.AsyncRetrying(retry=tenacity.retry_if_exception_type(UnavailableError), wait=pause)
        distrust = Distrust(link.peer)
        async for attempt in retrying:
            with attempt:
                return await self._dial(index, link, distrust)
        raise AssertionError("it is tried until it works")

    async def _dial(self, index: int, link: LinkState, distrust: Distrust) -> WorkerConnection:
        """One attempt; UnavailableError for whatever goes wrong. In a frame of its own, which the error holds."""
        connection = WorkerConnection(link.peer, functools.partial(self._take, index), link.data)
        link.connection, link.known, link.built, link.leaving = connection, {}, set(), False
        link.sent = 0
        link.doomed.clear()
        try:
            await connection.attach(self._attach)
            await self._build_resources(link, connection)
        except (*LOST_CONNECTION, PsClusterError) as error:
            failure = why_lost(error, "it")
            link.why = str(failure)
            await connection.close()
            if connection.incarnation:
                await self._give_up(index, connection.incarnation)
            await distrust.look(failure)
            link.why = distrust.why or link.why
            # Refusals, too, may pass: another coordinator's job ends, a token file is put right.
            raise UnavailableError(link.why) from None
        return connection

    async def _until_lost(self, index: int, link: LinkState, connection: WorkerConnection) -> None:
        """Write and read until the worker leaves or something fails; raises what failed."""
        reader = connection.ended
        writer = asyncio.create_task(self._write(index, link, connection))
        watcher = asyncio.create_task(connection.leaving())
        heart = asyncio.create_task(connection.until_silent(self._worker_lease))
        doom = asyncio.create_task(link.doomed.wait())
        try:
            await asyncio.wait((reader, writer, watcher, heart, doom), return_when=asyncio.FIRST_COMPLETED)
            if heart.done():
                raise UnavailableError(heart.result())
            if doom.done():
                raise UnavailableError("it runs a function that does not stop, though its time is over")
            if reader.done() and not watcher.done():  # if it left, the word of that is just behind
                await asyncio.wait((watcher,), timeout=LEAVE_SECONDS)
            if watcher.done():
                link.leaving = watcher.result()
            if link.leaving and not reader.done():
                # It gives back what it has not started; what it runs may still end. The writer sees it and ends.
                link.wake.set()
                with self._lock:
                    recalls = self._recalls_of(index)
                self._recall(recalls, cancel_running=False)
                await asyncio.wait((reader,))
            elif not reader.done():  # outcomes that have come already still count
                await asyncio.wait((reader,), timeout=LEAVE_SECONDS)
            if reader.done():
                if (why := reader.result()) is not None:
                    # Not the stream's own error: with its traceback it would hold this frame, which holds it.
                    raise why_lost(why, "it") if isinstance(why, grpc.RpcError) else why
                if link.leaving:
                    # It has ended the stream in order: what has no outcome was never begun.
                    with self._changed:
                        unread = [task.id for task in self._scheduler.recallable(index)]
                        self._settle_cancelled(self._scheduler.give_back(index, unread))
                        self._changed.notify_all()
                    return
            if writer.done() and not writer.cancelled():
                writer.result()
        finally:
            await _end((writer, watcher, heart, doom))

    async def _give_up(self, index: int, incarnation: int) -> None:
        """The worker's attachment is over: close its incarnation everywhere, then let others have its tasks."""
        link = self._links[index]
        with self._lock:
            had_tasks = self._scheduler.lose(index)
            # It was running; the others waited behind it, so it is the only one that may have had all its attempts.
            first = next(iter(self._scheduler.workers[index].limbo), None)
            for task in self._scheduler.workers[index].limbo:
                task.payload.applied = True  # or not: nobody knows
            if first is not None:
                first.payload.deaths = (*first.payload.deaths, f"{link.peer} ({link.why})")
                self._counted.remember(first, first.payload.function.name, index, time.monotonic(), "lost")
        reach("coordinator.close.before")
        try:
            await asyncio.gather(*(server.close_incarnation(incarnation) for server in self._servers))
        except PsClusterError as error:
            if had_tasks or isinstance(error, PSUnavailableError):
                why = f"the updates of a lost worker can't be shut out from all parameter servers: {error}"
                self._abort(PSUnavailableError(why), final=True)
        reach("coordinator.close.after")
        with self._changed:
            if first is not None:
                asked = first.state is State.LIMBO and first.id == self._scheduler.workers[index].asked
                late = asked and not self._may_retry(index, first, "ran too long")
                last = self._too_long(index, first) if late else self._deadly(index, first)
                failed, cancelled = self._scheduler.requeue(index, last, first.id if late else 0)
                for task in failed:
                    self._say(index, last)
                    self._set_error(task, last, RemoteValueStatus.FAILED)
                self._settle_cancelled(cancelled)
                if first.state is State.QUEUED:
                    self._counted.retried_lost += 1
            self._changed.notify_all()
        reach("coordinator.retry.after")
        self._wake_hungry()

    async def _write(self, index: int, link: LinkState, connection: WorkerConnection) -> None:
        while True:
            link.wake.clear()
            await self._build_resources(link, connection)
            with self._changed:
                if link.leaving:
                    connection.end_steps()
                    return
                full = self._scheduler.waiting >= self._max_queued
                now = time.monotonic()
                tasks = self._scheduler.take(index, now)
                if tasks:
                    self._counted.sent(tasks, now)
                if full and tasks:
                    self._changed.notify_all()
                link.hungry = not tasks
            if not tasks:
                timer = self._loop.call_later(STEAL_SECONDS, self._consider_stealing, index)
                await link.wake.wait()
                link.hungry = False  # until it has looked again: it may have resources to build first
                timer.cancel()
                continue
            # What is recalled while it is prepared may be another worker's by then, at a place of its own there.
            places = [task.position for task in tasks]
            ready = await self._prepare(index, link, connection, tasks, places)
            link.heard = time.monotonic()
            if ready:
                connection.send(places[0], [self._message(index, task) for task in ready])
                link.sent = places[0] + len(ready) - 1
            await self._forget_definitions(index, link, connection)
            del tasks, ready  # lest their arrays, and handles, be kept here until there is something new to send

    def _message(self, index: int, task: Task[Call]) -> worker_pb2.Step:
        if not self._has(index, task):  # recalled, or cancelled: the worker will pass over it
            with self._lock:
                self._scheduler.never_sent(index, task)
            return worker_pb2.Step()
        return _step(task, task.attempts, self.term)

    async def _prepare(
        self,
        index: int,
        link: LinkState,
        connection: WorkerConnection,
        tasks: list[Task[Call]],
        places: list[int],
    ) -> list[Task[Call]]:
        """See to it that the worker has what the tasks need. Those that can't be prepared have failed."""
        await self._build_resources(link, connection)  # what was added since the tasks were taken may be theirs
        ready, last = tasks, ""
        for task, place in zip(tasks, places, strict=True):
            call = task.payload
            if not self._has(index, task):
                continue
            if call.arguments is None and call.function.digest == last:
                continue  # one like the one before, with nothing to prepare
            last = call.function.digest
            try:
                _fill_arguments(call)
                for each in (call.function, *call.classes.values()):
                    await self._define(link, connection, each)
            except (grpc.RpcError, MisuseError, TypeError) as error:
                failure = from_rpc(error, str(link.peer)) if isinstance(error, grpc.RpcError) else error
                if _is_of_link(failure):
                    raise
                # What was taken behind it goes back, and is taken anew.
                self._fail(index, task.id, failure)
                with self._changed:
                    position = tasks.index(task)
                    self._settle_cancelled(
                        self._scheduler.give_back(index, [other.id for other in tasks[position + 1 :]])
                    )
                    self._changed.notify_all()
                ready = tasks[:position]
                link.wake.set()
                break
            if call.attachments:
                head = worker_pb2.UploadRequest()
                head.attachments.position = place
                head.attachments.sizes.extend(map(len, call.attachments))
                await connection.upload(head, call.attachments)
        return ready

    async def _define(self, link: LinkState, connection: WorkerConnection, function: CapturedFunction) -> None:
        """Give the worker a function or class. MisuseError or TypeError if that is not possible."""
        with self._lock:
            if _has_definition(link, function):
                return
        for inner in function.functions:
            await self._define(link, connection, inner)
        why = ""
        for form in function.forms():
            head = worker_pb2.UploadRequest(definition=form)
            bulk = split_off_bulk(head.definition)
            why = await connection.upload(head, [memoryview(bulk)] if bulk else ())
            if not why:
                link.known[function.digest] = None
                return
        raise MisuseError(why)

    def _has(self, index: int, task: Task[Call]) -> bool:
        """Is the task with this worker, or on its way there? No lock: should it be recalled in this very moment, the
        worker will pass over it."""
        return self._scheduler.workers[index].sent.get(task.id) is task

    async def _forget_definitions(self, index: int, link: LinkState, connection: WorkerConnection) -> None:
        """Where functions are made anew for every call, let the worker drop those that were not used for longest."""
        if len(link.known) <= MAX_DEFINITIONS:
            return
        with self._lock:
            calls = [task.payload for task in self._scheduler.recallable(index)]
            used = {digest for call in calls for digest in (call.function.digest, *call.classes)}
            oldest = itertools.islice(link.known, len(link.known) - MAX_DEFINITIONS // 2)
            dropped = [digest for digest in oldest if digest not in used]
            for digest in dropped:
                del link.known[digest]
        await connection.release(definitions=dropped)

    async def _build_resources(self, link: LinkState, connection: WorkerConnection) -> None:
        for number in set(self._resources) - link.built:  # a copy at once: other threads add
            recipe = self._resources.get(number)
            if recipe is None:  # released meanwhile
                continue
            resource = worker_pb2.Resource()
            resource.CopyFrom(recipe.message)
            try:
                await self._define(link, connection, recipe.function)
            except (grpc.RpcError, MisuseError, TypeError) as error:
                failure = from_rpc(error, str(link.peer)) if isinstance(error, grpc.RpcError) else error
                if _is_of_link(failure):
                    raise
                if isinstance(failure, PSUnavailableError):  # the cluster's error, and not of the dataset
                    self._resources.pop(number, None)
                    with self._lock:
                        self._doubt_servers()
                    self._abort(self._not_begun(recipe.function, link.peer.index, 0, failure), final=False)
                    continue
                # The error of whoever uses it, as one of `dataset_fn` is: others need not hear of it.
                resource.unloadable = f"{recipe.function.name} can't be used on {link.peer}: {failure}"
            await connection.upload(worker_pb2.UploadRequest(resource=resource))
            link.built.add(number)
            if number not in self._resources:  # released while it was built
                self._release_everywhere(recipe.message)

    # On the threads of the workers' outcomes

    def _take(self, index: int, connection: WorkerConnection, outcomes: Sequence[Outcome]) -> None:
        reach("coordinator.outcome.before")
        complete: list[tuple[Outcome, Sequence[Buffer]]] = []
        for outcome in outcomes:
            buffers: Sequence[Buffer] = ()
            if outcome.kind == Outcome.DONE and outcome.HasField("attachments"):
                # Before the function counts as done: should the worker die here, another one runs it again.
                buffers = connection.download(outcome.attachments)
            complete.append((outcome, buffers))
        self._links[index].heard = time.monotonic()
        self._take_outcomes(index, complete)
        reach("coordinator.outcome.after")

    def _take_outcomes(self, index: int, outcomes: Sequence[tuple[Outcome, Sequence[Buffer]]]) -> None:
        scheduler, counts, begin = self._scheduler, self._counted, time.monotonic()
        returned: list[int] = []
        again: list[int] = []
        if not self._lock.acquire(blocking=False):
            self._lock.acquire()
            took = time.monotonic() - begin
            counts.lock_waits += 1
            counts.lock_seconds += took
        try:
            before, asked = scheduler.error, scheduler.workers[index].asked
            unblocked = False
            for outcome, buffers in outcomes:
                number, kind = outcome.function, outcome.kind
                if kind == Outcome.DONE and number != asked:
                    seconds = outcome.seconds
                    task = scheduler.finish(index, number, seconds)
                    if task is not None:
                        # As the worker does.
                        if seconds >= SHORT_SECONDS or not number & (EACH - 1) or task.attempts > 1:
                            counts.remember(task, task.payload.function.name, index, begin, "done")
                        self._visited(task.payload, outcome)
                        unblocked |= self._set_value(task, outcome, buffers)
                elif kind == Outcome.RETURNED:
                    returned.append(number)
                elif (sent := scheduler.workers[index].sent.get(number)) is None:
                    scheduler.cancelled(index, number)  # it is no longer this worker's; an attempt of it has ended
                elif self._ended_badly(index, sent, outcome, begin):
                    again.append(number)
            if returned:
                self._settle_cancelled(scheduler.give_back(index, returned))
            if again:
                self._settle_cancelled(scheduler.run_again(index, again))
            failed = scheduler.error is not None and before is None
            if failed or (
                not scheduler.in_flight and (scheduler.idle or scheduler.error is not None or scheduler.cuts)
            ):
                self._changed.notify_all()
            recalls = self._all_recalls() if failed else []
            for_all = bool(unblocked or returned or again)
            # Where nothing is left to do nobody waits for what may be possible now.
            done = self._hand_over(index) or scheduler.idle
            self._links[index].outcomes += len(outcomes)
        finally:
            self._lock.release()
        if recalls or for_all or not done:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._go_on, index, recalls, for_all)

    def _ended_badly(self, index: int, task: Task[Call], outcome: Outcome, begin: float) -> bool:
        """Under the lock: it has failed, was too late, or stopped because it was asked to. Is it to be run again?"""
        call, kind = task.payload, outcome.kind
        call.applied |= outcome.updated or kind == Outcome.DONE
        remember = functools.partial(self._counted.remember, task, call.function.name, index, begin)
        asked = task.id == self._scheduler.workers[index].asked
        if kind == Outcome.CANCELLED and (not asked or self._scheduler.error):
            remember("cancelled")
            self._scheduler.cancelled(index, task.id)
            self._settle_cancelled([task])
            return False
        what = "failed" if kind == Outcome.FAILED else "ran too long"
        if (outcome.failure.module, outcome.failure.qualname) == _SERVER_LOST:
            self._doubt_servers()
        if self._may_retry(index, task, what, outcome.failure):
            remember("failed, run again")
            return True
        remember("failed")
        failed = kind == Outcome.FAILED
        self._fail_with(
            index, task, self._raised(index, task, outcome.failure) if failed else self._too_long(index, task)
        )
        return False

    # On the loop's thread

    def _go_on(self, index: int, recalls: Sequence[Recall], for_all: bool) -> None:
        """What follows from outcomes of a worker."""
        self._recall(recalls)
        self._links[index].wake.set()
        if for_all:
            self._wake_hungry()

    def _set_value(self, task: Task[Call], outcome: Outcome, buffers: Sequence[Buffer]) -> bool:
        """Under the lock. True if another task waited for the value."""
        self._keys.discard(task.payload.key)
        value = task.payload.result()
        if value is None:
            return False
        message = outcome.value if outcome.HasField("value") else value_pb2.Value(none=True)
        value._set_value(message, buffers)
        if task.apart:
            self._changed.notify_all()
        dependents, value.dependents = value.dependents, None
        for dependent in dependents or ():
            self._scheduler.unblock(dependent)
        return bool(dependents)

    @staticmethod
    def _visited(call: Call, outcome: Outcome) -> None:
        """Under the lock: it has ended, and with it the visit of its parts."""
        for number, part in enumerate(call.parts):
            part.commit(call.key)
            skipped = [each for each in outcome.skipped if each.part == number] if outcome.skipped else ()
            part.dataset.took(outcome.seconds, outcome.waited, skipped)

    def _may_retry(self, index: int, task: Task[Call], what: str, failure: worker_pb2.Failure | None = None) -> bool:
        """Under the lock: a function failed; is it to be run again?"""
        call, peer = task.payload, self._links[index].peer
        if task.withdrawn:
            return False
        retries = call.retries
        if failure is not None and (failure.module, failure.qualname) == _DATASET_ERROR:
            retries = max(retries, call.data_retries)
        if call.failures >= retries or self._scheduler.error is not None:
            return False
        call.failures += 1
        self._counted.retried_failed += 1
        logger.warning("%s %s on %s; retrying (%d of %d)", call.function.name, what, peer, call.failures, retries)
        text = f"{call.function.name} {what}; retrying ({call.failures} of {retries})"
        self._observed.tell(peer.task, "retry", text, failure.traceback if failure is not None else "")
        return True

    def _fail_with(self, index: int, task: Task[Call], error: FunctionError) -> None:
        """Under the lock."""
        failed, cancelled = self._scheduler.fail(index, task.id, error)
        if failed is not None:
            self._say(index, error)
            self._set_error(failed, error, RemoteValueStatus.FAILED)
        self._settle_cancelled(cancelled)

    @staticmethod
    def _raised(index: int, task: Task[Call], failure: worker_pb2.Failure) -> FunctionError:
        attempts = task.attempts + task.payload.failures
        return rebuild_failure(
            failure,
            function=task.payload.function.name,
            worker=index,
            attempts=attempts,
            partly_applied=task.payload.applied,
        )

    def _deadly(self, index: int, task: Task[Call]) -> FunctionError:
        call, error = task.payload, FunctionError()
        error.function, error.worker, error.attempts = call.function.name, index, self._max_attempts
        error.summary = (
            f"{error.function} was running on {self._max_attempts} workers that died, so it may be what kills them, "
            f"and goes to no other: {'; '.join(call.deaths)}"
        )
        return _told_of_part(call, error)

    @staticmethod
    def _too_long(index: int, task: Task[Call]) -> FunctionTimeoutError:
        call, error = task.payload, FunctionTimeoutError()
        error.function, error.worker, error.attempts = call.function.name, index, task.attempts + call.failures
        error.summary = f"{error.function} ran longer than its timeout of {call.timeout:g} s on worker {index}"
        return _told_of_part(call, error)

    @staticmethod
    def _not_begun(function: CapturedFunction, worker: int, attempts: int, why: Exception) -> FunctionError:
        # Also an instance of why's class: a server that is gone is to be caught as such, whoever noticed first.
        error = rebuild_failure(failure_of(why), function=function.name, worker=worker, attempts=attempts)
        error.remote_traceback = ""  # it is not the worker's
        error.summary = f"{function.name} can't be started on worker {worker}: {why}"
        return error

    def _fail(self, index: int, number: int, failure: Exception) -> None:
        """A function that never ran fails: it, or its arguments, can't be brought to the worker."""
        with self._changed:
            if isinstance(failure, PSUnavailableError):
                self._doubt_servers()
            task = self._scheduler.workers[index].sent.get(number)
            if task is not None:
                error = self._not_begun(task.payload.function, index, task.attempts, failure)
                _told_of_part(task.payload, error)  # an attempt before this one
                self._say(index, error)
                _, cancelled = self._scheduler.fail(index, number, error)
                self._set_error(task, error, RemoteValueStatus.FAILED)
                self._settle_cancelled([other for other in cancelled if other is not task])
            recalls = self._all_recalls() if self._scheduler.error is not None else []
            self._changed.notify_all()
        self._recall(recalls)

    def _set_error(self, task: Task[Call], error: Exception, status: RemoteValueStatus) -> None:
        if status is RemoteValueStatus.FAILED and error is self._scheduler.error:
            self._failed_at = time.monotonic()
        self._keys.discard(task.payload.key)
        if task.payload.applied and not task.apart:  # what stands apart changes nothing but copies
            of = " and ".join(part.name for part in task.payload.parts)
            self._partly_applied.add(task.payload.function.name, f"{error}".partition("\n")[0] + (of and f", of {of}"))
        for part in task.payload.parts:
            part.release()
        value = task.payload.result()
        if value is not None:
            value.dependents = None
            value._set_error(error, status)
        if task.apart:
            self._changed.notify_all()

    def _settle_cancelled(self, tasks: Iterable[Task[Call]]) -> None:
        """Under the lock."""
        for task in tasks:
            first = self._scheduler.error
            self._cancelled_by_error += first is not None
            if first is not None and self._scheduler.final:  # to schedule it again would be of no use
                self._set_error(task, first, RemoteValueStatus.CANCELLED)
                continue
            error = _cancelled(task.payload.function.name, first, task.payload.applied)
            self._set_error(task, error, RemoteValueStatus.CANCELLED)

    def _say(self, index: int, error: FunctionError) -> None:
        """To who looks on: a function failed, for good."""
        head = error.summary.partition("\n\n")[0]
        self._observed.tell(self._links[index].peer.task, "error", head, error.remote_traceback)

    def _abort(self, error: Exception, *, final: bool) -> None:
        """On the loop's thread."""
        self._recall(self._aborted(error, final=final))

    def _aborted(self, error: Exception, *, final: bool) -> list[Recall]:
        """On any thread: what is to be asked back."""
        with self._lock:
            news = not self._scheduler.final
            self._settle_cancelled(self._scheduler.abort(error, final=final))
            recalls = self._all_recalls()
            self._changed.notify_all()
        if news:
            self._observed.tell("coordinator", "error", str(error))
        return recalls

    # Taking back

    def _recalls_of(self, index: int, tasks: Sequence[Task[Call]] | None = None) -> list[Recall]:
        """Under the lock: how to ask a worker for tasks (None: all it has)."""
        link = self._links[index]
        if tasks is None:
            tasks = self._scheduler.recallable(index)
        if link.connection is None or not tasks:
            return []
        return [Recall(link, link.connection, [task.id for task in tasks], [task.position for task in tasks])]

    def _all_recalls(self) -> list[Recall]:
        """Under the lock: how to ask for everything."""
        return [recall for index in range(len(self._links)) for recall in self._recalls_of(index)]

    def _recall(self, recalls: Iterable[Recall], *, cancel_running: bool = True) -> None:
        """What has not started comes back; what runs is asked to stop, where everything is cancelled."""
        for recall in recalls:
            self._in_background(self._ask_back(recall, cancel_running))

    def _recall_all(self, cancel_running: bool) -> None:
        with self._lock:
            recalls = self._all_recalls()
        self._recall(recalls, cancel_running=cancel_running)

    def _consider_stealing(self, index: int) -> None:
        thief = self._links[index]
        if not (thief.hungry and thief.up):
            return
        with self._lock:
            found = self._scheduler.to_steal() if self._scheduler.workers[index].empty else None
            recalls = [] if found is None or self._links[found[0]].stealing else self._recalls_of(*found)
        self._recall(recalls, cancel_running=False)

    async def _ask_back(self, recall: Recall, cancel_running: bool) -> None:
        recall.link.stealing = True
        try:
            await recall.connection.recall(recall.functions, recall.positions, cancel_running)
        finally:
            recall.link.stealing = False
        # Some may have looked in vain while this went on, and look once only by themselves.
        for index, thief in enumerate(self._links):
            if thief.hungry:
                self._loop.call_later(STEAL_SECONDS, self._consider_stealing, index)
        self._wake_hungry()

    # Servers

    async def _watch_server(self, server: PsLink) -> None:
        error = await server.watch()
        if self._closed:
            return
        logger.error("%s", error)
        self._abort(error, final=True)

    async def tell_seen(self, servers: Sequence[int]) -> None:
        """Have all workers that are there tell these servers of how many updates they were told."""

        async def tell(connection: WorkerConnection) -> None:
            with suppress(*LOST_CONNECTION, TimeoutError):  # then what is known is less
                await asyncio.wait_for(connection.tell_seen(servers), TELL_SECONDS)

        await asyncio.gather(
            *(tell(link.connection) for link in self._links if link.up and link.connection is not None)
        )

    def server_is_lost(self, error: PSUnavailableError) -> None:
        """The coordinator's own client has found it out: final. On any thread, without the lock."""
        if self._closed:
            return
        recalls = self._aborted(error, final=True)
        if recalls:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._recall, recalls)

    def _doubt_servers(self) -> None:
        """Under the lock: a worker says that a server is lost. It may be, or be out of the worker's reach only."""
        if self._scheduler.final or self._closed:
            return
        self._scheduler.doubt()
        try:
            self._loop.call_soon_threadsafe(self._check_servers)
        except RuntimeError:  # the loop is closed
            self._scheduler.no_doubt()

    def _check_servers(self) -> None:
        """On the loop's thread."""

        async def check() -> None:
            checks = [self._loop.create_task(server.check()) for server in self._servers]
            try:
                for done in asyncio.as_completed(checks):
                    if (error := await done) is not None and not self._closed:
                        logger.error("%s", error)
                        self._abort(error, final=True)
                        break
            finally:
                for each in checks:
                    each.cancel()
                with self._lock:
                    self._scheduler.no_doubt()
                    self._changed.notify_all()

        self._in_background(check())

    async def _collect_finished(self, untold: Sequence[IntervalSet]) -> None:
        while True:
            await asyncio.sleep(FINISH_SECONDS)
            with self._lock:
                # Keys with the numbers, never before: else a late copy of an update would meet neither.
                ended, self._scheduler.ended = self._scheduler.ended, []
                keys, self._to_forget = self._to_forget, set()
                for forgotten in self._forgotten:
                    forgotten.update(keys)
                if self._scheduler.queued:  # Ctrl-C has kept somebody from saying so
                    self._ask_to_wake()
            for start, stop in _runs(sorted(ended)):
                for each in untold:
                    each.add(start, stop)

    async def _tell_finished(self, server: PsLink, untold: IntervalSet, forgotten: set[int]) -> None:
        """Each server for itself: one that is gone keeps nobody else waiting."""
        while True:
            await asyncio.sleep(FINISH_SECONDS)
            intervals, keys = list(untold), list(forgotten)
            if not intervals and not keys:
                continue
            reach("coordinator.finish.before")
            try:
                await server.finish_functions(intervals, keys)
            except PsClusterError as error:  # a server that is lost is noticed elsewhere
                logger.debug("%s does not know which functions have ended: %s", server.peer, error)
            else:
                untold.remove(intervals)
                forgotten.difference_update(keys)


def _cancelled(name: str, first: Exception | None, applied: bool = False) -> CancelledError:
    why = f"because another function failed first ({type(first).__name__})" if first else "before it had ended"
    if applied:
        why += f". {PARTLY_APPLIED} If it should count"
    error = CancelledError(f"{name} was cancelled {why}: schedule it again")
    error.__cause__ = first
    return error


def _with_dependents(tasks: Iterable[Task[Call]]) -> list[Task[Call]]:
    """These, and those that will never have their arguments without them."""
    found, todo = dict[Task[Call], None](), list(tasks)
    while todo:
        task = todo.pop()
        if task in found:
            continue
        found[task] = None
        value = task.payload.result()
        if value is not None and value.dependents:
            todo += value.dependents
    return list(found)


def _told_of_part(call: Call, error: E) -> E:
    """The error of a call that is over, which says whether it may have applied a part."""
    if call.applied:
        error.partly_applied, error.summary = True, f"{error.summary}\n{PARTLY_APPLIED}"
    return error


def _listed(found: Sequence[str]) -> str:
    """What there is several times once, with its number."""
    return ", ".join(name if count == 1 else f"{count} times {name}" for name, count in Counter(found).items())


def _is_of_link(failure: Exception) -> bool:
    """The worker is gone, or this attachment to it: not that it says that a parameter server is out of its reach."""
    return isinstance(failure, UnavailableError | StaleError) and not isinstance(failure, PSUnavailableError)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Rising numbers as [start, stop) of those that follow one another."""
    at = 0
    while at < len(numbers):
        start = at
        while at < len(numbers) and numbers[at] - numbers[start] == at - start:
            at += 1
        yield numbers[start], numbers[start] + at - start


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks until they have ended.

    Once is not enough: grpc.aio forgets a cancellation that comes at the moment of a call's reply.
    """
    pending, cancelled = set(tasks), None
    while pending:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=CANCEL_SECONDS)
        except asyncio.CancelledError as error:  # of this very call: but first things first
            cancelled = error
        for task in [task for task in pending if task.done()]:
            pending.remove(task)
            if not task.cancelled():
                task.exception()  # it has been seen
    if cancelled is not None:
        raise cancelled


def _has_definition(link: LinkState, function: CapturedFunction) -> bool:
    """Under the lock: does the worker have it? If so it is the last one used."""
    if function.digest not in link.known:
        return False
    link.known[function.digest] = link.known.pop(function.digest)
    return True


def _step(task: Task[Call], attempt: int, term: int) -> worker_pb2.Step:
    call = task.payload
    step = worker_pb2.Step(
        function=task.id,
        attempt=attempt,
        definition=call.function.digest,
        arguments=call.arguments,
        want_result=call.result() is not None,
        key=call.key,
        term=term,
    )
    if call.parts:
        step.parts.extend(part.handle_key for part in call.parts)
        step.skips = call.skips
    return step


PLACEHOLDER = "remote-value"


def placeholder(key: str) -> value_pb2.Value:
    """What stands for a RemoteValue argument until its value is ready."""
    return value_pb2.Value(handle=value_pb2.Handle(kind=PLACEHOLDER, key=key))


def _too_large(size: int) -> str:
    return (
        f"the arguments take {size >> 20} MiB in one message, more than {MAX_INLINE_BYTES >> 20}: pass arrays or "
        "bytes, which travel beside it, in place of many small objects"
    )


def _fill_arguments(call: Call) -> None:
    """Put the values of RemoteValue arguments, ready now, in the places of their placeholders.

    Raises:
        TypeError: with them the arguments can't be sent.
    """
    if not call.remote or call.arguments is None or isinstance(call.attachments, tuple):
        return
    todo = [call.arguments]
    while todo:
        value = todo.pop()
        kind = value.WhichOneof("kind")
        if kind == "handle" and value.handle.kind == PLACEHOLDER:
            message, buffers = call.remote[value.handle.key]._encoded()
            value.CopyFrom(splice(message, buffers, call.attachments, define=call.define))
        else:
            todo += children(value, kind)
    if (size := call.size) > MAX_INLINE_BYTES:
        raise TypeError(_too_large(size))
    if nesting(call.arguments) > MAX_DEPTH:
        raise TypeError(f"with the values of RemoteValues its arguments are nested more than {MAX_DEPTH} levels deep")
    call.remote = _NOTHING
