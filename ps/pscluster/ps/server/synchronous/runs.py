"""The synchronous runs that a store knows, with what is staged of each."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from pscluster.core.errors import ProtocolError
from pscluster.ps.server.synchronous.run import Run
from pscluster.v1 import ps_pb2

T = TypeVar("T")

MAX_RUNS = 16
"""The most runs that a store knows; old ones of which nothing is staged make room. There is one for each strategy of a
job, and restore."""


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
        self._busy: dict[int, object] = {}  # by run, a step of it that is being applied
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
            if len(self._by_id) >= MAX_RUNS:
                self._make_room()
            run = self._by_id[run_id] = Run(self._server, self._applied(run_id), self.whole)
        return run

    def _make_room(self) -> None:
        for run_id, run in self._by_id.items():
            if not run.staged and run_id not in self._busy:
                del self._by_id[run_id]
                return
        raise ProtocolError(f"contributions to {MAX_RUNS} synchronous runs are staged here already")

    def begin_step(self, run_id: int) -> None:
        """Note that a step of this run is being applied."""
        self._busy[run_id] = object()

    def end_step(self, run_id: int, *, applied: bool) -> None:
        """Note that the step is applied, or could not be. Takes the lock."""
        with self.changed:
            run = self._by_id[run_id]
            if applied:
                run.end_step()
            else:
                run.torn = self._applied(run_id) > run.applied
            del self._busy[run_id]
            self.changed.notify_all()

    def until_ended(self) -> None:
        """Return once the steps that are being applied are in the log, or failed. Takes the lock."""
        with self.changed:
            busy = list(self._busy.values())
            while any(step in busy for step in self._busy.values()):
                self.changed.wait()

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """Run the block while no step is being applied, or may begin to be. Takes the lock."""
        with self.changed:
            while self._busy:
                self.changed.wait()
            yield
            self.changed.notify_all()

    @property
    def torn(self) -> bool:
        """Whether a step is applied that may be in no log. Takes the lock."""
        with self.changed:
            return any(run.torn for run in self._by_id.values())

    @property
    def known(self) -> bool:
        """Whether there has been any synchronous run. Takes the lock."""
        with self.changed:
            return bool(self._by_id)

    def drop(self, over: Callable[[T], bool]) -> None:
        """Drop what is staged of runs that are over: no step of them will be committed."""
        for run_id, run in self._by_id.items():
            if run_id not in self._busy and any(map(over, run.staged.values())):
                run.drop()

    def contributions(self) -> list[T]:
        """Return all that is staged."""
        return [contribution for run in self._by_id.values() for contribution in run.in_order()]

    def staged(self) -> list[T]:
        """Return all that is staged, for a new segment of the log. Takes the lock."""
        with self.changed:
            return self.contributions()

    # After a restart, by one thread

    def found(self, message: ps_pb2.Contribution, contribution: T) -> None:
        """Take a contribution from a log. All earlier steps were applied before it was staged."""
        run = self.found_epoch(message.run, message.step, message.epoch)
        if (message.step, message.epoch) == (run.applied, run.epoch):
            run.replicas, run.together = message.replicas, message.together or 1
            run.staged[message.replica] = contribution

    def found_epoch(self, run_id: int, step: int, epoch: int, *, unusable: bool = False) -> Run[T]:
        """Take note that an epoch has begun before this step. `unusable`: of a contribution that can't be used."""
        run = self._found.setdefault(run_id, Run(self._server))
        if (step, epoch) > (run.applied, run.epoch):
            run.applied, run.epoch, run.replicas, run.whole = step, epoch, 0, True
            run.staged.clear()
        if unusable and (step, epoch) == (run.applied, run.epoch):
            run.whole = False
        return run

    def end_of_log(self) -> None:
        """Restore the runs, now that all of the log is read and the ledger knows which steps were applied."""
        for run_id, run in self._found.items():
            if (applied := self._applied(run_id)) > run.applied:
                run.applied, run.whole = applied, True
                run.staged.clear()
            self._by_id[run_id] = run
        self._found.clear()
