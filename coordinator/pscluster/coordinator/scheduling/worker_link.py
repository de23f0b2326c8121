"""The life of a worker, as its coordinator sees it, on the loop.

    DIALLING -> ATTACHING -> PREPARING (resources are built) -> UP -> LOST -> CLOSING (its incarnation is closed
    on every server) -> DIALLING

Within UP a writer takes tasks and sends them, a thread takes outcomes, a watcher notices that the worker leaves, and
another that it is silent. Whatever fails ends the round.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Callable, Sequence

import grpc
import tenacity

from pscluster.coordinator.scheduling.call import (
    Call,
    fill_arguments,
    step_of,
)
from pscluster.coordinator.scheduling.connections import (
    LOST_CONNECTION,
    TlsDiagnosis,
    seconds_to_redial,
    why_lost,
)
from pscluster.coordinator.scheduling.definitions_cache import DefinitionsCache
from pscluster.coordinator.scheduling.function_errors import (
    deadly,
    not_begun,
    told_of_part,
    too_long,
    unpreparable,
)
from pscluster.coordinator.scheduling.loop import end_tasks
from pscluster.coordinator.scheduling.recalls import Recalls
from pscluster.coordinator.scheduling.remote_value import RemoteValueStatus
from pscluster.coordinator.scheduling.scheduler import State, Task
from pscluster.coordinator.scheduling.server_watch import ServerWatch
from pscluster.coordinator.scheduling.settlement import Settlement
from pscluster.coordinator.scheduling.state import DispatchState, WorkerHandle
from pscluster.coordinator.scheduling.worker_connection import WorkerConnection
from pscluster.core.errors import (
    MisuseError,
    PsClusterError,
    PSUnavailableError,
    UnavailableError,
)
from pscluster.core.fault_points import reach
from pscluster.v1 import worker_pb2

logger = logging.getLogger(__name__)

Outcome = worker_pb2.Outcome

LEAVE_SECONDS = 1.0
"""So long one of a worker's two streams, which tell of its outcomes and of its end, may end behind the other."""


Take = Callable[[int, WorkerConnection, Sequence[Outcome]], None]


