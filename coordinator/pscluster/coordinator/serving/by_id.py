"""An `EmbeddingTable` of a checkpoint, mapped into memory: its rows are found by their ids, which are held sorted.

Strings are sorted by a hash of them: in a table of a million rows numbers are found in a third of the time. Two strings
may have one hash, so those that follow are compared as well. No one can choose ids so that many have one hash, since
the hash has a key that only this process knows.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.coordinator.serving.versions import TableVersion
from pscluster.core.errors import CheckpointError, MisuseError
from pscluster.core.numbers.splitmix import Hashes
from pscluster.ps.row_ids import RowIds, are_strings, has_ids, hashes
from pscluster.ps.storage.files.tensor_files import Array
from pscluster.ps.tables import Ids, InitialRows, table_ids, tails_of

_KEY = secrets.randbits(64)


@dataclass(frozen=True, slots=True)
class MappedById:
    """The rows of a table in a checkpoint; ids without one have their initial values, as in the job. Read-only."""

    path: str  # of the checkpoint
    name: str
    version: TableVersion
    initial: InitialRows
    ids: RowIds  # [n], rising; strings: in the order of their hashes
    keys: Ids | Hashes  # [n], rising: what is searched, which is the ids, or their hashes
    places: Ids  # [n], of their rows in all shards, laid end to end
    shards: list[npt.NDArray[np.float32]]  # [rows, dim + TAIL] each
    starts: Ids  # where each shard begins

    @staticmethod
    def of(path: str, name: str, version: TableVersion, initial: InitialRows, shards: list[Array]) -> MappedById:
        """Sort the ids of these shards. CheckpointError if they are not rows of such a table."""
        mapped: list[npt.NDArray[np.float32]] = []
        ids: list[RowIds] = []
        for shard in shards:
            if shard.ndim != 2 or shard.dtype != np.float32 or not has_ids(shard.shape[1], initial.dim):
                raise CheckpointError(f"{shard.dtype}{list(shard.shape)} are not rows of {name!r} in {path}")
            mapped.append(shard)
            ids.append(tails_of(mapped[-1], initial.dim)[0])
        all_ids = np.concatenate(ids)
        all_keys = hashes(all_ids, _KEY) if are_strings(all_ids) else all_ids
        places = np.argsort(all_keys, kind="stable")
        sorted_ids, keys = all_ids[places], all_keys[places] if are_strings(all_ids) else None
        starts = np.cumsum([0, *map(len, shards)])[:-1]
        return MappedById(
            path, name, version, initial, sorted_ids, sorted_ids if keys is None else keys, places, mapped, starts
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows is not limited: 0 stands for it, as in the table's handle."""
        return 0, self.initial.dim

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32)

    @property
    def id_bytes(self) -> int:
        """The most bytes of an id that is a string; 0: ids are int64."""
        return self.ids.itemsize if are_strings(self.ids) else 0

    def checked(self, ids: npt.ArrayLike) -> RowIds:
        """Return ids as the table has them. InvalidUpdateError if they are of another kind, or do not fit."""
        return table_ids(ids, self.name, self.id_bytes)

    def take(self, ids: RowIds) -> Array:
        """Return the rows with these ids, [n, dim]."""
        if not len(self.ids):
            return self.initial.of(ids)
        at, known = self._search(ids)
        places = self.places[at]
        out = np.empty((len(ids), self.initial.dim), np.float32)
        for start, shard in zip(self.starts.tolist(), self.shards, strict=True):
            here = np.flatnonzero(known & (places >= start) & (places < start + len(shard)))
            out[here] = shard[places[here] - start, : self.initial.dim]
        missing = np.flatnonzero(~known)
        if len(missing):
            out[missing] = self.initial.of(ids[missing])
        return out

    def has(self, ids: RowIds) -> npt.NDArray[np.bool_]:
        """Return which of these ids have rows, [n]."""
        return self._search(ids)[1] if len(self.ids) else np.zeros(len(ids), np.bool_)

    def _search(self, ids: RowIds) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Return where ids are among those of the table, and which ones are there."""
        wanted = hashes(ids, _KEY) if are_strings(ids) else ids
        at = np.searchsorted(self.keys, wanted)
        at[at == len(self.ids)] = 0
        known = self.ids[at] == ids
        if wanted is not ids:
            others = np.flatnonzero(~known & (self.keys[at] == wanted))
            while len(others):  # further ones of the same hash
                at[others] += 1
                others = others[at[others] < len(self.ids)]
                others = others[self.keys[at[others]] == wanted[others]]
                known[others] = self.ids[at[others]] == ids[others]
                others = others[~known[others]]
            at[~known] = 0
        return at, known

    def check_like(self, other: object) -> None:
        """Raise MisuseError if the other is no such table, or its ids without a row have other values."""
        path = getattr(other, "path", "the other")
        if isinstance(other, MappedById) and self.ids.dtype != other.ids.dtype:
            raise MisuseError(
                f"{self.name!r} has ids of another kind or length in {self.path} than in {path}: open it again"
            )
        if not isinstance(other, MappedById) or self.initial != other.initial:
            raise MisuseError(
                f"{self.name!r} is an EmbeddingTable of rows of {self.initial.dim} values in {self.path}, but one with "
                f"other rows or initial values, or a variable, in {path}: open it again"
            )
