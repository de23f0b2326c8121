"""Runs gangs: places their members on workers, ends what is left of one that failed, and sets their results.

What becomes of a gang is decided in `gangs`. A member's result is kept until all have returned: a gang that runs again
may return something else. Where a gang can do without those that are late, their workers are asked now and then whether
they are there, and those that are not are left behind. All methods but that one need the dispatcher's lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Collection, Sequence

from pscluster.coordinator.scheduling.calls.call import Call
from pscluster.coordinator.scheduling.calls.function_errors import cancelled_error
from pscluster.coordinator.scheduling.calls.remote_value import RemoteValueStatus
from pscluster.coordinator.scheduling.connections.lifecycle import LOST_CONNECTION, is_cancelled
from pscluster.coordinator.scheduling.connections.worker_connection import WorkerConnection
from pscluster.coordinator.scheduling.decisions.gang import Gang, GangState
from pscluster.coordinator.scheduling.decisions.tasks import Task
from pscluster.coordinator.scheduling.overtime import Overtime
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.v1 import worker_pb2

logger = logging.getLogger(__name__)

_SECRET_BYTES = 16

_PATIENCE = 2.0
"""Leases for which members may hear nothing of each other before they ask. By then a worker that is frozen, or cut off
from here, too, has been given up, and that is the cause that is told."""


LATE_SECONDS = 1.0
"""How long a member may be late before its worker is asked whether it is there, and how long it has to answer."""


class GangRuns:
    """Does what `gangs` decides. `hand_over` sends a worker its next functions, if it can be done at once."""

    def __init__(self, state: DispatchState, overtime: Overtime, hand_over: Callable[[int], bool]) -> None:
        self._state, self._scheduler = state, state.scheduler
        self._overtime = overtime
        self._hand_over = hand_over
        self._watches = False  # for members that are late
        state.settle_gangs = self.settle

    def settle(self) -> None:
        """Go on with all gangs, after any event that may concern one."""
        if not self._scheduler.gangs:
            return
        while True:
            left_behind, ended = self._scheduler.settle_gangs()
            for task in left_behind:
                task.payload.may_have_applied()
            if left_behind:
                self._overtime.stop_lingering(left_behind)
            for gang in ended:
                self._finish(gang)
            if all(gang.error is None for gang in ended):
                break  # else the error of one may have ended others
        self._place()
        if not self._watches and any(gang.has_enough for gang in self._scheduler.gangs.running):
            self._watches = True
            self._state.on_loop(lambda: self._state.in_background(self._watch_late()))

    async def _watch_late(self) -> None:
        """Leave behind members whose workers are silent, of gangs that can do without them, while there are any."""
        late: set[Task[Call]] = set()
        while True:
            await asyncio.sleep(LATE_SECONDS)
            with self._state.lock:
                gangs = [gang for gang in self._scheduler.gangs.running if gang.has_enough]
                before, late = late, {task for gang in gangs for task in gang.late}
                self._watches = bool(late)
                if not late:
                    return
                workers = [(task, self._state.workers[index]) for task, index in self._where(before & late)]
                asked = [(task, handle.connection) for task, handle in workers if handle.up]
            answered = await asyncio.gather(*(_answers(connection) for _, connection in asked))
            silent = [task for (task, _), answers in zip(asked, answered, strict=True) if not answers]
            if silent:
                with self._state.changed:
                    self._leave_behind(silent)

    def _where(self, tasks: Collection[Task[Call]]) -> list[tuple[Task[Call], int]]:
        """Return the workers of members that are late, and that their gangs can do without."""
        late = [(task, task.gang) for task in tasks if task.gang is not None and task.gang.has_enough]
        return [(task, gang.placed[gang.rank_of(task)]) for task, gang in late if task in gang.late]

    def _leave_behind(self, tasks: Sequence[Task[Call]]) -> None:
        for _, index in self._where(tasks):
            peer = self._state.workers[index].peer
            logger.warning("%s does not answer, and is late: its replica has no result", peer)
            self._state.event_log.record(peer.task, "note", "does not answer, and is late: its replica has no result")
        left_behind = self._scheduler.leave_behind(tasks)
        for task in left_behind:
            task.payload.may_have_applied()
        if left_behind:
            self._overtime.stop_lingering(left_behind)
        self.settle()

    def _place(self) -> None:
        while (gang := self._scheduler.place_gang()) is not None:
            described = gang.described = worker_pb2.Gang(
                id=gang.id, generation=gang.generation, secret=secrets.token_bytes(_SECRET_BYTES)
            )
            if math.isfinite(lease := self._state.worker_lease):
                described.timeout = _PATIENCE * lease
            if gang.steps is not None:
                described.concurrent = len(set(gang.workers or ())) < gang.size
                described.steps.CopyFrom(gang.steps)
                described.steps.epoch += gang.generation
                described.steps.open |= gang.generation > 1
            for index in gang.placed:
                handle = self._state.workers[index]
                assert handle.connection is not None, "a worker that is up is connected"
                described.members.add(
                    worker=handle.peer.index,
                    address=handle.peer.address,
                    incarnation=handle.connection.incarnation,
                    tls_name=handle.peer.tls_name,
                )
            for index in dict.fromkeys(gang.placed):
                if not self._hand_over(index):
                    self._state.on_loop(self._state.workers[index].wake.set)

    def _finish(self, gang: Gang[Call]) -> None:
        """Set the results of a gang that has ended, or its error: like any function's, unless the gang is isolated."""
        state, failed = self._state, gang.error
        if failed is not None and self._scheduler.error is None and not gang.isolated:
            state.settle_cancelled(self._scheduler.abort(failed, final=False))
            state.recall_all()
        unblocked = False
        for rank, call in enumerate(gang.payloads):
            if gang.state is GangState.DONE:
                unblocked |= state.set_value(call, *gang.results.get(rank, gang.no_result))
            elif failed is not None:
                state.set_call_error(call, failed, RemoteValueStatus.FAILED)
            else:
                error = cancelled_error(call.function.name, self._scheduler.error, call.applied)
                state.set_call_error(call, error, RemoteValueStatus.CANCELLED)
        if unblocked:
            state.ask_to_wake()
        self._scheduler.forget(gang.keys)
        self._state.changed.notify_all()


async def _answers(connection: WorkerConnection | None) -> bool:
    try:
        return connection is not None and await connection.answers(LATE_SECONDS)
    except LOST_CONNECTION:
        return False
    except asyncio.CancelledError:  # it was closed meanwhile
        if is_cancelled():
            raise
        return False
