"""A checkpoint's variables, read where they are needed: no cluster, and no more in memory than is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pscluster.coordinator.checkpoints.folder import where
from pscluster.coordinator.checkpoints.index import SavedTensor, SavedVariable, check_whole, dtype_of, read_index
from pscluster.coordinator.job import progress as job_progress
from pscluster.core.errors import CheckpointError, UnknownVariableError
from pscluster.ps.spec import OURS
from pscluster.ps.storage.tensor_files import Array, WrittenTensor, join, read


class SavedVariables(Mapping[str, Array]):
    """The variables of a checkpoint by name, whole, however they were cut. Read-only.

    Each access reads and verifies the variable anew, shard by shard: keep what is needed twice.

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
        self._names = [name for name in self._index.variables if not name.startswith(OURS)]

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
        shards, blocks = variable.arrays["value"], variable.partition.blocks
        try:
            if len(shards) == 1:
                return self._shard(shards[0])
            whole: Array = np.empty(variable.shape, dtype_of(variable.dtype))
            for each in shards:
                whole[blocks[each.shard].slices] = self._shard(each)
        except CheckpointError as error:
            self.failure = error
            raise
        return whole

    def _shard(self, saved: SavedTensor) -> Array:
        place = WrittenTensor(saved.offset, saved.bytes, saved.sha256)
        return read(join(self.path, saved.file), saved.tensor, saved.dtype, saved.shape, place)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<SavedVariables of {self.path}: {', '.join(self._names)}>"
