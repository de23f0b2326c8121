"""Encoded values on a server: of the gradients that come, and of the reads that are answered.

A gradient is checked whole before any item of its request is applied, logged as it came, and decoded in pieces as it is
applied. See `pscluster.ps.wire_dtypes` for the encodings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import InvalidUpdateError, ProtocolError
from pscluster.core.transport.frames import Buffer, view
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.state.shard import Snapshot
from pscluster.ps.wire_dtypes import (
    BLOCK,
    UnencodableError,
    check_scales,
    decode,
    encode,
    encode_stream,
    encoded_bytes,
    name_of,
)
from pscluster.v1 import ps_pb2

Floats = npt.NDArray[np.float32]

_SPAN = 256 * BLOCK
"""Elements that are decoded at once: what an optimizer's rule updates at once, too."""

_INDEX_BYTES = 4


def check_dtype(wire_dtype: int, dtype: np.dtype[Any], name: str) -> None:
    """Raise ProtocolError for an unknown wire type, InvalidUpdateError if elements of that type are not encoded."""
    shown = name_of(wire_dtype)
    if dtype != np.float32:
        raise InvalidUpdateError(f"variable {name!r} is {dtype.name}: only float32 is sent as {shown}, or in part")


def update_bytes(
    request: ps_pb2.UpdateRequest, item: ps_pb2.UpdateItem, dtype: np.dtype[Any], width: int, name: str
) -> int:
    """Return the bytes of an encoded gradient's values; `width` are the elements of each of its rows, or of the shard.

    ProtocolError, or InvalidUpdateError, for one that clients do not send.
    """
    check_dtype(item.wire_dtype, dtype, name)
    if item.kind != ps_pb2.APPLY_GRADIENT or request.HasField("contribution") or item.HasField("offset"):
        raise ProtocolError(f"an encoded update of {name!r} is not a gradient, or is of a synchronous step")
    if item.gradients or item.scalar:
        raise ProtocolError(f"several gradients of {name!r}, or a single value, are encoded")
    if item.rows.WhichOneof("kind") == "ids":
        if item.elements:
            raise ProtocolError(f"single elements of rows of {name!r}")
        return encoded_bytes(item.wire_dtype, item.rows.ids, width)
    if not item.elements:
        return encoded_bytes(item.wire_dtype, 1, width)
    if item.elements > width or width > 1 << 32:
        raise ProtocolError(f"{item.elements:,} elements of a shard of {name!r}, which has {width:,}")
    return item.elements * _INDEX_BYTES + encoded_bytes(item.wire_dtype, 1, item.elements)


def check_values(item: ps_pb2.UpdateItem, values_at: int, size: int, payload: Payload, name: str) -> None:
    """Raise ProtocolError if scales are not finite, or the numbers of elements not ascending, or too high.

    `size` is the number of the shard's elements; of rows, of each one's.
    """
    rows = item.rows.ids if item.rows.WhichOneof("kind") == "ids" else 1
    if item.elements:
        indices = payload.array(values_at, item.elements, "<u4")
        if indices[-1] >= size or not (indices[1:] > indices[:-1]).all():
            raise ProtocolError(
                f"the numbers of elements of a gradient of {name!r} are not ascending ones below {size:,}"
            )
        values_at += item.elements * _INDEX_BYTES
        size = item.elements
    if item.wire_dtype == ps_pb2.WIRE_INT8 and rows:
        for offset, count, width in _pieces(item.wire_dtype, rows, size):
            data = payload.array(values_at + offset, encoded_bytes(item.wire_dtype, count, width), np.uint8)
            if not check_scales(data, count, width):
                raise ProtocolError(f"a gradient of {name!r} has scales that are not finite numbers of at least 0")


def _pieces(wire_dtype: int, rows: int, width: int) -> Iterator[tuple[int, int, int]]:
    """Yield pieces of rows: where each begins, how many rows or which part of a single one it has, and their width."""
    if rows == 1:
        for start in range(0, width, _SPAN):
            yield encoded_bytes(wire_dtype, 1, start), 1, min(_SPAN, width - start)
        return
    many = max(_SPAN // max(width, 1), 1)
    for start in range(0, rows, many):
        yield encoded_bytes(wire_dtype, start, width), min(many, rows - start), width


def rows_of(item: ps_pb2.UpdateItem, values_at: int, width: int, payload: Payload) -> Floats:
    """Return the rows of a gradient by rows."""
    return decode(item.wire_dtype, payload.array(values_at, item.value_bytes, np.uint8), item.rows.ids, width)


def spans(item: ps_pb2.UpdateItem, values_at: int, size: int, payload: Payload) -> Iterator[tuple[int, Floats]]:
    """Yield a dense gradient of `size` elements in pieces, each with its first element's number."""
    if item.elements:
        yield from _spans_of_elements(item, values_at, size, payload)
        return
    start = 0
    for offset, _, count in _pieces(item.wire_dtype, 1, size):
        data = payload.array(values_at + offset, encoded_bytes(item.wire_dtype, 1, count), np.uint8)
        yield start, decode(item.wire_dtype, data, 1, count)[0]
        start += count


def _spans_of_elements(
    item: ps_pb2.UpdateItem, values_at: int, size: int, payload: Payload
) -> Iterator[tuple[int, Floats]]:
    indices = payload.array(values_at, item.elements, "<u4")
    values_at += item.elements * _INDEX_BYTES
    data = payload.array(values_at, encoded_bytes(item.wire_dtype, 1, item.elements), np.uint8)
    values = decode(item.wire_dtype, data, 1, item.elements)[0]
    for start in range(0, size, _SPAN):
        count = min(_SPAN, size - start)
        first, last = np.searchsorted(indices, (start, start + count))
        piece = np.zeros(count, np.float32)
        piece[indices[first:last] - np.uint32(start)] = values[first:last]
        yield start, piece


def replies(
    wire_dtype: int, segment: Buffer | Snapshot, rows: int, width: int, name: str, row_of: Callable[[int], str]
) -> Iterator[Buffer]:
    """Yield values that are read, in float32, as they are to be sent. InvalidUpdateError if one can't be.

    `row_of` returns how an error names the n-th row of these values: ", row 7,", or nothing.
    """
    try:
        if isinstance(segment, Snapshot):
            for data in encode_stream(wire_dtype, segment):
                yield view(data)
        else:
            yield view(encode(wire_dtype, np.frombuffer(segment, np.float32).reshape(rows, width)))
    except UnencodableError as error:
        raise InvalidUpdateError(
            f"variable {name!r}{row_of(error.row)} has the value {error}: read it in `with exact_reads():`, or make "
            'it with wire_dtype="bfloat16"'
        ) from None
