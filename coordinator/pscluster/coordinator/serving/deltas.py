"""Deltas: the rows of a table that differ between two checkpoints, in a file of safetensors or Parquet.

Two checkpoints are compared, and nothing is counted while a job trains: updates cost nothing more, a row that has
changed back is not sent, and the delta is right whatever has died or was restored in between. Both are read as mapped
files, a few MiB at a time; what is remembered of a row is one bit. Of an `EmbeddingTable`, a row that was dropped has
its initial values again.

A file gets its name once all of it is on the disk, so a writer that is killed leaves none, or the one before.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from pscluster.coordinator.checkpoints.folder import numbers, path_of, reason
from pscluster.coordinator.serving import delta_parquet, delta_safetensors
from pscluster.coordinator.serving.by_id import MappedById
from pscluster.coordinator.serving.delta_files import Changes, Delta, Header, LoadedDelta
from pscluster.coordinator.serving.mapped import Ids, Mapped, map_table
from pscluster.core import checks
from pscluster.core.errors import CheckpointError, MisuseError
from pscluster.core.numbers.unique import sorted_unique
from pscluster.ps.storage.files.tensor_files import CHUNK_BYTES

Format = Literal["safetensors", "parquet"]
_FORMATS: tuple[Format, ...] = ("safetensors", "parquet")


def export_delta(
    checkpoint: str | Path,
    table: str,
    *,
    since: str | Path | int,
    out: str | Path,
    verify: bool = True,
    format: Format | None = None,  # noqa: A002  # as others name it
) -> Delta:
    """Write the rows of a table that have changed since an earlier checkpoint of the same job.

    Args:
        checkpoint: the later checkpoint, or a directory of checkpoints, of which the newest is taken.
        table: the name of a variable.
        since: the earlier checkpoint, or its number in the directory.
        out: the file to write, which is replaced if it exists; it gets this name once it is complete.
        verify: whether to check both checkpoints' values first, which reads all of them once more.
        format: "safetensors" or "parquet" (`pip install 'pscluster[parquet]'`). None: what `out` ends in,
            ".safetensors" or ".parquet"; safetensors if it has no ending.

    Raises:
        CheckpointError: one of the checkpoints is missing or damaged, or the file can't be written.
        UnknownVariableError: one of them has no such table.
        MisuseError: `out` has another ending, and no `format` is given; `since` is not the number of a checkpoint; the
            table has another shape or type in one of them than in the other; there is no such format, no pyarrow, or no
            type in Parquet for the rows, as for bfloat16 and complex numbers.
    """
    if format not in (None, *_FORMATS):
        raise MisuseError(f"format is {format!r}; it must be {' or '.join(map(repr, _FORMATS))}")
    if not isinstance(since, str | os.PathLike):
        try:
            since = checks.whole("since", since, at_least=1)
        except ValueError as error:
            raise MisuseError(
                f"table {table!r}: {error}: give the number of an earlier checkpoint, or its path"
            ) from None
    if "://" in str(out):
        raise CheckpointError(f"{out} can't be written: give a file on a disk of this machine, and copy that")
    parquet = (format or _format_of(out)) == "parquet"
    if parquet:
        delta_parquet.need_arrow(out)
    later = map_table(checkpoint, table, verify=verify)
    if isinstance(since, int):
        parent = str(checkpoint).rstrip("/")
        since = _numbered(parent if later.path != parent else str(Path(parent).parent), since)
    earlier = map_table(since, table, verify=verify)
    later.check_like(earlier)
    any_ids = isinstance(later, MappedById)
    id_bytes = later.id_bytes if isinstance(later, MappedById) else 0
    header = Header(later.name, later.dtype, later.shape, any_ids, earlier.version, later.version, id_bytes)
    if parquet:
        delta_parquet.check(out, header)
    changes = _changes(earlier, later, header)
    with _written(Path(out)) as file:
        write = delta_parquet.write if parquet else delta_safetensors.write
        write(file, changes)
    return Delta(str(out), table, earlier.version, later.version, changes.count)


def _format_of(out: str | Path) -> Format:
    """Return the format that a file's name ends in: safetensors if it has no ending. MisuseError for any other."""
    ending = Path(out).suffix.removeprefix(".") or "safetensors"
    for known in _FORMATS:
        if ending == known:
            return known
    endings = " or ".join(f".{known}" for known in _FORMATS)
    raise MisuseError(f"{out} ends in .{ending}; it must end in {endings}, or give format={_FORMATS[0]!r}")


