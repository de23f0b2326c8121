"""What the file of a delta says, in either format: of which table it is, and from which version to which it leads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.coordinator.checkpoints.index import dtype_of
from pscluster.coordinator.serving.versions import TableVersion
from pscluster.core.errors import CheckpointError, InvalidUpdateError
from pscluster.ps.row_ids import LEAST_ID_BYTES, MOST_ID_BYTES, RowIds, check_strings, shown
from pscluster.ps.storage.files.tensor_files import Array

Mask = npt.NDArray[np.bool_]

KEY = "pscluster-delta"
"""Where the metadata of a file has the header."""
HINT = "copy it again, or export it again"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta in a file: it leads the table from one version to another."""

    path: str
    table: str
    since: TableVersion
    version: TableVersion
    changed: int  # rows


@dataclass(frozen=True, slots=True)
class Header:
    """Of which table a delta is, and its versions."""

    table: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # of the table
    any_ids: bool  # whether it has rows by any id, not by 0..rows-1
    since: TableVersion
    version: TableVersion
    id_bytes: int = 0  # the most bytes of an id that is a string; 0: they are int64

    @property
    def id_dtype(self) -> np.dtype[Any]:
        return np.dtype(f"S{self.id_bytes}" if self.id_bytes else np.int64)

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(
            {
                "version": _FORMAT,
                "table": self.table,
                "dtype": self.dtype.name,
                "shape": self.shape,
                "any_ids": self.any_ids,
                **({"id_bytes": self.id_bytes} if self.id_bytes else {}),
                "since": asdict(self.since),
                "to": asdict(self.version),
            }
        )

    @staticmethod
    def of(path: str | Path, text: str | bytes) -> Header:
        """Read it again. CheckpointError, which names the file, if it makes no sense: any program may have written it.

        Args:
            path: of the file, for errors.
            text: JSON.
        """
        try:
            about = json.loads(text)
            if about.get("version") != _FORMAT:
                raise ValueError(f"format version {about.get('version')!r}; this program reads version {_FORMAT}")
            since, to = TableVersion(**about["since"]), TableVersion(**about["to"])
            if not all(isinstance(of.number, int) and isinstance(of.digest, str) for of in (since, to)):
                raise ValueError("versions without a number or a digest")
            shape = tuple(about["shape"])
            if not all(isinstance(length, int) and length >= 0 for length in shape) or not shape:
                raise ValueError(f"a table of shape {shape}")
            any_ids, id_bytes = about.get("any_ids") is True, about.get("id_bytes", 0)
            if id_bytes and not (any_ids and id_bytes in range(LEAST_ID_BYTES, MOST_ID_BYTES + 1, 8)):
                raise ValueError(f"ids of {id_bytes!r} bytes")
            return Header(str(about["table"]), dtype_of(about["dtype"]), shape, any_ids, since, to, id_bytes or 0)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, CheckpointError) as error:
            raise CheckpointError(f"{path} is not a readable delta: {error}") from None


@dataclass(frozen=True, slots=True)
class Changes:
    """What is to be written. The rows can be taken several times, a few at a time."""

    header: Header
    count: int
    ids: Callable[[], Iterator[RowIds]]  # rising, not all at once
    take: Callable[[RowIds], Array]  # their rows
    has: Callable[[RowIds], Mask]  # which of them have rows; the others were dropped


@dataclass(frozen=True, slots=True)
class LoadedDelta:
    """A delta in memory."""

    delta: Delta
    header: Header
    ids: RowIds  # [n], rising
    rows: Array  # [n, ...]
    dropped: Mask  # [n], which rows were dropped: they have initial values

    @staticmethod
    def of(path: str | Path, header: Header, ids: RowIds, rows: Array, dropped: Mask) -> LoadedDelta:
        """Return a delta whose ids were checked: see `check_ids`."""
        delta = Delta(str(path), header.table, header.since, header.version, len(ids))
        return LoadedDelta(delta, header, ids, rows, dropped)


def check_ids(path: str | Path, header: Header, ids: RowIds, first: int = 0) -> None:
    """Raise CheckpointError, which names the file and the place, if ids from a position on are none of the table's."""
    if header.id_bytes:
        try:
            check_strings(ids, header.table)
        except InvalidUpdateError as error:
            raise CheckpointError(f"{path} is not a readable delta: {error}") from None
    falls = np.flatnonzero(ids[1:] <= ids[:-1])
    if len(falls):
        at = int(falls[0]) + 1
        raise CheckpointError(
            f"{path} is not a readable delta: id {shown(ids[at])} (position {first + at:,}) comes after "
            f"{shown(ids[at - 1])}"
        )
    if not header.any_ids and len(ids) and not (ids[0] >= 0 and ids[-1] < header.shape[0]):
        at = 0 if ids[0] < 0 else int(np.searchsorted(ids, header.shape[0]))
        raise CheckpointError(
            f"{path} is not a readable delta: id {ids[at]} (position {first + at:,}) is not one of "
            f"{header.shape[0]:,} rows"
        )
