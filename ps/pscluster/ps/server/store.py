"""What a parameter server holds for a job: the directory with its shards, and the ledger of applied updates.

This is the state and its locks; `creation` adds to it, `reads` and `updates` go through it.

Updates and reads of different shards run at the same time, those of one shard one after the other. An update
request is checked whole before any of it is applied; then each item is applied under its shard's lock, in
which the ledger is asked and told, so that a repetition that arrives while the first is in progress waits
for it and finds it done. Closing an incarnation takes every shard's lock once after marking it: whatever was
in progress has ended when the reply goes out.

Locks, in order: a variable's while it is made, a shard's, then the store's. None is held over a network call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from pscluster.core.errors import InvalidUpdateError, StaleError, UnknownVariableError
from pscluster.core.transport.frames import view
from pscluster.ps.request_metrics import StoreCounts, VariableCounts
from pscluster.ps.server.dedup import Ledger
from pscluster.ps.server.directory import Contents, Directory, HeldOptimizer, HeldVariable, described
from pscluster.ps.server.losses import UNKNOWN, UNKNOWN_NAME, Losses
from pscluster.ps.server.prepared_reads import MAX_REQUEST_BYTES, PreparedRead, PreparedReads
from pscluster.ps.server.shard import Shard
from pscluster.ps.storage.spill import Spill
from pscluster.v1 import ps_pb2

logger = logging.getLogger(__name__)

_AT_ONCE = 256
"""So many intervals of functions are taken in under the lock, before others get it."""


class _Guarded:
    """A ledger under its lock, entered several times by each update."""

    def __init__(self, lock: threading.Lock, ledger: Ledger) -> None:
        self._lock, self._ledger = lock, ledger

    def __enter__(self) -> Ledger:
        self._lock.acquire()
        return self._ledger

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Store:
    """The state of one job on one server. See the module's docstring for what may happen at the same time."""

    def __init__(self, index: int, job: int = 0) -> None:
        self.index = index
        self.job = job
        self.counts = StoreCounts()
        self.spill = Spill()
        """Keeps what changes before it is written to disk, or sent."""
        self._lock = threading.Lock()
        self._ledger = Ledger()
        self._guarded = _Guarded(self._lock, self._ledger)
        self.directory = Directory(index)
        self._prepared = PreparedReads()
        self.losses = Losses()
        self._creating: dict[int, threading.Lock] = {}  # by variable, held while its shards are made

    # The directory

    def check_job(self, job: int) -> None:
        """StaleError if a request is of another job."""
        if job != self.job or not job:
            raise StaleError(
                f"ps {self.index} serves another job, or none: it was restarted and has lost its variables, or "
                "another coordinator took it over"
            )

    def take_over(self, job: int) -> None:
        """Another coordinator goes on with what is here. When this returns, nothing of the one before is applied any
        more, for it is of another job."""
        with self._lock:
            self.job = job
            self._ledger.forget_functions()
            self._prepared.clear()
            self.directory.forget_deleted()  # and numbers may come again
            shards = self.directory.shards()
        _pass_through(shards)

    def has_optimizer(self, spec: ps_pb2.OptimizerSpec) -> bool:
        """Is there one of this number and name, with this rule?"""
        with self._lock:
            return self.directory.has_optimizer(spec)

    def put_optimizer(self, optimizer: HeldOptimizer) -> None:
        """Enter an optimizer, or another form of it."""
        with self._lock:
            self.directory.put_optimizer(optimizer)

    def check_name(self, spec: ps_pb2.VariableSpec) -> None:
        """Refuse a variable whose name is taken or was deleted."""
        with self._lock:
            self.directory.check_name(spec)

    def add(self, spec: ps_pb2.VariableSpec, job: int, make: Callable[[], HeldVariable]) -> None:
        """Enter the variable that `make` makes, unless it is there.

        The same again is a copy of the request that comes late: what was made by the first may be trained by now, or
        is still being made.
        """
        with self._lock:
            creating = self._creating.setdefault(spec.id, threading.Lock())
        with creating:
            with self._lock:
                known = self.directory.variables.get(spec.id)
                if known is None:
                    self.directory.pending[spec.id] = spec.name
            if known is None:
                known = self._enter(spec, job, make)
        if known.spec != spec:
            raise InvalidUpdateError(f"variable id {spec.id} is taken by {known.spec.name!r}")

    def _enter(self, spec: ps_pb2.VariableSpec, job: int, make: Callable[[], HeldVariable]) -> HeldVariable:
        """Make a variable, and enter it unless it was deleted, or its name was taken, meanwhile."""
        made = None
        try:
            made = make()
        finally:
            with self._lock:
                wanted = self.directory.pending.pop(spec.id, None) is not None
                if made is not None and wanted:
                    self.check_job(job)
                    self.directory.check_name(spec)
                    self.directory.variables[spec.id] = made
        if not wanted:
            raise StaleError(f"variable {spec.name!r} was deleted while it was made")
        return made

    def delete(self, name: str, variable: int = 0, prefix: str = "") -> None:
        """Remove a variable, of this number if one is given; one that is not there is fine.

        With a prefix instead of a name: all whose names begin so, and none of them is made any more.
        """
        with self._lock:
            deleted = self.directory.delete(name, variable, prefix)
            if deleted:
                self._prepared.clear()
            for number in deleted if prefix else ():
                self._creating.pop(number, None)

    def describe(
        self, variables: Sequence[str], optimizers: Sequence[str], everything: bool = False
    ) -> ps_pb2.DescribeReply:
        """Return what the directory knows of these names. UnknownVariableError names the first unknown one."""
        return described(self.held(), variables, optimizers, everything)  # not under the lock

    # What is kept on disk

    def held(self) -> Contents:
        """Return the directory's contents."""
        with self._lock:
            return self.directory.contents()

    def ledger(self) -> _Guarded:
        """Return the memory of updates, to be used within `with`: under its lock."""
        return self._guarded

    def traffic(self) -> list[tuple[str, int, VariableCounts]]:
        """Of each variable its name, the bytes of its shards here, slots included, and what was read and updated."""
        with self._lock:
            self._prepared.settle()
            held, _, _ = self.directory.contents()
        return [(each.spec.name, sum(shard.nbytes for shard in each.shards.values()), each.counts) for each in held]

    def totals(self) -> tuple[int, int]:
        """How many shards are held, and their bytes, slots included."""
        shards = self._all_shards()
        return len(shards), sum(shard.nbytes for shard in shards)

    def _all_shards(self) -> list[Shard]:
        with self._lock:
            return self.directory.shards()

    # Incarnations and functions

    def close_incarnation(self, incarnation: int) -> None:
        """When this returns, no update of the incarnation is being or will be applied."""
        with self._lock:
            self._ledger.close(incarnation)
        _pass_through(self._all_shards())

    @property
    def remembered(self) -> int:
        """How many updates are remembered, so that a repetition of them is found."""
        with self._lock:
            return self._ledger.remembered

    @property
    def term(self) -> int:
        """What was sent under an earlier one is refused."""
        return self._ledger.term

    def finish_functions(
        self, intervals: Sequence[tuple[int, int]], keys: Iterable[int] = (), *, shut_out: bool = False
    ) -> None:
        """These functions have ended, and those with these keys will not be run again.

        With `shut_out`: when this returns, no update of theirs is being or will be applied.
        """
        pieces = [intervals[at : at + _AT_ONCE] for at in range(0, len(intervals), _AT_ONCE)]
        for piece in pieces:
            with self._lock:
                self._ledger.finish(piece)
        left = list(keys)
        while left:
            with self._lock:
                self._ledger.forget(left[:_AT_ONCE])
            del left[:_AT_ONCE]
        if shut_out:
            _pass_through(self._all_shards())

    # Prepared reads

    def prepared(self, request: bytes) -> PreparedRead | None:
        """What answers this request, byte for byte one that was prepared."""
        return self._prepared.find(request)

    def prepare(self, data: bytes, request: ps_pb2.ReadRequest) -> None:
        """Keep what answers a request that was just answered, if it is for whole arrays of variables only."""
        if request.job != self.job:  # of the job before, answered by its own store
            return
        if len(data) > MAX_REQUEST_BYTES or any(item.slot or not item.rows.all for item in request.items):
            return
        with self._lock:
            try:
                found = [self.directory.find(item.variable, item.shard) for item in request.items]
            except UnknownVariableError:  # deleted since
                return
            if len({id(shard) for _, shard in found}) < len(found):  # nobody of ours asks so: it would be kept, too
                return
            sources = [(shard.lock, view(shard.array)) for _, shard in found]
            self._prepared.add(data, PreparedRead(sources, [held.counts for held, _ in found]))

    # Losses

    def note_lost(self, told: Iterable[tuple[int, int, int, int]]) -> None:
        """Compare what a client was told by a process before this one with what was restored.

        Args:
            told: variable, shard, life of the process, updates.
        """
        if not self.losses.restored:
            return
        for variable, shard, life, updates in told:
            with self._lock:
                lost = self.losses.note((variable, shard), life, updates)
            held = self.directory.variables.get(variable)
            if lost and held is not None:
                name = held.spec.name
                logger.warning("at least %d acknowledged updates of %r, shard %d, were lost", lost, name, shard)

    @property
    def lost(self) -> dict[str, int]:
        """Acknowledged updates that are lost, at least, by variable: on the shard that has lost most."""
        found: dict[str, int] = {}
        with self._lock:
            for (variable, shard), lost in self.losses.total.items():
                if variable in self.directory.variables:
                    name = self.directory.variables[variable].spec.name
                    found[name] = max(lost, found.get(name, 0))
                elif (variable, shard) == UNKNOWN:
                    found[UNKNOWN_NAME] = lost
        return found


def _pass_through(shards: Sequence[Shard]) -> None:
    """Whatever was in progress on them has ended."""
    for shard in shards:
        with shard.lock:
            pass