class WorkerLinks:
    """Dials all workers, again and again, and brings tasks to those that are there."""

    def __init__(
        self,
        state: DispatchState,
        recalls: Recalls,
        settlement: Settlement,
        server_watch: ServerWatch,
        definitions: DefinitionsCache,
        take: Take,
    ) -> None:
        self._state, self._scheduler = state, state.scheduler
        self._recalls = recalls
        self._settlement = settlement
        self._server_watch = server_watch
        self._definitions = definitions
        self._take = take  # outcomes of a worker, by its index; called on the thread of its connection

    async def serve(self, index: int) -> None:
        """Dial a worker, and bring it functions for as long as it is there; again and again."""
        handle = self._state.workers[index]
        while True:
            connection = await self._connect(index, handle)
            with self._state.changed:
                self._scheduler.worker_up(index)
            handle.up, handle.restarts, handle.heard = True, handle.restarts + 1, time.monotonic()
            if handle.restarts:
                logger.warning("%s is back", handle.peer)
            self._state.event_log.record(handle.peer.task, "up", "is back" if handle.restarts else "is up")
            try:
                await self._until_lost(index, handle, connection)
                handle.why = "it left" if self._scheduler.workers[index].leaving else "its connection ended"
            except (*LOST_CONNECTION, PsClusterError) as error:
                handle.why = str(why_lost(error, "it"))
            except Exception as error:  # a message that can't be written, for one; it must not end the link for good
                logger.exception("the connection to %s failed", handle.peer)
                handle.why = f"{type(error).__name__}: {error}"
            finally:
                handle.up = self._scheduler.workers[index].idle = False
                self._state.no_worker_since = time.monotonic()
                if not self._state.closed:
                    await connection.close()
            if self._state.closed:
                return
            logger.warning("%s is gone: %s", handle.peer, handle.why)
            self._state.event_log.record(handle.peer.task, "down", f"is gone: {handle.why}")
            await self._give_up(index, connection.incarnation)

    async def _connect(self, index: int, handle: WorkerHandle) -> WorkerConnection:
        """Dial until the worker is attached and has all resources, for as long as that takes."""

        def pause(state: tenacity.RetryCallState) -> float:
            chance = random.random()  # noqa: S311 (nothing secret)  # nosec B311
            return seconds_to_redial(state.seconds_since_start or 0.0, chance)

        retrying = tenacity.AsyncRetrying(retry=tenacity.retry_if_exception_type(UnavailableError), wait=pause)
        diagnosis = TlsDiagnosis(handle.peer)
        async for attempt in retrying:
            with attempt:
                return await self._dial(index, handle, diagnosis)
        raise AssertionError("it is tried until it works")

    async def _dial(self, index: int, handle: WorkerHandle, diagnosis: TlsDiagnosis) -> WorkerConnection:
        """One attempt; UnavailableError for whatever goes wrong. In a frame of its own, which the error holds."""
        connection = WorkerConnection(handle.peer, functools.partial(self._take, index), handle.data)
        handle.connection, handle.known, handle.built = connection, {}, set()
        self._scheduler.workers[index].leaving, handle.sent = False, 0
        handle.doomed.clear()
        try:
            await connection.attach(self._state.attach)
            await self._definitions.build_resources(handle, connection)
        except (*LOST_CONNECTION, PsClusterError) as error:
            failure = why_lost(error, "it")
            handle.why = str(failure)
            await connection.close()
            if connection.incarnation:
                await self._give_up(index, connection.incarnation)
            await diagnosis.diagnose(failure)
            handle.why = diagnosis.why or handle.why
            # Refusals, too, may pass: another coordinator's job ends, a token file is put right.
            raise UnavailableError(handle.why) from None
        return connection

    async def _until_lost(self, index: int, handle: WorkerHandle, connection: WorkerConnection) -> None:
        """Write and read until the worker leaves or something fails; raises what failed."""
        reader, worker = connection.ended, self._scheduler.workers[index]
        writer = asyncio.create_task(self._write(index, handle, connection))
        watcher = asyncio.create_task(connection.leaving())
        heart = asyncio.create_task(connection.until_silent(self._state.worker_lease))
        doom = asyncio.create_task(handle.doomed.wait())
        try:
            await asyncio.wait((reader, writer, watcher, heart, doom), return_when=asyncio.FIRST_COMPLETED)
            if heart.done():
                raise UnavailableError(heart.result())
            if doom.done():
                raise UnavailableError("it runs a function that does not stop after its timeout")
            if reader.done() and not watcher.done():  # if it left, the word of that is just behind
                await asyncio.wait((watcher,), timeout=LEAVE_SECONDS)
            if watcher.done():
                worker.leaving = watcher.result()
            if worker.leaving and not reader.done():
                # It gives back what it has not started; what it runs may still end. The writer sees it and ends.
                handle.wake.set()
                with self._state.lock:
                    recalls = self._recalls.of(index)
                self._recalls.ask(recalls, cancel_running=False)
                await asyncio.wait((reader,))
            elif not reader.done():  # outcomes that have come already still count
                await asyncio.wait((reader,), timeout=LEAVE_SECONDS)
            if reader.done():
                if (why := reader.result()) is not None:
                    # Not the stream's own error: with its traceback it would hold this frame, which holds it.
                    raise why_lost(why, "it") if isinstance(why, grpc.RpcError) else why
                if worker.leaving:
                    # It has ended the stream in order: what has no outcome was never begun.
                    with self._state.changed:
                        unread = [task.id for task in self._scheduler.recallable(index)]
                        self._settlement.settle_cancelled(self._scheduler.give_back(index, unread))
                        self._state.changed.notify_all()
                    return
            if writer.done() and not writer.cancelled():
                writer.result()
        finally:
            await end_tasks((writer, watcher, heart, doom))

    async def _give_up(self, index: int, incarnation: int) -> None:
        """The worker's attachment is over: close its incarnation everywhere, then let others have its tasks."""
        handle = self._state.workers[index]
        with self._state.lock:
            had_tasks = self._scheduler.lose(index)
            # It was running; the others waited behind it, so it is the only one that may have had all its attempts.
            first = next(iter(self._scheduler.workers[index].orphaned), None)
            for task in self._scheduler.workers[index].orphaned:
                task.payload.applied = True  # or not: nobody knows
            if first is not None:
                first.payload.deaths = (*first.payload.deaths, f"{handle.peer} ({handle.why})")
                self._state.counts.remember(first, first.payload.function.name, index, time.monotonic(), "lost")
        reach("coordinator.close.before")
        try:
            await asyncio.gather(*(server.close_incarnation(incarnation) for server in self._state.servers))
        except PsClusterError as error:
            if had_tasks or isinstance(error, PSUnavailableError):
                why = f"the updates of a lost worker can't be shut out from all parameter servers: {error}"
                self._settlement.abort(PSUnavailableError(why), final=True)
        reach("coordinator.close.after")
        with self._state.changed:
            if first is not None:
                asked = self._scheduler.was_asked_to_stop(index) is first
                late = asked and not self._scheduler.retry(first)
                if asked and not late:
                    self._settlement.say_retry(index, first, "ran too long")
                last = too_long(index, first) if late else deadly(index, first, self._state.max_attempts)
                failed, cancelled = self._scheduler.requeue(index, last, first.id if late else 0)
                for task in failed:
                    self._settlement.say(index, last)
                    self._settlement.set_error(task, last, RemoteValueStatus.FAILED)
                self._settlement.settle_cancelled(cancelled)
                if first.state is State.QUEUED:
                    self._state.counts.retried_lost += 1
            self._state.changed.notify_all()
        reach("coordinator.retry.after")
        self._state.wake_idle()

    async def _write(self, index: int, handle: WorkerHandle, connection: WorkerConnection) -> None:
        worker = self._scheduler.workers[index]
        while True:
            handle.wake.clear()
            await self._definitions.build_resources(handle, connection)
            with self._state.changed:
                if worker.leaving:
                    connection.end_steps()
                    return
                full = self._scheduler.full
                now = time.monotonic()
                tasks = self._scheduler.take(index, now)
                if tasks:
                    self._state.counts.sent(tasks, now)
                if full and tasks:
                    self._state.changed.notify_all()
                worker.idle = not tasks
            if not tasks:
                timer = self._recalls.consider_stealing_soon(index)
                await handle.wake.wait()
                worker.idle = False  # until it has looked again: it may have resources to build first
                timer.cancel()
                continue
            # What is recalled while it is prepared may be another worker's by then, at a place of its own there.
            places = [task.position for task in tasks]
            ready = await self._prepare(index, handle, connection, tasks, places)
            handle.heard = time.monotonic()
            if ready:
                connection.send(places[0], [self._message(index, task) for task in ready])
                handle.sent = places[0] + len(ready) - 1
            await self._definitions.forget_unused(index, handle, connection)
            del tasks, ready  # lest their arrays, and handles, be kept here until there is something new to send

    def _message(self, index: int, task: Task[Call]) -> worker_pb2.Step:
        if not self._has(index, task):  # recalled, or cancelled: the worker will pass over it
            with self._state.lock:
                self._scheduler.never_sent(index, task)
            return worker_pb2.Step()
        return step_of(task, task.attempts, self._state.term)

    async def _prepare(
        self,
        index: int,
        handle: WorkerHandle,
        connection: WorkerConnection,
        tasks: list[Task[Call]],
        places: list[int],
    ) -> list[Task[Call]]:
        """See to it that the worker has what the tasks need. Those that can't be prepared have failed."""
        await self._definitions.build_resources(
            handle, connection
        )  # what was added since the tasks were taken may be theirs
        ready, last = tasks, ""
        for task, place in zip(tasks, places, strict=True):
            call = task.payload
            if not self._has(index, task):
                continue
            if call.arguments is None and call.function.digest == last:
                continue  # one like the one before, with nothing to prepare
            last = call.function.digest
            try:
                fill_arguments(call)
                for each in (call.function, *call.classes.values()):
                    await self._definitions.define(handle, connection, each)
            except (grpc.RpcError, MisuseError, TypeError) as error:
                failure = unpreparable(error, handle.peer)
                # What was taken behind it goes back, and is taken anew.
                self._fail(index, task.id, failure)
                with self._state.changed:
                    position = tasks.index(task)
                    self._settlement.settle_cancelled(
                        self._scheduler.give_back(index, [other.id for other in tasks[position + 1 :]])
                    )
                    self._state.changed.notify_all()
                ready = tasks[:position]
                handle.wake.set()
                break
            if call.attachments:
                head = worker_pb2.UploadRequest()
                head.attachments.position = place
                head.attachments.sizes.extend(map(len, call.attachments))
                await connection.upload(head, call.attachments)
        return ready

    def _has(self, index: int, task: Task[Call]) -> bool:
        """Is the task with this worker, or on its way there? No lock: should it be recalled in this very moment, the
        worker will pass over it."""
        return self._scheduler.workers[index].sent.get(task.id) is task

    def _fail(self, index: int, number: int, failure: Exception) -> None:
        """A function that never ran fails: it, or its arguments, can't be brought to the worker."""
        with self._state.changed:
            if isinstance(failure, PSUnavailableError):
                self._server_watch.doubt()
            task = self._scheduler.workers[index].sent.get(number)
            if task is not None:
                error = not_begun(task.payload.function, index, task.attempts, failure)
                told_of_part(task.payload, error)  # an attempt before this one
                self._settlement.say(index, error)
                _, cancelled = self._scheduler.fail(index, number, error)
                self._settlement.set_error(task, error, RemoteValueStatus.FAILED)
                self._settlement.settle_cancelled([other for other in cancelled if other is not task])
            recalls = self._recalls.of_all() if self._scheduler.error is not None else []
            self._state.changed.notify_all()
        self._recalls.ask(recalls)
