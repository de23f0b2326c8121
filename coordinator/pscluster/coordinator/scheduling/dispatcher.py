"""The shell around the scheduler: moves tasks to workers and outcomes back.

One lock guards the scheduler and all transitions of RemoteValues; it is held for decisions only. User threads submit
tasks and wait on its condition. Each worker's outcomes are taken by a thread. The loop's thread maintains connections,
recalls tasks, and runs a writer for each worker, which prepares tasks and sends them. While a writer is waiting for
tasks (its worker is idle), the other threads send tasks that need no preparation themselves, under the lock: sending
does not block. So a function that is scheduled alone reaches its worker without involving the loop.

    state              what the parts share: scheduler, lock, workers; settling and recalling tasks
    outcomes           hands tasks to idle workers, takes outcomes    worker_link   a worker's lifetime, and its writer
    definitions_cache  what each worker has                           server_watch  lost servers; what they may forget
    waits              join, cancel, barriers                         overtime      tasks that run too long
    gang_runs          functions that run together                  answers       what running functions ask
    queue_stats        the state of all that, as metrics and in words

Others rely on this order: a result's large arrays are fetched before its task counts as finished; a lost worker's
incarnation is closed on every server before its tasks go back to the queue. The ids of ended functions reach the
servers in the background, since they only free memory there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from pscluster.coordinator.scheduling.answers import Answers
from pscluster.coordinator.scheduling.calls.call import Call
from pscluster.coordinator.scheduling.calls.remote_value import RemoteValue, RemoteValueStatus
from pscluster.coordinator.scheduling.connections.lifecycle import end_job, is_cancelled
from pscluster.coordinator.scheduling.connections.loop import end_tasks
from pscluster.coordinator.scheduling.connections.server_link import ServerAttachment
from pscluster.coordinator.scheduling.decisions.gang import Gang
from pscluster.coordinator.scheduling.decisions.tasks import Task
from pscluster.coordinator.scheduling.definitions_cache import DefinitionsCache
from pscluster.coordinator.scheduling.gang_runs import GangRuns
from pscluster.coordinator.scheduling.outcomes import Outcomes
from pscluster.coordinator.scheduling.overtime import Overtime
from pscluster.coordinator.scheduling.queue_stats import QueueStatus
from pscluster.coordinator.scheduling.server_watch import ServerWatch
from pscluster.coordinator.scheduling.state import DispatchState, WorkerHandle
from pscluster.coordinator.scheduling.waits import Waits
from pscluster.coordinator.scheduling.worker_link import WorkerLink
from pscluster.coordinator.waiting import deadline_of
from pscluster.core.errors import CancelledError, MisuseError, PsClusterError
from pscluster.core.fault_points import reach
from pscluster.core.transport.channels import PeerAddress

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Dispatcher:
    """Runs the tasks of one coordinator on the workers of its cluster."""

    def __init__(self, state: DispatchState) -> None:
        self.state, self._scheduler = state, state.scheduler
        self._no_workers: PsClusterError | None = None  # why no worker will come up by itself
        self._overtime = Overtime(state)
        self.status = QueueStatus(state)
        self.waits = Waits(state, self.status, self._overtime)
        self.servers = ServerWatch(state)
        self.definitions = DefinitionsCache(state, self.servers)
        self._outcomes = Outcomes(state, self.servers, self.definitions)
        self._answers = Answers(state)
        self._gangs = GangRuns(state, self._overtime, self._outcomes.hand_over)

    def atomically(self, query: Callable[[], T]) -> T:
        """Return what a query returns while no task begins or ends. It may take the locks of positions only."""
        with self.state.lock:
            return query()

    def forget_ended(self, keys: Iterable[int]) -> set[int]:
        """Let the servers forget those of these keys that are not scheduled again, and return them."""
        with self.state.lock:
            return self._scheduler.forget(keys)

    def submit(self, task: Task[Call], key: str = "", left: float | None = None) -> None:
        """Add a task to the queue. Blocks while the queue is full; raises the pending error, or the cluster's.

        An isolated task is cancelled by such an error, which stays pending. Raises WaitTimeoutError after `left` s.
        """
        state, scheduler = self.state, self._scheduler
        deadline = deadline_of(left)
        task.size = task.payload.check_size()
        # The lock, not its condition: entering that is Python code, where Ctrl-C could leave it locked forever.
        with state.lock:
            self._wait_for_room(deadline, task.payload.function.name if task.isolated else "")
            pending: list[RemoteValue] = []
            for value in task.payload.remote.values():
                if value._error is not None:
                    raise CancelledError(f"an argument has no value: {value!r}") from value._error
                if value.status is RemoteValueStatus.NOT_READY:
                    pending.append(value)
            if scheduler.is_scheduled(task.key):
                raise MisuseError(
                    f"a function with the key {key!r} is already scheduled and has not ended: "
                    "use one key per piece of work"
                )
            task.blockers, task.since = len(pending), time.monotonic()
            if task.limits.timeout is not None and not self._overtime.timed.is_set():
                state.loop.call_soon_threadsafe(self._overtime.timed.set)
            free = None if pending or scheduler.queued else scheduler.next_free()
            # In this order, so that Ctrl-C leads to a wake-up too many, not one too few. A task that is handed over
            # directly needs none: the loop finds it by itself.
            if not pending and free is None:
                state.ask_to_wake()
            for value in pending:
                if value.dependents is None:
                    value.dependents = []
                value.dependents.append(task)
            scheduler.add(task)
            if free is not None and not self._outcomes.hand_over(free):
                state.ask_to_wake()

    def submit_gang(self, gang: Gang[Call], left: float | None = None) -> None:
        """Add a gang. Blocks, and raises, as `submit` does. Its arguments must be ready."""
        for call in gang.payloads:
            call.check_size()
        with self.state.lock:
            self._wait_for_room(deadline_of(left), gang.payloads[0].function.name if gang.isolated else "")
            gang.since = time.monotonic()
            if gang.limits.timeout is not None and not self._overtime.timed.is_set():
                self.state.loop.call_soon_threadsafe(self._overtime.timed.set)
            self._scheduler.add_gang(gang)
            self.state.settle_gangs()

    def _wait_for_room(self, deadline: float, isolated: str) -> None:
        """Wait until a task may be added; `isolated` is the name of an isolated one. Under the lock."""
        state, scheduler = self.state, self._scheduler
        while True:
            if scheduler.error is not None:
                if isolated:
                    self.waits.check_may_run(isolated)
                self.waits.raise_error(deadline, "schedule")
            if self._no_workers is not None:
                raise self._no_workers.with_traceback(None)
            if state.closed:
                raise CancelledError("the strategy is closed: no more functions can be scheduled")
            if scheduler.may_add(threading.get_ident()):
                return
            self.waits.wait(deadline, lambda: "timed out before everything was scheduled")

    def workers_gone(self, error: PsClusterError | None) -> None:
        """Fail all tasks with this error: no worker is left, and none will come up by itself. None: one will."""
        with self.state.lock:
            self._no_workers = error
            busy = not self._scheduler.idle
        if error is not None and busy:
            self.state.abort(error, final=False)

    async def start(self) -> None:
        """Begin to dial the workers and to watch the servers."""
        jobs = [self._link(index) for index in range(len(self.state.workers))]
        jobs += [*self.servers.jobs(), self.status.warn_when_quiet(), self._overtime.watch()]
        self.state.jobs = [asyncio.create_task(self._supervised(job)) for job in jobs]

    def _link(self, index: int) -> Coroutine[Any, Any, None]:
        parts = self.state, self.servers, self.definitions, self._outcomes, self._answers
        return WorkerLink(*parts, index).serve()

    def join(self, peer: PeerAddress, boot_id: int) -> None:
        """Take a worker that has registered: a new one, or a new process of one, which may be at another place.

        On the loop's thread.
        """
        state = self.state
        known = {handle.peer.index: index for index, handle in enumerate(state.workers)}
        place = known.get(peer.index)
        if place is not None and self._scheduler.workers[place].gone is None:
            handle = state.workers[place]
            if (peer.address, boot_id) != (handle.peer.address, handle.boot_id):
                self._note(peer, "has registered")
            if handle.up and handle.connection is not None and handle.connection.boot_id != boot_id:
                handle.abandon("another process has registered as this task")
            handle.move(peer, boot_id)
            return
        self._note(peer, "has joined the cluster")
        handle = WorkerHandle(peer, boot_id, transient=True)
        with state.changed:
            if state.closed:
                return
            index = self._scheduler.worker_joined(place)
            if index == len(state.workers):
                state.workers.append(handle)
            else:
                state.workers[index] = handle
            state.changed.notify_all()
        self._run(self._link(index))

    def _run(self, job: Coroutine[Any, Any, None]) -> None:
        """Run another job for as long as it takes, or until the end."""
        task = self.state.loop.create_task(self._supervised(job))
        self.state.jobs.append(task)
        task.add_done_callback(self.state.jobs.remove)

    def add_server(self, server: ServerAttachment) -> None:
        """Watch a server that was added, and have all workers know it. On the loop's thread."""
        for job in self.servers.add(server):
            self._run(job)
        self.state.servers_moved()

    def _note(self, peer: PeerAddress, news: str) -> None:
        logger.info("%s %s", peer, news)
        self.state.event_log.record(peer.task, "note", news)

    def retire(self, index: int) -> None:
        """Let the worker with this index leave for good when it is next down, or now if it is. On the loop's thread."""
        for handle in self.state.workers:
            if handle.peer.index == index:
                handle.retired = True

    def places(self, indices: Iterable[int]) -> list[int]:
        """Return the scheduler's indices of the workers with these indices."""
        known = {handle.peer.index: place for place, handle in enumerate(self.state.workers)}
        return [known[index] for index in indices]

    def is_there(self, index: int) -> bool:
        """Return whether the worker with this index is connected, or expected to be for the first time."""
        workers = zip(self.state.workers, self._scheduler.workers, strict=True)
        return any(handle.up or worker.awaited for handle, worker in workers if handle.peer.index == index)

    async def _supervised(self, job: Coroutine[Any, Any, None]) -> None:
        """Make a job's failure the cluster's error: others would wait forever for a job that ended unnoticed."""
        try:
            await job
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            failure: BaseException = error
        except Exception as error:
            failure = error
        else:
            return
        logger.error("a job of the coordinator failed", exc_info=failure)
        self.state.abort(PsClusterError(f"the coordinator failed ({type(failure).__name__}: {failure})"), final=True)

    async def close(self, reason: str) -> None:
        """Cancel all tasks, tell all roles that the job is over, and close the connections."""
        with self.state.changed:
            self.state.closed = True
            cancelled = self._scheduler.abort(CancelledError(f"the job is over: {reason}"), final=True)
            self.state.settle_cancelled(cancelled)
            self.state.changed.notify_all()
        for server in self.state.servers:
            server.over = True
        # The roles first, while they are connected: they must not take the end for a lost coordinator.
        workers = zip(self.state.workers, self._scheduler.workers, strict=True)
        peers = [handle.peer for handle, worker in workers if worker.gone is None]
        peers += [server.peer for server in self.state.servers]
        reach("coordinator.end.before")
        await asyncio.gather(*(end_job(peer, self.state.attach.job, reason) for peer in peers))
        reach("coordinator.end.after")
        await end_tasks(self.state.jobs)
        await asyncio.gather(*(handle.connection.close() for handle in self.state.workers if handle.connection))
        with self.state.changed:
            for index, handle in enumerate(self.state.workers):
                handle.up = False
                self._scheduler.lose(index)
                self.state.settle_cancelled(self._scheduler.requeue(index))
            self._scheduler.shut_out()
            self.state.settle_gangs()
            self.state.changed.notify_all()
