"""What has rows that can be read in any order: npy files and Arrow's, both mapped into memory, and Hugging Face's.

Before each read a mapped file's size is compared with what it was: reading past the end of one that was cut short would
kill the process. Files with as many rows are often of one size, so a digest of samples is saved with a position, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pscluster.core.dtypes import array_of
from pscluster.core.values import describe
from pscluster.worker.data.blocks import joined, leaves, map_leaves
from pscluster.worker.data.files.columns import arrays_of, check_names, check_schema, need_arrow
from pscluster.worker.data.files.opening import DataFile, Opener, digests_of, of_each
from pscluster.worker.data.sources import Listed, MappedArray, Numbers, RowFiles, Sent

_FILE_MAGIC, _STREAM_MAGIC = b"ARROW1", b"\xff\xff\xff\xff"


def _listed(files: Sequence[DataFile]) -> list[Listed]:
    return [Listed(file.path, file.size, 1, digest) for file, digest in zip(files, digests_of(files), strict=True)]


def pieces_of(starts: Numbers, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return where the rows [start, stop) are: (file, first row, the one after the last) for each file with some.

    Args:
        starts: the row at which each file begins, and the number of all rows.
        start, stop: 0 <= start <= stop <= that number.
    """
    pieces = []
    file = int(np.searchsorted(starts, start, "right")) - 1
    while start < stop:
        end = min(stop, int(starts[file + 1]))
        if start < end:
            pieces.append((file, start - int(starts[file]), end - int(starts[file])))
        start, file = end, file + 1
    return pieces


