"""A table that is served: looked up in a checkpoint, and in the rows that have changed since.

    one state = a mapped checkpoint, and an overlay of rows from deltas, sorted by id

A state never changes. `follow` and `refresh` make another one and, once it is complete, put it in place of the one
before: a lookup on another thread takes all its rows from one of them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pscluster.coordinator.checkpoints.index import read_index
from pscluster.coordinator.serving.by_id import MappedById
from pscluster.coordinator.serving.delta_files import Delta, Header, LoadedDelta, Mask
from pscluster.coordinator.serving.deltas import read_delta
from pscluster.coordinator.serving.mapped import Ids, Mapped, map_table, of_newest
from pscluster.coordinator.serving.versions import TableVersion
from pscluster.core.errors import CheckpointError, StaleError
from pscluster.ps.row_ids import Missing, RowIds, check_missing, without_rows
from pscluster.ps.storage.files.tensor_files import Array


@dataclass(frozen=True, slots=True)
class _State:
    base: Mapped
    version: TableVersion
    ids: RowIds  # [n], rising: of the rows that differ from the base
    rows: Array  # [n, ...]
    dropped: Mask  # [n], which of them there are no longer

    @staticmethod
    def of(base: Mapped) -> _State:
        ids = base.ids[:0] if isinstance(base, MappedById) else np.empty(0, np.int64)
        return _State(base, base.version, ids, np.empty((0, *base.shape[1:]), base.dtype), np.empty(0, np.bool_))

    def take(self, ids: RowIds) -> Array:
        """Return the rows with these ids, [n]."""
        found = self.base.take(ids)
        if len(self.ids):
            changed, at = self._changed_among(ids)
            if len(changed):
                found[changed] = self.rows[at]
        return found

    def has(self, ids: RowIds) -> Mask:
        """Return which of these ids have rows, [n]."""
        known = self.base.has(ids)
        if len(self.ids):
            changed, at = self._changed_among(ids)
            known[changed] = ~self.dropped[at]
        return known

    def _changed_among(self, ids: RowIds) -> tuple[Ids, Ids]:
        """Return which of these ids, by position, deltas have changed, and where these are in `self.ids`."""
        at = np.searchsorted(self.ids, ids)
        at[at == len(self.ids)] = 0
        changed = (self.ids[at] == ids).nonzero()[0]
        return changed, at[changed]

    def changed(self, loaded: LoadedDelta) -> _State:
        """Return the state with a delta's rows in place of those that were.

        Leaves out rows that were dropped and that the base lacks, too: it gives their initial values anyway, and they
        would pile up.
        """
        kept, needed = ~np.isin(self.ids, loaded.ids), ~loaded.dropped
        needed[loaded.dropped] = self.base.has(loaded.ids[loaded.dropped])
        ids = np.concatenate((self.ids[kept], loaded.ids[needed]))
        order = np.argsort(ids)
        rows = np.concatenate((self.rows[kept], loaded.rows[needed]))[order]
        dropped = np.concatenate((self.dropped[kept], loaded.dropped[needed]))[order]
        return _State(self.base, loaded.delta.version, ids[order], rows, dropped)


class ServingTable:
    """A variable or an `EmbeddingTable` of a checkpoint, read by rows without a cluster. Thread-safe.

    The checkpoint is mapped into memory: it is read as it is used, and all processes of a machine share one copy. Rows
    that deltas have changed are held in memory besides.
    """

    def __init__(self, source: str, state: _State, verify: bool) -> None:
        self._source, self._state, self._verify = source, state, verify
        self._changing = threading.Lock()  # held by `follow` and `refresh`, not by lookups

    @classmethod
    def open(cls, path: str | Path, name: str, *, verify: bool = True) -> Self:
        """Open a table.

        Args:
            path: a checkpoint, or a directory of checkpoints, of which the newest is opened; not a URL.
            name: of the variable.
            verify: whether to read all of the table once, and check that it is what was written. Without, damage to a
                value is not noticed, and opening takes milliseconds, however large the table is.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged; the message names the file.
            UnknownVariableError: also a KeyError; it has no variable of that name.
            MisuseError: the variable is a scalar, and has no rows.
        """
        return cls(str(path), _State.of(map_table(path, name, verify=verify)), verify)

    @property
    def name(self) -> str:
        return self._state.base.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._state.base.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._state.base.dtype

    @property
    def path(self) -> str:
        """The checkpoint that is open; `SavedVariables(table.path)` has the rest of the model."""
        return self._state.base.path

    @property
    def version(self) -> TableVersion:
        """The version that lookups return: the checkpoint's, or that of the last delta."""
        return self._state.version

    @property
    def changed_rows(self) -> int:
        """How many rows are held in memory, since deltas have changed them."""
        return len(self._state.ids)

    def lookup(self, ids: npt.ArrayLike, *, missing: Missing = "initial") -> Array:
        """Return copies of rows, in the order of the ids.

        Args:
            ids: integers in 0..rows-1, or any ids of the kind of an `EmbeddingTable`, of any shape; they may repeat.
            missing: what an id without a row in an `EmbeddingTable` gives, such as one that a delta has dropped: its
                "initial" values, as in the job, or an "error".

        Returns:
            An array of the shape of `ids`, followed by that of a row.

        Raises:
            InvalidUpdateError: also a ValueError; they are of another kind, or one, which is named, is out of range, or
                has no row.
            MisuseError: `missing` is neither of the two.
        """
        state, strict = self._state, check_missing(missing)
        checked = state.base.checked(ids)
        flat = checked.reshape(-1)
        if strict and not (known := state.has(flat)).all():
            raise without_rows(state.base.name, flat[~known])
        return state.take(flat).reshape(*checked.shape, *state.base.shape[1:])

    def follow(self, path: str | Path) -> Delta:
        """Apply a delta that `export_delta` has written, in either format. Lookups go on, and see all of it or nothing.

        Raises:
            StaleError: it does not begin at the version that is open; the message names both.
            CheckpointError: it is damaged, not complete, or of another table.
            MisuseError: it is in Parquet, and there is no pyarrow. In all cases nothing has changed.
        """
        with self._changing:
            state, base = self._state, self._state.base

            def accept(header: Header) -> None:
                expected = base.name, base.dtype.name, base.shape
                found = header.table, header.dtype.name, header.shape
                if expected != found:
                    raise CheckpointError(
                        f"{path} is of table {found[0]!r}, {found[1]}{list(found[2])}, not of {expected[0]!r}, "
                        f"{expected[1]}{list(expected[2])}"
                    )
                if header.id_dtype != state.ids.dtype or header.any_ids != isinstance(base, MappedById):
                    raise CheckpointError(f"{path} has ids of another kind or length than {base.name!r}")

            loaded = read_delta(path, accept)
            delta = loaded.delta
            if delta.since.digest != state.version.digest:
                raise StaleError(
                    f"{path} leads from version {delta.since} of {base.name!r} to {delta.version}, but {state.version} "
                    "is open: follow the deltas in order, or open the newest checkpoint with refresh()"
                )
            self._state = state.changed(loaded)
            return delta

    def refresh(self) -> bool:
        """Open the newest checkpoint in the directory unless it is open, or older; return whether another is open now.

        Rows of deltas are then held no longer. Lookups go on meanwhile, with what was open before.

        Raises:
            CheckpointError: the newest is damaged, or can't be read.
            MisuseError: the table has another shape or type there. In both cases nothing has changed.
        """
        with self._changing:
            if (base := of_newest(self._source, self._newer)) is None:
                return False
            self._state.base.check_like(base)
            self._state = _State.of(base)
            return True

    def _newer(self, path: str) -> Mapped | None:
        """Open this checkpoint; None if it is open, or older."""
        base, version = self._state.base, self._state.version
        if path == base.path or read_index(path).number < version.number:
            return None
        return map_table(path, base.name, verify=self._verify)

    def __repr__(self) -> str:
        state = self._state
        return f"<ServingTable {self.name!r}, {self.dtype}{list(self.shape)}, version {state.version} of {self.path}>"
