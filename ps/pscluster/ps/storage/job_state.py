"""The job whose state a server saves, and what a generation has of it: the shards that changed since the last one."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pscluster.ps.server.state.directory import HeldVariable
from pscluster.ps.server.state.shard import Shard, Snapshot
from pscluster.ps.server.state.store import Store
from pscluster.ps.server.synchronous.combine import Contribution
from pscluster.ps.storage import replay
from pscluster.ps.storage.files.generations import StateDirectory
from pscluster.v1 import state_pb2

_MAX_FILES = 8
"""The most files of generations that are in use; shards in others are written again."""


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The job that a store belongs to."""

    store_id: int = 0  # drawn by this server for the store; 0: none
    job_id: int = 0  # shared by all coordinators of the job
    coordinator_number: int = 0  # the number of coordinators so far
    name: str = ""
    num_servers: int = 0  # of the job; 0: unknown


@dataclass(slots=True)
class JobState:
    """A job, and what is saved of it."""

    store: Store
    identity: JobIdentity
    saved: state_pb2.Manifest | None = None  # the last generation
    before: state_pb2.Manifest | None = None  # the previous one
    sizes: Counter[str] = field(default_factory=Counter)  # by file, the bytes in use
    losses_written: int = 0  # `Losses.news` when the losses were last written

    def record_of(self, contribution: Contribution) -> tuple[state_pb2.LogRecord, int]:
        """Return the log's record of a contribution to a synchronous step, and its size."""
        total, identity = contribution.total_bytes, self.identity
        record = state_pb2.LogRecord(update=contribution.request, total_bytes=total, last=True)
        record.store_id, record.coordinator_number = identity.store_id, identity.coordinator_number
        known = [change.optimizer for change in contribution.changes if change.optimizer is not None]
        record.optimizers.extend(map(replay.saved_optimizer, {used.spec.id: used for used in known}.values()))
        return record, total + record.ByteSize()


def write_shards(
    directory: StateDirectory, job: JobState, variables: list[HeldVariable], manifest: state_pb2.Manifest
) -> int:
    """Write the shards that changed since the last generation, each as of one moment; return the bytes."""
    before: dict[tuple[int, int], state_pb2.SavedShard] = {}
    if job.saved is not None:
        reusable = {name for name, _ in job.sizes.most_common(_MAX_FILES - 1)}
        before = {
            (saved_shard.variable, saved_shard.shard): saved_shard
            for saved_shard in job.saved.shards
            if all(array.file in reusable for array in saved_shard.arrays)
        }
    with contextlib.ExitStack() as captures:
        changed = _changed_shards(job, variables, manifest, before, captures)
        arrays = [array for saved, _, _ in changed for array in saved.arrays]
        return directory.write_arrays(manifest.generation, arrays, _captured(job.store, changed))


def _changed_shards(
    job: JobState,
    variables: Sequence[HeldVariable],
    manifest: state_pb2.Manifest,
    before: Mapping[tuple[int, int], state_pb2.SavedShard],
    captures: contextlib.ExitStack,
) -> list[_ChangedShard]:
    """Enter all shards in the manifest; return those to be written, of which `before` has no file to go on with."""
    changed: list[_ChangedShard] = []
    for held in variables:
        for index, shard in held.shards.items():
            known = before.get((held.spec.id, index))
            saved = manifest.shards.add(variable=held.spec.id, shard=index)
            with shard.lock:
                # Slots or averages created since, without an update, need not be saved. A copy is filled
                # in without any.
                if known is not None and known.updates == shard.updates and not held.spec.evaluation:
                    # Not with the remembered updates of that generation: if they are of the previous coordinator,
                    # they would be taken for those of this one, which numbers its functions anew.
                    replay.note_shard(job.store, shard, saved)
                    saved.arrays.extend(known.arrays)
                else:
                    saved.arrays.extend(replay.arrays_to_save(held.spec.id, index, shard))
                    captured = None
                    if shard.row_limit:  # the next update may give it more rows than the file's header says
                        replay.note_shard(job.store, shard, saved)
                        captured = shard.capture(job.store.spill)
                        for array in captured.values():
                            captures.callback(array.close)
                    changed.append((saved, shard, captured))
    return changed


class MoreArraysError(Exception):
    """A shard's arrays differ from those in the file's header: another optimizer has created its slots."""


_ChangedShard = tuple[state_pb2.SavedShard, Shard, Mapping[str, Snapshot] | None]
"""A shard to be written, with its entry, and its arrays if they were captured before."""


def _captured(store: Store, shards: Sequence[_ChangedShard]) -> Iterator[Snapshot]:
    """Yield snapshots of each shard's arrays, of the moment its first one is written, and enter its counts."""
    for saved, shard, before in shards:
        if before is not None:
            yield from before.values()
            continue
        with shard.lock:
            if replay.arrays_to_save(saved.variable, saved.shard, shard) != list(saved.arrays):
                raise MoreArraysError
            replay.note_shard(store, shard, saved)
            captured = shard.capture(store.spill)
        try:
            yield from captured.values()
        finally:
            for array in captured.values():
                array.close()


def has_arrivals(before: state_pb2.Manifest, manifest: state_pb2.Manifest) -> bool:
    """Return whether a generation has a shard that the one before lacks, though it has the variable."""
    known = {(shard.variable, shard.shard) for shard in before.shards}
    variables = {spec.id for spec in before.variables}
    return any(shard.variable in variables and (shard.variable, shard.shard) not in known for shard in manifest.shards)


def sizes_of(manifest: state_pb2.Manifest) -> Counter[str]:
    """Return the bytes in use, by file."""
    sizes: Counter[str] = Counter()
    for shard in manifest.shards:
        for array in shard.arrays:
            sizes[array.file] += array.bytes + 1  # an empty file would not count
    return sizes
