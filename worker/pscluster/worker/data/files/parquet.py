"""Parquet files as blocks of rows.

A block has some of the row groups of a file, as many as hold `block_rows` rows; a larger row group is cut into at most
`_PIECES` blocks, so that several workers have something to do with a small file. Parquet can only decode a row group as
a whole: a worker that is given one of its blocks keeps it, and blocks of one row group stay together in shuffled
epochs.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pscluster.worker.data.blocks import cut, size_of
from pscluster.worker.data.files.columns import arrays_of, check_names, check_schema, need_arrow
from pscluster.worker.data.files.opening import DataFile, Opener, of_each
from pscluster.worker.data.files.partitions import Partitions
from pscluster.worker.data.sources import Blocks, Listed, Numbers

logger = logging.getLogger(__name__)

_PIECES = 4
_OPEN_FILES = 8
_LARGE_GROUP = 1 << 30  # bytes


@dataclass(init=False, eq=False)
class ParquetBlocks(Blocks):
    """The rows of Parquet files. The coordinator reads the files' footers when it makes this.

    Args:
        files: in their order.
        columns: the names of those to read; None: all.
        filters: as of `pyarrow.parquet.read_table`: rows that do not match are not among the examples, and row groups
            without any that may match, by their statistics, are not read.
        fills: values in place of nulls, by column; under "" that of all others.
        block_rows: see the module's docstring.
        partitions: columns that are not in the files, but in the names of their folders.

    Raises:
        MisuseError: there is no pyarrow.
        ValueError: a file is not a Parquet file; lacks a column, or has it with another type than the first file; or
            a column has no array of NumPy.
    """

    files: list[DataFile]
    partitions: Partitions
    columns: list[str]
    filters: Any
    fills: dict[str, Any]
    # For each block: the file; its first row group, and the one after the last; their rows; the file's rows before
    # them; and of their rows the block's, [start, stop).
    table: Numbers

    def __init__(
        self,
        files: Sequence[DataFile],
        columns: Sequence[str] | None,
        filters: Any,
        fills: Mapping[str, Any],
        block_rows: int,
        partitions: Partitions | None = None,
    ) -> None:
        self.files, self.filters, self.fills = list(files), filters, dict(fills)
        self.partitions = partitions or Partitions([], [[] for _ in self.files])
        footers = of_each(self._footer, self.files)
        first = footers[0].schema.to_arrow_schema()
        where = repr(self.files[0].path)
        for name in self.partitions.names:
            if name in first.names:
                raise ValueError(f"the column {name!r} is in {where}, and in the names of its folders: rename one")
        names = [*first.names, *self.partitions.names]
        self.columns = list(names if columns is None else columns)
        check_names(self.columns, names, where)
        if not self._own_columns:
            raise ValueError(f"columns={self.columns} are all in the names of folders: add one that is in the files")
        check_names([name for name in self.fills if name], self._own_columns, "the selection of fill_nulls=")
        schema = _selected(first, self._own_columns)
        check_schema(schema, where)
        for file, footer in zip(self.files[1:], footers[1:], strict=True):
            own = footer.schema.to_arrow_schema()
            check_names(self._own_columns, own.names, repr(file.path))
            _check_types(_selected(own, self._own_columns), schema, file, where)
        groups = [self._matching(index, footer) for index, footer in enumerate(footers)]
        blocks = [
            (index, *block)
            for index, (footer, chosen) in enumerate(zip(footers, groups, strict=True))
            for block in _blocks(footer, chosen, block_rows)
        ]
        if filters is not None and not blocks:
            more = f" and {len(self.files) - 1:,} more files" if len(self.files) > 1 else ""
            raise ValueError(f"no row of {where}{more} can match filters={filters!s:.200}: there would be no examples")
        self.table = np.array(blocks, np.int64).reshape(-1, 7)
        _warn_of_large_groups(footers, where)

    noun = "block"

    def __len__(self) -> int:
        return len(self.table)

    @property
    def sizes(self) -> Numbers | None:
        """The rows of each block; with filters unknown."""
        return None if self.filters is not None else self.table[:, 6] - self.table[:, 5]

    @property
    def nbytes(self) -> Numbers:
        """The bytes of the files, shared out among their blocks by rows."""
        file, rows = self.table[:, 0], self.table[:, 6] - self.table[:, 5]
        sizes = np.array([each.size for each in self.files], np.float64)
        of_files = np.maximum(np.bincount(file, rows, len(self.files)), 1)
        return (sizes[file] * rows / of_files[file]).astype(np.int64)

    @property
    def neighbours(self) -> Numbers | None:
        """Number the row groups, so that the blocks of one stay together."""
        return np.unique(self.table[:, :2], axis=0, return_inverse=True)[1].reshape(-1)

    @property
    def listed(self) -> list[Listed]:
        """The files, with their sizes and numbers of blocks."""
        counts = np.bincount(self.table[:, 0], minlength=len(self.files)).tolist()
        return [Listed(file.path, file.size, count) for file, count in zip(self.files, counts, strict=True)]

    def name_of(self, index: int) -> str:
        """Name the rows of a block."""
        file, _, _, _, before, start, stop = self.table[index].tolist()
        return f"rows {before + start:,} to {before + stop - 1:,} of {self.files[file].path!r}"

    def load(self, index: int) -> Any:
        """Return the columns of a block's rows. ValueError if the file was changed, or has nulls without a fill."""
        file_index, first, after, rows, before, start, stop = self.table[index].tolist()
        file = self.files[file_index]
        if self._kept[0] == (file_index, first):
            columns = self._kept[1]
        else:
            self._kept[:] = (None, None)  # freed first
            table = self._read(file_index, first, after)
            columns = arrays_of(table, self.fills, repr(file.path), None if self.filters is not None else before)
            if self.partitions.names:
                columns |= self.partitions.columns_of(file_index, size_of(columns))
                columns = {name: columns[name] for name in self.columns}
        if file.is_local:
            # Checks that it was there, and as it was. Not before: while it waited for the disk, the function's thread
            # would take Python's lock, and use its block before, not while, this one is decoded.
            self._opener.path(file)
        if stop - start == rows:
            return columns
        self._kept[:] = (file_index, first), columns
        matching = size_of(columns)  # fewer, if there are filters: each block has its share of them
        return cut(columns, matching * start // rows, matching * stop // rows)

    @cached_property
    def _own_columns(self) -> list[str]:
        """The columns to read that are in the files."""
        return [name for name in self.columns if name not in self.partitions.names]

    # What is open

    @cached_property
    def _opener(self) -> Opener:
        return Opener()

    @cached_property
    def _kept(self) -> list[Any]:
        """The last row group that was read of which there are several blocks: its name and its columns."""
        return [None, None]

    @cached_property
    def _open(self) -> OrderedDict[int, Any]:
        """The last files that were read, by index, with their readers."""
        return OrderedDict()

    @cached_property
    def _expression(self) -> Any:
        pq = need_arrow("pyarrow.parquet")
        try:
            return pq.filters_to_expression(self.filters)
        except Exception as error:
            raise ValueError(
                f"filters={self.filters!r:.200} is not a filter of pyarrow, such as [('age', '>', 3)]: {error}"
            ) from None

    def _file(self, file_index: int) -> Any:
        """Return the open file. Some stay open: opening one takes an eighth of the time of reading a block."""
        if file_index not in self._open:
            pq, file = need_arrow("pyarrow.parquet"), self.files[file_index]
            while len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)
            # Not mapped: reading from a mapped file that was cut short would kill the process.
            source = self._opener.path(file) if file.is_local else self._opener.open(file)
            try:
                # What is read ahead of decoding stays in memory with the open file, and saves only round trips.
                self._open[file_index] = pq.ParquetFile(source, pre_buffer=not file.is_local)
            except need_arrow().ArrowException as error:
                raise _not_parquet(file, error) from None
        self._open.move_to_end(file_index)
        return self._open[file_index]

    def _read(self, file_index: int, first: int, after: int) -> Any:
        """Return the chosen columns of some row groups, without rows that do not match."""
        file = self.files[file_index]
        try:
            if self.filters is None:
                own = self._own_columns
                several = need_arrow().cpu_count() > 1  # with one, its thread would only be waited for
                table = self._file(file_index).read_row_groups(range(first, after), own, use_threads=several)
                return table if table.column_names == own else table.select(own)
            with self._opener.open(file) as opened:
                fragment = self._fragment(opened, file_index)
                schema = self.partitions.schema_with(fragment.physical_schema)
                chosen = fragment.subset(row_group_ids=range(first, after))
                return chosen.to_table(schema=schema, columns=self._own_columns, filter=self._expression)
        except (need_arrow().ArrowException, OSError) as error:
            if file.is_local:
                self._opener.path(file)  # says it if it was changed
            groups = f"row group {first}" if after == first + 1 else f"row groups {first} to {after - 1}"
            raise ValueError(f"{groups} of {file.path!r} can't be decoded: {error}") from None

    def _footer(self, file: DataFile) -> Any:
        """Return a file's metadata."""
        pq, arrow = need_arrow("pyarrow.parquet"), need_arrow()
        with self._opener.open(file) as opened:
            try:
                return pq.read_metadata(opened)
            except arrow.ArrowException as error:
                raise _not_parquet(file, error) from None

    def _fragment(self, opened: Any, file_index: int) -> Any:
        """Return an open file as pyarrow filters it."""
        guarantee = self.partitions.expression_of(file_index)
        return need_arrow("pyarrow.dataset").ParquetFileFormat().make_fragment(opened, None, guarantee)

    def _matching(self, file_index: int, footer: Any) -> list[int]:
        """Return the row groups that may have matching rows."""
        if self.filters is None:
            return list(range(footer.num_row_groups))
        arrow, file = need_arrow(), self.files[file_index]
        with self._opener.open(file) as opened:
            fragment = self._fragment(opened, file_index)
            try:
                schema = self.partitions.schema_with(fragment.physical_schema)
                return [group.id for group in fragment.subset(self._expression, schema).row_groups]
            except (arrow.ArrowException, TypeError) as error:
                names = ", ".join(map(repr, [*footer.schema.to_arrow_schema().names, *self.partitions.names]))
                reason = str(error).partition("\n")[0]  # the schema follows
                raise ValueError(
                    f"the filters {self.filters!s:.200} don't fit {file.path!r}, with columns {names:.500}: {reason}"
                ) from None


