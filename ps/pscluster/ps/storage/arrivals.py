"""Shards that come from elsewhere, saved without writing anew what this server has had before.

The pages of one that moves here are written into a file of their own as they come, while the source still serves the
shard and changes it (`ShardFile`). Nothing refers to the file, so it does not count, and is removed if the process
dies. Once the shard is frozen only its last pages are missing. Then a manifest extends that of the last generation
(`extended`): it has the new shard, and the other ones as they were saved there. Their log is not begun anew, but goes
on: the manifest says with which generation it begins. So what is saved while a shard is frozen does not depend on how
much else the server has.

    (none) --begin--> OPEN --put, put, ...--> OPEN --finish--> whole, on the disk --manifest--> it counts
                        \\--discard, another job, or the process dies--> removed

A shard that leaves is noted in the same way, by a manifest without it. The new shards of a variable that is cut are
written when all of them are there (`ps.server.resharding`); their manifest has the files of all.

A replay of the log goes by the shards' counts, which go with a shard: records from before it left are not applied again
when it has come back. The rest of the manifest is as of now, which is later than the shards: functions that had ended,
and requests that were answered, are refused, and their records in the log are applied nevertheless. What identifies the
records of the log, the coordinator and the term, must be the same as in the last generation; else, or if the server has
other shards than that one, or there are synchronous steps, which a replay counts by the ledger, a whole generation is
saved instead.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
from xxhash import xxh3_128

from pscluster.core.errors import StaleError
from pscluster.core.transport.frames import view
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.server.state.store import Store
from pscluster.ps.storage import replay
from pscluster.ps.storage.files.disk import write_all
from pscluster.ps.storage.files.tensor_files import lay_out
from pscluster.v1 import ps_pb2, state_pb2

MAX_FILES = 32
"""If the arrays would be in more files than this, a whole generation is saved, which has few."""

Array = npt.NDArray[Any]


class ShardFile:
    """The arrays of a shard, which are written in pieces, in any order. Thread-safe.

    OSError if there is no room for all of it; StaleError from anything after `discard`.
    """

    def __init__(self, path: Path, tensors: Iterable[ps_pb2.SavedTensor], *, fsync: bool) -> None:
        self.path = path
        self.tensors = {tensor.array: tensor for tensor in tensors}
        self.open = True
        self._fsync = fsync
        self._lock = threading.Lock()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            header = lay_out(list(self.tensors.values()))
            self.nbytes = len(header) + sum(tensor.bytes for tensor in self.tensors.values())
            os.posix_fallocate(self._descriptor, 0, self.nbytes)
            write_all(self._descriptor, [header], 0)
        except BaseException:
            self.discard()
            raise
        for tensor in self.tensors.values():
            tensor.file = path.name

    def has_room(self, arrays: Mapping[str, Array]) -> bool:
        """Return whether there is room for arrays of these sizes."""
        return all(array.nbytes <= self.tensors[name].bytes for name, array in arrays.items())

    def put(self, array: str, at: int, data: memoryview) -> None:
        """Write these bytes of an array, from byte `at` on."""
        with self._lock:
            self._check_open()
            write_all(self._descriptor, [data], self.tensors[array].offset + at)

    def flush(self) -> None:
        """Have what was written on the disk, where it is to survive a crash of the machine."""
        with self._lock:
            self._check_open()
            if self._fsync:
                os.fdatasync(self._descriptor)

    def finish(self, arrays: Mapping[str, Array]) -> list[ps_pb2.SavedTensor]:
        """Return the entries of these arrays, all of which must have been written; nothing more is written.

        An array may be smaller than its place in the file, which the file's header describes.
        """
        for name, array in arrays.items():
            tensor = self.tensors[name]
            tensor.checksum, tensor.bytes = xxh3_128(view(array)).hexdigest(), array.nbytes
            tensor.shape[:] = array.shape
        with self._lock:
            self._check_open()
            if self._fsync:
                os.fsync(self._descriptor)
            self._close()
        return [self.tensors[name] for name in arrays]

    def discard(self) -> None:
        """Remove the file, unless it is finished."""
        with self._lock:
            if self.open:
                self._close()
                with contextlib.suppress(OSError):  # it is removed later, as what nothing refers to
                    self.path.unlink()

    def _check_open(self) -> None:
        if not self.open:
            raise StaleError("this move is over")

    def _close(self) -> None:
        self.open = False
        os.close(self._descriptor)


def log_begins(manifest: state_pb2.Manifest) -> int:
    """Return the generation with whose segment the log begins that goes on from a manifest."""
    return manifest.log_generation or manifest.generation


def may_extend(saved: state_pb2.Manifest, store: Store, arriving: int) -> bool:
    """Return whether a manifest may be extended by this many shards, each in a file of its own."""
    files = {array.file for shard in saved.shards for array in shard.arrays}
    return not store.runs.known and len(files) + arriving <= MAX_FILES


def extended(
    saved: state_pb2.Manifest, store: Store, arrived: Mapping[tuple[int, int], tuple[Shard, list[ps_pb2.SavedTensor]]]
) -> state_pb2.Manifest | None:
    """Return a manifest of what the store has now: shards as they were saved, and those that have arrived.

    None if a whole generation is needed. Shards that have arrived must not change yet. The caller sees to it that the
    last generation is of the same coordinator, and of the same kind of durability.
    """
    contents = store.held()
    manifest = replay.manifest_of(store, contents)
    if (manifest.term, manifest.job, list(manifest.boot_ids)) != (saved.term, saved.job, list(saved.boot_ids)):
        return None
    if not may_extend(saved, store, len(arrived)):
        return None
    known = {(shard.variable, shard.shard): shard for shard in saved.shards}
    for held in contents[0]:
        for index in held.shards:
            key = held.spec.id, index
            if key in arrived:
                shard, arrays = arrived[key]
                entry = manifest.shards.add(variable=key[0], shard=index, arrays=arrays)
                with shard.lock:
                    replay.note_shard(store, shard, entry)
            elif key in known:
                manifest.shards.add().CopyFrom(known[key])
            else:
                return None
    manifest.metadata.CopyFrom(saved.metadata)
    manifest.store_id, manifest.job_id, manifest.coordinator_number = (
        saved.store_id,
        saved.job_id,
        saved.coordinator_number,
    )
    manifest.job_name, manifest.num_servers, manifest.logged = saved.job_name, saved.num_servers, saved.logged
    manifest.saved_at, manifest.log_generation = saved.saved_at or time.time(), log_begins(saved)
    return manifest
