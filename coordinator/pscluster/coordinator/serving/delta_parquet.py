"""Deltas as Parquet files, for programs that read tables.

key-value metadata  in "pscluster-delta" the header, as JSON; in "pscluster-delta-checksum" XXH3 (128 bits) of its text,
                    of all ids, then of all rows, and of a table by id then of all of `dropped`
id                  int64, rising, or a string
row                 the row with this id as it is in the later checkpoint: a list of its values, all of one length;
                    of a variable with one axis the value alone
dropped             bool, of a table by id: whether it no longer has this row, which has its initial values

A checksum of the whole file would have to be in its footer, which it would cover. This one is of what is read, so that
nothing else is ever served; pages have the format's own checksums besides, which name the place of damage.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from xxhash import xxh3_128

from pscluster.coordinator.serving.delta_files import HINT, KEY, Changes, Header, LoadedDelta, Mask, check_ids
from pscluster.core.errors import CheckpointError, MisuseError
from pscluster.core.transport.frames import view
from pscluster.ps.row_ids import RowIds, string_ids, texts_of
from pscluster.ps.storage.files.tensor_files import Array

MAGIC = b"PAR1"
_CHECKSUM_KEY = f"{KEY}-checksum"
_GROUP_BYTES = 16 << 20
_IDS_AT_ONCE = 1 << 16
_TYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bool"),
)


def need_arrow(path: str | Path, module: str = "pyarrow") -> Any:
    """Return pyarrow, or a module of it. MisuseError, with a hint, if it can't be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MisuseError(
            f"{path} is a delta in Parquet, and pyarrow can't be imported here ({error}): "
            "pip install 'pscluster[parquet]', or export it as safetensors"
        ) from None


def check(path: str | Path, header: Header) -> None:
    """Raise MisuseError if there is no pyarrow, or Parquet has no rows like this table's."""
    need_arrow(path, "pyarrow.parquet")
    if header.dtype.name not in _TYPES or not math.prod(header.shape[1:]):
        raise MisuseError(
            f"{path}: Parquet has no type for the rows of {header.table!r}, "
            f"{header.dtype.name}{list(header.shape[1:])}: export it as safetensors"
        )


def write(file: BinaryIO, changes: Changes) -> None:
    """Write a delta whose table `check` has passed."""
    header = changes.header
    pa, pq = (need_arrow(header.table, module) for module in ("pyarrow", "pyarrow.parquet"))
    digest = xxh3_128(header.text().encode())
    for some in changes.ids():
        digest.update(some.tobytes())
    for some in changes.ids():
        digest.update(changes.take(some).tobytes())
    for some in changes.ids() if header.any_ids else ():
        digest.update((~changes.has(some)).tobytes())
    schema = _schema(header).with_metadata({KEY: header.text(), _CHECKSUM_KEY: digest.hexdigest()})
    with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=False, write_page_checksum=True) as writer:
        for ids in _groups(changes):
            columns = [
                pa.array(texts_of(ids).tolist(), pa.string()) if header.id_bytes else pa.array(ids),
                _column(pa, schema, changes.take(ids)),
                *([pa.array(~changes.has(ids))] if header.any_ids else []),
            ]
            writer.write_table(pa.table(columns, schema=schema))


def _schema(header: Header) -> Any:
    pa = need_arrow(header.table)
    value = pa.from_numpy_dtype(header.dtype)
    if len(header.shape) > 1:
        value = pa.list_(pa.field("element", value, nullable=False), math.prod(header.shape[1:]))
    return pa.schema(
        [
            pa.field("id", pa.string() if header.id_bytes else pa.int64(), nullable=False),
            pa.field("row", value, nullable=False),
            *([pa.field("dropped", pa.bool_(), nullable=False)] if header.any_ids else []),
        ]
    )


