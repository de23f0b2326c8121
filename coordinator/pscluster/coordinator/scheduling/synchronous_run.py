"""The synchronous run of a job: numbers its steps, and the attempts at them.

A run begins with the first steps, and anew after a checkpoint is restored, whose steps are others. The iterators go on
where they were: server 0 keeps their positions for the next run, and replicas ask for them before its first step.

Only one call takes steps at a time. It knows how many steps are committed: all that it asked for, if it succeeded; if
it did not, it asks server 0, which ends the attempt, and has all servers apply what is committed. So between two calls
no server holds anything of a step that is not applied, and no other part of the job needs to know of steps.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pscluster.core.errors import PsClusterError
from pscluster.core.ids import fresh_id
from pscluster.ps.client.updates.updater import Updater
from pscluster.ps.spec import steps_lost
from pscluster.v1 import worker_pb2

_GENERATION_BITS = 20
"""An epoch is the number of the call, and below it the generation of its gang."""


class SynchronousRun:
    """The run of one job. Thread-safe. `options` has what the strategy says of all steps."""

    def __init__(self, updater: Updater, options: worker_pb2.SynchronousSteps) -> None:
        self._updater = updater
        self._options = options
        self._lock = threading.Lock()
        self._id, self._term = 0, -1
        self._is_first = True  # of this job
        self._calls = 0
        self._settled = True  # all that is committed is applied, and nothing else will be
        self.committed = 0
        """How many steps of the run are committed; with bounded staleness, how many were asked for."""

    @contextlib.contextmanager
    def steps(
        self, count: int, collect: worker_pb2.SynchronousSteps.Collect
    ) -> Iterator[tuple[worker_pb2.SynchronousSteps, Callable[..., Any]]]:
        """Yield the message for `count` steps, and what to call with the number of steps that are then committed.

        A block that does not call it, or raises, may have committed any of them. If a replica was left behind, this is
        to be told: then the servers that it should have told of the last steps are told here.
        """
        with self._lock:
            if (term := self._updater.term) != self._term:
                self._is_first = not self._id
                self._id, self._term = fresh_id(), term
                self.committed, self._settled = 0, True
            if self._options.staleness:
                # Their updates are applied as they come: nothing is ever left to be applied.
                message = self._message(count, collect)
                self.committed += count
                yield message, lambda *_: None
                return
            if not self._settled:
                self._settle()
            message = self._message(count, collect)
            self._settled = False
            try:
                yield message, self._committed
            finally:
                if not self._settled:
                    with contextlib.suppress(PsClusterError):  # then the next call does it
                        self._settle()

    def _message(self, count: int, collect: worker_pb2.SynchronousSteps.Collect) -> worker_pb2.SynchronousSteps:
        self._calls += 1
        message = worker_pb2.SynchronousSteps(
            run=self._id,
            first=self.committed,
            count=count,
            epoch=self._calls << _GENERATION_BITS,
            collect=collect,
            open=not (self.committed or self._is_first),
        )
        message.MergeFrom(self._options)
        return message

    def settle(self, *, anew: bool = False) -> None:
        """Have all servers apply what is committed, if the last call failed and could not do that.

        UnavailableError if a server can't be reached. Does nothing while steps are taken. `anew`: also if that was
        done: a server that has restarted since may have found in its log what an attempt had staged that failed.
        """
        if self._lock.acquire(blocking=False):
            try:
                if not self._settled or (anew and self._stages):
                    self._settle()
            finally:
                self._lock.release()

    @property
    def _stages(self) -> bool:
        """Whether there is a run whose contributions are staged, and would be taken."""
        return bool(self._id) and self._term == self._updater.term and not self._options.staleness

    def _committed(self, steps: int, left_behind: bool = False) -> None:
        if left_behind:
            self._settle()
        else:
            self.committed, self._settled = steps, True

    def _settle(self) -> None:
        """End what may be left of the last attempt."""
        self._calls += 1
        committed = self._updater.settle_run(self._id, self._calls << _GENERATION_BITS)
        if committed < self.committed:
            raise steps_lost(0, committed, self.committed)
        self.committed, self._settled = committed, True
