"""Plain rows are gathered into one buffer: with the bytes, counts and refusals of the long way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ps.storage.support import padded

from pscluster.core.errors import InvalidUpdateError, StaleError, UnknownVariableError
from pscluster.ps.server.requests import creation, reads, row_reads
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.state.store import Store
from pscluster.v1 import ps_pb2

SHAPES = {1: (40, 4), 2: (9, 3), 3: (6,), 4: (5, 2, 3), 5: (4, 0)}
IDS = {1: [3, 0, 3, 39], 2: [8, 7, 8], 3: [1], 4: [4, 4], 5: [0]}


@pytest.fixture
def store() -> Store:
    """A server with small variables, of float64 if their number is even."""
    store, rng = Store(0, 1), np.random.default_rng(1)
    for number, shape in SHAPES.items():
        dtype = "float32" if number % 2 else "float64"
        splits = [ps_pb2.AxisSplit(ends=[length]) for length in shape]
        spec = ps_pb2.VariableSpec(id=number, name=f"v{number}", shape=shape, dtype=dtype, owners=[0], splits=splits)
        creation.create(store, ps_pb2.CreateRequest(job=1, variable=spec), padded(rng.normal(size=shape).astype(dtype)))
    return store


def request_of(ids: dict[int, list[int]], **fields: Any) -> tuple[ps_pb2.ReadRequest, int, Payload]:
    """A read, the bytes of its row numbers, and its payload."""
    items = [ps_pb2.ReadItem(variable=n, rows=ps_pb2.Rows(ids=len(rows)), **fields) for n, rows in ids.items()]
    payload = padded(*(np.array(rows, np.int64) for rows in ids.values()))
    return ps_pb2.ReadRequest(job=1, items=items), len(payload.joined()), payload


def test_the_bytes_and_the_counts_are_those_of_the_long_way(store: Store) -> None:
    """Rows of two matrices, in any order and repeated, with padding after those of the second."""
    request, ids_bytes, payload = request_of({n: IDS[n] for n in (1, 2)})
    counts = []
    expected = b"".join(reads.read(store, request, payload, reads.sources_of(store, request, ids_bytes)))
    for _ in range(2):
        metrics = [store.directory.variables[n].metrics for n in (1, 2)]
        counts.append([(own.pulls, own.pulled_bytes, own.rows_read) for own in metrics])
        rows = row_reads.rows_of(store, request, ids_bytes)
        assert rows is not None
        assert rows[1] == len(expected) == 4 * 16 + 3 * 24 + 8
        assert bytes(row_reads.gathered(*rows, payload)) == expected
    assert counts == [[(1, 64, 4), (1, 72, 3)], [(2, 128, 8), (2, 144, 6)]]


def test_others_go_the_long_way(store: Store) -> None:
    """No matrix, no values, no rows, a slot, another type, over two axes, and row numbers that are too few."""
    for number in (3, 4, 5):
        request, ids_bytes, _ = request_of({1: [0], number: IDS[number]})
        assert row_reads.rows_of(store, request, ids_bytes) is None
    for fields in ({"slot": "m"}, {"wire_dtype": ps_pb2.WIRE_BFLOAT16}):
        request, ids_bytes, _ = request_of({1: [0]}, **fields)
        assert row_reads.rows_of(store, request, ids_bytes) is None
    request, ids_bytes, _ = request_of({1: [0, 1]})
    assert row_reads.rows_of(store, request, ids_bytes) is not None
    assert row_reads.rows_of(store, request, ids_bytes - 16) is None
    for rows in (ps_pb2.Rows(all=True), ps_pb2.Rows(ids=2, leading=2), ps_pb2.Rows(ids=2, id_bytes=16), ps_pb2.Rows()):
        request.items[0].rows.CopyFrom(rows)
        assert row_reads.rows_of(store, request, ids_bytes) is None
    assert row_reads.rows_of(store, ps_pb2.ReadRequest(job=1), 0) is None


def test_what_can_not_be_read_is_refused(store: Store) -> None:
    """A row beyond the last, or before the first; a variable that is not there; another job's read."""
    for wrong in (40, -1):
        request, ids_bytes, payload = request_of({1: [0, wrong]})
        rows = row_reads.rows_of(store, request, ids_bytes)
        assert rows is not None
        with pytest.raises(InvalidUpdateError, match=f"row {wrong} of a shard of 'v1' that has 40 rows"):
            row_reads.gathered(*rows, payload)
    with pytest.raises(UnknownVariableError):
        row_reads.rows_of(store, request_of({9: [0]})[0], 16)
    request.job = 2
    with pytest.raises(StaleError):
        row_reads.rows_of(store, request, ids_bytes)
