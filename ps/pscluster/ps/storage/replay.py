"""Between a store and what is kept of it: a manifest's facts, and a store made of a generation and a log."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import PsClusterError
from pscluster.core.transport.frames import padding
from pscluster.ps.server import creation, updates
from pscluster.ps.server.dedup import Origin
from pscluster.ps.server.directory import HeldOptimizer, HeldVariable
from pscluster.ps.server.losses import UNKNOWN
from pscluster.ps.server.payload import Payload
from pscluster.ps.server.shard import Shard
from pscluster.ps.server.store import Store
from pscluster.ps.server.updates import Change
from pscluster.ps.spec import partition_of
from pscluster.ps.storage.capture import Capture
from pscluster.ps.storage.generations import Array, DamagedError
from pscluster.ps.storage.log import Dropped
from pscluster.v1 import ps_pb2, state_pb2

logger = logging.getLogger(__name__)


def manifest_of(
    store: Store,
    variables: Iterable[HeldVariable],
    optimizers: Iterable[HeldOptimizer],
    awaited: Iterable[ps_pb2.OptimizerSpec],
) -> state_pb2.Manifest:
    """Everything but the shards."""
    manifest = state_pb2.Manifest(server=store.index, job=store.job)
    with store.ledger() as ledger:
        manifest.term = ledger.term
        manifest.closed.extend(ledger.closed)
        for start, stop in ledger.finished:
            manifest.finished_starts.append(start)
            manifest.finished_stops.append(stop)
        for incarnation, settled in ledger.settled.items():
            manifest.clients.add(incarnation=incarnation, settled=settled)
    manifest.lives.extend((*store.losses.before, store.losses.life))
    manifest.variables.extend(held.spec for held in variables)
    manifest.optimizers.extend(map(saved_optimizer, optimizers))
    for spec in awaited:
        manifest.optimizers.add(spec=spec, by_value=True)
    return manifest


def saved_optimizer(known: HeldOptimizer) -> state_pb2.SavedOptimizer:
    """What is kept of an optimizer: all but a class that came as a pickle."""
    saved = state_pb2.SavedOptimizer(spec=known.spec, by_value=known.by_value)
    if known.definition is not None and not known.by_value:
        saved.rule.CopyFrom(known.definition)
    return saved


def _declare(store: Store, saved: state_pb2.SavedOptimizer) -> None:
    request = ps_pb2.CreateRequest(job=store.job, optimizer=saved.spec)
    if saved.HasField("rule"):
        request.rule.CopyFrom(saved.rule)
    creation.create(store, request, Payload([memoryview(b"")]))


def captured(
    store: Store, variable: int, number: int, shard: Shard, before: state_pb2.SavedShard | None
) -> tuple[state_pb2.SavedShard, Capture | None]:
    """A shard as it is now, with what is remembered of its updates.

    The arrays are still to be read; without a capture they are those that were saved before. What is remembered is not:
    the keys of a coordinator that is gone would be taken for those of the next one, which numbers its functions anew.
    """
    saved = state_pb2.SavedShard(variable=variable, shard=number)
    with shard.lock:
        saved.updates = shard.updates
        for optimizer, step in shard.steps.items():
            saved.steps[optimizer] = step
        with store.ledger() as ledger:
            for origin, nths in ledger.keys_of(variable, number):
                saved.keys.add(
                    function=origin.function,
                    incarnation=origin.incarnation,
                    sequence=origin.sequence,
                    key=origin.key,
                    nth=nths,
                )
        # An average or a slot that was made since makes no update less.
        if before is not None and before.updates == saved.updates:
            saved.arrays.extend(before.arrays)
            return saved, None
        return saved, shard.capture(store.spill)


def restored(manifest: state_pb2.Manifest, arrays: Sequence[Mapping[str, Array]]) -> Store:
    """The store of a generation. DamagedError if its parts do not fit together."""
    store = Store(manifest.server, manifest.job)
    found: defaultdict[int, dict[int, Shard]] = defaultdict(dict)
    for saved, parts in zip(manifest.shards, arrays, strict=True):
        if "value" not in parts:
            raise DamagedError(f"generation {manifest.generation} lacks the values of a shard")
        shard = found[saved.variable][saved.shard] = Shard(parts["value"], saved.updates)
        shard.put(parts)
        shard.steps.update(saved.steps)
    held = []
    for spec in manifest.variables:
        mine = found[spec.id]
        owned = {number for number, owner in enumerate(spec.owners) if owner == manifest.server}
        partition = partition_of(spec)
        if set(mine) != owned or any(
            shard.array.shape != partition.block(number).shape for number, shard in mine.items()
        ):
            raise DamagedError(f"generation {manifest.generation} lacks shards of {spec.name!r}")
        held.append(HeldVariable(spec, dtype_named(spec.dtype), partition, mine))
    store.directory.restore(held, {saved.spec.id: saved.spec for saved in manifest.optimizers})
    for known in manifest.optimizers:
        if not known.by_value:
            try:
                _declare(store, known)
            except PsClusterError as error:  # its module is not here any more, or another version: it is sent again
                logger.warning("the rule of optimizer %r has not arrived yet: %s", known.spec.name, error)
    with store.ledger() as ledger:
        ledger.open_term(manifest.term)
        for saved in manifest.shards:
            for keys in saved.keys:
                origin = Origin(keys.incarnation, keys.function, keys.sequence, keys.key)
                for nth in keys.nth:
                    ledger.record(origin, saved.variable, saved.shard, nth)
        if len(manifest.finished_starts) != len(manifest.finished_stops):
            raise DamagedError(f"generation {manifest.generation} has half an interval of functions")
        ledger.finish(zip(manifest.finished_starts, manifest.finished_stops, strict=True))
        for client in manifest.clients:
            ledger.settle(client.incarnation, client.settled)
        for incarnation in manifest.closed:
            ledger.close(incarnation)
    return store


def losses_of(store: Store, holding: int) -> state_pb2.SavedLosses:
    """What is known to be lost."""
    known = store.losses
    losses = state_pb2.SavedLosses(holding=holding, life=known.before[-1] if known.before else 0)
    for (variable, shard), lost in dict(known.total).items():
        losses.lost.add(variable=variable, shard=shard, updates=lost, since=known.since.get((variable, shard), 0))
    return losses


def settle_losses(
    store: Store, manifest: state_pb2.Manifest, losses: state_pb2.SavedLosses | None, dropped: Dropped
) -> None:
    """All that was kept is in the store: what clients know of beyond that is lost, besides what was known to be.

    Args:
        losses: what was known to be lost before.
        dropped: what the log has lost now.
    """
    counts = {
        (held.spec.id, number): shard.updates for held in store.held()[0] for number, shard in held.shards.items()
    }
    lost, since = {}, {}
    if losses is not None and losses.holding == manifest.holding:
        lost = {(each.variable, each.shard): each.updates for each in losses.lost}
        if manifest.lives and losses.life == manifest.lives[-1]:
            since = {(each.variable, each.shard): each.since for each in losses.lost}
    found = {
        (variable, shard): more
        for (holding, variable, shard), updates in dropped.updates.items()
        if holding == manifest.holding
        and (more := sum(number > counts.get((variable, shard), number) for number in updates))
    }
    if dropped.unknown:
        found[UNKNOWN] = dropped.unknown
    store.losses.restore(manifest.lives, counts, lost, found, since)


def _only(update: ps_pb2.UpdateRequest, kept: Sequence[int], payload: Payload) -> tuple[ps_pb2.UpdateRequest, Payload]:
    """An update with these of its items only."""
    if len(kept) == len(update.items):
        return update, payload
    part, chunks, at = ps_pb2.UpdateRequest(), list[memoryview](), 0
    part.CopyFrom(update)
    del part.items[:]
    data = payload.joined()
    for number, item in enumerate(update.items):
        ids = item.rows.ids * 8
        size = ids + padding(ids) + item.value_bytes + padding(item.value_bytes)
        if number in kept:
            part.items.append(item)
            chunks.append(data[at : at + size])
        at += size
    return part, Payload([memoryview(b"".join(chunks))])


class Replay:
    """Applies the updates of a log to a store: of each shard in the order in which they were applied then.

    Those that a generation holds are passed over. Records of one shard may stand in another order than its updates
    were applied in; where one is missing, because it was never flushed and so never acknowledged, what came behind it
    is applied without it, when all records are read.

    Behind a generation that can't be used the store may be of the coordinator before: with the first update of the
    next one it is taken over, as it was then.
    """

    def __init__(self, store: Store, holding: int, epoch: int) -> None:
        self._store = store
        self._holding = holding
        self.epoch = epoch  # of the last coordinator
        self._here = {held.spec.id for held in store.held()[0]}
        self._declared: dict[int, bytes] = {}
        self.passed_over = 0  # of variables that are not there: they were deleted
        self._early: defaultdict[tuple[int, int], dict[int, tuple[Any, Change, Payload]]] = defaultdict(dict)
        self.applied = 0

    def add(self, record: state_pb2.LogRecord, payload: memoryview) -> None:
        """Take the next record. DamagedError if it does not fit the store."""
        if record.holding != self._holding:
            return  # of a job before this one, which was still under way as this began
        if record.update.term > self._store.term:
            raise DamagedError("a checkpoint was restored after the generation that is used, and is not in the log")
        if record.epoch > self.epoch:
            self._store.take_over(record.update.job)
            self.epoch = record.epoch
        data = Payload([payload])
        kept = [number for number, item in enumerate(record.update.items) if item.variable in self._here]
        self.passed_over += len(record.update.items) - len(kept)
        if not kept:
            return
        if len(record.updates) != len(record.update.items):
            raise DamagedError("an update in the log lacks its numbers")
        update, data = _only(record.update, kept, data)
        counts = [record.updates[number] for number in kept]
        try:
            self._declare(record)
            changes = updates.changes_of(self._store, update, sum(map(len, data.chunks)))
        except PsClusterError as error:
            raise DamagedError(f"an update in the log does not fit what was saved: {error}") from None
        for change, count in zip(changes, counts, strict=True):
            if count > change.shard.updates:
                key = change.item.variable, change.item.shard
                self._early[key][count] = update, change, data
                self._go_on(change.shard, self._early[key])

    def _declare(self, record: state_pb2.LogRecord) -> None:
        """Have the optimizers as they were when the update was applied."""
        for saved in record.optimizers:
            form = saved.SerializeToString(deterministic=True)
            if self._declared.get(saved.spec.id) != form:
                self._declared[saved.spec.id] = form
                _declare(self._store, saved)

    def _go_on(self, shard: Shard, early: dict[int, tuple[Any, Change, Payload]]) -> None:
        while (found := early.pop(shard.updates + 1, None)) is not None:
            self._apply(*found, shard.updates + 1)

    def _apply(self, request: ps_pb2.UpdateRequest, change: Change, payload: Payload, count: int) -> None:
        try:
            updates.replay(self._store, request, change, payload, count)
        except Exception as error:
            raise DamagedError(f"an update in the log can't be replayed: {error}") from error
        self.applied += 1

    def end(self) -> None:
        """All records are read."""
        for early in self._early.values():
            for count in sorted(early):
                self._apply(*early[count], count)


def replayed(
    store: Store,
    manifest: state_pb2.Manifest,
    records: Iterable[tuple[state_pb2.LogRecord, memoryview]],
    *,
    newest: bool,
) -> tuple[int, int]:
    """Apply a log; how many updates of shards that were, and the epoch of the coordinator that sent the last.

    Args:
        manifest: of the generation that the store is of; updates of another job are passed over.
        newest: the store is of the newest generation, so that its optimizers were declared last.
    """
    _, optimizers, _ = store.held()
    declared_last = list(map(saved_optimizer, optimizers))
    replay = Replay(store, manifest.holding, manifest.epoch)
    for record, payload in records:
        replay.add(record, payload)
    replay.end()
    for saved in declared_last if newest else ():
        if not saved.by_value:
            _declare(store, saved)
    if replay.passed_over:
        logger.warning("%d updates in the log belong to variables that no longer exist", replay.passed_over)
    return replay.applied, replay.epoch
