"""A worker's lifetime as its coordinator sees it, on the loop.

    DIALLING -> ATTACHING -> PREPARING (resources are built) -> UP -> LOST -> CLOSING (its incarnation is closed
    on every server) -> DIALLING, or GONE

A worker that TF_CONFIG names is dialled for as long as the job lasts. One that has joined is GONE when it leaves in
order, or stays away for FORGET_SECONDS, and any is when it is retired: by then its functions are back in the queue. If
another process registers as the same task, it is dialled in the place of the last one.

While it is UP a writer takes tasks and sends them, a thread takes outcomes, and watchers notice that the worker leaves
or is silent. The first of these that ends or fails ends the round.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Sequence

import grpc
import tenacity

from pscluster.coordinator.scheduling.answers import Answers
from pscluster.coordinator.scheduling.calls.call import Call, add_step, fill_arguments
from pscluster.coordinator.scheduling.calls.function_errors import (
    not_begun,
    too_long,
    too_many_deaths,
    unpreparable,
    with_part_applied,
)
from pscluster.coordinator.scheduling.connections.lifecycle import (
    LOST_CONNECTION,
    TlsDiagnosis,
    seconds_to_redial,
    why_lost,
)
from pscluster.coordinator.scheduling.connections.loop import end_tasks
from pscluster.coordinator.scheduling.connections.worker_connection import WorkerConnection
from pscluster.coordinator.scheduling.decisions.tasks import Loss, Task
from pscluster.coordinator.scheduling.definitions_cache import DefinitionsCache
from pscluster.coordinator.scheduling.outcomes import Outcomes
from pscluster.coordinator.scheduling.server_watch import ServerWatch
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.core.errors import FunctionError, MisuseError, PsClusterError, PSUnavailableError, UnavailableError
from pscluster.core.fault_points import reach
from pscluster.core.transport.retry import until
from pscluster.v1 import worker_pb2

logger = logging.getLogger(__name__)

JOIN_SECONDS = 30.0
"""A worker that has not come up for this long is not awaited any more: gangs that can do without it begin."""

LEAVE_SECONDS = 1.0
"""One of a worker's two streams (outcomes, and notice that it leaves) may end this long after the other."""


