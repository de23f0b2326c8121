"""A parameter server's state for a job: the directory with its shards, and the ledger of applied updates.

This module holds the state and its locks; `creation` adds to it, `reads` and `updates` use it.

Updates and reads of different shards run in parallel, those of one shard one after another. An update request is
checked whole before any of it is applied. Then each item is applied under its shard's lock, together with the query and
entry in the ledger, so that a repetition that arrives during the first copy waits for it and finds it done. Closing an
incarnation takes every shard's lock once after marking it, so updates in progress have ended before the reply.

Locks, in order: a variable's while it is made, a shard's, then the store's. None is held during a network call. An
update may hold those of several shards, but waits for one only while it has no other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pscluster.core.errors import InvalidUpdateError, PsClusterError, StaleError
from pscluster.core.transport.frames import view
from pscluster.ps.request_metrics import StoreMetrics
from pscluster.ps.server.state.dedup import Ledger
from pscluster.ps.server.state.directory import Contents, Directory, HeldOptimizer, HeldVariable, described
from pscluster.ps.server.state.losses import NAMES, Losses, ShardKey
from pscluster.ps.server.state.prepared_reads import MAX_PREPARED, MAX_REQUEST_BYTES, PreparedRead
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.server.synchronous.runs import Runs
from pscluster.ps.storage.files.spill import Spill
from pscluster.v1 import ps_pb2

logger = logging.getLogger(__name__)

ARRIVING_SECONDS = 1.0
"""How long a request waits for a shard that is arriving from another server before its client has to try again."""

_BATCH = 256
"""The most intervals of functions that are entered before the lock is released for others."""


class _Guarded:
    """A ledger under its lock. Each update enters it several times, so this is no generator."""

    def __init__(self, lock: threading.Lock, ledger: Ledger) -> None:
        self._lock, self._ledger = lock, ledger

    def __enter__(self) -> Ledger:
        self._lock.acquire()
        return self._ledger

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Store:
    """The state of one job on one server. See the module's docstring for its concurrency."""

    def __init__(self, index: int, job: int = 0) -> None:
        self.index = index
        self.job = job
        self.metrics = StoreMetrics()
        self.spill = Spill()
        """Old bytes of blocks that change before they are written or sent."""
        self._lock = threading.Lock()
        self._ledger = Ledger()
        self._guarded = _Guarded(self._lock, self._ledger)
        self.directory = Directory(index)
        self._prepared: dict[bytes, PreparedRead] = {}  # by their requests
        self._prepared_sizes: frozenset[int] = frozenset()  # of these
        self.losses = Losses()
        self._creating: dict[int, threading.Lock] = {}  # by variable, held while its shards are made
        self.runs: Runs[Any] = Runs(index, self._steps_applied)  # synchronous ones

    # The directory

    def check_job(self, job: int) -> None:
        """Raise StaleError if a request is of another job."""
        if job != self.job or not job:
            raise StaleError(
                f"ps {self.index} serves another job, or none: it was restarted and has lost its variables, or "
                "another coordinator took it over"
            )

    def take_over(self, job: int) -> None:
        """Continue under another coordinator. After this returns, no update of the previous one is applied."""
        with self.runs.between_steps(), self._lock:
            self.job = job
            if self.index == 0:
                self.runs.drop(lambda _: True)  # this is the server that decides, so they are not committed
            self._ledger.forget_functions()
            self._forget_prepared()
            self.directory.forget_deleted()  # their ids may be reused
            shards = self.directory.shards()
        _pass_through(shards)

    def find(self, variable: int, shard: int) -> tuple[HeldVariable, Shard]:
        """Return a variable and one of its shards, as `Directory.find`; wait a moment for one that is arriving."""
        held = self.directory.variables.get(variable)
        found = None if held is None else held.shards.get(shard)
        if held is None or found is None:
            return self.directory.find(variable, shard)  # which knows why
        if (arriving := found.arriving) is not None:
            arriving.wait(ARRIVING_SECONDS)
            return self.directory.find(variable, shard)
        return held, found

    def check_not_staged(self, shard: Shard) -> None:
        """Raise StaleError if a synchronous step that changes a shard is, or may be, under way."""
        if any(change.shard is shard for staged in self.runs.staged() for change in staged.changes):
            raise StaleError("a synchronous step that changes the shard is under way")

    def put_optimizer(self, optimizer: HeldOptimizer) -> None:
        with self._lock:
            self.directory.put_optimizer(optimizer)

    def knows_optimizer(self, name: str) -> bool:
        """Return whether there is an optimizer of this name, or one whose rule is awaited."""
        _, optimizers, awaited = self.held()
        return name in (*(known.spec.name for known in optimizers), *(spec.name for spec in awaited.values()))

    def check_name(self, spec: ps_pb2.VariableSpec) -> None:
        """Refuse a variable whose name is taken or was deleted."""
        with self._lock:
            self.directory.check_name(spec)

    def add(self, spec: ps_pb2.VariableSpec, job: int, make: Callable[[], HeldVariable]) -> None:
        """Make a variable and enter it, unless it exists.

        A repetition is a late copy of the request: the variable may have been trained since, or is still being made.
        """
        with self._lock:
            creating = self._creating.setdefault(spec.id, threading.Lock())
        with creating:
            with self._lock:
                known = self.directory.variables.get(spec.id)
                if known is None:
                    self.directory.pending[spec.id] = spec
            if known is None:
                known = self._enter(spec, job, make)
        if known.spec != spec:
            raise InvalidUpdateError(f"variable id {spec.id} is taken by {known.spec.name!r}")

    def _enter(self, spec: ps_pb2.VariableSpec, job: int, make: Callable[[], HeldVariable]) -> HeldVariable:
        """Make a variable, and enter it unless meanwhile it was deleted or its name was taken."""
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

    def delete(self, name: str, variable: int = 0, evaluation: int = 0) -> None:
        """Remove a variable, if it exists and has this id (if one is given).

        With an evaluation instead of a name, remove all variables of its snapshot, and refuse their creation.
        """
        with self._lock:
            deleted = self.directory.delete(name, variable, evaluation)
            if deleted:
                self._forget_prepared()
            for deleted_id in deleted:
                self._creating.pop(deleted_id, None)

    def describe(
        self, variables: Sequence[str], optimizers: Sequence[str], everything: bool = False, moved: bool = False
    ) -> ps_pb2.DescribeReply:
        """Return what the directory knows of these names. UnknownVariableError names the first unknown one."""
        return described(self.held(), variables, optimizers, everything, moved)  # not under the lock

    # Moves: see `moves`

    def install(self, spec: ps_pb2.VariableSpec, job: int, index: int, shard: Shard) -> HeldVariable | None:
        """Enter a shard that has come here with a later spec; return what was held of the variable before.

        None if the variable was deleted, or has a spec that is as late.
        """
        with self._lock:
            self.check_job(job)
            before = self.directory.variables.get(spec.id)
            if before is None or spec.placement <= before.spec.placement:
                return None
            self.directory.place(spec, {index: shard})
            return before

    def uninstall(self, before: HeldVariable) -> None:
        """Undo `install`: it could not be saved."""
        with self._lock:
            self.directory.put_back(before)

    def place(self, spec: ps_pb2.VariableSpec, job: int) -> bool:
        """Take a later spec, and drop the shards that it gives to others; return whether any was.

        When this returns, no update is being or will be applied to these. StaleError if shards that it has here are
        not.
        """
        with self._lock:
            self.check_job(job)
            gone = self.directory.place(spec)
            if gone:
                self._forget_prepared()
        for index, shard in gone.items():
            with shard.lock:
                shard.moved, shard.pages = True, None
                with self.ledger() as ledger:
                    ledger.replace(spec.id, index, {})
                shard.release()
            with self._lock:
                self.losses.leave((spec.id, index))
        return bool(gone)

    def adopt(self, spec: ps_pb2.VariableSpec, job: int) -> None:
        """Have a variable that is here take this spec, in place of the one that has had its name: see `resharding`."""
        with self._lock:
            self.check_job(job)
            gone = self.directory.adopt(spec)
            self._forget_prepared()
        for held in gone:
            for index, shard in held.shards.items():
                with shard.lock:
                    shard.moved, shard.pages = True, None
                    with self.ledger() as ledger:
                        ledger.replace(held.spec.id, index, {})
                    shard.release()
                with self._lock:
                    self.losses.leave((held.spec.id, index))

    # Contents

    def held(self) -> Contents:
        with self._lock:
            return self.directory.contents()

    def ledger(self) -> _Guarded:
        """Return a context manager that gives the ledger under its lock."""
        return self._guarded

    def traffic(self) -> list[tuple[HeldVariable, int]]:
        """Return each variable, with its counts up to date, and the bytes of its shards here with slots."""
        self.count_reads()
        held, _, _ = self.held()
        return [(variable, sum(shard.nbytes for shard in variable.shards.values())) for variable in held]

    def count_reads(self) -> None:
        """Bring the counts of reads up to date."""
        with self._lock:
            for prepared in self._prepared.values():
                prepared.count_reads()

    def totals(self) -> tuple[int, int]:
        """Return the number of shards and their bytes, slots included."""
        shards = self._all_shards()
        return len(shards) - 1, sum(shard.nbytes for shard in shards)  # the metadata is not counted, and has none

    def _all_shards(self) -> list[Shard]:
        with self._lock:
            return self.directory.shards()

    # Incarnations and functions

    def close_incarnation(self, incarnation: int) -> None:
        """Refuse an incarnation. After this returns, none of its updates is being or will be applied."""
        with self._lock:
            self._ledger.close(incarnation)
        _pass_through(self._all_shards())

    @property
    def remembered(self) -> int:
        """The number of updates that are remembered to detect repetitions."""
        with self._lock:
            return self._ledger.remembered

    @property
    def term(self) -> int:
        """The present term; updates of earlier ones are refused."""
        return self._ledger.term

    def finish_functions(
        self, intervals: Sequence[tuple[int, int]], keys: Iterable[int] = (), *, shut_out: bool = False
    ) -> None:
        """Forget functions that have ended, and keys whose functions will not run again.

        With `shut_out`, none of their updates is being or will be applied after this returns.
        """
        for at in range(0, len(intervals), _BATCH):
            with self._lock:
                self._ledger.finish(intervals[at : at + _BATCH])
        over = list(keys)
        for at in range(0, len(over), _BATCH):
            with self._lock:
                self._ledger.forget(over[at : at + _BATCH])
        if shut_out:
            _pass_through(self._all_shards())

    def _steps_applied(self, run_id: int) -> int:
        """Return how many steps of a synchronous run have been applied: each is a request of the run, as a client."""
        with self._lock:
            return self._ledger.last_sequence(run_id)

    # Prepared reads

    def prepared(self, request: bytes) -> PreparedRead | None:
        """Return the prepared answer to this request, if it was prepared byte for byte."""
        return self._prepared.get(request) if len(request) in self._prepared_sizes else None  # hashing takes time, too

    def prepare(self, data: bytes, request: ps_pb2.ReadRequest) -> None:
        """Prepare a request that was just answered, if it reads only whole arrays of variables."""
        if request.job != self.job:  # of the previous job, whose store has answered it
            return
        if len(data) > MAX_REQUEST_BYTES or any(
            item.slot or item.wire_dtype or not item.rows.all for item in request.items
        ):
            return
        with self._lock:
            try:
                targets = [self.directory.find(item.variable, item.shard) for item in request.items]
            except PsClusterError:  # deleted since, or elsewhere
                return
            if len({id(shard) for _, shard in targets}) < len(targets):  # our clients read each shard once
                return
            sources = [(shard.lock, view(shard.array)) for _, shard in targets]
            while len(self._prepared) >= MAX_PREPARED:
                self._prepared.pop(next(iter(self._prepared))).count_reads()
            self._prepared[data] = PreparedRead(sources, [(held.metrics, shard.traffic) for held, shard in targets])
            self._prepared_sizes = frozenset(map(len, self._prepared))

    def _forget_prepared(self) -> None:
        """Drop all, since their arrays may have been removed. Needs the lock."""
        for prepared in self._prepared.values():
            prepared.count_reads()
        self._prepared.clear()

    # Losses

    def note_lost(self, seen: Iterable[tuple[int, int, int, int]]) -> None:
        """Compare counts that a client saw, as (variable, shard, boot id of the sender, count), with those restored."""
        if not self.losses.restored:
            return
        for variable, shard, boot_id, updates in seen:
            with self._lock:
                lost = self.losses.note((variable, shard), boot_id, updates)
            if lost and (name := self._name_of((variable, shard))):
                logger.warning("at least %d acknowledged updates of %r, shard %d, were lost", lost, name, shard)

    @property
    def lost(self) -> dict[str, int]:
        """By variable, the acknowledged updates that are lost, at least, on the shard that lost most."""
        by_name: dict[str, int] = {}
        with self._lock:
            for shard, lost in self.losses.total.items():
                if name := self._name_of(shard):
                    by_name[name] = max(lost, by_name.get(name, 0))
        return by_name

    def _name_of(self, shard: ShardKey) -> str:
        """Return the name under which losses of a shard are counted; "" if its variable was deleted."""
        held = self.directory.variables.get(shard[0])
        return NAMES.get(shard, "") if held is None else held.spec.name


def _pass_through(shards: Sequence[Shard]) -> None:
    """Wait until updates in progress on these shards have ended."""
    for shard in shards:
        with shard.lock:
            pass
