"""Deltas: the rows of a table that differ between two checkpoints, as a safetensors file.

    __metadata__    "format": "np", and in "pscluster-delta", as JSON: the table, the version it begins at, and its own
    ids             [n], int64, rising
    rows            [n, ...], the rows with these ids as they are in the later checkpoint
    checksum        [16], bytes: XXH3 (128 bits) of all bytes of the file before it

Two checkpoints are compared, and nothing is counted while a job trains: updates cost nothing more, a row that has
changed back is not sent, and the delta is right whatever has died or was restored in between. Both are read as mapped
files, a few MiB at a time; what is remembered of a row is one bit. Of an `EmbeddingTable`, a row that was dropped has
its initial values again.

A file gets its name once all of it is on the disk, so a writer that is killed leaves none, or the one before.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from pscluster.coordinator.checkpoints.folder import path_of, reason
from pscluster.coordinator.checkpoints.index import dtype_of
from pscluster.coordinator.serving.by_id import MappedById
from pscluster.coordinator.serving.mapped import Ids, Mapped, map_table
from pscluster.coordinator.serving.versions import TableVersion
from pscluster.core.errors import CheckpointError
from pscluster.ps.storage.tensor_files import CHUNK_BYTES, Array, stream, tensor_to_write

KEY = "pscluster-delta"
FORMAT = 1
_MAX_HEADER_BYTES = 1 << 20
_CHECKSUM_BYTES = 16


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta in a file: it leads the table from one version to another."""

    path: str
    table: str
    since: TableVersion
    version: TableVersion
    changed: int  # rows


