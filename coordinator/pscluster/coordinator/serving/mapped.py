"""A table of a checkpoint, mapped into memory: its pages are read when they are used, and shared by all processes."""

from __future__ import annotations

import math
import mmap
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pscluster.coordinator.checkpoints.folder import reason, where
from pscluster.coordinator.checkpoints.index import SavedTensor, check_whole, dtype_of, read_index
from pscluster.coordinator.serving.by_id import MappedById
from pscluster.coordinator.serving.versions import TableVersion
from pscluster.core.errors import CheckpointError, InvalidUpdateError, MisuseError, UnknownVariableError
from pscluster.core.geometry.partition import Partition
from pscluster.core.geometry.rows import check_ids, split_rows
from pscluster.ps.storage.files.tensor_files import Array, join, verified
from pscluster.ps.tables import initial_rows
from pscluster.v1 import ps_pb2

Ids = npt.NDArray[np.int64]
Columns = tuple[slice, ...]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class MappedTable:
    """The values of a variable in a checkpoint. Read-only; they stay readable if the checkpoint is removed."""

    path: str  # of the checkpoint
    name: str
    version: TableVersion
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    rows: Partition  # of the first axis alone; other axes may be cut, too
    shards: list[list[tuple[Columns, Array]]]  # by range of rows: the columns that an array has, all of them but rarely

    def take(self, ids: Ids) -> Array:
        """Return the rows with these ids, [n], each in 0..rows-1."""
        split = split_rows(self.rows, ids)
        if len(self.shards) == 1 and len(self.shards[0]) == 1:
            ((_, only),) = self.shards[0]
            return only.take(split[0].local_ids, axis=0, mode="clip")  # "raise" would copy once more
        out: Array = np.empty((len(ids), *self.shape[1:]), self.dtype)
        for pieces, (positions, local_ids) in zip(self.shards, split, strict=True):
            if len(positions):
                for columns, array in pieces:
                    index: Any = (positions, *columns)
                    out[index] = array.take(local_ids, axis=0, mode="clip")
        return out

    def has(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return which of these ids have rows, [n]: all that `checked` has passed."""
        return np.ones(len(ids), np.bool_)

    def checked(self, ids: npt.ArrayLike) -> Ids:
        """Return ids as int64. InvalidUpdateError if they are not integers, or one is out of range."""
        return check_ids(ids, self.shape[0], self.name)

    def check_like(self, other: Mapped) -> None:
        """Raise MisuseError if the other has another type or shape."""
        if isinstance(other, MappedById):
            other.check_like(self)
        mine, theirs = ((table.dtype.name, list(table.shape)) for table in (self, other))
        if mine != theirs:
            raise MisuseError(
                f"table {self.name!r} is {mine[0]}{mine[1]} in {self.path}, but {theirs[0]}{theirs[1]} in {other.path}"
            )


Mapped = MappedTable | MappedById


def map_table(path: str | Path, name: str, *, verify: bool = True) -> Mapped:
    """Map a variable of a checkpoint, or of the newest in a directory of them.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it is not in a file system of this machine.
        UnknownVariableError: it has no variable of that name.
        MisuseError: the variable is a scalar, and has no rows.
    """
    if "://" in str(path):
        raise CheckpointError(f"{path} can't be mapped into memory: copy the checkpoint to a disk of this machine")
    return of_newest(path, partial(_map_checkpoint, name=name, verify=verify))


def of_newest(path: str | Path, read: Callable[[str], _T]) -> _T:
    """Return what is read of a checkpoint, or of the newest in a directory of them.

    If that can't be read, and another one is the newest by then, it has probably been removed: read that one.
    """
    while True:
        newest = where(path)
        try:
            return read(newest)
        except CheckpointError:
            if where(path) == newest:
                raise


def _map_checkpoint(path: str, name: str, verify: bool) -> Mapped:
    index = read_index(path)
    check_whole(index, path)
    if name not in index.variables:
        raise UnknownVariableError(f"{path} has no variable {name!r}; it has {', '.join(index.variables)}")
    variable = index.variables[name]
    if not variable.shape:
        raise MisuseError(f"{name!r} is a scalar in {path}, and has no rows: read it with SavedVariables")
    dtype, partition = dtype_of(variable.dtype), variable.partition
    if variable.dim:
        table = ps_pb2.TableSpec(dim=variable.dim, initializer=variable.initializer, numbers=variable.numbers)
        try:
            initial = initial_rows(table, name)
        except InvalidUpdateError as error:
            raise CheckpointError(f"{path}: {error}") from None
        saved_shards = sorted(variable.arrays["value"], key=lambda tensor: tensor.shard)
        arrays = [_mapped(Path(join(path, saved.file)), saved, verify) for saved in saved_shards]
        return MappedById.of(path, name, TableVersion.of(index.number, variable), initial, arrays)
    by_rows: dict[int, list[tuple[Columns, Array]]] = defaultdict(list)
    side_by_side = math.prod(partition.grid[1:])
    for saved in sorted(variable.arrays["value"], key=lambda tensor: tensor.shard):
        array = _mapped(Path(join(path, saved.file)), saved, verify)
        by_rows[saved.shard // side_by_side].append((partition.block(saved.shard).slices[1:], array))
    version, shards = TableVersion.of(index.number, variable), [by_rows[at] for at in sorted(by_rows)]
    return MappedTable(path, name, version, dtype, variable.shape, partition.of_rows, shards)


def _mapped(path: Path, saved: SavedTensor, verify: bool) -> npt.NDArray[Any]:
    """Map a tensor of a file, perhaps after it was read and verified."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < saved.offset + saved.bytes:
                missing = saved.offset + saved.bytes - size
                raise CheckpointError(f"{path} is too short: {missing:,} bytes are missing at its end")
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {reason(error)}") from error
    if verify:
        for _ in verified(path, saved.tensor, saved.offset, saved.bytes, saved.checksum):
            pass
    return np.ndarray(saved.shape, dtype_of(saved.dtype), buffer=memory, offset=saved.offset)