def _groups(changes: Changes) -> Iterator[RowIds]:
    """Yield the ids of each row group: changed rows are few in some pieces, and a group has a few MiB."""
    header, held = changes.header, list[RowIds]()
    enough = max(_GROUP_BYTES // (math.prod(header.shape[1:]) * header.dtype.itemsize), 1)
    for some in changes.ids():
        held.append(some)
        if sum(map(len, held)) >= enough:
            yield np.concatenate(held)
            held.clear()
    if held:
        yield np.concatenate(held)


def _column(pa: Any, schema: Any, rows: Array) -> Any:
    values = pa.array(rows.reshape(-1))
    return values if rows.ndim == 1 else pa.FixedSizeListArray.from_arrays(values, type=schema.field("row").type)


def read(path: str | Path, data: bytes, accept: Callable[[Header], object] | None = None) -> LoadedDelta:
    """Read a delta.

    A few bytes may stand for many equal rows, so its header, and of each row group the ids, are checked before rows are
    decoded: they must be different ones.

    Args:
        path: of the file, for errors.
        data: the file.
        accept: called with its header first; raises an error for a delta that is not wanted.

    Raises:
        CheckpointError: it is not what was written; the message names the file and the row group.
        MisuseError: there is no pyarrow.
    """
    pa, pq = (need_arrow(path, module) for module in ("pyarrow", "pyarrow.parquet"))
    wrong = (pa.ArrowException, OSError, ValueError)
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        stored, schema = file.metadata.metadata or {}, file.schema_arrow.remove_metadata()
    except wrong as error:
        raise CheckpointError(
            f"{path} is damaged, or was not written to its end: its footer can't be read ({_said(error)}); {HINT}"
        ) from None
    text, checksum = (stored.get(key.encode()) for key in (KEY, _CHECKSUM_KEY))
    if text is None or checksum is None:
        raise CheckpointError(f"{path} is a Parquet file, but no delta: its metadata has no {KEY!r}; {HINT}")
    header = Header.of(path, text)
    check(path, header)
    expected = _schema(header)
    if not schema.equals(expected):
        columns = [", ".join(f"{field.name} ({field.type})" for field in each) for each in (schema, expected)]
        raise CheckpointError(
            f"{path} is not a readable delta: its columns are {columns[0]:.500}, not {columns[1]}; {HINT}"
        )
    if accept is not None:
        accept(header)
    count = file.metadata.num_rows
    if not header.any_ids and count > header.shape[0]:
        raise CheckpointError(f"{path} is not a readable delta: it has {count:,} of {header.shape[0]:,} rows")
    ids, rows, masks = list[RowIds](), list[Array](), list[Mask]()
    for group in range(file.num_row_groups):
        try:
            ids.append(_ids(path, file.iter_batches(_IDS_AT_ONCE, [group], ["id"]), header, ids))
            table = file.read_row_group(group, columns=[name for name in expected.names if name != "id"])
            table.validate(full=True)
            found = _arrays(table, header, len(ids[-1]))
        except wrong as error:
            raise CheckpointError(
                f"{path} is damaged: row group {group} can't be decoded ({_said(error)}); {HINT}"
            ) from None
        rows.append(found[0])
        masks.append(found[1])
    all_ids = np.concatenate(ids) if ids else np.empty(0, header.id_dtype)
    all_rows: Array = np.concatenate(rows) if rows else np.empty((0, *header.shape[1:]), header.dtype)
    digest = xxh3_128(text)
    digest.update(all_ids.tobytes())
    digest.update(view(all_rows))
    dropped = np.concatenate(masks) if masks else np.empty(0, np.bool_)
    if header.any_ids:
        digest.update(view(dropped))
    if len(all_ids) != count or digest.hexdigest().encode() != checksum:
        raise CheckpointError(f"{path} is damaged: its {len(all_ids):,} rows are not what was written; {HINT}")
    return LoadedDelta.of(path, header, all_ids, all_rows, dropped)


def _ids(path: str | Path, batches: Iterator[Any], header: Header, before: Sequence[RowIds]) -> RowIds:
    """Return the ids of a row group. ValueError if there are nulls, CheckpointError as of `check_ids`."""
    found, position = [], sum(map(len, before))
    last: RowIds = next((ids[-1:] for ids in reversed(before) if len(ids)), np.empty(0, header.id_dtype))
    for batch in batches:
        batch.validate(full=True)
        column = batch.column("id")
        if column.null_count:
            raise ValueError("it has nulls")
        ids = column.to_numpy(zero_copy_only=False)
        if header.id_bytes:
            ids = string_ids(ids, header.table, header.id_bytes).astype(header.id_dtype)
        check_ids(path, header, np.concatenate((last, ids)), position - len(last))
        found.append(ids)
        position += len(ids)
        if len(ids):
            last = ids[-1:]
    return np.concatenate(found) if found else np.empty(0, header.id_dtype)


def _arrays(table: Any, header: Header, count: int) -> tuple[Array, Mask]:
    """Return the other columns of a row group. ValueError if there are nulls, or not as many rows as ids."""
    columns = [table.column(name).combine_chunks() for name in table.column_names]
    values = columns[0].flatten() if len(header.shape) > 1 else columns[0]
    if any(column.null_count for column in (*columns, values)):
        raise ValueError("it has nulls")
    flat = values.to_numpy(zero_copy_only=False)
    dropped = columns[1].to_numpy(zero_copy_only=False) if header.any_ids else np.zeros(count, np.bool_)
    return flat.reshape(count, *header.shape[1:]), dropped


def _said(error: Exception) -> str:
    """Return an error of Arrow, which may have several lines, in one."""
    return " ".join(str(error).split())