@dataclass(init=False, eq=False)
class NpyFiles(RowFiles):
    """The rows of arrays in npy files, one after another. The coordinator reads the files' headers.

    Raises:
        ValueError: a file is not a local npy file of numbers, or its rows are not like those of the first one.
    """

    files: list[DataFile]
    arrays: list[MappedArray]
    starts: Numbers

    def __init__(self, files: Sequence[DataFile]) -> None:
        self.files = list(files)
        self.arrays = of_each(_mapped, self.files)
        first = self.arrays[0]
        for file, array in zip(self.files, self.arrays, strict=True):
            if (array.shape[1:], array.dtype) != (first.shape[1:], first.dtype):
                raise ValueError(
                    f"{file.path!r} has rows of {array.dtype} and shape {array.shape[1:]}, and {self.files[0].path!r} "
                    f"of {first.dtype} and {first.shape[1:]}: give files with rows that are alike"
                )
        self.starts = np.cumsum([0, *(array.shape[0] for array in self.arrays)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def listed(self) -> list[Listed]:
        """The files, with digests."""
        return _listed(self.files)

    def read(self, start: int, stop: int) -> Any:
        """Return a copy of the rows [start, stop)."""
        rows = []
        for file, first, after in pieces_of(self.starts, start, stop):
            self._opener.path(self.files[file])
            if file not in self._opened:
                self._opened[file] = self.arrays[file].open()
            rows.append(self._opened[file][first:after])
        return np.concatenate(rows) if len(rows) > 1 else array_of(rows[0]).copy()

    @cached_property
    def _opener(self) -> Opener:
        return Opener()

    @cached_property
    def _opened(self) -> dict[int, Any]:
        return {}


def _mapped(file: DataFile) -> MappedArray:
    if not file.is_local:
        raise ValueError(
            f"{file.path!r} is not a local file, and npy files are mapped into memory: copy it, or use Parquet"
        )
    path = Opener().path(file)
    try:
        with open(path, "rb") as opened:
            head = opened.read(6)
        if head and not head.startswith((b"\x93NUMPY", b"PK")):  # NumPy would speak of pickles
            raise ValueError(f"it begins with {head!r}")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.memmap):
            array.close()
            raise ValueError("it is an archive of several arrays: np.load and np.save them one by one")
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{file.path!r} can't be read as an npy file: {error}") from None
    described = MappedArray.of(array)
    if described is None or not array.ndim:
        raise ValueError(f"{file.path!r} has an array without rows, of shape {array.shape}: give one row per example")
    return described


@dataclass(init=False, eq=False)
class Together(RowFiles):
    """Sources of ranges with the same number of examples, in a dict or tuple."""

    structure: Any

    def __init__(self, structure: Any, lengths: Mapping[str, int]) -> None:
        self.structure = structure
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the arrays have {dict(lengths)} rows: give the same number for each name")

    def __len__(self) -> int:
        lengths: list[int] = []
        map_leaves(lambda leaf: lengths.append(len(leaf)), self.structure)
        return lengths[0]

    @property
    def listed(self) -> list[Listed]:
        """The files of all, in the order of the structure."""
        return [file for leaf in leaves(self.structure) for file in leaf.listed]

    def read(self, start: int, stop: int) -> Any:
        """Return the rows [start, stop) of each."""
        return map_leaves(lambda leaf: leaf.read(start, stop), self.structure)


@dataclass(init=False, eq=False)
class ArrowFiles(RowFiles):
    """The rows of Arrow IPC files or streams, one after another. The coordinator reads the files' metadata.

    Args:
        files: local ones.
        columns: the names of those to read; None: all.
        fills: values in place of nulls, by column; under "" that of all others.

    Raises:
        MisuseError: there is no pyarrow.
        ValueError: a file is not a local Arrow file; lacks a column, or has it with another type than the first file;
            or a column has no array of NumPy.
    """

    files: list[DataFile]
    columns: list[str]
    fills: dict[str, Any]
    starts: Numbers

    def __init__(self, files: Sequence[DataFile], columns: Sequence[str] | None, fills: Mapping[str, Any]) -> None:
        self.files, self.fills, self.columns = list(files), dict(fills), []
        tables = of_each(self._load, self.files)
        first, where = tables[0].schema, repr(self.files[0].path)
        self.columns = list(first.names if columns is None else columns)
        check_names([name for name in self.fills if name], self.columns, "the selection of fill_nulls=")
        for file, table in zip(self.files, tables, strict=True):
            check_names(self.columns, table.column_names, repr(file.path))
            for name in self.columns:
                if (own := table.schema.field(name).type) != first.field(name).type:
                    raise ValueError(
                        f"the column {name!r} is of type {own} in {file.path!r}, and {first.field(name).type} in "
                        f"{where}: write it alike in all files, or leave it out with columns="
                    )
        check_schema(tables[0].select(self.columns).schema, where)
        self.starts = np.cumsum([0, *(table.num_rows for table in tables)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def listed(self) -> list[Listed]:
        """The files, with digests."""
        return _listed(self.files)

    def read(self, start: int, stop: int) -> Any:
        """Return the columns of the rows [start, stop)."""
        blocks = []
        for file, first, after in pieces_of(self.starts, start, stop):
            self._opener.path(self.files[file])
            if file not in self._tables:
                self._tables[file] = self._load(self.files[file])
            table = self._tables[file].select(self.columns).slice(first, after - first)
            blocks.append(arrays_of(table, self.fills, repr(self.files[file].path), first))
        return joined(blocks)

    @cached_property
    def _opener(self) -> Opener:
        return Opener()

    @cached_property
    def _tables(self) -> dict[int, Any]:
        return {}

    def _load(self, file: DataFile) -> Any:
        """Return a file's rows as a table, mapped into memory."""
        if not file.is_local:
            raise ValueError(
                f"{file.path!r} is not a local file, and Arrow files are mapped into memory: copy it, or use Parquet"
            )
        arrow, ipc = need_arrow(), need_arrow("pyarrow.ipc")
        with self._opener.open(file) as opened:
            magic = opened.read(len(_FILE_MAGIC))
        if magic != _FILE_MAGIC and not magic.startswith(_STREAM_MAGIC):
            raise ValueError(f"{file.path!r} can't be read as an Arrow file: it begins with {magic!r}")
        mapped = arrow.memory_map(self._opener.path(file))
        try:
            reader = ipc.open_file(mapped) if magic == _FILE_MAGIC else ipc.open_stream(mapped)
            return reader.read_all()
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"{file.path!r} can't be read as an Arrow file: {error}") from None


@dataclass(init=False, eq=False)
class HuggingFaceRows(Sent):
    """The rows of a dataset of Hugging Face's `datasets`, as columns of Arrow.

    Raises:
        TypeError: it is not a `Dataset`.
        ValueError: it lacks a column, or a column has no array of NumPy.
    """

    dataset: Any
    fills: dict[str, Any]

    def __init__(self, dataset: Any, columns: Sequence[str] | None, fills: Mapping[str, Any]) -> None:
        if isinstance(dataset, Mapping):
            name = next(iter(dataset), "train")
            raise TypeError(f"a dict of datasets is not a dataset: give one of them, dataset[{name!r}]")
        if not all(hasattr(dataset, name) for name in ("with_format", "column_names", "__len__")):
            raise TypeError(f"{describe(dataset)} is not a Dataset of Hugging Face that has a length")
        where = "the dataset"
        check_names(list(columns or []), dataset.column_names, where)
        chosen = dataset if columns is None else dataset.select_columns(list(columns))
        check_names([name for name in fills if name], chosen.column_names, "the selection of fill_nulls=")
        self.dataset, self.fills = chosen.with_format("arrow"), dict(fills)
        check_schema(self.dataset.features.arrow_schema, where)

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, start: int, stop: int) -> Any:
        """Return the columns of the rows [start, stop)."""
        return arrays_of(self.dataset[start:stop], self.fills, "the dataset", start)