def _numbered(directory: str, number: int) -> str:
    """Return the path of a checkpoint in a directory. CheckpointError, which lists those that exist, if it is none."""
    if number not in (there := numbers(directory, whole=True)):
        which = ", ".join(map(str, there[-8:])) or "none"
        raise CheckpointError(
            f"{directory} no longer has checkpoint {number}, or never had it; it has {which}: "
            f"{'export since one of these, or ' if there else ''}open the newest with refresh() where the table is "
            "served, and keep more (CheckpointManager(max_to_keep=))"
        )
    return path_of(directory, number)


def read_delta(path: str | Path, accept: Callable[[Header], object] | None = None) -> LoadedDelta:
    """Read a delta, whole, in whichever format it begins as.

    Args:
        path: of the file.
        accept: called with its header before rows are decoded; raises an error for a delta that is not wanted.

    Raises:
        CheckpointError: it can't be read, or is not what was written; the message names the file.
        MisuseError: it is in Parquet, and there is no pyarrow.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {reason(error)}") from error
    # As the length of a header in safetensors, this would be more than is allowed.
    if data.startswith(delta_parquet.MAGIC):
        return delta_parquet.read(path, data, accept)
    loaded = delta_safetensors.read(path, data)
    if accept is not None:
        accept(loaded.header)
    return loaded


def _changes(earlier: Mapped, later: Mapped, header: Header) -> Changes:
    step = max(CHUNK_BYTES // max(math.prod(later.shape[1:]) * later.dtype.itemsize, 1), 8) // 8 * 8
    changed = [_changed(earlier, later, ids) for ids in _ranges(earlier, later, step)]

    def ids() -> Iterator[Ids]:
        for bits, all_ids in zip(changed, _ranges(earlier, later, step), strict=True):
            yield all_ids[np.unpackbits(bits, count=len(all_ids)).astype(np.bool_)]

    return Changes(header, sum(int(np.unpackbits(bits).sum()) for bits in changed), ids, later.take, later.has)


def _ranges(earlier: Mapped, later: Mapped, step: int) -> Iterator[Ids]:
    """Yield the ids of all rows, rising, `step` at a time."""
    if isinstance(earlier, MappedById) and isinstance(later, MappedById):
        both = sorted_unique(np.concatenate([earlier.ids, later.ids]))
        yield from (both[start : start + step] for start in range(0, len(both), step))
        return
    rows = later.shape[0]
    for start in range(0, rows, step):
        yield np.arange(start, min(start + step, rows), dtype=np.int64)


def _changed(earlier: Mapped, later: Mapped, ids: Ids) -> npt.NDArray[np.uint8]:
    """Return for these rows, as bits, whether any byte differs, or one of the tables alone has a row."""
    before, after = (table.take(ids).reshape(len(ids), -1).view(np.uint8) for table in (earlier, later))
    return np.packbits((before != after).any(axis=1) | (earlier.has(ids) != later.has(ids)))


@contextmanager
def _written(out: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `out` once it is on the disk. CheckpointError if it can't be written."""
    if not out.name or out.is_dir():
        raise CheckpointError(f"{str(out)!r} can't be written: it is a directory; give the path of a file")
    temporary = out.with_name(f"{out.name}.new")
    try:
        with temporary.open("wb") as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                temporary.unlink(missing_ok=True)  # a full disk gets its room back
                raise
        os.replace(temporary, out)
        folder = os.open(out.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise CheckpointError(f"{out} can't be written: {reason(error)}") from error
