"""The synchronous runs that a store knows, with what is staged of each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from pscluster.core.errors import ProtocolError
from pscluster.ps.server.synchronous.run import Run

T = TypeVar("T")

MAX_RUNS = 16
"""The most runs that a store knows; the oldest make room. There is one for each strategy of a job, and restore."""


class Runs(Generic[T]):
    """The runs of one store. All access under `changed`, except where a method says otherwise.

    Args:
        server: the index of this one.
        applied: returns how many steps of a run the ledger knows to have been applied.
    """

    def __init__(self, server: int, applied: Callable[[int], int]) -> None:
        self._server, self._applied = server, applied
        self.changed = threading.Condition()
        self.whole = True  # False: restored without a log
        self._by_id: dict[int, Run[T]] = {}
        self._busy: set[int] = set()  # runs of which a step is being applied
        self._found: dict[int, Run[T]] = {}  # in a log

    def has_reached(self, run_id: int, step: int) -> bool:
        """Return whether this many steps of a run have been applied. Takes no lock."""
        run = self._by_id.get(run_id)
        return run is not None and run.applied >= step

    def idle(self, run_id: int) -> Run[T]:
        """Return a run, once no step of it is being applied. ProtocolError if the number is none."""
        if not run_id:
            raise ProtocolError("a synchronous step of a run without a number")
        while run_id in self._busy:
            self.changed.wait()
        run = self._by_id.get(run_id)
        if run is None:
            while len(self._by_id) >= MAX_RUNS:
                del self._by_id[next(iter(self._by_id))]
            run = self._by_id[run_id] = Run(self._server, self._applied(run_id), self.whole)
        return run

    def begin_step(self, run_id: int) -> None:
        """Note that a step of this run is being applied."""
        self._busy.add(run_id)

    def end_step(self, run_id: int, *, applied: bool) -> None:
        """Note that the step is applied, or could not be. Takes the lock."""
        with self.changed:
            if applied:
                self._by_id[run_id].end_step()
            self._busy.discard(run_id)
            self.changed.notify_all()

    def staged(self) -> list[T]:
        """Return all that is staged, for a new segment of the log. Takes the lock."""
        with self.changed:
            return [contribution for run in self._by_id.values() for contribution in run.in_order()]

    # After a restart, by one thread

    def found(self, run_id: int, step: int, epoch: int, replica: int, replicas: int, contribution: T) -> None:
        """Take a contribution from a log. All earlier steps were applied before it was staged."""
        run = self._found.setdefault(run_id, Run(self._server))
        if (step, epoch) > (run.applied, run.epoch):
            run.applied, run.epoch, run.replicas = step, epoch, replicas
            run.staged.clear()
        if (step, epoch) == (run.applied, run.epoch):
            run.staged[replica] = contribution

    def end_of_log(self) -> None:
        """Restore the runs, now that all of the log is read and the ledger knows which steps were applied."""
        for run_id, run in self._found.items():
            if (applied := self._applied(run_id)) > run.applied:
                run.applied = applied
                run.staged.clear()
            self._by_id[run_id] = run
        self._found.clear()
