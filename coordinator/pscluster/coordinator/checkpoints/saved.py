"""A checkpoint's variables, read as they are needed: without a cluster, one variable in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.coordinator.checkpoints.folder import where
from pscluster.coordinator.checkpoints.index import SavedTensor, check_whole, dtype_of, read_index
from pscluster.coordinator.checkpoints.saved_layers import layers_of
from pscluster.coordinator.job.progress import PROGRESS, decoded
from pscluster.core.errors import CheckpointError, UnknownVariableError
from pscluster.core.geometry.row_orders import RANGE
from pscluster.ps.row_ids import are_strings, has_ids, texts_of
from pscluster.ps.storage.files.tensor_files import Array, join, read
from pscluster.ps.tables import ids_in
from pscluster.worker.features.layer import Layer


class SavedVariables(Mapping[str, Array]):
    """The variables of a checkpoint by name, whole, however they were cut. Read-only.

    Each access reads and verifies the variable again, shard by shard.

    Args:
        path: a checkpoint, or a directory of checkpoints, of which the newest is read; a path or a URL of fsspec. The
            attribute `path` is the checkpoint's.

    Raises:
        CheckpointError: there is no checkpoint, or its index is damaged; at an access: the variable is damaged.
        UnknownVariableError: also a KeyError; it has no variable of that name.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = where(path)
        self.failure: CheckpointError | None = None  # the last one that reading from it raised
        self._index = read_index(self.path)
        check_whole(self._index, self.path)
        self.number = self._index.number  # in its directory; 0 for one made by `Checkpoint.write`
        self.created = self._index.created  # in ISO 8601

    @property
    def progress(self) -> dict[str, Any]:
        """Return what `strategy.save_progress` had saved; {} if nothing was."""
        return decoded(PROGRESS, self._index.job_metadata)

    @property
    def features(self) -> dict[str, Layer]:
        """Return the preprocessing layers that were saved with it, by name, as they were; read again at each access.

        Raises:
            CheckpointError: one is damaged, or was removed.
        """
        try:
            return layers_of(self.path, self._index)
        except CheckpointError as error:
            self.failure = error
            raise

    def __getitem__(self, name: str) -> Array:
        if name not in self:
            raise UnknownVariableError(f"{self.path} has no variable {name!r}; it has {', '.join(self)}")
        variable = self._index.variables[name]
        shards, partition = variable.arrays["value"], variable.partition
        try:
            if variable.dim:
                return np.concatenate([self._shard(saved) for saved in sorted(shards, key=lambda each: each.shard)])
            if len(shards) == 1 and partition.order == RANGE:
                return self._shard(shards[0])
            whole: Array = np.empty(variable.shape, dtype_of(variable.dtype))
            for saved in shards:
                whole[partition.index(saved.shard)] = self._shard(saved)
        except CheckpointError as error:
            self.failure = error
            raise
        return whole

    def rows(self, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """Return the ids and the values, (n, dim), of the rows of an `EmbeddingTable`, in no order.

        Ids are int64 or, of a table with `ids=str`, an array of `str`.

        `saved[name]` gives them as they are stored, with the ids beside the values.

        Raises:
            CheckpointError: it is damaged, or a variable that is no table.
            UnknownVariableError: also a KeyError; there is no variable of that name.
        """
        stored = self[name]
        dim = self._index.variables[name].dim
        if not dim or stored.ndim != 2 or stored.dtype != np.float32 or not has_ids(stored.shape[1], dim):
            raise CheckpointError(f"{name!r} in {self.path} is not an EmbeddingTable")
        ids = ids_in(stored, dim)
        return texts_of(ids) if are_strings(ids) else ids, np.ascontiguousarray(stored[: len(ids), :dim])

    def _shard(self, saved: SavedTensor) -> Array:
        return read(join(self.path, saved.file), saved)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._index.variables

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.variables)

    def __len__(self) -> int:
        return len(self._index.variables)

    def __repr__(self) -> str:
        return f"<SavedVariables of {self.path}: {', '.join(self)}>"