def export_delta(
    checkpoint: str | Path, table: str, *, since: str | Path | int, out: str | Path, verify: bool = True
) -> Delta:
    """Write the rows of a table that have changed since an earlier checkpoint of the same job.

    Args:
        checkpoint: the later checkpoint, or a directory of checkpoints, of which the newest is taken.
        table: the name of a variable.
        since: the earlier checkpoint, or its number in the directory.
        out: the file to write, which is replaced if it exists; it gets this name once it is complete.
        verify: whether to check both checkpoints' values first, which reads all of them once more.

    Raises:
        CheckpointError: one of the checkpoints is missing or damaged, or the file can't be written.
        UnknownVariableError: one of them has no such table.
        MisuseError: the table has another shape or type in one of them than in the other.
    """
    later = map_table(checkpoint, table, verify=verify)
    if isinstance(since, int):
        parent = str(checkpoint).rstrip("/")
        since = path_of(parent if later.path != parent else str(Path(parent).parent), since)
    earlier = map_table(since, table, verify=verify)
    later.check_like(earlier)
    step = max(CHUNK_BYTES // max(math.prod(later.shape[1:]) * later.dtype.itemsize, 1), 8) // 8 * 8
    changed = [_changed(earlier, later, ids) for ids in _ranges(earlier, later, step)]
    count = sum(int(np.unpackbits(bits).sum()) for bits in changed)
    _write(Path(out), earlier, later, changed, step, count)
    return Delta(str(out), table, earlier.version, later.version, count)


def _ranges(earlier: Mapped, later: Mapped, step: int) -> Iterator[Ids]:
    """Yield the ids of all rows, rising, `step` at a time."""
    if isinstance(earlier, MappedById) and isinstance(later, MappedById):
        both = np.union1d(earlier.ids, later.ids)
        yield from (both[start : start + step] for start in range(0, len(both), step))
        return
    rows = later.shape[0]
    for start in range(0, rows, step):
        yield np.arange(start, min(start + step, rows), dtype=np.int64)


def _changed(earlier: Mapped, later: Mapped, ids: Ids) -> npt.NDArray[np.uint8]:
    """Return for these rows, as bits, whether any byte differs."""
    before, after = (table.take(ids).reshape(len(ids), -1).view(np.uint8) for table in (earlier, later))
    return np.packbits((before != after).any(axis=1))


def _write(
    out: Path, earlier: Mapped, later: Mapped, changed: list[npt.NDArray[np.uint8]], step: int, count: int
) -> None:
    def ids() -> Iterator[Ids]:
        for bits, all_ids in zip(changed, _ranges(earlier, later, step), strict=True):
            yield all_ids[np.unpackbits(bits, count=len(all_ids)).astype(np.bool_)]

    digest = xxh3_128()
    tensors = [
        tensor_to_write("ids", np.dtype(np.int64), (count,)),
        tensor_to_write("rows", later.dtype, (count, *later.shape[1:])),
        tensor_to_write("checksum", np.dtype(np.uint8), (_CHECKSUM_BYTES,)),
    ]
    about = {
        "version": FORMAT,
        "table": later.name,
        "dtype": later.dtype.name,
        "shape": later.shape,
        "any_ids": isinstance(later, MappedById),
        "since": asdict(earlier.version),
        "to": asdict(later.version),
    }
    temporary = out.with_name(f"{out.name}.new")
    try:
        with temporary.open("wb") as file:

            def put(data: bytes) -> None:
                digest.update(data)
                file.write(data)

            pieces = (
                (some.tobytes() for some in ids()),
                (later.take(some).tobytes() for some in ids()),
                (digest.digest() for _ in range(1)),  # when all else has been put
            )
            stream(put, tensors, pieces, {KEY: json.dumps(about)})
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, out)
        folder = os.open(out.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise CheckpointError(f"{out} can't be written: {reason(error)}") from error


@dataclass(frozen=True, slots=True)
class LoadedDelta:
    """A delta in memory."""

    delta: Delta
    dtype: str
    shape: tuple[int, ...]  # of the table
    ids: Ids  # [n], rising
    data: memoryview  # of the rows

    def rows(self, dtype: np.dtype[Any]) -> Array:
        """Return the rows, [n, ...]."""
        return np.ndarray((len(self.ids), *self.shape[1:]), dtype, self.data)


def read_delta(path: str | Path) -> LoadedDelta:
    """Read a delta, whole. CheckpointError, which names the file, if it can't be read, or is not what was written."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {reason(error)}") from error
    header_bytes = int.from_bytes(data[:8], "little")
    if len(data) < 8 + _CHECKSUM_BYTES or header_bytes > min(len(data) - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(f"{path} is no delta, or was not written to its end")
    try:
        header = json.loads(data[8 : 8 + header_bytes])
        about = json.loads(header["__metadata__"][KEY])
        begin, ids_end, rows_end = 8 + header_bytes, *(header[name]["data_offsets"][1] for name in ("ids", "rows"))
        total = begin + header["checksum"]["data_offsets"][1]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise CheckpointError(f"{path} is no delta, or is damaged: its header is not what was written") from None
    if total != len(data):
        raise CheckpointError(f"{path} has {len(data):,} bytes, not {total!r}: it was not written to its end")
    if xxh3_128(memoryview(data)[:-_CHECKSUM_BYTES]).digest() != data[-_CHECKSUM_BYTES:]:
        raise CheckpointError(f"{path} is damaged: it is not what was written")
    try:  # it is what some program has written
        if about.get("version") != FORMAT:
            raise ValueError(f"format version {about.get('version')!r}; this program reads version {FORMAT}")
        since, to = TableVersion(**about["since"]), TableVersion(**about["to"])
        ids = np.ndarray(ids_end // 8, np.int64, data, begin)
        rows = memoryview(data)[begin + ids_end : begin + rows_end]
        shape = tuple(about["shape"])
        in_range = about.get("any_ids") is True or not len(ids) or (ids[0] >= 0 and ids[-1] < shape[0])
        if not in_range or (ids[1:] <= ids[:-1]).any():
            raise ValueError("row ids that do not rise, or are out of range")
        if len(ids) * math.prod(shape[1:]) * dtype_of(about["dtype"]).itemsize != len(rows):
            raise ValueError(f"{len(rows):,} bytes of rows for {len(ids):,} ids")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no delta that can be read: {error}") from None
    return LoadedDelta(Delta(str(path), about["table"], since, to, len(ids)), about["dtype"], shape, ids, rows)
