"""Deltas as safetensors files.

__metadata__    "format": "np", and in "pscluster-delta" the header, as JSON
ids             [n], int64, rising; strings as [n, bytes], their UTF-8, filled up with NULs
rows            [n, ...], the rows with these ids as they are in the later checkpoint
dropped         [n], bool, of a table by id: which of them it no longer has, whose rows are their initial values
checksum        [16], bytes: XXH3 (128 bits) of all bytes of the file before it
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import BinaryIO

import numpy as np
from xxhash import xxh3_128

from pscluster.coordinator.serving.delta_files import HINT, KEY, Changes, Header, LoadedDelta, check_ids
from pscluster.core.errors import CheckpointError
from pscluster.ps.row_ids import RowIds
from pscluster.ps.storage.files.tensor_files import stream, tensor_to_write
from pscluster.v1 import ps_pb2

_MAX_HEADER_BYTES = 1 << 20
_CHECKSUM_BYTES = 16


def write(file: BinaryIO, changes: Changes) -> None:
    """Write a delta."""
    digest, header = xxh3_128(), changes.header

    def put(data: bytes) -> None:
        digest.update(data)
        file.write(data)

    tensors = [
        _ids_to_write(header, changes.count),
        tensor_to_write("rows", header.dtype, (changes.count, *header.shape[1:])),
        *([tensor_to_write("dropped", np.dtype(np.bool_), (changes.count,))] if header.any_ids else []),
        tensor_to_write("checksum", np.dtype(np.uint8), (_CHECKSUM_BYTES,)),
    ]
    dropped = ((~changes.has(some)).tobytes() for some in changes.ids())
    pieces = (
        (some.tobytes() for some in changes.ids()),
        (changes.take(some).tobytes() for some in changes.ids()),
        *([dropped] if header.any_ids else []),
        (digest.digest() for _ in range(1)),  # when all else has been put
    )
    stream(put, tensors, pieces, {KEY: header.text()})


def _ids_to_write(header: Header, count: int) -> ps_pb2.SavedTensor:
    if header.id_bytes:
        return tensor_to_write("ids", np.dtype(np.uint8), (count, header.id_bytes))
    return tensor_to_write("ids", np.dtype(np.int64), (count,))


def read(path: str | Path, data: bytes) -> LoadedDelta:
    """Read a delta. CheckpointError, which names the file, if it is not what was written."""
    header_bytes = int.from_bytes(data[:8], "little")
    if len(data) < 8 + _CHECKSUM_BYTES or header_bytes > min(len(data) - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(f"{path} is not a delta, or is incomplete: {HINT}")
    try:
        described = json.loads(data[8 : 8 + header_bytes])
        text = described["__metadata__"][KEY]
        begin, ids_end, rows_end = 8 + header_bytes, *(described[name]["data_offsets"][1] for name in ("ids", "rows"))
        dropped_end = described["dropped"]["data_offsets"][1] if "dropped" in described else rows_end
        total = begin + described["checksum"]["data_offsets"][1]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise CheckpointError(
            f"{path} is not a delta, or is damaged: its header does not match its checksum; {HINT}"
        ) from None
    if total != len(data):
        what = "it was not written to its end" if len(data) < total else "something was added to it"
        raise CheckpointError(f"{path} has {len(data):,} bytes, not {total:,}: {what}; {HINT}")
    if xxh3_128(memoryview(data)[:-_CHECKSUM_BYTES]).digest() != data[-_CHECKSUM_BYTES:]:
        raise CheckpointError(f"{path} is damaged: it is not what was written; {HINT}")
    header = Header.of(path, text)
    try:  # it is what some program has written
        ids: RowIds = np.ndarray(ids_end // header.id_dtype.itemsize, header.id_dtype, data, begin)
        stored = memoryview(data)[begin + ids_end : begin + rows_end]
        if len(ids) * math.prod(header.shape[1:]) * header.dtype.itemsize != len(stored):
            raise ValueError(f"{len(stored):,} bytes of rows for {len(ids):,} ids")
        rows = np.ndarray((len(ids), *header.shape[1:]), header.dtype, stored)
        dropped = np.frombuffer(data, np.uint8, dropped_end - rows_end, begin + rows_end)
        if len(dropped) != (len(ids) if header.any_ids else 0) or dropped.max(initial=0) > 1:
            raise ValueError(f"{len(dropped):,} bytes say which of {len(ids):,} rows were dropped")
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path} is not a readable delta: {error}") from None
    check_ids(path, header, ids)
    none = np.zeros(len(ids), np.bool_)
    return LoadedDelta.of(path, header, ids, rows, dropped.view(np.bool_) if header.any_ids else none)