def _blocks(footer: Any, groups: Sequence[int], block_rows: int) -> list[tuple[int, ...]]:
    """Return the blocks of a file, as in `ParquetBlocks.table`."""
    counts = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
    before = np.cumsum([0, *counts]).tolist()
    blocks: list[tuple[int, ...]] = []
    at = 0
    while at < len(groups):
        first = groups[at]
        after, rows, at = first + 1, counts[first], at + 1
        while at < len(groups) and groups[at] == after and rows + counts[after] <= block_rows:
            rows, after, at = rows + counts[after], after + 1, at + 1
        pieces = min(_PIECES, -(-rows // block_rows))
        bounds = [rows * piece // pieces for piece in range(pieces + 1)] if pieces else [0]
        blocks += [(first, after, rows, before[first], *interval) for interval in itertools.pairwise(bounds)]
    return blocks


def _selected(schema: Any, columns: Sequence[str]) -> Any:
    return need_arrow().schema([schema.field(name) for name in columns])


def _check_types(schema: Any, wanted: Any, file: DataFile, where: str) -> None:
    for field, expected in zip(schema, wanted, strict=True):
        if field.type != expected.type:
            raise ValueError(
                f"the column {field.name!r} is of type {field.type} in {file.path!r}, and {expected.type} in {where}: "
                "write it alike in all files, or leave it out with columns="
            )


def _not_parquet(file: DataFile, error: Exception) -> ValueError:
    return ValueError(f"{file.path!r} can't be read as a Parquet file: {error}")


def _warn_of_large_groups(footers: Sequence[Any], where: str) -> None:
    sizes = [footer.row_group(group).total_byte_size for footer in footers for group in range(footer.num_row_groups)]
    if max(sizes, default=0) > _LARGE_GROUP:
        logger.warning(
            "the largest row group of %s has %.1f GiB in all its columns, and a worker decodes the chosen ones at "
            "once: write the files with smaller row groups (row_group_size)",
            where if len(footers) == 1 else f"{len(footers)} files",
            max(sizes) / (1 << 30),
        )
