"""A checkpoint's variables, read where they are needed: no cluster, and no more in memory than is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pscluster.coordinator import job_progress
from pscluster.coordinator.checkpoints.folder import where
from pscluster.coordinator.checkpoints.index import SavedTensor, SavedVariable, check_whole, dtype_of, read_index
from pscluster.core.errors import CheckpointError, UnknownVariableError
from pscluster.core.frames import view
from pscluster.ps.checkpoints.tensor_files import CHUNK_BYTES, Array, join, verified

_LEAST_READ_BYTES = 64 << 10
_OURS = "pscluster/"
"""How the names of variables begin that keep something of ours."""


class SavedVariables(Mapping[str, Array]):
    """The variables of a checkpoint by name, whole, however they were cut. Read-only.

    Each access reads and verifies the variable anew: keep what is needed twice.

    Args:
        path: of a checkpoint, or of a directory of them: the newest there is meant then. Or a URL of fsspec.

    Attributes:
        path: of the checkpoint.
        failure: the last CheckpointError that reading a variable ended with, or None.

    Raises:
        CheckpointError: there is none, or its index is damaged; at an access: the variable is.
        UnknownVariableError: also a KeyError; it has no variable of that name.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = where(path)
        self.failure: CheckpointError | None = None
        self._index = read_index(self.path)
        check_whole(self._index, self.path)
        self._names = [name for name in self._index.variables if not name.startswith(_OURS)]

    @property
    def number(self) -> int:
        """That of the checkpoint in its directory; 0 for one made by `Checkpoint.write`."""
        return self._index.number

    @property
    def created(self) -> str:
        """When it was made, in ISO 8601."""
        return self._index.created

    @property
    def progress(self) -> dict[str, Any]:
        """What `strategy.save_progress` had kept; {} if nothing was."""
        found = self._index.variables.get(job_progress.NAME)
        return job_progress.decoded(self._read(found).tobytes()) if found is not None else {}

    def __getitem__(self, name: str) -> Array:
        if name not in self:
            raise UnknownVariableError(f"{self.path} has no variable {name!r}; it has {', '.join(self._names)}")
        return self._read(self._index.variables[name])

    def _read(self, variable: SavedVariable) -> Array:
        parts = {tensor.shard: tensor for tensor in variable.arrays["value"]}
        array: Array = np.empty(variable.shape, dtype_of(variable.dtype))
        data, at = view(array), 0
        try:
            for chunk in in_order(self.path, variable, parts, array.dtype):
                data[at : at + len(chunk)] = chunk
                at += len(chunk)
        except CheckpointError as error:
            self.failure = error
            raise
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<SavedVariables of {self.path}: {', '.join(self._names)}>"


class _Shard:
    """The elements of a saved shard, in order, a few at a time. Verified when the last one has been taken."""

    def __init__(self, path: str, tensor: SavedTensor, chunk_bytes: int) -> None:
        self._dtype = dtype_of(tensor.dtype)
        self._left = tensor.bytes
        self._data = bytearray()
        self._chunks = verified(
            join(path, tensor.file), tensor.tensor, tensor.offset, tensor.bytes, tensor.sha256, chunk_bytes
        )

    def take(self, shape: tuple[int, ...]) -> Array:
        size = math.prod(shape) * self._dtype.itemsize
        while len(self._data) < size:
            self._data += next(self._chunks)
        taken: Array = np.frombuffer(bytes(self._data[:size]), self._dtype).reshape(shape)
        del self._data[:size]
        self._left -= size
        if not self._left:
            next(self._chunks, None)  # compares the digests
        return taken


def in_order(
    path: str, variable: SavedVariable, parts: dict[int, SavedTensor], dtype: np.dtype[Any], fill: float = 0.0
) -> Iterator[bytes]:
    """The bytes of the whole, some of it at a time; shards that lie side by side are read side by side.

    Args:
        parts: by shard; one that is not there is `fill` everywhere.
    """
    shape = variable.shape
    if math.prod(shape) == 0:
        return
    blocks = [(number, block) for number, block in enumerate(variable.partition.blocks()) if block.size]
    side_by_side = variable.partition.num_shards // (variable.partition.grid[0] if shape else 1)
    chunk_bytes = max(_LEAST_READ_BYTES, CHUNK_BYTES // side_by_side)
    shards = {number: _Shard(path, tensor, chunk_bytes) for number, tensor in parts.items()}
    if not shape:
        yield shards[0].take(()).astype(dtype, copy=False).tobytes()
        return
    # Rows of the first axis whose rows are small. The axes before it are walked through one index at a time.
    row_bytes = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))]
    axis = next(axis for axis, size in enumerate(row_bytes) if size <= CHUNK_BYTES)
    many = CHUNK_BYTES // row_bytes[axis]
    for before in np.ndindex(shape[:axis]):
        here = [
            each
            for each in blocks
            if all(a <= at < b for at, a, b in zip(before, each[1].start, each[1].stop, strict=False))
        ]
        for start in range(0, shape[axis], many):
            stop = min(start + many, shape[axis])
            rows = np.full((stop - start, *shape[axis + 1 :]), fill, dtype)
            for number, block in here:
                low, high = max(start, block.start[axis]), min(stop, block.stop[axis])
                if low < high and number in shards:
                    place = (slice(low - start, high - start), *block.slices[axis + 1 :])
                    rows[place] = shards[number].take((high - low, *block.shape[axis + 1 :]))
            yield rows.tobytes()
