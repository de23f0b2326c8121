"""Reads of rows of matrices as they are: the most frequent ones, all of whose rows are gathered into one buffer.

All other reads, and invalid ones, go through `reads`, which raises the errors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pscluster.core.limits import MAX_ROWS_BYTES
from pscluster.core.transport.frames import padding
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.requests.selection import check_ids
from pscluster.ps.server.state.directory import HeldVariable
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.server.state.store import Store
from pscluster.v1 import ps_pb2


class RowsRead(NamedTuple):
    """What one item reads, and where its row numbers are in the request's payload and its values in the reply's."""

    held: HeldVariable
    shard: Shard
    rows: int
    ids_at: int
    values_at: int
    stop: int  # of its values, before padding


def rows_of(store: Store, request: ps_pb2.ReadRequest, ids_bytes: int) -> tuple[list[RowsRead], int] | None:
    """Return what the items of a read read, and the bytes of the reply; None if any is not one of plain rows.

    `ids_bytes`: the bytes of row numbers that came. StaleError for another job's read, and as `Store.find`.
    """
    store.check_job(request.job)
    reads, ids_at, values_at = list[RowsRead](), 0, 0
    for item in request.items:
        rows = item.rows
        count = rows.ids
        if not count or rows.leading > 1 or rows.id_bytes or item.slot or item.wire_dtype:
            return None
        held, shard = store.find(item.variable, item.shard)
        array = shard.array
        if array.ndim != 2 or held.spec.HasField("table"):
            return None
        size = count * array.shape[1] * array.itemsize
        if not 0 < size <= MAX_ROWS_BYTES:
            return None
        reads.append(RowsRead(held, shard, count, ids_at, values_at, values_at + size))
        ids_at += 8 * count + padding(8 * count)
        values_at += size + padding(size)
    return (reads, values_at) if reads and ids_at == ids_bytes else None


def gathered(reads: Sequence[RowsRead], total: int, payload: Payload) -> memoryview:
    """Return the values of all in turn, each with its padding. InvalidUpdateError if a row is not there."""
    begin = time.monotonic()
    result = np.empty(total, np.uint8)
    for held, shard, rows, ids_at, values_at, stop in reads:
        ids = payload.array(ids_at, rows, np.int64)
        check_ids(shard.array, ids, held.spec.name)
        values = result[values_at:stop]
        with shard.lock:
            table = shard.array
            # The row numbers are checked; with "clip" NumPy needs no buffer.
            table.take(ids, 0, values.view(table.dtype).reshape(rows, -1), "clip")
        if gap := padding(stop - values_at):
            result[stop : stop + gap] = 0
    end = time.monotonic()
    seconds = (end - begin) / len(reads)
    for held, shard, rows, _, values_at, stop in reads:
        held.metrics.read(stop - values_at, seconds, rows)
        shard.traffic.add(stop - values_at, end)
    return result.data