class WorkerLink:
    """Dials a worker whenever it is down, and sends it functions while it is up."""

    def __init__(
        self,
        state: DispatchState,
        server_watch: ServerWatch,
        definitions: DefinitionsCache,
        outcomes: Outcomes,
        answers: Answers,
        index: int,
    ) -> None:
        self._state, self._scheduler = state, state.scheduler
        self._server_watch = server_watch
        self._definitions = definitions
        self._outcomes, self._answers = outcomes, answers
        self._index, self._handle, self._worker = index, state.workers[index], state.scheduler.workers[index]
        self._diagnosis = TlsDiagnosis(self._handle.peer)

    async def serve(self) -> None:
        """Dial the worker and send it functions until it is lost, over and over, until it is gone for good."""
        handle = self._handle
        while (connection := await self._connect()) is not None:
            with self._state.changed:
                self._scheduler.worker_up(self._index)
                self._state.settle_gangs()
            self._state.on_worker_up(handle.peer)
            handle.up, handle.restarts, handle.heard = True, handle.restarts + 1, time.monotonic()
            if handle.restarts:
                logger.warning("%s is back", handle.peer)
            self._state.event_log.record(handle.peer.task, "up", "is back" if handle.restarts else "is up")
            try:
                await self._until_lost(connection)
                handle.why = "it left" if self._worker.leaving else "its connection ended"
            except (*LOST_CONNECTION, PsClusterError) as error:
                handle.why = str(why_lost(error, "it"))
            except Exception as error:  # such as a message that can't be written; the link must go on
                logger.exception("the connection to %s failed", handle.peer)
                handle.why = f"{type(error).__name__}: {error}"
            finally:
                handle.up = False
                self._scheduler.worker_busy(self._index)
                self._state.no_worker_since = time.monotonic()
                if not self._state.closed:
                    await connection.close()
            if self._state.closed:
                return
            logger.warning("%s is gone: %s", handle.peer, handle.why)
            self._state.event_log.record(handle.peer.task, "down", f"is gone: {handle.why}")
            handle.expected_since = time.monotonic()
            await self._give_up(connection.incarnation)
            # Unless another process has registered meanwhile.
            has_left = self._worker.leaving and handle.transient and handle.boot_id == connection.boot_id
            if has_left or handle.retired:
                break
        self._forget()

    def _forget(self) -> None:
        """Take the worker out of the cluster: it has left, or does not come back."""
        handle = self._handle
        news = f"has left the cluster: {handle.why}"
        logger.info("%s %s", handle.peer, news)
        self._state.event_log.record(handle.peer.task, "note", news)
        with self._state.changed:
            error = UnavailableError(
                f"{handle.peer} has left the cluster ({handle.why}), and a function that runs on it together with "
                "others can't run without it: run it again on the workers that are there"
            )
            self._scheduler.worker_left(self._index, error)
            self._state.settle_gangs()
            self._state.changed.notify_all()
        self._state.on_worker_left(handle.peer)

    async def _connect(self) -> WorkerConnection | None:
        """Dial until the worker is attached and has all resources, however long that takes. None: it is forgotten."""

        def pause(state: tenacity.RetryCallState) -> float:
            chance = random.random()  # noqa: S311 (nothing secret)  # nosec B311
            return seconds_to_redial(state.seconds_since_start or 0.0, chance)

        retrying = tenacity.AsyncRetrying(**until(wait=pause, over=self._handle.is_forgotten))
        timer = self._state.loop.call_later(JOIN_SECONDS, self._missing)
        try:
            connection: WorkerConnection = await retrying(self._dial)
        except tenacity.RetryError:
            return None
        finally:
            timer.cancel()
        return connection

    def _missing(self) -> None:
        with self._state.lock:
            self._scheduler.worker_missing(self._index)
            self._state.settle_gangs()

    async def _dial(self) -> WorkerConnection:
        """Dial once. Raise UnavailableError for any failure, from a frame that holds nothing but this attempt."""
        handle, diagnosis = self._handle, self._diagnosis
        if diagnosis.peer is not handle.peer:  # it has moved
            diagnosis = self._diagnosis = TlsDiagnosis(handle.peer)
        boot_id = handle.boot_id
        take = functools.partial(self._outcomes.take, self._index)
        take_questions = functools.partial(self._answers.take, self._index)
        connection = WorkerConnection(handle.peer, take, handle.transport, take_questions)
        connection.resharded = self._state.resharded
        handle.connection, handle.known, handle.built = connection, {}, set()
        handle.sent = 0
        handle.abandoned.clear()
        handle.moved.clear()  # what has moved before is in the request
        try:
            await connection.attach(self._state.attach)
            connection.follow_servers(handle.moved, self._state.attach)
            if boot_id and connection.boot_id != boot_id:
                raise UnavailableError("another process answers there than the one that has registered")
            await self._definitions.build_resources(handle, connection)
        except (*LOST_CONNECTION, PsClusterError) as error:
            failure = why_lost(error, "it")
            handle.why = str(failure)
            await connection.close()
            if connection.incarnation:
                await self._give_up(connection.incarnation)
            await diagnosis.diagnose(failure)
            handle.why = diagnosis.why or handle.why
            # Refusals may pass as well: another coordinator's job ends, a token file is corrected.
            raise UnavailableError(handle.why) from None
        return connection

    async def _until_lost(self, connection: WorkerConnection) -> None:
        """Send and receive until the worker leaves or something fails; raise that failure."""
        reader, worker, handle = connection.ended, self._worker, self._handle
        writer = asyncio.create_task(self._write(connection))
        watcher = asyncio.create_task(connection.leaving())
        heartbeat = asyncio.create_task(connection.until_silent(self._state.worker_lease))
        abandoned = asyncio.create_task(handle.abandoned.wait())
        try:
            await asyncio.wait((reader, writer, watcher, heartbeat, abandoned), return_when=asyncio.FIRST_COMPLETED)
            if heartbeat.done():
                raise UnavailableError(heartbeat.result())
            if abandoned.done():
                raise UnavailableError(handle.why_abandoned)
            if reader.done() and not watcher.done():  # if it left, the notice follows at once
                await asyncio.wait((watcher,), timeout=LEAVE_SECONDS)
            if watcher.done() and watcher.result():
                self._scheduler.worker_leaves(self._index)
            if worker.leaving and not reader.done():
                # It gives back tasks that it has not started; what it runs may still end. The writer notices and ends.
                self._handle.wake.set()
                with self._state.lock:
                    self._state.recall(self._index, cancel_running=False)
                await asyncio.wait((reader,))
            elif not reader.done():  # outcomes that have arrived still count
                await asyncio.wait((reader,), timeout=LEAVE_SECONDS)
            if reader.done():
                if (why := reader.result()) is not None:
                    # Not the stream's own error: with its traceback it would hold this frame, which holds it.
                    raise why_lost(why, "it") if isinstance(why, grpc.RpcError) else why
                if worker.leaving:
                    # It has ended the stream cleanly: tasks without an outcome never began.
                    with self._state.changed:
                        self._state.settle_cancelled(self._scheduler.give_back(self._index, worker.sent))
                        self._state.settle_gangs()
                        self._state.changed.notify_all()
                    return
            if writer.done() and not writer.cancelled():
                writer.result()
        finally:
            await end_tasks((writer, watcher, heartbeat, abandoned))

    async def _give_up(self, incarnation: int) -> None:
        """Close a lost worker's incarnation on every server, then queue its tasks again."""
        with self._state.lock:
            ran = self._scheduler.lose(self._index)
            for task in self._worker.orphaned:
                task.payload.may_have_applied()
            if ran is not None:
                ran.payload.deaths = (*ran.payload.deaths, f"{self._handle.peer} ({self._handle.why})")
                self._state.metrics.remember(ran, ran.payload.function.name, self._index, time.monotonic(), "lost")
            self._state.settle_gangs()
        reach("coordinator.close.before")
        try:
            await asyncio.gather(*(server.close_incarnation(incarnation) for server in self._state.servers))
        except PsClusterError as error:
            if ran is not None or isinstance(error, PSUnavailableError):
                why = f"the updates of a lost worker can't be blocked on all parameter servers: {error}"
                self._state.abort(PSUnavailableError(why), final=True)
        reach("coordinator.close.after")
        with self._state.changed:
            if ran is not None:
                self._requeue(ran)
            self._state.settle_gangs()
            self._state.changed.notify_all()
        reach("coordinator.retry.after")
        self._state.wake_idle()

    def _requeue(self, ran: Task[Call]) -> None:
        """Queue the worker's tasks again, unless the one that it ran has to fail. Under the lock."""
        loss = self._scheduler.decide_loss(self._index, ran)
        error: FunctionError | None = None
        if loss is Loss.TOO_LONG:
            error = too_long(self._index, ran)
        elif loss is Loss.DEADLY:
            error = too_many_deaths(self._index, ran, self._state.max_attempts)
        elif loss is not None:
            self._state.metrics.retried_lost += 1
            if loss is Loss.RETRY:
                self._state.say_retry(self._index, ran, "ran too long")
        cancelled = self._scheduler.requeue(self._index, error)
        if error is not None:
            self._state.settle_failed(self._index, ran, error)
        self._state.settle_cancelled(cancelled)

    async def _write(self, connection: WorkerConnection) -> None:
        handle, worker = self._handle, self._worker
        while True:
            handle.wake.clear()
            await self._definitions.build_resources(handle, connection)
            with self._state.changed:
                if worker.leaving:
                    connection.end_steps()
                    return
                full = self._scheduler.full
                now = time.monotonic()
                tasks = self._scheduler.take(self._index, now)
                if tasks:
                    self._state.metrics.sent(tasks, now)
                if full and tasks:
                    self._state.changed.notify_all()
                if not tasks:
                    self._state.settle_gangs()  # this worker may be the last that one waits for
            if not tasks:
                timer = self._state.steal_soon(self._index)
                await handle.wake.wait()
                self._scheduler.worker_busy(self._index)  # until the next check: there may be resources to build first
                timer.cancel()
                continue
            # A task that is recalled while it is prepared may have another worker, and position, by then.
            positions = [task.position for task in tasks]
            ready = await self._prepare(connection, tasks, positions)
            handle.heard = time.monotonic()
            if ready:
                connection.send(self._request(positions[0], ready))
                handle.sent = positions[0] + len(ready) - 1
            await self._definitions.forget_unused(self._index, handle, connection)
            del tasks, ready  # so as not to hold their arrays and handles until there is something new to send

    def _request(self, position: int, tasks: Sequence[Task[Call]]) -> worker_pb2.StepsRequest:
        request = worker_pb2.StepsRequest(position=position)
        for task in tasks:
            if self._has(task):
                add_step(request, task, task.attempts, self._state.term, self._state.placements)
                continue
            with self._state.lock:
                self._scheduler.lingering_ended(self._index, task.id)
            request.steps.add()  # recalled or cancelled: the worker will skip its position
        return request

    async def _prepare(
        self, connection: WorkerConnection, tasks: list[Task[Call]], positions: list[int]
    ) -> list[Task[Call]]:
        """Send the worker what the tasks need, and return those to send: after one that fails here none is."""
        handle = self._handle
        await self._definitions.build_resources(handle, connection)  # the tasks may need those added since
        last = ""
        for task, position in zip(tasks, positions, strict=True):
            call = task.payload
            if not self._has(task):
                continue
            if call.arguments is None and call.function.digest == last:
                continue  # the same function as before, with nothing to prepare
            last = call.function.digest
            try:
                fill_arguments(call)
                for definition in (call.function, *call.classes.values()):
                    await self._definitions.define(handle, connection, definition)
            except (grpc.RpcError, MisuseError, TypeError) as error:
                self._fail(task, unpreparable(error, handle.peer), tasks[tasks.index(task) + 1 :])
                handle.wake.set()
                return tasks[: tasks.index(task)]
            if call.attachments:
                head = worker_pb2.UploadRequest()
                head.attachments.position = position
                head.attachments.sizes.extend(map(len, call.attachments))
                await connection.upload(head, call.attachments)
        return tasks

    def _has(self, task: Task[Call]) -> bool:
        """Return whether the worker still has the task. Takes no lock: a task that is recalled just then is skipped."""
        return self._worker.sent.get(task.id) is task

    def _fail(self, task: Task[Call], failure: Exception, later: Sequence[Task[Call]]) -> None:
        """Fail a function that the worker can't be sent, and give back the tasks that were taken after it."""
        with self._state.changed:
            if isinstance(failure, PSUnavailableError):
                self._server_watch.doubt()
            if self._has(task):
                error = not_begun(task.payload.function, self._index, task.attempts, failure)
                with_part_applied(task.payload, error)  # an attempt before this one
                self._state.fail(self._index, task, error)
            self._state.settle_cancelled(self._scheduler.give_back(self._index, [other.id for other in later]))
            if self._scheduler.error is not None:
                self._state.recall_all()
            self._state.settle_gangs()
            self._state.changed.notify_all()
