"""Describe a store in a manifest, and restore a store from a generation and a log."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import PsClusterError
from pscluster.core.geometry.partition import Partition
from pscluster.core.transport.frames import padding
from pscluster.ps.row_ids import bytes_by
from pscluster.ps.server.requests import creation, update_checks, updates
from pscluster.ps.server.requests.changes import Change
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.state.directory import Contents, HeldOptimizer, HeldVariable
from pscluster.ps.server.state.losses import UNKNOWN
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.server.state.store import Store
from pscluster.ps.server.synchronous.combine import Contribution
from pscluster.ps.spec import METADATA, partition_of
from pscluster.ps.storage.files.generations import DamagedError
from pscluster.ps.storage.files.tensor_files import Array, tensor_to_write
from pscluster.ps.storage.log.reader import Dropped
from pscluster.ps.tables import row_limit
from pscluster.v1 import ps_pb2, state_pb2

logger = logging.getLogger(__name__)


def manifest_of(store: Store, contents: Contents) -> state_pb2.Manifest:
    """Return a manifest with everything but the shards."""
    variables, optimizers, awaited = contents
    manifest = state_pb2.Manifest(server=store.index, job=store.job)
    metadata, saved = store.directory.metadata, manifest.metadata
    saved.variable, saved.shard = METADATA
    with metadata.lock:  # of one moment with the term
        note_shard(store, metadata, saved)
        saved.texts.update(metadata.texts)
        with store.ledger() as ledger:
            manifest.term = ledger.term
            manifest.closed.extend(ledger.closed)
            for start, stop in ledger.finished:
                manifest.finished_starts.append(start)
                manifest.finished_stops.append(stop)
            for incarnation, client in ledger.clients.items():
                manifest.clients.add(incarnation=incarnation, settled=client.settled)
    manifest.boot_ids.extend((*store.losses.before, store.losses.boot_id))
    manifest.variables.extend(held.spec for held in variables)
    manifest.optimizers.extend(map(saved_optimizer, optimizers))
    for spec in awaited.values():
        manifest.optimizers.add(spec=spec, by_value=True)
    return manifest


def saved_optimizer(known: HeldOptimizer) -> state_pb2.SavedOptimizer:
    """Return what is saved of an optimizer: all but a class that came as a pickle."""
    saved = state_pb2.SavedOptimizer(spec=known.spec, by_value=known.by_value)
    if known.definition is not None and not known.by_value:
        saved.rule.CopyFrom(known.definition)
    return saved


def _declare(store: Store, saved: state_pb2.SavedOptimizer) -> None:
    request = ps_pb2.CreateRequest(job=store.job, optimizer=saved.spec)
    if saved.HasField("rule"):
        request.rule.CopyFrom(saved.rule)
    creation.create(store, request, Payload([memoryview(b"")]))


def arrays_to_save(variable: int, shard_index: int, shard: Shard) -> list[ps_pb2.SavedTensor]:
    """Return the entries of a shard's arrays, as they are named in a file. Needs the shard's lock."""
    return entries_of(variable, shard_index, shard.arrays())


def entries_of(variable: int, shard_index: int, arrays: Mapping[str, Array]) -> list[ps_pb2.SavedTensor]:
    """Return the entries of these arrays of a shard, by their names, as they are named in a file."""
    return [
        tensor_to_write(f"{variable}/{shard_index}/{name}", array.dtype, array.shape, name)
        for name, array in arrays.items()
    ]


def note_shard(store: Store, shard: Shard, saved: state_pb2.SavedShard) -> None:
    """Enter a shard's count of updates, its steps, and the updates that are remembered. Needs the shard's lock."""
    saved.updates = shard.updates
    saved.steps.update(shard.steps)
    with store.ledger() as ledger:
        saved.keys.extend(ledger.saved_keys(saved.variable, saved.shard))


def restored(manifest: state_pb2.Manifest, arrays: Sequence[Mapping[str, Array]]) -> Store:
    """Return the store of a generation. DamagedError if the manifest and the arrays do not fit together."""
    store = Store(manifest.server, manifest.job)
    by_variable: defaultdict[int, dict[int, Shard]] = defaultdict(dict)
    for saved, of_shard in zip(manifest.shards, arrays, strict=True):
        if "value" not in of_shard:
            raise DamagedError(f"snapshot {manifest.generation} lacks the values of a shard")
        shard = by_variable[saved.variable][saved.shard] = Shard(of_shard["value"], saved.updates)
        shard.put(of_shard)
        shard.steps.update(saved.steps)
    held = []
    for spec in manifest.variables:
        partition, shards = partition_of(spec), by_variable[spec.id]
        for index, shard in shards.items():
            shard.row_limit = row_limit(spec, partition, index)
        here = {i for i, owner in enumerate(spec.owners) if owner == manifest.server}
        if not all(_fit_together(spec, shard) for shard in shards.values()):
            raise DamagedError(f"snapshot {manifest.generation} has arrays of a shard that have different shapes")
        if shards.keys() != here or not all(_fits(partition, *item) for item in shards.items()):
            raise DamagedError(f"snapshot {manifest.generation} lacks shards of {spec.name!r}")
        held.append(HeldVariable(spec, dtype_named(spec.dtype), partition, shards))
    store.directory.restore(held, {saved.spec.id: saved.spec for saved in manifest.optimizers})
    for known in manifest.optimizers:
        if not known.by_value:
            try:
                _declare(store, known)
            except PsClusterError as error:  # its module is missing or has changed: the rule is sent again
                logger.warning("the rule of optimizer %r has not arrived yet: %s", known.spec.name, error)
    store.directory.metadata.updates = manifest.metadata.updates
    store.directory.metadata.texts = dict(manifest.metadata.texts)
    with store.ledger() as ledger:
        ledger.open_term(manifest.term)
        for saved in (manifest.metadata, *manifest.shards):
            ledger.record_saved(saved.variable, saved.shard, saved.keys)
        if len(manifest.finished_starts) != len(manifest.finished_stops):
            raise DamagedError(f"snapshot {manifest.generation} has half an interval of functions")
        ledger.finish(zip(manifest.finished_starts, manifest.finished_stops, strict=True))
        for client in manifest.clients:
            ledger.forget_answered(client.incarnation, client.settled)
        for incarnation in manifest.closed:
            ledger.close(incarnation)
    return store


def _fit_together(spec: ps_pb2.VariableSpec, shard: Shard) -> bool:
    """Return whether what is beside the values has their shape; of a table, their rows."""
    shape = shard.array.shape
    if spec.HasField("table"):
        shape = shape[0], spec.table.dim
    return all(array.shape == shape for name, array in shard.arrays().items() if name != "value")


def _fits(partition: Partition, index: int, shard: Shard) -> bool:
    """Return whether a shard has its shape; that of a table has any number of rows within its limit."""
    shape = partition.block(index).shape
    if shard.row_limit:
        return shard.array.ndim == 2 and shard.array.shape[1] == shape[1] and len(shard.array) <= shard.row_limit
    return shard.array.shape == shape


def losses_of(store: Store, store_id: int) -> state_pb2.SavedLosses:
    """Return the record of the updates that are known to be lost."""
    known = store.losses
    losses = state_pb2.SavedLosses(store_id=store_id, boot_id=known.before[-1] if known.before else 0)
    for (variable, shard), lost in dict(known.total).items():
        losses.lost.add(variable=variable, shard=shard, updates=lost, since=known.since.get((variable, shard), 0))
    return losses


def restore_losses(
    store: Store, manifest: state_pb2.Manifest, losses: state_pb2.SavedLosses | None, dropped: Dropped
) -> None:
    """Begin to count losses, with those known before and `dropped`, now that all that was saved is in the store."""
    counts = {(held.spec.id, index): shard.updates for held in store.held()[0] for index, shard in held.shards.items()}
    if store.index == 0:  # clients tell every server of all that they know
        counts[METADATA] = store.directory.metadata.updates
    lost, since = {}, {}
    if losses is not None and losses.store_id == manifest.store_id:
        lost = {(shard_losses.variable, shard_losses.shard): shard_losses.updates for shard_losses in losses.lost}
        if manifest.boot_ids and losses.boot_id == manifest.boot_ids[-1]:
            since = {(shard_losses.variable, shard_losses.shard): shard_losses.since for shard_losses in losses.lost}
    newly_lost = {
        (variable, shard): more
        for (store_id, variable, shard), updates in dropped.updates.items()
        if store_id == manifest.store_id
        and (more := sum(update_number > counts.get((variable, shard), update_number) for update_number in updates))
    }
    if dropped.unknown:
        newly_lost[UNKNOWN] = dropped.unknown
    store.losses.restore(manifest.boot_ids, counts, lost, newly_lost, since)


def _only(
    update: ps_pb2.UpdateRequest, wanted: Sequence[int], data: memoryview
) -> tuple[ps_pb2.UpdateRequest, memoryview]:
    """Return an update and its payload with only these of its items."""
    if len(wanted) == len(update.items):
        return update, data
    reduced, chunks, at = ps_pb2.UpdateRequest(), list[memoryview](), 0
    reduced.CopyFrom(update)
    del reduced.items[:]
    for index, item in enumerate(update.items):
        ids = bytes_by(item.rows)
        size = ids + padding(ids) + item.value_bytes + padding(item.value_bytes)
        if index in wanted:
            reduced.items.append(item)
            chunks.append(data[at : at + size])
        at += size
    return reduced, memoryview(b"".join(chunks))


class Replay:
    """Applies the updates of a log to a store, for each shard in their original order.

    Updates that the generation contains are skipped. Records of one shard may be in a different order than its updates
    were applied in. If one is missing, because it was never flushed and so never acknowledged, the updates after it are
    applied without it once all records are read.

    If a newer generation was damaged, the store may be of the previous coordinator; the first update of the next
    coordinator then takes the store over, as it did originally.
    """

    def __init__(self, store: Store, store_id: int, coordinator_number: int, *, newest: bool = True) -> None:
        self._store = store
        self._newest = newest  # whether the generation is the last one, so that no restore has been saved since
        self._store_id = store_id
        self.coordinator_number = coordinator_number  # of the last coordinator
        # Others were deleted, or have moved to another server since.
        self._here = {METADATA, *((held.spec.id, index) for held in store.held()[0] for index in held.shards)}
        self._declared: dict[int, bytes] = {}
        self.skipped = 0  # updates of variables that were deleted, and of shards that have moved
        self._early: defaultdict[tuple[int, int], dict[int, tuple[Any, Change, Payload, Any]]] = defaultdict(dict)
        self.applied = 0

    def add(self, record: state_pb2.LogRecord, payload: memoryview) -> None:
        """Take the next record. DamagedError if it does not fit the store."""
        if record.store_id != self._store_id:
            return  # of the previous job, which was still in progress when this one began
        # A server that died before it had saved a restore takes updates of the others' term, on what it had before.
        if record.update.term > self._store.term and not self._newest:
            raise DamagedError("a checkpoint was restored after the snapshot that is used, and is not in the log")
        if record.update.HasField("contribution"):  # perhaps of the coordinator before the one that had it logged again
            self._contributed(record, payload)
            return
        if record.coordinator_number > self.coordinator_number:
            self._store.take_over(record.update.job)
            self.coordinator_number = record.coordinator_number
        wanted = [index for index, item in enumerate(record.update.items) if (item.variable, item.shard) in self._here]
        self.skipped += len(record.update.items) - len(wanted)
        if not wanted:
            return
        if len(record.updates) != len(record.update.items):
            raise DamagedError("an update in the log lacks its numbers")
        update, payload = _only(record.update, wanted, payload)
        try:
            self._declare(record)
            changes = update_checks.changes_of(self._store, update, len(payload))
        except PsClusterError as error:
            raise DamagedError(f"an update in the log does not fit what was saved: {error}") from None
        of_tables = {each.item: each for each in record.tables}
        for change, index in zip(changes, wanted, strict=True):
            count = record.updates[index]
            if count > change.shard.updates:
                early = self._early[change.item.variable, change.item.shard]
                early[count] = update, change, Payload([payload]), of_tables.get(index)
                while (ready := early.pop(change.shard.updates + 1, None)) is not None:
                    self._apply(change.shard.updates + 1, *ready)

    def _contributed(self, record: state_pb2.LogRecord, data: memoryview) -> None:
        """Take a contribution to a synchronous step, which may have been applied since, and may not."""
        update, of, runs = record.update, record.update.contribution, self._store.runs
        if update.term < self._store.term:
            return
        try:
            self._declare(record)
            changes = update_checks.changes_of(self._store, update, len(data))
        except PsClusterError:  # of a variable that was deleted since, after the step
            runs.found_epoch(of.run, of.step, of.epoch, unusable=True)
            return
        staged = Contribution(update, changes, Payload([data]), len(data))
        runs.found(of, staged)

    def _declare(self, record: state_pb2.LogRecord) -> None:
        """Declare the optimizers as they were when the update was applied."""
        for saved in record.optimizers:
            form = saved.SerializeToString(deterministic=True)
            if self._declared.get(saved.spec.id) != form:
                self._declared[saved.spec.id] = form
                _declare(self._store, saved)

    def _apply(
        self,
        count: int,
        request: ps_pb2.UpdateRequest,
        change: Change,
        payload: Payload,
        table: state_pb2.TableChange | None,
    ) -> None:
        try:
            updates.replay(self._store, request, change, payload, count, table)
        except Exception as error:
            raise DamagedError(f"an update in the log can't be replayed: {error}") from error
        self.applied += 1

    def end(self) -> None:
        """Apply the remaining updates, after the last record."""
        for early in self._early.values():
            for count in sorted(early):
                self._apply(count, *early[count])


def replayed(
    store: Store,
    manifest: state_pb2.Manifest,
    records: Iterable[tuple[state_pb2.LogRecord, memoryview]],
    *,
    newest: bool,
) -> tuple[int, int]:
    """Apply a log to a generation; return the number of updates of shards, and the number of the last coordinator.

    The optimizers of the `newest` generation are newer than the log's.
    """
    _, optimizers, _ = store.held()
    declared_last = list(map(saved_optimizer, optimizers))
    replay = Replay(store, manifest.store_id, manifest.coordinator_number, newest=newest)
    for record, payload in records:
        replay.add(record, payload)
    replay.end()
    store.runs.end_of_log()
    for saved in declared_last if newest else ():
        if not saved.by_value:
            _declare(store, saved)
    if replay.skipped:
        logger.warning(
            "%d updates in the log belong to variables that no longer exist, or to shards that have moved",
            replay.skipped,
        )
    return replay.applied, replay.coordinator_number
